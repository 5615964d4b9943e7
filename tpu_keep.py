"""Training that can be killed at any moment and goes on as if nothing had happened: one file beside tpu_helpers.py.

Apart from it because it is what you take along to machines that are taken away, and nothing else of the kit needs it.
Each part is first built by hand in notebooks/08_keep_your_work.ipynb: the same, but for hints, imports and checks.
"""

import contextlib
import fcntl
import io
import os
import signal
import sys
import threading
from pathlib import Path

from tpu_helpers import Refused, _check, _check_kind, check_parameters, quietly

with quietly():
    import numpy as np
    import tensorflow as tf

LOCKS = {}  # path: the open file whose lock says that this process writes into its folder


def claim(folder: str) -> None:
    """Make `folder`, lock it against other processes, remove what one that was killed had not finished writing.

    Built in notebooks/08_keep_your_work.ipynb. However a process ends, the kernel frees its lock. Where there are none,
    as in a bucket, it says so. Raises `Refused` if another process has the lock, or nothing can be written.
    """
    path = os.path.abspath(os.path.join(folder, "lock"))
    try:
        tf.io.gfile.makedirs(folder)
        if "://" in folder:
            print(f"{folder} cannot be locked: let one run at a time write there.")
        elif path not in LOCKS or not os.path.exists(path):
            file = open(path, "a+")  # noqa: SIM115 - it stays open, and with it the lock
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError as error:  # a file system without locks
                print(f"{folder} cannot be locked ({error}): let one run at a time write there.")
            file.truncate(0)
            print(os.getpid(), end="", file=file, flush=True)
            LOCKS[path] = file
        for part in tf.io.gfile.glob(os.path.join(folder, "step-*.part")):
            tf.io.gfile.remove(part)
    except BlockingIOError:
        used = f"{folder=} is used by process {Path(path).read_text()}"
        raise Refused(f"{used}: wait until it ends, or pass another folder.") from None
    except (tf.errors.OpError, OSError) as error:
        raise Refused(f"{folder=} cannot be used ({error}): pass one to write into.") from None


def variables_of(model) -> tuple[list, list]:
    """(what training changes, metrics of the running epoch), as Keras orders them: the same in each run of a program.

    Built in notebooks/08_keep_your_work.ipynb. The first has weights, the state of Keras 3's random layers, and the
    optimizer with its step and, where it is no schedule, its learning rate.
    """
    metrics = [variable for metric in model.metrics for variable in metric.variables]
    others = [*model.variables, *model.optimizer.variables, model.optimizer.learning_rate]
    known = {id(variable) for variable in metrics}
    state = {id(variable): variable for variable in others if hasattr(variable, "assign") and id(variable) not in known}
    return list(state.values()), metrics


def parts_of(variable, strategy) -> list:
    """The tf.Variables that one of Keras consists of: one that all replicas copy, or one for each replica.

    Built in notebooks/08_keep_your_work.ipynb. Metrics and the moving averages of BatchNormalization are of the second
    kind: tf.train.Checkpoint would keep their sum or mean, and each replica's own would be lost.
    """
    inner = variable.value if hasattr(variable, "path") else variable  # Keras 3 wraps TensorFlow's
    apart = inner.synchronization == tf.VariableSynchronization.ON_READ
    return list(strategy.experimental_local_results(inner)) if apart else [inner]


def put(variable, strategy, saved) -> None:
    """Assign what was saved, [parts, ...]; if by another number of replicas, so that sum or mean stays the same.

    Built in notebooks/08_keep_your_work.ipynb.
    """
    parts = parts_of(variable, strategy)
    saved = saved.view(parts[0].dtype.as_numpy_dtype)  # NumPy's files have no bfloat16
    if len(saved) != len(parts):
        summed = parts[0].aggregation == tf.VariableAggregation.SUM
        share = saved.sum(0) / len(parts) if summed else saved.mean(0)
        saved = [share.astype(saved.dtype)] * len(parts)
    for part, value in zip(parts, saved, strict=True):
        part.assign(value)


def write(path: str, arrays: dict) -> None:
    """Write {name: array} beside `path`, then move it there: what stands at `path` is whole. Raises OSError.

    Built in notebooks/08_keep_your_work.ipynb. A NumPy .npz file, in which each array has a CRC-32.
    """
    content, part = io.BytesIO(), f"{path}.part"
    np.savez(content, **arrays)
    try:
        with tf.io.gfile.GFile(part, "wb") if "://" in path else open(part, "wb") as file:
            file.write(content.getvalue())
            if "://" not in path:
                file.flush()
                os.fsync(file.fileno())  # or it may be empty after a loss of power
        tf.io.gfile.rename(part, path, overwrite=True)
    except BaseException:
        with contextlib.suppress(tf.errors.OpError):
            tf.io.gfile.remove(part)
        raise


def read_newest(folder: str) -> dict:
    """{name: array} of the newest file in `folder` that is whole, {} if there is none; says which are not.

    Built in notebooks/08_keep_your_work.ipynb. Those are renamed to end in `.broken`; `Refused` if there are no others.
    """
    paths = sorted(tf.io.gfile.glob(os.path.join(folder, "step-*.npz")))
    for path in reversed(paths):
        try:
            with tf.io.gfile.GFile(path, "rb") as file, np.load(io.BytesIO(file.read())) as content:
                return dict(content)
        except Exception as error:  # noqa: BLE001 - noise in a file can raise anything
            print(f"{path} cannot be read ({error!r}): the one before it is used.")
            tf.io.gfile.rename(path, f"{path}.broken", overwrite=True)
    _check(not paths, f"{folder=} has no file that can be read: delete it to start anew.")
    return {}


def save(model, path: str, within_epoch: bool) -> None:
    """Write all that `variables_of` finds, of each replica, to `path`; metrics only within an epoch.

    Built in notebooks/08_keep_your_work.ipynb. Raises OSError where it cannot, or where weights are no longer numbers.
    """
    if not all(np.isfinite(variable.numpy()).all() for variable in model.trainable_variables):
        raise OSError("a weight is no longer a number")
    state, metrics = variables_of(model)
    kinds = {"state": state, "metric": metrics if within_epoch else []}
    arrays = {
        f"{kind}-{i:05d}": np.stack([part.numpy() for part in parts_of(variable, model.distribute_strategy)])
        for kind, variables in kinds.items()
        for i, variable in enumerate(variables)
    }
    write(path, arrays)


def restore(model, data, folder: str) -> list:
    """Put back the state that the newest whole file in `folder` holds; returns what it holds of metrics.

    Built in notebooks/08_keep_your_work.ipynb. First it makes what Keras makes late: the optimizer's variables, and
    metrics, for which tf-keras has to see a batch of `data`. Raises `Refused` if the files are another model's.
    """
    if not (saved := read_newest(folder)):
        return []
    model.optimizer.build(model.trainable_variables)
    model.evaluate(data.take(1), verbose=0)
    state, _ = variables_of(model)
    arrays = [saved[name] for name in sorted(saved) if name.startswith("state")]
    _check(
        [array.shape[1:] for array in arrays] == [tuple(variable.shape) for variable in state],
        f"{folder=} is of another model: pass another folder, or delete this one.",
    )
    for variable, array in zip(state, arrays, strict=True):
        put(variable, model.distribute_strategy, array)
    layers = tf.keras.layers
    drawing = (layers.Dropout, layers.GaussianDropout, layers.GaussianNoise, layers.AlphaDropout)
    if not hasattr(state[0], "path") and any(isinstance(layer, drawing) for layer in model.submodules):
        print("Dropout goes on with other numbers than without a stop: tf-keras hides its state.")
    return [saved[name] for name in sorted(saved) if name.startswith("metric")]


def keep_step(model, folder: str, step: int, kept: int, within_epoch: bool) -> bool:
    """Write `folder`/step-<step>.npz, then remove all but the newest `kept`. Returns whether it did, or says why not.

    Built in notebooks/08_keep_your_work.ipynb. What is there stays if the disk is full, or weights are not numbers.
    """
    try:
        save(model, os.path.join(folder, f"step-{step:09d}.npz"), within_epoch)
        for path in sorted(tf.io.gfile.glob(os.path.join(folder, "step-*.npz")))[:-kept]:
            tf.io.gfile.remove(path)
    except (tf.errors.OpError, OSError) as error:
        print(f"\nStep {step} is not kept in {folder} ({error}): what was kept before stays.")
        return False
    return True


class OnSigterm(tf.keras.callbacks.Callback):
    """While `fit` runs, SIGTERM waits for the end of the step; then `save` is called, and the process ends.

    Built in notebooks/08_keep_your_work.ipynb. The exit status is 143, as it would be without this. A second SIGTERM
    does what the first would have done before.
    """

    asked = False

    def on_train_begin(self, logs=None):
        self.asked, self.before = False, None
        if threading.current_thread() is threading.main_thread():  # no other may ask for signals
            self.before = signal.signal(signal.SIGTERM, self.ask) or signal.SIG_DFL

    def ask(self, *_):
        self.asked = True
        signal.signal(signal.SIGTERM, self.before)

    def on_train_end(self, logs=None):
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)

    def on_test_batch_end(self, batch, logs=None):  # of validation
        self.leave(within_epoch=False)

    def leave(self, within_epoch):
        if self.asked:
            self.save(within_epoch)
            print(f"\nSIGTERM: step {self.kept_step} is kept in {self.folder}.")
            sys.exit(128 + signal.SIGTERM)


class Keep(OnSigterm):
    """Keep all of a training in `folder` every so many steps, also when SIGTERM comes, and go on from there.

    Built in notebooks/08_keep_your_work.ipynb. Kept are weights, optimizer, metrics of the epoch, and in Keras 3 the
    state of random layers (tf-keras hides it: its Dropout goes on with other numbers, which is said). Not kept: what
    other callbacks remember. The newest `kept` are NumPy's files step-<optimizer.iterations>.npz. A disk that is full,
    or weights that are not numbers, are said, the training goes on, and the last files stay.

    Raises `Refused` if `folder`, local or in a bucket (gs://…), cannot be used, or another process uses it.
    """

    def __init__(self, folder: str, every: int, kept: int = 2):
        super().__init__()
        _check_kind(str | os.PathLike, folder=folder)
        _check(bool(str(folder)), f"{folder=} is no folder: pass its path.")
        check_parameters(every=every, kept=kept)
        self._supports_tf_logs = True  # or tf-keras waits for the numbers of each step
        self.folder, self.every, self.kept = os.fspath(folder), every, kept
        self.step, self.kept_step, self.since, self.metrics = 0, 0, 0, []
        claim(self.folder)

    def restore(self, model, data) -> int:
        """Go on from the newest whole file: returns the steps it has behind it, 0 for a fresh start.

        To be called in the strategy's scope. `data`: a dataset of such batches as `fit` gets. Raises `Refused`.
        """
        _check(bool(getattr(model, "optimizer", None)), "model is not compiled: compile it, then restore.")
        _check(isinstance(data, tf.data.Dataset), f"data is a {type(data).__name__}: pass a tf.data.Dataset.")
        _check(
            tf.distribute.get_strategy() is model.distribute_strategy,
            "model was built in a strategy's scope: restore it there, too.",
        )
        self.metrics = restore(model, data, self.folder)
        self.step = self.kept_step = int(model.optimizer.iterations.numpy())
        return self.step

    def save(self, within_epoch: bool) -> None:
        """Keep the present step, unless it is kept already."""
        self.step, self.since = int(self.model.optimizer.iterations.numpy()), 0
        if self.step != self.kept_step:
            done = keep_step(self.model, self.folder, self.step, self.kept, within_epoch)
            self.kept_step = self.step if done else self.kept_step

    def on_epoch_begin(self, epoch, logs=None):
        self.batch, saved, self.metrics = -1, self.metrics, []
        for variable, array in zip(variables_of(self.model)[1], saved, strict=False):
            put(variable, self.model.distribute_strategy, array)

    def on_train_batch_end(self, batch, logs=None):
        self.since, self.batch = self.since + batch - self.batch, batch
        within_epoch = batch + 1 != self.params["steps"]
        if self.since >= self.every:
            self.save(within_epoch)
        self.leave(within_epoch)

    def on_train_end(self, logs=None):
        super().on_train_end(logs)
        self.save(within_epoch=False)
