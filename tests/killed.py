"""A small training that keeps itself, run in forks of this process, for test_keep.py: killed, resumed, compared.

    python tests/killed.py REPLICAS KILLS   # prints as JSON what became of it, and of one that nobody killed

Forks, because TensorFlow's import would otherwise be paid for every life of a process. It has not started before them.
"""

import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tpu_helpers import connect, load_data, make_dataset, quietly
from tpu_keep import Keep

with quietly():
    import tensorflow as tf

EVERY, EPOCHS, BATCH = 5, 16, 64


class Report(tf.keras.callbacks.Callback):
    """Write down each step and each epoch's numbers, and survive: the kernel has them as soon as they are written."""

    def __init__(self, file, start):
        super().__init__()
        self.file, self.step = file, start

    def note(self, **entry):
        os.write(self.file, json.dumps(entry).encode() + b"\n")

    def on_train_batch_end(self, batch, logs=None):
        self.step += 1
        self.note(step=self.step)

    def on_epoch_end(self, epoch, logs=None):
        self.note(epoch=epoch, loss=float(logs["loss"]).hex(), accuracy=float(logs["accuracy"]).hex())


def build():
    layers = tf.keras.layers
    stack = [layers.Conv2D(8, 3, 2), layers.BatchNormalization(), layers.ReLU(), layers.Flatten(), layers.Dense(64)]
    return tf.keras.Sequential([layers.Input((28, 28, 1)), *stack, layers.Dense(10)])


def train(folder, replicas, file=1, epochs=EPOCHS, data=None):
    """Train, or go on training, and write what becomes of it into `file`."""
    tf.keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()
    strategy = connect(virtual_replicas=replicas)
    (x, y), (x_val, y_val) = data or load_data()
    steps = len(x) // BATCH
    options = {"global_batch_size": BATCH, "replicas": replicas}
    with strategy.scope():
        model = build()
        rate = tf.keras.optimizers.schedules.CosineDecay(0.003, steps * epochs)
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
        keep = Keep(folder, every=EVERY)
        start = keep.restore(model, make_dataset(x_val, y_val, 72, replicas=replicas))
    report = Report(file, start)
    report.note(start=start)
    while start < steps * epochs:
        epoch, done = divmod(start, steps)
        model.fit(
            make_dataset(x, y, **options, start=start),
            initial_epoch=epoch,
            epochs=epoch + 1 if done else epochs,
            steps_per_epoch=steps - done,
            callbacks=[report, keep],
            verbose=0,
        )
        start = keep.step
    variables = [*model.variables, *model.optimizer.variables]
    report.note(bits=hashlib.sha256(b"".join(variable.numpy().tobytes() for variable in variables)).hexdigest())


def fork(folder, replicas, log, data):
    """(pid of a process that trains, reading end of its reports)"""
    reader, writer = os.pipe()
    if pid := os.fork():
        os.close(writer)
        return pid, reader
    status = 1
    try:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        os.dup2(1, 2)
        train(folder, replicas, writer, data=data)
        status = 0
    finally:
        os._exit(status)


def entries(reader):
    with open(reader) as lines:
        return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for(condition, pid):
    """True when the condition holds, False when the process has ended before."""
    while not (found := condition()) and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.0001)
    return found


def main(replicas, kills):
    rng = random.Random(0)
    folder = Path(tempfile.mkdtemp())
    kept, log, data = folder / "kept", folder / "log", load_data()
    pid, reader = fork(str(folder / "other"), replicas, log, data)
    found = {"undisturbed": entries(reader), "lives": [], "parts": 0}
    os.waitpid(pid, 0)
    for number in range(kills + 1):
        before = set(kept.glob("step-*.npz"))
        pid, reader = fork(str(kept), replicas, log, data)
        if number < kills:
            if number % 3 == 0:  # at any moment, also before the first step
                time.sleep(rng.random() * 2.5)
            else:
                wait_for(lambda before=before: set(kept.glob("step-*.npz")) - before, pid)
            if number % 3 == 1:  # during a write
                wait_for(lambda: list(kept.glob("*.part")), pid)
            else:
                time.sleep(rng.random() * 0.06)
            os.kill(pid, signal.SIGKILL)
        lived = entries(reader)
        _, status = os.waitpid(pid, 0)
        found["lives"].append({"status": os.waitstatus_to_exitcode(status), "entries": lived})
        found["parts"] += len(list(kept.glob("*.part")))
    found["log"] = log.read_text()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
