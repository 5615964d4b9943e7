"""What a reader would type (the listing), the kit, JAX and PyTorch, side by side on this machine: *measured*.

    python benchmarks/speed.py                                 # half an hour; writes build/bench/
    python benchmarks/speed.py --only pipeline,fit --rounds 3  # of pipeline, fit, jpeg, helpers, tune
    python benchmarks/speed.py --record                        # also recorded/speed.json, its picture, and the README
    python benchmarks/speed.py --record --only tune            # anew one section of this machine's record
    python benchmarks/speed.py --readme                        # the README from recorded/speed.json, without measuring

Each competitor is a process of its own, which prepares once and then waits: they take turns, one round of each, in
another order each time. A turn in which the machine was in a slow phase (its pulse, notebook 5) is repeated,
up to three times. A ratio is computed within a round; shown is the median of all rounds, and lowest … highest. A target
that is not met is said, and is no error.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import itertools
import json
import math
import operator
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import peers

import tpu_helpers
import tpu_measure

CORES = os.cpu_count()
RECORDED, PICTURE = ROOT / "recorded" / "speed.json", ROOT / "images" / "speed.png"
MARKERS = "<!-- make bench writes from here -->\n", "<!-- to here, from recorded/speed.json -->"
SECTIONS = {"pipeline": (128, 1024), "fit": (128, 1024), "jpeg": (64,), "helpers": (128,), "tune": ()}  # their batches
MORE = {"jpeg": 2, "helpers": 5}  # times as many rounds: their targets are close to 1
PEERS = ("JAX", "PyTorch, indexed", "PyTorch, DataLoader")  # which may be missing
KITS = ("kit, XLA", "kit, no XLA")  # "kit" is the faster of the two
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)  # to choose a batch size from
OPERATORS = {">=": operator.ge, ">": operator.gt, "<=": operator.le}
# Section, batch, the ratio of what to what, and its target, if it has one; "kit" in `fit` is its faster row.
TARGETS = [
    *(("pipeline", 128, name, "listing", ">= 2.5") for name in ("kit, float32", "kit, uint8")),
    *(("pipeline", 1024, name, "listing", ">= 4") for name in ("kit, float32", "kit, uint8")),
    *(("pipeline", batch, "kit, augmented", "listing", "") for batch in (128, 1024)),
    *(("fit", 128, "kit", name, ">= 3") for name in ("listing, Keras 3", "listing, tf-keras")),
    *(("fit", 1024, "kit", name, ">= 2") for name in ("listing, Keras 3", "listing, tf-keras")),
    *(("fit", batch, "kit", "JAX", target) for batch, target in ((128, ""), (1024, ">= 0.8"))),
    *(("fit", batch, "kit", "PyTorch, indexed", "> 1") for batch in (128, 1024)),
    *(("fit", batch, "kit", "PyTorch, DataLoader", "") for batch in (128, 1024)),
    ("jpeg", 64, "kit", "bare decoding", ">= 0.9"),
    *(("jpeg", 64, "kit", f"kit without {stage}", ">= 0.9") for stage in ("resize", "flip", "batch")),
    ("jpeg", 64, "kit", "kit without crop", ""),
    ("helpers", 128, "make_dataset", "written out", ">= 0.97"),
]
# A field of each run, the ratio of what to what, its target, and which of the runs is judged: the worst.
TUNE_TARGETS = [
    ("rate", "the chosen size's examples/s", "those of the best size", ">= 0.95", "lowest"),
    ("seconds", "time of tune_batch_size", "that of an exhaustive sweep", "<= 0.333", "highest"),
]


# --- what is measured: each function prepares, and then calls `next(turn)` after every epoch, for ever


def data(given):
    """Random images of MNIST's shape, the same in every process."""
    import numpy as np

    random_numbers = np.random.default_rng(0)
    images = random_numbers.integers(0, 256, (given.count, 28, 28, 1), dtype=np.uint8)
    return images, random_numbers.integers(0, 10, given.count).astype("int32")


def listing(x, y, n):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(60000).repeat().batch(n).prefetch(tf.data.AUTOTUNE)


def consume(dataset, steps: int, turn):
    iterator = iter(dataset)
    while True:
        for _ in range(steps):
            next(iterator)
        next(turn)


def pipeline(given, turn):
    (x, y), n = data(given), given.batch
    kit = {"augmented": given.name == "kit, augmented", "dtype": "uint8" if "uint8" in given.name else "float32"}
    dataset = listing(x, y, n) if given.name == "listing" else tpu_helpers.make_dataset(x, y, n, **kit)
    consume(dataset, given.count // n, turn)


def fit(given, turn):
    import tensorflow as tf

    layers, (x, y), n, options = tf.keras.layers, data(given), given.batch, {}
    first, steps = [layers.Input((28, 28, 1))], given.count // given.batch
    if given.name in KITS:
        dataset = tpu_helpers.make_dataset(x, y, n, augmented=False, dtype="uint8")
        first = layers.Input((28, 28, 1), dtype="uint8"), layers.Rescaling(1 / 255)
        options = {"steps_per_execution": steps, "jit_compile": given.name == "kit, XLA"}
    elif given.name == "make_dataset":
        dataset = tpu_helpers.make_dataset(x, y, n, augmented=False)
    elif given.name == "written out":
        dataset = defined("02_build_input_pipeline", "make_dataset")(x, y, n, augmented=False)
    else:
        dataset = listing(x, y, n)
    model = tf.keras.Sequential([*first, layers.Flatten(), layers.Dense(128, "relu"), layers.Dense(10)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], **options)
    clock = tf.keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: next(turn))
    model.fit(dataset, steps_per_epoch=steps, epochs=10**9, callbacks=[clock], verbose=0)


def fit_with_a_peer(given, turn):
    build = peers.with_jax if given.name == "JAX" else peers.with_torch
    epoch = build(*data(given), given.batch, **({"loader": True} if "DataLoader" in given.name else {}))
    while math.isfinite(epoch()[0]):
        next(turn)
    raise ValueError("the loss is no number any more")


def defined(notebook: str, name: str):
    """The function of this name as the notebook's cells define it, with the functions that it may call."""
    import numpy as np
    import tensorflow as tf

    space = {"tf": tf, "np": np, "math": math}
    for cell in json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]:
        for node in ast.parse("".join(cell["source"])).body if cell["cell_type"] == "code" else ():
            if isinstance(node, ast.FunctionDef):
                exec(compile(ast.Module([node], []), notebook, "exec"), space)
    return space[name]


# --- JPEG files: notebook 2 shows these two functions


def crop(size, drawn):
    """[top, left, height, width] of a part with 60 to 100 % of each side, anywhere in a picture of that size."""
    import tensorflow as tf

    size = tf.cast(size, tf.float32)
    kept = tf.floor(size * (0.6 + 0.4 * drawn[:2]))
    return tf.cast(tf.concat([(size - kept) * drawn[2:], kept], axis=0), tf.int32)


def decode(number, record):
    """A random part of the picture as uint8 [224, 224, 3], half of them mirrored; only that part is decoded."""
    import tensorflow as tf

    whole = tf.io.FixedLenFeature([], tf.int64)
    image = tf.io.FixedLenFeature([], tf.string)
    feature = {"image": image, "label": whole, "height": whole, "width": whole}
    example = tf.io.parse_single_example(record, feature)
    drawn = tf.random.stateless_uniform([5], tf.stack([0, number]))
    part = crop(tf.stack([example["height"], example["width"]]), drawn[:4])
    image = tf.io.decode_and_crop_jpeg(example["image"], part, channels=3)
    image = tf.cast(tf.image.resize(image, [224, 224]), tf.uint8)
    image = tf.cond(drawn[4] < 0.5, lambda: tf.reverse(image, [1]), lambda: image)
    return image, tf.cast(example["label"], tf.int32)


def write_jpegs(given):
    """Scikit-learn's two photographs, of 640 × 427, a little of two edges cut off, as JPEG files in four shards."""
    import numpy as np
    import tensorflow as tf
    from sklearn.datasets import load_sample_images

    photographs, numbers = load_sample_images().images, np.random.default_rng(0)
    for shard in range(4):
        with tf.io.TFRecordWriter(f"{given.folder}/{shard}.tfrecord") as file:
            for label in range(given.pictures // 4):
                part = photographs[label % 2][numbers.integers(0, 32) :, numbers.integers(0, 32) :]
                height, width = part.shape[:2]
                jpeg = tf.train.BytesList(value=[tf.io.encode_jpeg(part, quality=95).numpy()])
                feature = {"image": tf.train.Feature(bytes_list=jpeg)}
                for name, value in {"label": label, "height": height, "width": width}.items():
                    feature[name] = tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
                file.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())


def jpeg(given, turn):
    """Leaving a stage out puts something in its place, and leaves `decode` as it is."""
    import tensorflow as tf

    def bare(number, record):
        feature = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}
        return tf.io.decode_jpeg(tf.io.parse_single_example(record, feature)["image"], 3)[0, 0]  # one pixel to count by

    instead = {
        "kit without resize": (tf.image, "resize", lambda image, size: image[: size[0], : size[1]]),
        "kit without flip": (tf, "cond", lambda mirrored, yes, no: no()),
        "kit without crop": (tf.io, "decode_and_crop_jpeg", lambda jpeg, part, channels: tf.io.decode_jpeg(jpeg, 3)),
    }.get(given.name)
    others = {"bare decoding": bare, "kit without batch": lambda *record: decode(*record)[0][0, 0]}
    parallel, options = {"num_parallel_calls": CORES}, tf.data.Options()
    options.autotune.enabled, options.threading.private_threadpool_size = False, CORES
    files = tf.data.Dataset.list_files(f"{given.folder}/*.tfrecord", shuffle=False).repeat()
    records = files.interleave(tf.data.TFRecordDataset, cycle_length=4, **parallel).enumerate()
    with mock.patch.object(*instead) if instead else contextlib.nullcontext():
        dataset = records.map(others.get(given.name, decode), **parallel).batch(given.batch, drop_remainder=True)
    consume(dataset.prefetch(2).with_options(options), given.count // given.batch, turn)


def tune(given, say):
    """An exhaustive sweep, runs of `tune_batch_size`, another sweep; the best epochs of both sweeps are the truth.

    As in `tune_batch_size`, no epoch in a slow phase of the machine counts, if a training has others; else it is
    repeated. A sweep's time is that of one training of each size.
    """
    import tensorflow as tf

    build_model = defined("05_tune_batch_size", "build_model")
    (x, y), _ = tpu_helpers.load_data("digits")
    sizes, runs, sweeps, best = SIZES[-2:] if given.small else SIZES, [], [], dict.fromkeys(SIZES, 0.0)

    class Clock(tf.keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.epochs = []

        def on_epoch_begin(self, epoch, logs=None):
            given.beats.append(tpu_measure.pulse())
            self.began = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            rate = self.params["steps"] / (time.perf_counter() - self.began)
            given.beats.append(tpu_measure.pulse())
            self.epochs += [(rate, min(given.beats[-2:])[0])] if epoch else []

    def train(size, clock):
        model, dataset = build_model(), tpu_helpers.make_dataset(x, y, size)
        model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(dataset, steps_per_epoch=max(1, 8192 // size), epochs=16, callbacks=[clock], verbose=0)

    def sweep():
        sweeps.append(0.0)
        for size in sizes:
            trainings, seconds, known = [], [], []
            while not known and len(trainings) < given.tries:
                began, clock = time.perf_counter(), Clock()
                train(size, clock)
                seconds.append(time.perf_counter() - began)
                trainings.append(clock.epochs)
                known = tpu_measure.calm([clock.epochs], given.beats)
            known = known or [[rate for rate, _ in epochs] for epochs in trainings]
            best[size] = max(best[size], size * sorted(itertools.chain(*known))[-2])  # one alone may be luck
            sweeps[-1] += statistics.mean(seconds)
        say(note=f"tune: an exhaustive sweep took {sweeps[-1]:.1f} s, measured")

    train(sizes[0], tf.keras.callbacks.Callback())  # TensorFlow's own start
    sweep()
    for _ in range(2 if given.small else 10):
        began = time.perf_counter()
        tuned = tpu_helpers.tune_batch_size(train, sizes, 1)
        seconds = time.perf_counter() - began
        runs.append({"chosen": int(tuned.per_replica_batch_size), "sure": tuned.sure, "seconds": seconds})
        say(note=f"tune: {runs[-1]['chosen']} chosen in {seconds:.1f} s, measured, {runs[-1]['sure']:.0%} sure")
    sweep()
    for run in runs:
        run["rate"] = best[run["chosen"]] / max(best.values())
        run["seconds"] /= statistics.mean(sweeps)
    say(runs=runs, sweeps=sweeps, best={size: rate for size, rate in best.items() if rate})


WORKERS = {
    "pipeline": dict.fromkeys(("listing", "kit, float32", "kit, uint8", "kit, augmented"), pipeline),
    "fit": dict.fromkeys(("listing, Keras 3", "listing, tf-keras", *KITS), fit) | dict.fromkeys(PEERS, fit_with_a_peer),
    "jpeg": dict.fromkeys(("kit", *(row[3] for row in TARGETS if row[0] == "jpeg")), jpeg),
    "helpers": dict.fromkeys(("make_dataset", "written out"), fit),
}


def work(given) -> None:
    """A worker process: what it finds goes to stdout, one JSON a line, and what libraries print to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**answer):
        print(json.dumps(answer), file=answers, flush=True)

    def turns(examples):
        """Advanced after every epoch. One round for each line on stdin: for a quarter of its time it only warms up."""
        say(ready=True)
        for _ in sys.stdin:
            for seconds in (given.seconds / 4, given.seconds):  # the first: buffers that filled up are used up
                began, done = time.perf_counter(), 0
                while not done or time.perf_counter() - began < seconds:
                    yield
                    done += examples
            say(rate=done / (time.perf_counter() - began))
        os._exit(0)  # at once: TensorFlow's own end can take 20 s

    section, _, given.name = given.worker.partition(": ")
    if section == "tune":
        tune(given, say)
    elif section == "files":
        write_jpegs(given)
    else:
        given.count = given.pictures if section == "jpeg" else given.count
        WORKERS[section][given.name](given, turns(given.count // given.batch * given.batch))


# --- who takes turns


@contextlib.contextmanager
def worker(given, name: str, batch: int = 1, folder: str = ""):
    """The process of a worker, and `answer()`: its next line, or `Refused` with its last words if it has ended."""
    environment = os.environ | {"TF_USE_LEGACY_KERAS": "0" if name.endswith("Keras 3") else "1"}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TPU_LOAD_LIBRARY": "0", "JAX_PLATFORMS": "cpu"}
    # PyTorch's threads wait for each other by spinning. That makes it a hundred times slower whenever other load leaves
    # them one core; without spinning it loses about a fifth on two quiet cores.
    environment["OMP_WAIT_POLICY"] = "PASSIVE"
    command = [sys.executable, __file__, "--worker", name, "--batch", str(batch), "--folder", folder]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with tempfile.TemporaryFile("w+") as said:
        command += ["--small"] if given.small else []
        with subprocess.Popen(command, stderr=said, **streams) as process:

            def answer() -> dict:
                if line := process.stdout.readline():
                    return json.loads(line)
                said.seek(0)
                raise tpu_helpers.Refused((said.read().strip() or "it ended without a word").splitlines()[-1])

            yield process, answer


def calm(beats: list) -> bool:
    """Is this machine in no slow phase (notebook 5)? `beats`: the pulses so far, which this one joins."""
    time.sleep(0.2)  # for buffers of the worker whose turn it was to fill up
    beats.append(tpu_measure.pulse())
    return beats[-1][0] > 0.45 * max(itertools.chain(*beats))


def side_by_side(given, section: str, batch: int, folder: str) -> dict:
    """Examples/s of each worker in each round, in turns; without the peers that are missing."""
    rates = {name: [] for name in WORKERS[section]}
    with contextlib.ExitStack() as stack:
        started = {
            name: stack.enter_context(worker(given, f"{section}: {name}", batch, folder)) for name in WORKERS[section]
        }
        for name, (_, answer) in started.items():
            try:
                answer()
            except tpu_helpers.Refused as refused:
                if name not in PEERS:
                    raise tpu_helpers.Refused(f"{section}: {name} failed: {refused}") from None
                print(f"Without {name}: {refused} (pip install -r requirements-bench.txt)", flush=True)
                del rates[name]
        rounds = given.rounds * MORE.get(section, 1)
        for number in range(rounds + 1):  # the first one warms up
            print(f"{section} at {batch:,}: {f'round {number} of {rounds}' if number else 'warms up'}", flush=True)
            for name in random.Random(number).sample(list(rates), len(rates)):
                process, answer = started[name]
                before = calm(given.beats)
                for _ in range(given.tries):
                    print("go", file=process.stdin, flush=True)
                    rate = round(answer()["rate"], 1)
                    before, after = calm(given.beats), before
                    if before and after:
                        break
                    given.again.append(name)
                rates[name] += [rate] if number else []
    return rates


def judged(values: list[float], target: str = "", by: str = "median") -> dict:
    """Median, lowest, highest; and whether the first (or the one named) meets the target, None if there is none."""
    found = {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
    found, (sign, _, limit) = {key: round(value, 3) for key, value in found.items()}, target.partition(" ")
    return found | {"target": target, "met": OPERATORS[sign](found[by], float(limit)) if target else None}


def ratios(samples: dict, runs: list[dict]) -> list[dict]:
    """Those of TARGETS, computed within each round, and those of TUNE_TARGETS."""
    rows = []
    for section, batch, of, to, target in TARGETS:
        rates = samples.get(section, {}).get(str(batch), {})
        if to in rates:
            of = max(KITS, key=lambda kit: statistics.median(rates[kit])) if section == "fit" else of
            within = [mine / other for mine, other in zip(rates[of], rates[to], strict=True)]
            rows.append({"section": section, "batch": batch, "of": of, "to": to} | judged(within, target))
    for field, of, to, target, by in TUNE_TARGETS if runs else ():
        values = [run[field] for run in runs]
        rows.append({"section": "tune", "batch": 0, "of": of, "to": to} | judged(values, target, by))
    return rows


# --- what is told


def figures(found: dict, digits: int = 2) -> str:
    return f"{found['median']:,.{digits}f} ({found['lowest']:,.{digits}f} … {found['highest']:,.{digits}f})"


def verdict(row: dict) -> str:
    return {None: "", True: "met", False: "not met"}[row["met"]]


def table(content: dict) -> str:
    lines = ["", "examples/s, measured: median (lowest … highest)"]
    for section, batches in content["samples"].items():
        for batch, rates in batches.items():
            lines += [f"  {section:9} {batch:5}  {name:20} {figures(judged(rates[name]), 0)}" for name in rates]
    lines += ["", "ratios, measured: median (lowest … highest) of those within a round"]
    for row in content["ratios"]:
        target = f"  target {row['target']}: {verdict(row)}" if row["target"] else ""
        names = f"{row['of']} / {row['to']}"
        lines.append(f"  {row['section']:9} {row['batch'] or '':<5}  {names:58} {figures(row)}{target}")
    return "\n".join(lines)


def performance(content: dict) -> str:
    """The README's section, of recorded/speed.json alone."""
    machine, rows = content["machine"], []
    for row in content["ratios"]:
        batch = f"{row['batch']:,}" if row["batch"] else ""
        names, target = f"{row['of']} / {row['to']}", f"{row['target']} | {verdict(row)}"
        rows.append(f"| {row['section']} | {batch} | {names} | {figures(row)} | {target} |")
    absent = f"\nNot there, so left out: {'; '.join(content['missing'])}.\n" if content["missing"] else ""
    slow = f"Tries in a slow phase of the machine (its pulse, notebook 5): {content.get('again')}; of four in a row the"
    slow = f"{slow}\nlast one counts all the same.\n" if "again" in content else ""
    return f"""## How fast it is

`make bench` lets what one would type without the kit (the listing), the kit, JAX and PyTorch take turns on one machine,
and divides their rates within each of {content["rounds"]} rounds (of helpers and jpeg there are more).
The listing does not augment. The kit's `fit` is the faster of its two rows, named below. All of it was recorded on
{content["date"]}, and none of it on a TPU: {machine["cpu"]}, {machine["cores"]} cores,
load before {machine["load_before"]}, {machine["versions"]}.
{slow}What holds back where a target is not met is in [`benchmarks/speed.md`](benchmarks/speed.md).

| section | batch | ratio, recorded | median (lowest … highest) | target | met? |
| --- | --- | --- | --- | --- | --- |
{chr(10).join(rows)}
{absent}
![Bars of examples/s, recorded: the input pipeline alone, and fit, at two batch sizes](images/speed.png)
"""


def write_readme() -> None:
    readme = ROOT / "README.md"
    before, start, rest = readme.read_text().partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    if not end:
        raise tpu_helpers.Refused(f"README.md lacks the line {MARKERS[0].strip()} or {MARKERS[1]}: add it.")
    readme.write_text(before + start + performance(json.loads(RECORDED.read_text())) + end + after)


def draw(path: Path, content: dict) -> None:
    """A panel for each batch size of the pipeline and of `fit`."""
    import matplotlib.style
    from matplotlib.figure import Figure

    samples, titles = content["samples"], {"pipeline": "input pipeline alone", "fit": "fit"}
    panels = [
        (titles[section], batch, samples[section][batch]) for section in titles for batch in samples.get(section, ())
    ]
    with matplotlib.style.context(ROOT / "kit.mplstyle"):
        figure = Figure(figsize=(10, 1 + 1.3 * len(panels)), layout="constrained")
        on = (
            f"{'recorded' if path == PICTURE else 'measured'} on {content['machine']['cores']} cores, {content['date']}"
        )
        figure.suptitle(
            f"thousand examples/s, {on}: median of {content['rounds']} rounds, lowest … highest", fontsize=11
        )
        for place, (title, batch, rates) in enumerate(panels, 1):
            axis = figure.add_subplot(-(-len(panels) // 2), 2, place)
            for name, values in rates.items():
                middle, low, high = (judged(values)[key] / 1000 for key in ("median", "lowest", "highest"))
                colour = "C0" if name.startswith("kit") else "C6" if name.startswith("listing") else "0.8"
                axis.barh(name, middle, xerr=[[middle - low], [high - middle]], color=colour, capsize=3)
                axis.annotate(
                    f"{middle:,.0f}", (high, name), (5, 0), textcoords="offset points", va="center", fontsize=8
                )
            axis.invert_yaxis()
            axis.margins(x=0.12)
            axis.set_title(f"{title}, batch {int(batch):,}", fontsize=10)
        figure.savefig(path, dpi=120)


def machine(load: float) -> dict:
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"(?m)^model name\s*: (.+)$", cpuinfo.read_text()) if cpuinfo.exists() else []
    packages = tpu_helpers.installed(*tpu_helpers.TENSORFLOWS, "tf-keras", "keras", "jax", "torch", "numpy")
    versions = f"Python {platform.python_version()}, {packages}"
    cpu = names[0] if names else platform.machine()
    return {
        "cpu": cpu,
        "cores": CORES,
        "load_before": load,
        "os": f"{platform.system()} {platform.release()}",
        "versions": versions,
    }


def merged(given, content: dict | None = None) -> dict:
    """`content` with the sections that were not measured now taken from the record; `Refused` if that is another's."""
    if not RECORDED.exists() or set(given.only) == set(SECTIONS):
        return content or {}
    kept, now = json.loads(RECORDED.read_text()), machine(0)
    alike = {"rounds": given.rounds} | {name: now[name] for name in ("cpu", "cores", "versions")}
    other = next((name for name, value in alike.items() if (kept | kept["machine"])[name] != value), "")
    if other:
        raise tpu_helpers.Refused(f"--record: recorded/speed.json has other {other}: leave out --only.")
    if content:
        kept["date"] += "" if kept["date"] == content["date"] else f" ({', '.join(given.only)}: {content['date']})"
        kept["samples"] |= content["samples"]
        kept["again"] += content["again"]
        kept["tune"] = content["tune"] or kept["tune"]
        kept["ratios"] = ratios(kept["samples"], kept["tune"].get("runs", []))
    return kept


def benchmark(given) -> dict:
    samples, tuned, load = {}, {}, round(os.getloadavg()[0], 2)
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TPU_LOAD_LIBRARY": "0"}
    with tpu_helpers.quietly():
        calm(given.beats)  # TensorFlow's start-up
    print(f"Load before: {load}. Other work on this machine makes every ratio less certain.", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if "jpeg" in given.only:
            print("jpeg: writing the files", flush=True)
            with worker(given, "files: ", folder=folder) as (process, _):
                process.wait()
        for section in given.only:
            for batch in SECTIONS[section]:
                samples.setdefault(section, {})[str(batch)] = side_by_side(given, section, batch, folder)
    if "tune" in given.only:
        with worker(given, "tune: ") as (_, answer):
            while "runs" not in (tuned := answer()):
                print(tuned["note"], flush=True)
    content = {"schema": 1, "date": datetime.date.today().isoformat(), "machine": machine(load), "rounds": given.rounds}
    content["again"] = len(given.again)
    content["missing"] = [name for name in PEERS if "fit" in samples and name not in samples["fit"]["128"]]
    return content | {"ratios": ratios(samples, tuned.get("runs", [])), "samples": samples, "tune": tuned}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"with commas (default: {','.join(SECTIONS)})")
    parser.add_argument("--rounds", type=int, default=5, help="of each competitor (default: 5)")
    parser.add_argument("--record", action="store_true", help="also into recorded/, images/ and the README")
    parser.add_argument("--readme", action="store_true", help="write the README's section from recorded/speed.json")
    parser.add_argument("--small", action="store_true", help="little data: does it run? The figures mean nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="folder (default: build/bench)")
    for name, kind in {"--worker": str, "--batch": int, "--folder": str}.items():
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.only, given.beats, given.again = given.only.split(","), [], []
    if unknown := [name for name in given.only if name not in SECTIONS]:
        raise tpu_helpers.Refused(f"--only {unknown[0]} is unknown: pass some of {','.join(SECTIONS)}.")
    if given.rounds < 1:
        raise tpu_helpers.Refused(f"--rounds {given.rounds} cannot be used: pass 1 or more.")
    if given.record and given.small:
        raise tpu_helpers.Refused("--record keeps no figures that mean nothing: leave out --small.")
    if given.record:
        merged(given)  # refused before the work, if at all
    given.count, given.pictures, given.seconds, given.tries = (
        (2048, 64, 0.0, 1) if given.small else (60_000, 192, 1.0, 4)
    )
    return given


def main(arguments: list[str] | None = None) -> int:
    try:
        given = parse(arguments)
        if given.worker:
            work(given)
        elif given.readme:
            write_readme()
        else:
            content, json_here = benchmark(given), given.out / "speed.json"
            places = {json_here: (given.out / "speed.png", content)}
            places |= {RECORDED: (PICTURE, merged(given, content))} if given.record else {}
            for path, (picture, content) in places.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
                draw(picture, content)
            print(f"{table(content)}\n\nWritten: {json_here}")
            if given.record:
                write_readme()
    except tpu_helpers.Refused as refused:
        print(f"Refused: {refused}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
