"""What the notebooks share: one file, to be copied whole or in part.

Importing it does no work and needs no TensorFlow. Import it before TensorFlow: where tf-keras is installed and you have
not decided otherwise, it sets TF_USE_LEGACY_KERAS=1, so that `tf.keras` is tf-keras, as in Google's own TPU jobs.

Each helper is built by hand in the notebook that its docstring names; the code there is the same, without docstring,
type hints, imports and the `_check…` lines, which refuse bad input in one sentence before any work is done.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import numbers
import os
import re
import socket
import statistics
import sys
import tempfile
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np
    import tensorflow as tf

if "tensorflow" not in sys.modules and importlib.util.find_spec("tf_keras"):
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

CHOICES = {"dataset": ("digits", "mnist"), "dtype": ("float32", "bfloat16", "float16")}
LIMITS = {"virtual_replicas": 64, "per_replica_batch_size": 2**30, "epochs": 10_000, "steps": 10**6, "seed": 2**31 - 1}
INSTALL = (
    "pip uninstall -y tensorflow tensorflow-cpu; "
    "pip install tensorflow-tpu==2.20.0 'libtpu>=0.0.14,<0.0.32' && pip install --no-deps tf-keras==2.20.1"
)


class Refused(ValueError):
    """Bad input, or something that is not there, in one sentence; a notebook shows the sentence and no traceback."""

    def _render_traceback_(self) -> list[str]:  # IPython's hook for exceptions that print themselves
        return [f"{type(self).__name__}: {self}"]


def _check(accepted: bool, sentence: str) -> None:
    if not accepted:
        raise Refused(sentence)


def check_parameters(**parameters: object) -> None:
    """Refuse bad parameters by name, before any work: `check_parameters(dataset=dataset, epochs=epochs)`.

    `dataset` and `dtype` must be one of `CHOICES`; anything else a whole number of at least 1 (`seed`: 0) and at most
    what `LIMITS` says. Raises `Refused` for the first that is not.
    """
    for name, value in parameters.items():
        if name in CHOICES:
            known = ", ".join(map(repr, CHOICES[name]))
            _check(isinstance(value, str) and value in CHOICES[name], f"{name}={value!r} is unknown: pass {known}.")
            continue
        least, most = int(name != "seed"), LIMITS.get(name, 2**40)
        whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        accepted = whole and least <= value <= most
        _check(accepted, f"{name}={value!r} cannot be used: pass a whole number from {least} to {most:,}.")


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep TensorFlow's start-up chatter off the screen: `with quietly(): import tensorflow as tf`.

    Drops TensorFlow's INFO lines, and its complaints of what this CPU and a missing GPU cannot do, which it writes to
    the process's stderr below Python's reach; passes on all else. Plumbing of the notebooks' Setup cell.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    chatter = rb"(?m)^(WARNING: All log messages before absl|I\d{4} |E\d{4} .*(failed call to cuInit|oneDNN)).*\n"
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            caught.seek(0)
            sys.stderr.write(re.sub(chatter, b"", caught.read()).decode(errors="replace"))
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].get_logger().setLevel("WARNING")


def virtual_strategy(replicas: int) -> tf.distribute.MirroredStrategy:
    """Real synchronous data parallelism without a TPU: `replicas` virtual devices on this CPU.

    Built in notebooks/01_connect_to_tpu.ipynb. TensorFlow divides its CPU once, when it starts: call this before any
    other TensorFlow operation. The first call for several divides it by 8 or more; later calls share those. Raises
    `Refused` if it comes too late, or `replicas` is no whole number from 1 to 64.
    """
    check_parameters(virtual_replicas=replicas)
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    there = len(tf.config.get_logical_device_configuration(cpu) or ["CPU:0"])
    if replicas > there:
        try:
            parts = [tf.config.LogicalDeviceConfiguration()] * max(replicas, 8)
            tf.config.set_logical_device_configuration(cpu, parts)
        except RuntimeError:
            late = f"virtual_replicas={replicas} comes too late, TensorFlow has started with {there}"
            raise Refused(f"{late}: restart the kernel, and connect before any other TensorFlow operation.") from None
    one_device = tf.distribute.ReductionToOneDevice()  # the default way to all-reduce can hang on CPUs
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)], cross_device_ops=one_device)


def connect(tpu: str | None = None, virtual_replicas: int = 1) -> tf.distribute.Strategy:
    """A `TPUStrategy` if a TPU answers; else say why not, and return virtual replicas on the CPU.

    Built in notebooks/01_connect_to_tpu.ipynb. `tpu` is a name, or "local" for chips in this machine; left out,
    TPU_NAME is read, then the two places searched where TensorFlow's XLA looks for chips. `virtual_replicas` stand in
    where there is no TPU. Raises `Refused` as `virtual_strategy` does.
    """
    check_parameters(virtual_replicas=virtual_replicas)
    _check(tpu is None or isinstance(tpu, str), f"tpu={tpu!r} is not a name: pass a string, such as tpu='local'.")
    import tensorflow as tf

    chip = any(os.path.exists(path) for path in ("/dev/accel0", "/dev/vfio/0"))
    tpu = tpu or os.environ.get("TPU_NAME") or ("local" if chip else None)
    reason = "no chip at /dev/accel0 or /dev/vfio/0, and no TPU_NAME in the environment"
    if tpu:
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=tpu)
            tf.config.experimental_connect_to_cluster(resolver)
            tf.tpu.experimental.initialize_tpu_system(resolver)
            strategy = tf.distribute.TPUStrategy(resolver)
            print(f"TPU {tpu!r}: {strategy.num_replicas_in_sync} replicas.")
            return strategy
        except (ValueError, RuntimeError, tf.errors.OpError) as error:
            message = str(error).partition("\n")[0]
            reason = f"TPU {tpu!r} did not start, {type(error).__name__}: {message}"
            virtual_replicas = 1  # the attempt has started TensorFlow: its CPU can no longer be divided
    print(f"No TPU: {reason}.")
    print(f"Training on {virtual_replicas} virtual replica(s) of this CPU instead. To use a TPU:")
    print("choose a TPU runtime, run the next line there, restart the kernel and connect again.")
    print(INSTALL)
    return virtual_strategy(virtual_replicas)


def load_digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """scikit-learn's 1,797 handwritten digits, enlarged from 8×8 to 28×28; a fixed fifth held out. No network.

    Built in notebooks/02_build_input_pipeline.ipynb. Returns ((x_train, y_train), (x_val, y_val)): uint8
    [n, 28, 28, 1] and int32 [n].
    """
    import numpy as np
    from scipy import ndimage  # scikit-learn brings it
    from sklearn import datasets, model_selection

    small, labels = datasets.load_digits(return_X_y=True)
    images = ndimage.zoom(small.reshape(-1, 8, 8), (1, 3.5, 3.5), order=1, mode="nearest", grid_mode=True)
    images = np.rint(images / 16 * 255).astype("uint8")[..., np.newaxis]
    x_train, x_val, y_train, y_val = model_selection.train_test_split(
        images, labels.astype("int32"), test_size=0.2, random_state=0, stratify=labels
    )
    return (x_train, y_train), (x_val, y_val)


def load_data(dataset: str = "digits") -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """((x_train, y_train), (x_val, y_val)) of "digits" (offline) or "mnist" (downloaded once, kept by Keras).

    Built in notebooks/02_build_input_pipeline.ipynb. uint8 [n, 28, 28, 1] and int32 [n]. Raises `Refused` for another
    name, and within seconds for "mnist" where there is no network.
    """
    check_parameters(dataset=dataset)
    if dataset == "digits":
        return load_digits()
    import tensorflow as tf

    patience = socket.getdefaulttimeout()
    socket.setdefaulttimeout(10)  # seconds; without it a dead network is waited for, for ever
    try:
        with contextlib.redirect_stdout(None):  # the progress bar
            parts = tf.keras.datasets.mnist.load_data()
    except Exception as error:  # noqa: BLE001 - Keras raises a bare Exception when a download fails
        reason = str(error).partition("\n")[0] or type(error).__name__
        failed = f"dataset='mnist' could not be downloaded ({reason})"
        raise Refused(f"{failed}: connect to a network, or use dataset='digits'.") from None
    finally:
        socket.setdefaulttimeout(patience)
    return tuple((images[..., None], labels.astype("int32")) for images, labels in parts)


def augment(image: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """One image turned by up to ±12°, scaled by up to ±12 % and shifted by up to ±2 pixels.

    Built in notebooks/02_build_input_pipeline.ipynb. `image` [height, width, channels]; `key` int [2]: the same key
    makes the same change on any machine. Returns float32 of the same shape and range of values.
    """
    import tensorflow as tf

    height, width = image.shape[:2]
    turn, scale, right, down = tf.unstack(tf.random.stateless_uniform([4], key, -1.0, 1.0))
    cos, sin = (1 + 0.12 * scale) * tf.cos(0.21 * turn), (1 + 0.12 * scale) * tf.sin(0.21 * turn)
    x, y = (width - 1) / 2, (height - 1) / 2  # the middle, which is turned about and then moved
    matrix = [cos, -sin, x - cos * x + sin * y + 2 * right, sin, cos, y - sin * x - cos * y + 2 * down, 0.0, 0.0]
    moved = tf.raw_ops.ImageProjectiveTransformV3(
        images=tf.cast(image, tf.float32)[tf.newaxis],
        transforms=tf.stack(matrix)[tf.newaxis],
        output_shape=[height, width],
        fill_value=0.0,
        interpolation="BILINEAR",
    )
    return moved[0]


def make_dataset(
    images: np.ndarray,
    labels: np.ndarray,
    global_batch_size: int,
    *,
    training: bool = True,
    replicas: int = 1,
    seed: int = 0,
    dtype: str = "float32",
) -> tf.data.Dataset:
    """Cache, shuffle, repeat, augment, batch, prefetch: batches that all have one static shape.

    Built in notebooks/02_build_input_pipeline.ipynb. `images` uint8 [n, height, width, channels] and `labels` [n]
    become `dtype` [global_batch_size, height, width, channels], 0…1, and labels [global_batch_size]. For training
    without end, shuffled anew each epoch and augmented, the same for the same `seed` and `tf.random.set_seed`;
    otherwise one pass, in order, which says how many examples it leaves out if the batch does not divide them.

    Raises `Refused` for a batch that is no whole number, larger than the data or not divisible by `replicas`, an
    unknown `dtype`, and images and labels that are not as above.
    """
    check_parameters(global_batch_size=global_batch_size, replicas=replicas, seed=seed, dtype=dtype)
    _check_examples(images, labels, global_batch_size, replicas)
    import tensorflow as tf

    if not training and len(images) % global_batch_size:
        print(f"{len(images) % global_batch_size} of {len(images):,} examples fill no batch: left out.")

    def prepare(number, image, label):
        image = augment(image, tf.stack([seed, number])) if training else tf.cast(image, tf.float32)
        return tf.cast(image / 255, dtype), label

    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).cache()
    if training:
        dataset = dataset.shuffle(len(images), seed=seed).repeat()
    dataset = tf.data.Dataset.zip(tf.data.Dataset.counter(), dataset)
    dataset = dataset.map(lambda number, example: prepare(number, *example), num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.batch(global_batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def _check_examples(images, labels, global_batch_size, replicas) -> None:
    shape, dtype, batch = getattr(images, "shape", ()), getattr(images, "dtype", None), f"{global_batch_size=}"
    _check(len(shape) == 4, f"images has shape {shape}: pass [n, height, width, channels].")
    _check(dtype == "uint8", f"images has dtype {dtype}: pass uint8, 0…255, which make_dataset scales last.")
    _check(len(labels) == len(images), f"labels has length {len(labels)}: pass one for each of {len(images):,} images.")
    _check(global_batch_size <= len(images), f"{batch} is larger than the data: pass at most {len(images):,}.")
    divides = global_batch_size % replicas == 0
    _check(divides, f"{batch} is not divisible by {replicas=}: pass per-replica batch size × replicas.")


class Throughput(NamedTuple):
    """Examples per second, *measured* on this machine: the median of several timings, the lowest and the highest."""

    median: float
    lowest: float
    highest: float


def throughput(
    batches: Iterable, global_batch_size: int, step: Callable | None = None, *, steps: int = 20, repeats: int = 5
) -> Throughput:
    """Examples per second that `batches` gives, or that `step` takes when called with each batch.

    Built in notebooks/02_build_input_pipeline.ipynb. `batches`: a dataset, a distributed one or
    `itertools.repeat(batch)`, of at least (repeats + 1) × steps batches; the first `steps` are warm-up. `step(batch)`
    returns a scalar; the last of each timing is read, as devices work asynchronously. Raises `Refused` for numbers
    that are not whole, and batches that end too soon.
    """
    check_parameters(global_batch_size=global_batch_size, steps=steps, repeats=repeats)
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


def steps_per_epoch(examples: int, global_batch_size: int) -> int:
    """Whole global batches in `examples`. Built in notebooks/04_fit.ipynb. Raises `Refused` where there is none."""
    check_parameters(examples=examples, global_batch_size=global_batch_size)
    _check(global_batch_size <= examples, f"{global_batch_size=} is larger than the data: pass at most {examples:,}.")
    return examples // global_batch_size


class BatchTiming(NamedTuple):
    """A row of `tune_batch_size`: examples per second *measured* with one per-replica batch size."""

    per_replica_batch_size: int
    global_batch_size: int
    median: float
    lowest: float
    highest: float


def tune_batch_size(
    train: Callable[[int, tf.keras.callbacks.Callback], object], per_replica_batch_sizes: Sequence[int], replicas: int
) -> list[BatchTiming]:
    """Time training at each per-replica batch size, smallest first; stop cleanly at the first that does not fit.

    Built in notebooks/05_tune_batch_size.ipynb. `train(per_replica_batch_size, clock)` builds, compiles and fits a
    model for 3 epochs or more with `callbacks=[clock]`; the first (tracing, compiling) is not counted. Prints each
    row when it is done, and returns the rows. Raises `Refused` for sizes that are no whole numbers, and too few epochs.
    """
    _check(len(per_replica_batch_sizes) > 0, "per_replica_batch_sizes is empty: pass sizes to try, as in [8, 16, 32].")
    for size in per_replica_batch_sizes:
        check_parameters(per_replica_batch_size=size, replicas=replicas)
    import tensorflow as tf

    rows = []
    print("per replica   global   examples/s, measured: median (lowest … highest)")
    for size in sorted(set(per_replica_batch_sizes)):
        ends = []
        clock = tf.keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs, ends=ends: ends.append(time.perf_counter())
        )
        try:
            train(size, clock)
        except (tf.errors.ResourceExhaustedError, MemoryError) as error:
            reason = re.search(r".*(OOM when|ut of memory|nable to allocate).*|$", str(error)).group()
            print(f"{size:11}   does not fit, so stopped here. {type(error).__name__}: {reason}")
            break
        _check(len(ends) >= 3, f"train({size}, clock) ran {len(ends)} epochs: fit 3 or more, with callbacks=[clock].")
        examples = size * replicas * clock.params["steps"]
        rates = [examples / (end - begin) for begin, end in itertools.pairwise(ends)]
        median, lowest, highest = statistics.median(rates), min(rates), max(rates)
        rows.append(BatchTiming(size, size * replicas, median, lowest, highest))
        print(f"{size:11} {size * replicas:8}   {median:,.0f} ({lowest:,.0f} … {highest:,.0f})")
    return rows


def plot_images(images: np.ndarray, titles: Sequence[object], columns: int = 10) -> None:
    """Images [n, height, width, 1] in rows, each with its title. Built in notebooks/02_build_input_pipeline.ipynb."""
    import matplotlib.pyplot as plt

    rows = -(-len(images) // columns)
    figure = plt.figure(figsize=(columns, 1.25 * rows))
    for place, (image, title) in enumerate(zip(images, titles, strict=True), 1):
        axis = figure.add_subplot(rows, columns, place)
        axis.imshow(image[..., 0], cmap="gray_r")
        axis.set_title(title, fontsize=9)
        axis.axis("off")
    plt.show()
