"""Describe a machine, explain an error, measure pipeline, step and batch sizes: one file beside tpu_helpers.py.

Apart from it because nothing that trains needs it, and so that tpu_helpers.py stays small. As there, what measures is
first built by hand in the notebook its docstring names: the same, but for hints, imports and checks.
"""

import importlib.util
import itertools
import numbers
import os
import random
import re
import reprlib
import statistics
import sys
import time
from collections import namedtuple
from collections.abc import Iterable, Sequence
from pathlib import Path

from tpu_helpers import TENSORFLOWS, Refused, _check, _check_kind, check_parameters, find_tpu, installed

PCI = "/sys/bus/pci/devices"  # where Linux lists them all
CHIP_KINDS = {"0x0027": "v2 or v3, 16 or 32", "0x005e": "v4, 32", "0x0062": "v5p, 95", "0x0063": "v5e, 16"}
CHIP_KINDS |= {"0x006f": "v6e, 32", "0x0076": "TPU7x, which TensorFlow does not support, 192"}
HOSTS = {"KAGGLE_KERNEL_RUN_TYPE": "Kaggle", "COLAB_RELEASE_TAG": "Colab", "BINDER_LAUNCH_HOST": "Binder"}
SHOWN = ("TPU_NAME", "TPU_ACC", "TPU_LOAD", "TPU_SKIP", "ISTPUVM", "TF_USE_LEGACY", *HOSTS)

MESSAGES = {  # part of a message: what it means and what to do, shown in notebooks/09_when_it_breaks.ipynb
    r"No module named 'tensorflow'": "TensorFlow is not installed, as on Colab's TPU runtimes: connect() says how.",
    r"provide a TPU Name": "there is no TPU here and none was named: choose a TPU runtime, or pass its name.",
    r"Op 'ConfigureDistributedTPU'": "this TensorFlow was built without TPUs: connect() names the cell to run.",
    r"found for '/device:TPU|No TPU platform": "TensorFlow finds no chip, or a libtpu it cannot drive: ask connect().",
    r"TPU is already in use": "another process holds the chip: shut its kernel down, then restart this one.",
    r"context_id|incarnation|to all addresses|Socket closed|reset by peer|Reinitializing the TPU": "the TPU's worker "
    "is gone or was restarted, with all that lay on it: restart the kernel, connect, load what was kept.",
    r"scheme '\[local\]'": "the TPU's worker is another machine that cannot read this disk: use a bucket, or for a "
    "tf.train.Checkpoint CheckpointOptions(experimental_io_device='/job:localhost').",
    r'created in the distribution|inside "with strategy': "a model was built outside the strategy's scope: build "
    "it inside, compile it inside.",
    r"Mixing different tf.distribute.Str": "two strategies in one model: connect once, and use that strategy only.",
    r"not support pure eager": "strategy.run got a plain function: call it inside one that is a @tf.function.",
    r"singleton tf.Variables|non-first call": "a step made variables when it was called: make model, optimizer and "
    "metrics before it, in the scope.",
    r"being in cross-replica context": "strategy.run or strategy.reduce was called inside the step: call it outside.",
    r"outside the replica context": "what belongs into a replica was called outside: call it in what strategy.run "
    "runs.",
    r"'PerReplica'": "each replica has its own value: make one of them by strategy.reduce.",
    r"losses\.Reduction|loss reduction when": "the loss does not know the global batch: reduction='none', then "
    "tf.nn.compute_average_loss.",
    r"evenly divisible|to reshape|Cannot reshape": "a size does not fit; if only at the end of an epoch, the last "
    "batch is smaller: batch(n, drop_remainder=True).",
    r"shapes of loop body|compile-time const": "a shape depends on values, and a TPU's program has fixed ones: pad.",
    r"unsupported operations|No registered '\w+' OpK": "strings, Python and decoding cannot be compiled: move them "
    "into the tf.data pipeline.",
    r"Trying to access resource": "jit_compile=True on several replicas: leave it out, a TPU compiles anyway.",
    r"feed a value for placeholder": "Keras 3 cannot run several steps in one execution with the default all-reduce: "
    "pass cross_device_ops=tf.distribute.ReductionToOneDevice() to MirroredStrategy, or steps_per_execution=1.",
    r"RESOURCE_EXHAUSTED|ResourceExhausted|Ran out of memory|That was not possible": "it does not fit: a smaller "
    "per-replica batch, or mixed_bfloat16.",
    r"to be a \w+ tensor but|not match type float": "two types met, often float64, which is NumPy's own, and "
    "float32: x.astype('float32').",
    r"outside the valid range": "a label is no class of the model (a TPU says nothing): look at labels.min(), .max().",
    r"ran out of data|End of sequence|StopIteration": "the data ended before the steps did: repeat(), or fewer steps.",
    r"Received: labels.shape|equal `logits|same first dim|rank \(ndim\)": "one-hot labels need another loss than "
    "whole numbers: not Sparse….",
}

ADVICE = {  # for the slowest stage of a pipeline
    "map": "give it whole batches, num_parallel_calls=tf.data.AUTOTUNE, or cache() what stays the same",
    "batch|shuffle|slice": "shuffle indices, batch them, then gather batches, as make_dataset does",
    "interleave|record": "read more shards at once (num_parallel_calls=tf.data.AUTOTUNE), or cache()",
    "": "leave it out, or do it once, before cache()",
}

Throughput = namedtuple("Throughput", "median lowest highest")
Diagnosis = namedtuple("Diagnosis", "pipeline step stages slowest")
BatchTiming = namedtuple("BatchTiming", "per_replica_batch_size global_batch_size median lowest highest")
Tuned = namedtuple("Tuned", "per_replica_batch_size sure rows")


def describe(strategy=None) -> str:
    """A table to paste into a bug report: host, TPU, replicas, HBM, versions, and what is unusual about them.

    Used in notebooks/01_connect_to_tpu.ipynb. Chips are told by their PCI ids (github.com/jax-ml/jax,
    jax/_src/hardware_utils.py); HBM is what docs.cloud.google.com/tpu/docs states for a chip, not read from it.
    """
    accepted = strategy is None or hasattr(strategy, "num_replicas_in_sync")
    _check(accepted, f"strategy={reprlib.repr(strategy)} is no strategy: pass one.")
    google = [file for file in Path(PCI).glob("*/vendor") if file.read_text().strip() == "0x1ae0"]
    kinds = [CHIP_KINDS.get(file.with_name("device").read_text().strip()) for file in google]
    chips = [f"{kinds.count(kind)} × {kind} GiB of HBM" for kind in {*kinds} - {None}]
    tensorflow, keras = installed(*TENSORFLOWS), installed("tf-keras", "keras")
    legacy = os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True")  # as TensorFlow reads it
    tpu, problem, _ = find_tpu()
    unusual = {
        problem: tpu and problem,
        "a TPU on the PCI bus, but no device file: is this a container without --device?": chips and not tpu,
        "several TensorFlow packages, which overwrite each other's files": "," in tensorflow,
        "tf.keras is Keras 3, whose maintainers do not test it with TPUStrategy": not legacy,
        "TF_USE_LEGACY_KERAS asks for tf-keras, which is not installed": legacy and "tf-keras" not in keras,
    }
    rows = {
        "host": ", ".join(host for name, host in HOSTS.items() if name in os.environ) or "your own",
        "TPU": f"{tpu or 'none'} (chips on the PCI bus: {', '.join(chips) or 'none'})",
        "strategy": strategy and f"{type(strategy).__name__}, {strategy.num_replicas_in_sync} replica(s)",
        "TensorFlow": tensorflow or "not installed",
        "Keras": f"{keras or 'not installed'}; tf.keras is {'tf_keras' if legacy else 'keras'}",
        "Python": f"{sys.version.split()[0]} on {sys.platform}, {os.cpu_count()} CPU cores",
        "others": installed("libtpu", "jax", "jaxlib", "protobuf", "numpy"),
        "environment": " ".join(f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith(SHOWN)),
        "unusual": "; ".join(text for text, true in unusual.items() if true) or "nothing",
    }
    return "\n".join(f"{name:12} {text}" for name, text in rows.items())


def explain(error: Exception | str) -> str:
    """What an exception or its message means, and what to do; the message itself if it is none of `MESSAGES`.

    Built in notebooks/09_when_it_breaks.ipynb, which provokes them: their texts are of TensorFlow 2.20 and 2.21.
    """
    _check_kind(str | BaseException, error=error)
    said = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return next((meaning for pattern, meaning in MESSAGES.items() if re.search(pattern, said)), said)


def check_shards(paths: list, parse) -> int:
    """How many records these TFRecord files hold: each is read and parsed once, before a training waits for it.

    Built in notebooks/02_build_input_pipeline.ipynb. `parse(record)` is what the pipeline maps. Raises `Refused`, with
    the file's name, for one that is not there, is empty, damaged, or of another schema. A file that was cut between two
    records is whole to all that can be seen: compare the number returned with the one you wrote.
    """
    _check_kind(Sequence, paths=paths)
    _check(not isinstance(paths, str | bytes), f"paths={reprlib.repr(paths)} is one name: pass a list of names.")
    _check(len(paths) > 0, "paths=[] has no file: pass the names of the shards.")
    for path in paths:
        _check_kind(str | os.PathLike, path=path)
        _check(bool(str(path)), "path='' cannot be used: pass the name of a shard.")
    _check(callable(parse), f"parse={reprlib.repr(parse)} is no function: pass what the pipeline maps.")
    import tensorflow as tf

    total = 0
    for path in map(os.fspath, paths):
        count, parsed = 0, tf.data.TFRecordDataset([path]).map(parse, num_parallel_calls=tf.data.AUTOTUNE)
        try:
            for _ in parsed:
                count += 1
        except tf.errors.NotFoundError:
            raise Refused(f"{path} is not there: pass the names of shards that are.") from None
        except tf.errors.OpError as error:
            around = r"(?s)\{\{.*?\}\} |Error in .* iterator: \S+ |\.?\s*(\[\[|\[Op:).*"
            reason, remedy = re.sub(around, "", error.message)[:200], "read it with the parse it was written for"
            if isinstance(error, tf.errors.DataLossError):
                remedy = "the file is damaged, copy or write it anew, or leave it out"
            raise Refused(f"{path}, record {count}: {reason}: {remedy}.") from None
        if not count:
            raise Refused(f"{path} has no records: write it anew, or leave it out.")
        total += count
    return total


def throughput(batches, global_batch_size: int, step=None, *, steps=20, repeats=5) -> Throughput:
    """Examples/s that `batches` gives, or that `step` takes when called with each: *measured*, median, lowest, highest.

    Built in notebooks/02_build_input_pipeline.ipynb. `batches`: a dataset or `itertools.repeat(batch)`; the first
    `steps` warm up. `step(batch)` returns a scalar, which is read after `steps`. Raises `Refused` if batches end early.
    """
    check_parameters(global_batch_size=global_batch_size, steps=steps, repeats=repeats)
    _check_kind(Iterable, batches=batches)
    _check(step is None or callable(step), f"step={reprlib.repr(step)} is no function: pass one of a batch.")
    iterator, rates = iter(batches), []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        for done in range(steps):
            batch = next(iterator, None)
            _check(batch is not None, f"batches ended after {done} of {steps=}: pass an endless dataset.")
            result = step(batch) if step else 0
        float(result)
        rates.append(steps * global_batch_size / (time.perf_counter() - began))
    return Throughput(statistics.median(rates[1:]), min(rates[1:]), max(rates[1:]))


def _check_tpu(tpu: str | None) -> None:
    _check(
        tpu is None or bool(importlib.util.find_spec("tpu_compiler")),
        f"tpu={reprlib.repr(tpu)} needs tpu_compiler.py: get it, too.",
    )
    if tpu is not None:
        from tpu_compiler import TOPOLOGIES

        accepted = isinstance(tpu, str) and tpu in TOPOLOGIES
        _check(accepted, f"tpu={reprlib.repr(tpu)} is unknown: pass one of {', '.join(TOPOLOGIES)}.")


def _check_batches(dataset) -> None:
    import tensorflow as tf

    _check(hasattr(dataset, "element_spec"), f"dataset={reprlib.repr(dataset)} is none: pass a tf.data.Dataset.")
    shapes = [getattr(spec, "shape", None) for spec in tf.nest.flatten(dataset.element_spec)]
    batched = all(shape is not None and shape.rank and shape[0] for shape in shapes) and shapes
    _check(bool(batched), f"dataset has elements of the shapes {shapes}: batch(n, drop_remainder=True).")


def _check_seconds(seconds: float) -> None:
    accepted = isinstance(seconds, numbers.Real) and 0 < seconds <= 3600
    _check(accepted, f"seconds={reprlib.repr(seconds)} cannot be used: pass a number above 0, at most 3600.")


def _check_sizes(sizes: Sequence) -> None:
    accepted, shown = isinstance(sizes, Sequence) and len(sizes) > 0, reprlib.repr(sizes)
    _check(accepted, f"per_replica_batch_sizes={shown} has no sizes to try: pass a list, as in [8, 16, 32].")


def _check_compiled(model) -> None:
    optimizer = getattr(model, "optimizer", None)
    _check(
        hasattr(optimizer, "build"),
        f"model={reprlib.repr(model)} has {optimizer=}: compile it, with one of today's optimizers.",
    )


def pipeline_stages(dataset) -> list[tuple]:
    """[(name, the dataset up to that stage, examples in one of its elements)], from the source on.

    Built in notebooks/02_build_input_pipeline.ipynb. Reads tf.data's private `_inputs()` and `_map_func`, for nothing
    public tells what a dataset is made of: tested with TensorFlow 2.20 and 2.21. Without them, all is one stage.
    """
    import tensorflow as tf

    _check_batches(dataset)
    stages, examples = [], tf.nest.flatten(dataset.element_spec)[-1].shape[0]
    while True:
        name = re.sub("Parallel|Dataset|V[0-9]|_", "", type(dataset).__name__).lower()
        function = getattr(getattr(dataset, "_map_func", None), "_func", None)
        inner = "tensorflow" in str(getattr(function, "__module__", ""))  # part of the stage after it
        if name not in ("options", "restructured") and not inner:
            stages.insert(0, (f"{name}({function.__name__})" if function else name, dataset, examples))
        before = getattr(dataset, "_inputs", list)()[-1:]
        if not before or name in ("interleave", "flatmap", "filter", "window", "scan", "take"):
            return stages  # beyond these, nothing says how many elements make one example
        after, dataset = dataset, before[0]
        here, there = (tf.nest.flatten(each.element_spec)[-1].shape for each in (after, dataset))
        if name.endswith("batch"):  # batch, unbatch, rebatch
            examples = examples * (name == "batch" or there[0]) // (name == "unbatch" or here[0])


def time_step(dataset, model, *, steps=20) -> Throughput:
    """Examples/s of the step that `fit` runs for this compiled model, on the first batch over and over: *measured*.

    Built in notebooks/02_build_input_pipeline.ipynb. The weights and the optimizer's state are put back afterwards.
    Raises `Refused` for a model that is not compiled.
    """
    check_parameters(steps=steps)
    _check_batches(dataset)
    _check_compiled(model)
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    state = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    kept = [(variable, variable.numpy()) for variable in [*model.variables, *state]]
    one_batch = dataset.take(1).cache().repeat()
    batches = iter(model.distribute_strategy.experimental_distribute_dataset(one_batch))
    train, before = model.make_train_function() or model.train_function, optimizer.iterations.numpy()
    train(batches)
    at_once = int(optimizer.iterations.numpy() - before)  # steps_per_execution
    size = next(iter(dataset.element_spec)).shape[0]
    calls = {"steps": max(1, steps // at_once), "step": lambda batches: next(iter(train(batches).values()))}
    rates = throughput(itertools.repeat(batches), size * at_once, **calls)
    for variable, value in kept:
        variable.assign(value)
    return rates


def diagnose(dataset, model, tpu: str | None = None, *, seconds=0.1) -> Diagnosis:
    """What holds up the training, the pipeline or the step? And which stage of the pipeline? Prints it, *measured*.

    Built in notebooks/02_build_input_pipeline.ipynb. `dataset`: endless (inputs, labels), as for `fit`; `model`: a
    compiled one. Times the dataset alone, the step alone (`time_step`), and the dataset up to each stage: what it takes
    more than up to the stage before, leaving it out would save. A window lasts about so many `seconds`. With `tpu`, as
    "v5e-8", also says whether it would feed that slice, *predicted* by tpu_compiler.py. Returns the examples/s of both,
    µs an example by stage, and the slowest stage. Raises `Refused` for bad input.
    """
    _check_seconds(seconds)
    import tensorflow as tf

    _check(isinstance(dataset, tf.data.Dataset), f"dataset is a {type(dataset).__name__}: pass a tf.data.Dataset.")
    _check(isinstance(dataset.element_spec, tuple), f"dataset has {dataset.element_spec}: pass (inputs, labels).")
    shape = tf.nest.flatten(dataset.element_spec)[0].shape
    _check(bool(shape.rank and shape[0]), f"dataset has elements of shape {shape}: batch(n, drop_remainder=True).")
    _check_tpu(tpu)
    _check_compiled(model)

    def timed(part, examples):
        quick = throughput(part.repeat(), examples, steps=3, repeats=1).median
        return throughput(part.repeat(), examples, steps=max(3, int(seconds * quick / examples)), repeats=3)

    size, costs, before = shape[0], {}, 0
    pipeline, step = timed(dataset, size), time_step(dataset, model)
    print(f"pipeline {pipeline.median:12,.0f} examples/s alone, measured")
    print(f"step     {step.median:12,.0f} examples/s alone, measured")
    for name, part, examples in pipeline_stages(dataset):
        part = part if examples >= size else part.batch(size // examples)
        rate = timed(part, max(examples, size)).median
        costs[name], before = 1e6 / rate - before, 1e6 / rate
        print(f"{costs[name]:12.2f} µs an example, measured: {name}")
    slowest = max(costs, key=costs.get)
    if pipeline.median < step.median:
        advice = next(text for names, text in ADVICE.items() if re.search(names, slowest))
        print(f"The pipeline holds up the training, most of all {slowest}: {advice}.")
    else:
        ahead = pipeline.median / step.median
        print(f"The step holds up the training: the pipeline gives {ahead:.1f} times as much.")
    if tpu:
        from tpu_compiler import compile_for_tpu

        try:
            most = compile_for_tpu(
                model, tpu, size // model.distribute_strategy.num_replicas_in_sync
            ).examples_per_second
            share = f"this host's pipeline gives {pipeline.median / most:.1%} of that, measured"
            print(f"{tpu} takes at most {most:,.0f} examples/s, predicted: {share}.")
        except Refused as error:
            print(f"Whether this would feed {tpu} is not known: {error}")
    return Diagnosis(pipeline, step, costs, slowest)


def pulse() -> tuple[float, float]:
    """GB/s at which the cores hand each other 4 MiB, and at which one core copies as much: *measured*, now, in 3 ms.

    Built in notebooks/05_tune_batch_size.ipynb. On a virtual machine the first can fall to a quarter for seconds (for
    want of a common cache, or as others use the cores): a slow phase, in which a step's kernels are slower, too.
    """
    import numpy as np
    import tensorflow as tf

    own, copy = np.ones([2, 1024, 1024], "float32")
    together, alone = [], []
    with tf.device("CPU:0"):
        shared = tf.constant(own)
        for _ in range(9):
            began = time.perf_counter()
            shared = tf.reverse(shared, [0])  # each core reads what another one wrote
            between = time.perf_counter()
            np.copyto(copy, own[::-1])
            together.append(between - began)
            alone.append(time.perf_counter() - between)
    return tuple(2 * own.nbytes / statistics.median(seconds) / 1e9 for seconds in (together, alone))


def how_sure(rates: dict) -> tuple[int, float]:
    """The fastest of {size: [rates of a training, …]}, and how sure it is that it is within 5 % of the best of them.

    Built in notebooks/05_tune_batch_size.ipynb. Sure is the share of 300 resamplings (a bootstrap), of trainings and of
    their epochs, in which it is.
    """
    draw = random.Random(0).choices

    def second(trainings):
        return sorted(itertools.chain(*trainings))[-2]

    def again(trainings):
        return second(draw(training, k=len(training)) for training in draw(trainings, k=len(trainings)))

    best = max(rates, key=lambda size: second(rates[size]))
    draws = [{size: again(trainings) for size, trainings in rates.items()} for _ in range(300)]
    return best, sum(drawn[best] >= 0.95 * max(drawn.values()) for drawn in draws) / len(draws)


def next_size(sizes: list[int], rates: dict, trainings: int) -> int | None:
    """The size to measure next on the climb to the fastest, None at the end. `rates`: {size: [rates of a training, …]}.

    Built in notebooks/05_tune_batch_size.ipynb. Starts in the middle; looks above and below the best so far; then again
    at all within a tenth of it (30 % after a single training), three times and until it is 95 % sure, in fewer
    trainings than there are sizes. `trainings` is how many there were, also in slow phases.
    """
    if not rates:
        return sizes[len(sizes) // 2] if sizes else None
    best, sure = how_sure(rates)
    place = sizes.index(best)
    top = {size: sorted(itertools.chain(*of))[-2] for size, of in rates.items()}
    near = sizes[place + 1 : place + 2] + sizes[max(place - 1, 0) : place]
    unknown = [size for size in near if size not in rates]
    rivals = [size for size, of in rates.items() if top[size] > (0.9 if len(of) > 1 else 0.7) * top[best]]
    fewest = min(rivals, key=lambda size: len(rates[size]))
    enough = len(rivals) == 1 or (sure >= 0.95 and len(rates[fewest]) > 2)
    if unknown or enough or trainings >= len(sizes) - 1:
        return next(iter(unknown), None)
    return fewest


def calm(trainings: list, beats: list) -> list:
    """[[rate, …] of a training, …] without the epochs in slow phases. `trainings`: [[(rate, pulse), …] of one, …].

    Built in notebooks/05_tune_batch_size.ipynb. `beats`: all that `pulse` has said. Empty if there is one training with
    fewer than two others; after a second, or on a machine that is always slow, every epoch counts.
    """
    limit = 0.45 * max(itertools.chain(*beats))
    kept = [[rate for rate, shared in each if shared > limit] for each in trainings]
    kept = [each for each in kept if len(each) > 1]
    every = len(trainings) > 1 or (len(beats) > 20 and max(beats)[0] < limit)
    return kept or [[rate for rate, _ in each] for each in trainings if every]


def time_training(train, size: int, replicas: int, beats: list, most: float) -> list[tuple]:
    """[(examples/s, pulse), …] of a training's epochs but the first, which traces and compiles: *measured*.

    Built in notebooks/05_tune_batch_size.ipynb. Ends it after three calm epochs, when two of them are hopeless beside
    `most`, or after six of any kind.
    """
    import tensorflow as tf

    epochs = []

    class Clock(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            beats.append(pulse())
            self.began = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            rate = size * replicas * self.params["steps"] / (time.perf_counter() - self.began)
            beats.append(pulse())
            if epoch:
                epochs.append((rate, min(beats[-2:])[0]))
            known = list(itertools.chain(*calm([epochs], beats)))
            hopeless = len(known) > 1 and max(known) < 0.7 * most
            self.model.stop_training = hopeless or len(known) > 2 or len(epochs) > 5

    train(size, Clock())
    _check(len(epochs) > 1, f"train({size}, clock) ran too few epochs: fit 4 or more, with callbacks=[clock].")
    return epochs


def tune_batch_size(train, per_replica_batch_sizes, replicas: int) -> Tuned:
    """Find the fastest per-replica batch size: climb from the middle, and end a training when enough is known.

    Built in notebooks/05_tune_batch_size.ipynb. `train(per_replica_batch_size, clock)` builds, compiles and fits a
    model for 4 epochs or more (7 let it wait) with `callbacks=[clock]`, which ends it sooner; the first (tracing,
    compiling) is not counted, nor are epochs in slow phases of the machine (`pulse`); a training with no others is done
    once more. A size's second fastest epoch counts: other load only slows epochs down (docs.python.org, timeit), and
    one alone may be luck. A size that does not fit ends the climb. Prints a row for each training, and returns the
    fastest size, how sure it is that this is within 5 % of the best measured (by resampling trainings and epochs; that
    the sizes left out are no faster is assumed), and a row for each size. Raises `Refused` for sizes that are no whole
    numbers, and for too few epochs.
    """
    _check_sizes(per_replica_batch_sizes)
    _check(callable(train), f"train={reprlib.repr(train)} is no function: pass one of a size and a clock.")
    check_parameters(replicas=replicas)
    for size in per_replica_batch_sizes:
        check_parameters(per_replica_batch_size=size, replicas=replicas)
    import tensorflow as tf

    sizes, timed, rates, beats, tried = sorted(set(per_replica_batch_sizes)), {}, {}, [pulse()], 0
    print("per replica   global   examples/s, measured: median (lowest … highest)")
    while size := next(iter(timed.keys() - rates.keys()), None) or next_size(sizes, rates, tried):
        most, tried = max(itertools.chain(*itertools.chain(*rates.values())), default=0), tried + 1
        try:
            epochs = time_training(train, size, replicas, beats, most)
        except (tf.errors.ResourceExhaustedError, MemoryError) as error:
            reason = re.search(r".*(OOM when|ut of memory|nable to allocate).*|$", str(error)).group()
            print(f"{size:11}   does not fit, nor will larger ones. {type(error).__name__}: {reason}")
            sizes, timed = [n for n in sizes if n < size], {n: timed[n] for n in timed if n < size}
        else:
            timed.setdefault(size, []).append(epochs)
            slow = "" if calm([epochs], beats) else ", in a slow phase of the machine"
            new = [rate for rate, _ in epochs]
            spread = f"{statistics.median(new):,.0f} ({min(new):,.0f} … {max(new):,.0f})"
            print(f"{size:11} {size * replicas:8}   {spread}{slow}")
        rates = {n: found for n, trainings in sorted(timed.items()) if (found := calm(trainings, beats))}
    if not rates:
        return Tuned(None, 0.0, [])
    every = {size: list(itertools.chain(*trainings)) for size, trainings in rates.items()}
    rows = [BatchTiming(n, n * replicas, statistics.median(of), min(of), max(of)) for n, of in every.items()]
    best, sure = how_sure(rates)
    found = f"{best} per replica is within 5 % of the best of {len(rows)} sizes"
    print(f"{found}: {sure:.0%} sure by resampling, measured.")
    return Tuned(best, sure, rows)
