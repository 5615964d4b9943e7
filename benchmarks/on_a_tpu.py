"""Train the kit's models on this machine's TPU for a few minutes: *measured* beside *predicted*, to be sent in.

    python benchmarks/on_a_tpu.py                       # on any TPU host
    python benchmarks/on_a_tpu.py --minutes 10 --per-replica-batch 128,1024,16384 --slice v5e-8

It writes one JSON, whole and anew after every case, and one picture. Where there is no TPU it trains on virtual
replicas: that proves the mechanism, and the figures are a CPU's. Its author had no TPU: it is yet to run on one.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tpu_compiler
import tpu_helpers
import tpu_measure
from tpu_helpers import Refused, check_parameters, installed

OUT = Path(__file__).resolve().parent.parent / "build/on_a_tpu"
MODELS = ("the kit's MLP", "the kit's CNN")
CASE = ("model", "policy", "per_replica_batch_size")
BATCHES = {"TPU": "128,512,2048,8192", "GPU": "128,512,2048,8192", "CPU": "32,128"}  # per replica
STEPS_PER_EXECUTION = {"TPU": 32, "GPU": 32, "CPU": 4}
EPOCHS = 5  # timed, after one that is not
COLOURS = {"float32": "C6", "mixed_bfloat16": "C0"}  # as kit.mplstyle has them


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, checked before TensorFlow is imported. Raises `Refused`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tpu", help='name, address or "local", as for tpu_helpers.connect (default: look for one)')
    parser.add_argument("--minutes", default="4", help="starts no new case when they are used up (default: 4)")
    parser.add_argument("--per-replica-batch", help="sizes, with commas (default: 128,512,2048,8192; on a CPU 32,128)")
    parser.add_argument("--policies", default=",".join(COLOURS), help="with commas (default: float32,mixed_bfloat16)")
    parser.add_argument("--virtual-replicas", default="2", help="where there is no TPU (default: 2)")
    parser.add_argument("--slice", default="", help="the TPU's name, such as v5e-8, where it is not found by itself")
    parser.add_argument("--out", type=Path, default=OUT, help="folder (default: build/on_a_tpu)")
    given = parser.parse_args(arguments)

    def whole(texts):
        return [int(text) if text.isdecimal() else text for text in texts.split(",")]

    if not re.fullmatch(r"\d{0,6}\.?\d{1,6}", given.minutes) or not float(given.minutes):
        raise Refused(f"--minutes {given.minutes} cannot be used: pass a number above 0.")
    given.minutes = float(given.minutes)
    (given.virtual_replicas, *_) = whole(given.virtual_replicas)
    check_parameters(virtual_replicas=given.virtual_replicas)
    named = given.per_replica_batch is not None
    given.sizes = {kind: whole(given.per_replica_batch if named else sizes) for kind, sizes in BATCHES.items()}
    for size in given.sizes["CPU"]:
        check_parameters(per_replica_batch_size=size)
    given.policies = list(dict.fromkeys(given.policies.split(",")))
    if wrong := [policy for policy in given.policies if policy not in COLOURS]:
        raise Refused(f"--policies {wrong[0]} is unknown: pass {', '.join(COLOURS)}, or both with a comma.")
    given.slice = given.slice.replace("v5litepod", "v5e")
    if given.slice and given.slice not in tpu_compiler.TOPOLOGIES:
        raise Refused(f"--slice {given.slice} is unknown: pass one of {', '.join(tpu_compiler.TOPOLOGIES)}.")
    if absent := [name for name in ("matplotlib", "sklearn") if not importlib.util.find_spec(name)]:
        raise Refused(f"{', '.join(absent)} not installed: pip install matplotlib scikit-learn.")
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=given.out).close()
    except OSError as error:
        raise Refused(f"--out {given.out} cannot be written to ({error.strerror}): pass another folder.") from None
    return given


def replicas_of(name: str) -> int:
    kind, _, shape = tpu_compiler.TOPOLOGIES[name].partition(":")
    return math.prod(map(int, shape.split("x"))) * tpu_compiler.GENERATIONS[kind].replicas


def generation_name(accelerator: str, devices: list[str]) -> str:
    """ "v5e" of TPU_ACCELERATOR_TYPE ("v5litepod-8", "v5e-8"), else of PCI ids; "": unknown, as v2 or v3 by its id."""
    said = re.match(r"v\d+[a-z]*", accelerator.lower().replace("v5litepod", "v5e"))
    kinds = [tpu_measure.CHIP_KINDS.get(device, "").partition(",")[0] for device in devices]
    return next((name for name in [said and said[0], *kinds] if name in tpu_compiler.GENERATIONS), "")


def slice_name(generation: str, replicas: int) -> str:
    """That many replicas as a name of tpu_compiler.TOPOLOGIES, since what is used counts, not what is there; or ""."""
    names = [name for name in tpu_compiler.TOPOLOGIES if name.partition("-")[0] == generation]
    return next((name for name in names if replicas_of(name) == replicas), "")


def find_slice(given: str, replicas: int) -> tuple[str, str]:
    """(generation, slice) of the TPU that is connected, "" where unknown. Raises `Refused` if `given` cannot be it."""
    if given and replicas_of(given) != replicas:
        raise Refused(
            f"--slice {given} has {replicas_of(given)} replica(s), and this TPU {replicas}: pass another, or none."
        )
    google = [file for file in Path(tpu_measure.PCI).glob("*/vendor") if file.read_text().strip() == "0x1ae0"]
    devices = [file.with_name("device").read_text().strip() for file in google]
    generation = generation_name(given or os.environ.get("TPU_ACCELERATOR_TYPE", ""), devices)
    return generation, given or slice_name(generation, replicas)


def compiled(name: str, steps_per_execution: int = 1):
    """The kit's model; to be called in the scope of a strategy."""
    import tensorflow as tf

    layers = tf.keras.layers
    model = tf.keras.Sequential([layers.Input((28, 28, 1))])
    for filters in (16, 32) if name == "the kit's CNN" else ():
        model.add(layers.Conv2D(filters, 3, activation="relu"))
        model.add(layers.MaxPooling2D())
    model.add(layers.Flatten())
    model.add(layers.Dense(64 if name == "the kit's CNN" else 128, activation="relu"))
    model.add(layers.Dense(10, dtype="float32"))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    adam = tf.keras.optimizers.Adam(0.001)
    model.compile(adam, loss, metrics=["accuracy"], steps_per_execution=steps_per_execution)
    return model


def measure(strategy, name: str, policy: str, size: int, steps_per_execution: int, seconds: float) -> list[float]:
    """Examples/s of each timed epoch, which is made to last about `seconds`."""
    import numpy as np
    import tensorflow as tf

    replicas, ends = strategy.num_replicas_in_sync, []
    (images, labels), _ = tpu_helpers.load_data("digits")
    # One batch, the same at every step. So reading, shuffling and augmenting are left out; handing it to the replicas
    # and its way from the host's memory to the chips are not, and the predictions leave those out as well.
    batch = np.resize(images / np.float32(255), (size * replicas, 28, 28, 1)), np.resize(labels, size * replicas)
    data = tf.data.Dataset.from_tensors(batch).cache().repeat().prefetch(tf.data.AUTOTUNE)

    def note(epoch, logs):
        float(logs["loss"])  # waits for the last step
        ends.append(time.perf_counter())

    options = {"callbacks": [tf.keras.callbacks.LambdaCallback(on_epoch_end=note)], "verbose": 0, "shuffle": False}
    tf.keras.utils.set_random_seed(0)
    tf.keras.mixed_precision.set_global_policy(policy)
    try:
        with strategy.scope():
            model = compiled(name, steps_per_execution)
        model.fit(data, steps_per_epoch=steps_per_execution, epochs=2, **options)  # the first traces and compiles
        steps = steps_per_execution * max(1, min(10_000, round(seconds / (ends[1] - ends[0]))))
        ends.clear()
        model.fit(data, steps_per_epoch=steps, epochs=1 + EPOCHS, **options)
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")
    return [steps * size * replicas / (end - begin) for begin, end in itertools.pairwise(ends)]


def in_one_line(error: object) -> str:
    """The first line of the words, without this machine's folders."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"(?<![\w:/])/(?:[^\s/:'\"]+/)+", "…/", line)[:500]


def measured_fields(strategy, *case) -> dict:
    """A row's `fits` (None: failed for another reason than memory), `words` and `measured`; raises nothing."""
    import tensorflow as tf

    try:
        rates = measure(strategy, *case)
    except Exception as error:  # noqa: BLE001 - it is told, and the next cases go on: the TPU may be there only today
        full = isinstance(error, MemoryError | tf.errors.ResourceExhaustedError)
        full = full or re.search(r"RESOURCE_EXHAUSTED|\bOOM\b|[Oo]ut of memory", str(error))
        words = f"{type(error).__name__}: {in_one_line(error)}"
        return {"fits": False if full else None, "words": words, "measured": None}
    finally:
        gc.collect()  # the model leaves the chip
    found = {"median": statistics.median(rates), "lowest": min(rates), "highest": max(rates)}
    return {"fits": True, "words": "", "measured": {key: round(value, 1) for key, value in found.items()}}


def predicted_fields(tpu: str, name: str, policy: str, size: int) -> dict:
    """A row's `predicted`, `predicted_for` and, by which compiler or why not, `prediction_note`; raises nothing."""
    rates, note, options = (
        None,
        "not predicted: no slice to predict for",
        {"name": name, "recorded": True, "time_limit": 120},
    )

    def build():  # only called where nothing is recorded; on a TPU's host nothing is lowered beside the training
        if why := tpu_compiler.missing():
            raise Refused(f"nothing is recorded, and the compiler cannot be asked here: {why}")
        return compiled(name)

    if tpu:
        try:
            report = tpu_compiler.compile_for_tpu(build, tpu, size, policy, **options)
            note = report.origin() + ("" if report.fits else f": does not fit, {in_one_line(report.words)}")
            both = {"at_most": report.examples_per_second, "cost_model": report.cost_examples_per_second}
            rates = {key: round(value, 1) for key, value in both.items()} if report.fits else None
        except Exception as error:  # noqa: BLE001 - Refused or not, what was measured must not be lost
            note = f"not predicted: {in_one_line(error)}"
    return {"predicted": rates, "predicted_for": tpu, "prediction_note": note}


def table_line(row: dict, on_a_tpu: bool) -> str:
    said = f"{'failed' if row['fits'] is None else 'does not fit'}, measured: {row['words']}"
    if rates := row["measured"]:
        said = f"measured {rates['median']:,.0f} ({rates['lowest']:,.0f} … {rates['highest']:,.0f})"
    if rates := row["predicted"]:
        said += f"; predicted for {row['predicted_for']}{'' if on_a_tpu else ', another machine'}: "
        said += f"at most {rates['at_most']:,.0f}, by the cost model {rates['cost_model']:,.0f}"
    elif row["predicted_for"]:
        said += f"; {row['prediction_note']}"
    start = f"{row['model']:14} {row['policy']:15} {row['per_replica_batch_size']:11,}"
    return f"{start} {row['global_batch_size']:8,}   {said}" + (f"; ratio {row['ratio']:.3g}" if row["ratio"] else "")


def draw(path: Path, content: dict, kind: str):
    """A panel for each model, a colour for each policy; with the predictions on a TPU only. Returns the figure."""
    import matplotlib.style
    import numpy as np
    from matplotlib.figure import Figure

    title = f"a {kind}'s figures: they prove the mechanism, not a TPU's speed"
    if content["on_a_tpu"]:
        title = f"{content['slice'] or 'a TPU'}, {content['date']}: measured (median, lowest … highest) and predicted"
    with matplotlib.style.context(Path(__file__).resolve().parent.parent / "kit.mplstyle"):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        figure.suptitle(f"{title}; {content['replicas']} replica(s)", fontsize=11)
        for axis, model in zip(figure.subplots(1, len(MODELS), sharey=True), MODELS, strict=True):
            rows = [row for row in content["rows"] if row["model"] == model]
            sizes = sorted({row["per_replica_batch_size"] for row in rows})
            axis.set_xscale("log", base=2)
            axis.set(title=model, yscale="log", xlabel="per-replica batch size")
            axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
            for policy, colour in COLOURS.items():
                mine = [(row["per_replica_batch_size"], row) for row in rows if row["policy"] == policy]
                if points := [(size, *row["measured"].values()) for size, row in mine if row["measured"]]:
                    size, median, lowest, highest = np.array(points).T
                    style = {"color": colour, "marker": "o", "capsize": 4, "label": f"{policy}, measured"}
                    axis.errorbar(size, median, [median - lowest, highest - median], **style)
                points = [(size, row["predicted"]["at_most"]) for size, row in mine if row["predicted"]]
                if points and content["on_a_tpu"]:
                    axis.plot(*np.array(points).T, color=colour, ls="--", label=f"{policy}, predicted: at most")
            if axis.get_legend_handles_labels()[0]:
                axis.legend(frameon=False, fontsize=8)
        figure.axes[0].set_ylabel("examples/s of all replicas")
        figure.savefig(path, dpi=120)
    return figure


def free_path(folder: Path, stem: str) -> Path:
    names = itertools.chain([stem], (f"{stem}-{count}" for count in itertools.count(2)))
    paths = (folder / f"{name}.json" for name in names)
    return next(path for path in paths if not path.exists() and not path.with_suffix(".png").exists())


def benchmark(given: argparse.Namespace) -> int:
    """0; or 1 if nothing was measured, or a case failed for another reason than memory."""
    with tpu_helpers.quietly():
        import tensorflow as tf

        tf.config.list_physical_devices()
    strategy = tpu_helpers.connect(given.tpu, given.virtual_replicas)
    replicas, on_a_tpu = strategy.num_replicas_in_sync, isinstance(strategy, tf.distribute.TPUStrategy)
    kind = "TPU" if on_a_tpu else "GPU" if "GPU" in strategy.extended.worker_devices[0] else "CPU"
    not_a_tpus = f"These figures are a {kind}'s: they prove the mechanism, not a TPU's speed"
    generation, tpu = find_slice(given.slice, replicas) if on_a_tpu else ("", "")
    why = "" if on_a_tpu else tpu_compiler.missing()
    asked = tpu if on_a_tpu else "" if why else given.slice or "v5e-8"
    if on_a_tpu and not tpu:
        why = (
            f"a TPU {generation or 'of unknown generation'} with {replicas} replica(s) has no known name: pass --slice."
        )
    if not on_a_tpu:
        print(f"{not_a_tpus}.")
    if why:
        print(f"No prediction: {why}")
    keras = tf.keras.Model.__module__.partition(".")[0].replace("_", "-")
    several = keras == "tf-keras" or replicas == 1  # Keras 3 fails at more than 1 on several replicas
    content = {
        "schema": 1,
        "on_a_tpu": on_a_tpu,
        "date": datetime.date.today().isoformat(),
        "host": next((host for name, host in tpu_measure.HOSTS.items() if name in os.environ), "own"),
        "slice": tpu,
        "generation": generation,
        "replicas": replicas,
        "versions": {
            "TensorFlow": installed(*tpu_helpers.TENSORFLOWS),
            "Keras": installed(keras),
            "libtpu": installed("libtpu"),
            "Python": platform.python_version(),
        },
        "steps_per_execution": STEPS_PER_EXECUTION[kind] if several else 1,
        "minutes": given.minutes,
        "rows": [],
        "left_out": [],
    }
    path = free_path(given.out, f"{content['date']}-{tpu or kind.lower()}")
    cases = list(itertools.product(sorted(set(given.sizes[kind])), MODELS, given.policies))
    seconds = min(2.0, 30 * given.minutes / len(cases) / (1 + EPOCHS))  # half the time is for what is not timed
    left = [dict(zip(CASE, (model, policy, size), strict=True)) for size, model, policy in cases]
    print("model          policy          per replica   global   examples/s: median (lowest … highest)")
    end = time.perf_counter() + 60 * given.minutes
    with contextlib.suppress(KeyboardInterrupt):
        while left and (not content["rows"] or time.perf_counter() < end):
            case = tuple(left[0].values())
            row = left[0] | {"global_batch_size": case[-1] * replicas}
            row |= measured_fields(strategy, *case, content["steps_per_execution"], seconds)
            row |= predicted_fields(asked, *case) | {"ratio": None}
            if asked and not on_a_tpu:
                row["prediction_note"] += "; for another machine than this one"
            if on_a_tpu and row["measured"] and row["predicted"]:
                row["ratio"] = round(row["predicted"]["at_most"] / row["measured"]["median"], 3)
            content["rows"].append(row)
            content["left_out"] = left = left[1:]
            part = path.with_suffix(".part")
            part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            os.replace(part, path)
            print(table_line(row, on_a_tpu), flush=True)
    if left:
        names = ["{model}, {policy}, {per_replica_batch_size:,}".format(**case) for case in left]
        print(f"Left out, since {given.minutes:g} minute(s) are used up or you interrupted: {'; '.join(names)}.")
    if content["rows"]:
        draw(path.with_suffix(".png"), content, kind)
        print(f"Written: {path}\n         {path.with_suffix('.png')}")
    share = "To share it: open a pull request that adds the JSON to recorded/measured/."
    print(share if on_a_tpu else f"{not_a_tpus}, and are not collected.")
    return int(not content["rows"] or any(row["fits"] is None for row in content["rows"]))


def main(arguments: list[str] | None = None) -> int:
    try:
        return benchmark(parse(arguments))
    except Refused as refused:
        print(f"Refused: {refused}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
