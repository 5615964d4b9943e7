"""What the notebooks share: one file, to be copied whole or in part.

Import it before TensorFlow. Unless you have decided otherwise, it sets TF_USE_LEGACY_KERAS=1 if tf-keras is there, so
that `tf.keras` is tf-keras, as in Google's own TPU jobs; and TPU_LOAD_LIBRARY=0 if no TPU can be used, since importing
tensorflow-tpu would search for one for minutes, or end the process.

Each helper is first built by hand in the notebook its docstring names: the same, but for hints, imports and checks.
"""

import contextlib
import glob
import importlib.metadata
import importlib.util
import io
import logging
import math
import mmap
import numbers
import os
import re
import reprlib
import socket
import sys
import tempfile

CHOICES = {"dataset": ("digits", "mnist"), "dtype": ("float32", "bfloat16", "float16", "uint8")}
LIMITS = {"virtual_replicas": 64, "per_replica_batch_size": 2**30, "epochs": 10_000, "seed": 2**31 - 1}
LIMITS |= {"steps": 10**6, "repeats": 1000, "workers": 8}
TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu", "tf-nightly")  # each overwrites the others' files
CHIPS = ("/dev/accel0", "/dev/vfio/0")  # where TensorFlow's XLA looks for a TPU in this machine
PATIENCE = 30  # seconds to wait for an answer from the network
RUN = "run this once in a new cell, restart the kernel, run all cells:\n"
CHOOSE = "choose a TPU runtime (Colab: Runtime → Change runtime type; Kaggle: Settings → Accelerator), run all cells."
INSTALL = """%pip uninstall -y tensorflow tensorflow-cpu tensorflow-tpu
%pip install tensorflow-tpu==2.20.0 'libtpu>=0.0.14,<0.0.32'
%pip install --no-deps tf-keras==2.20.1"""


class Refused(ValueError):
    """Bad input, or something that is not there, in one sentence; a notebook shows the sentence and no traceback."""

    def _render_traceback_(self) -> list[str]:  # IPython's hook for exceptions that print themselves
        return [f"{type(self).__name__}: {self}"]


def _check(accepted: bool, sentence: str) -> None:
    if not accepted:
        raise Refused(" ".join(sentence.split()))


def _check_kind(kind: type, **values: object) -> None:
    for name, value in values.items():
        wrong = f"{name}={reprlib.repr(value)} cannot be used: pass {getattr(kind, '__name__', kind)}."
        _check(isinstance(value, kind), wrong)


def _shape(value: object, kinds: str) -> tuple | None:
    with contextlib.suppress(Exception):  # what NumPy cannot make an array of can raise anything
        import numpy as np

        array = np.asarray(value)
        return array.shape if array.dtype.kind in kinds else None


def check_parameters(**parameters: object) -> None:
    """Refuse bad parameters by name, before any work: `check_parameters(dataset=dataset, epochs=epochs)`.

    Raises `Refused` for the first that is not one of its `CHOICES`, no name (`tpu`), or else no whole number from 1
    (`seed`, `classes` and `start`: 0) to its `LIMITS`.
    """
    for name, value in parameters.items():
        if name == "tpu":
            _check_kind(str | None, tpu=value)
            continue
        if name in CHOICES:
            known = ", ".join(map(repr, CHOICES[name]))
            accepted = isinstance(value, str) and value in CHOICES[name]
            _check(accepted, f"{name}={reprlib.repr(value)} is unknown: pass {known}.")
            continue
        least, most = int(name not in ("seed", "classes", "start")), LIMITS.get(name, 2**40)
        accepted = isinstance(value, numbers.Integral) and not isinstance(value, bool) and least <= value <= most
        remedy = f"pass a whole number from {least} to {most:,}"
        _check(accepted, f"{name}={reprlib.repr(value)} cannot be used: {remedy}.")


@contextlib.contextmanager
def quietly():
    """Keep TensorFlow's start-up chatter off the screen: `with quietly(): import tensorflow as tf`.

    Drops INFO lines, and complaints of what this CPU and a missing GPU cannot do, which it writes to the process's
    stderr below Python's reach. Raises `Refused`, with the cell to run, where TensorFlow is missing.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    chatter = rb"(?m)^(WARNING: All log messages before absl|I\d{4} |E\d{4} .*(failed call to cuInit|oneDNN)).*\n"
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        except ModuleNotFoundError as error:
            if error.name != "tensorflow":
                raise
            cell = INSTALL if find_tpu()[0] else "%pip install 'tensorflow>=2.20,<2.22' 'tf-keras>=2.20,<2.22'"
            raise Refused(f"TensorFlow is not installed here: {RUN}{cell}") from None
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            caught.seek(0)
            sys.stderr.write(re.sub(chatter, b"", caught.read()).decode(errors="replace"))
    logging.getLogger("tensorflow").setLevel("WARNING")


def virtual_strategy(replicas: int):
    """Real synchronous data parallelism without a TPU: `replicas` virtual devices on this CPU.

    Built in notebooks/01_connect_to_tpu.ipynb. TensorFlow divides its CPU once, when it starts, by 8 or more: later
    calls share those. Raises `Refused` if it comes too late, or `replicas` is no whole number from 1 to 64.
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
            raise Refused(f"virtual_replicas={replicas} comes too late: restart the kernel, connect first.") from None
    devices = [f"/job:localhost/device:CPU:{i}" for i in range(replicas)]  # not those of a remote host
    reduction = tf.distribute.ReductionToOneDevice()  # the default way to all-reduce can hang on CPUs
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=reduction)


def installed(*packages: str) -> str:
    """Those of the packages that are installed here, with their versions, such as "libtpu 0.0.21.1"."""
    _check(all(isinstance(name, str) and name for name in packages), f"packages={reprlib.repr(packages)}: pass names.")
    there = [name for name in packages if any(importlib.metadata.distributions(name=name))]
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in there)


def tpu_functions(library: str) -> set[bytes]:
    """Names of libtpu's functions in a library: those libtensorflow_cc.so.2 calls, or libtpu.so offers.

    Built in notebooks/01_connect_to_tpu.ipynb. Comparing the two says whether they fit. Empty if there is no file.
    """
    _check_kind(str | os.PathLike, library=library)
    if not os.path.isfile(library) or not os.path.getsize(library):
        return set()
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return set(re.findall(rb"\0(Tpu\w+_\w+)(?=\0)", content))


def chip_holders(chip: str) -> set[str]:
    """Pids of other processes that have a chip's device file open. Built in notebooks/01_connect_to_tpu.ipynb."""
    _check_kind(str, chip=chip)
    pids = set()
    for file in glob.glob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            pids |= {file.split("/")[2]} if os.readlink(file).startswith(chip.rstrip("0")) else set()
    return pids - {str(os.getpid())}


def find_tpu(tpu: str | None = None) -> tuple[str, str, str]:
    """(name, problem, remedy): the TPU to connect to ("": none), what keeps TensorFlow from it ("": nothing known).

    Built in notebooks/01_connect_to_tpu.ipynb. `tpu` as for `connect`. Only looks at files, and needs no TensorFlow:
    with a libtpu that does not fit, its import would end the process.
    """
    _check_kind(str | None, tpu=tpu)
    chip = next(filter(os.path.exists, CHIPS), None)
    tpu = tpu or os.environ.get("TPU_NAME") or ("local" if chip else "")
    if not chip and tpu in ("", "local"):
        return tpu, f"no chip at {CHIPS[0]} or {CHIPS[1]}, and no name of a TPU elsewhere", CHOOSE
    tensorflow, libtpu = map(importlib.util.find_spec, ("tensorflow", "libtpu"))
    if not tensorflow or not tensorflow.origin:
        return tpu, "TensorFlow is not installed", RUN + INSTALL
    if tpu != "local":
        return tpu, "", ""
    library = os.path.join(os.path.dirname(tensorflow.origin), "libtensorflow_cc.so.2")
    called = tpu_functions(library)
    if os.path.exists(library) and not called:
        return tpu, f"TensorFlow was built without TPUs ({installed(*TENSORFLOWS)})", RUN + INSTALL
    folder = os.path.dirname(libtpu.origin) if libtpu and libtpu.origin else "/lib"
    driver = os.environ.get("TPU_LIBRARY_PATH") or os.path.join(folder, "libtpu.so")
    if missing := called - tpu_functions(driver):
        lacks = f"{installed('libtpu') or 'libtpu'} ({driver}) lacks {len(missing)} of {len(called)}"
        problem = f"{lacks} functions TensorFlow calls, such as {min(missing).decode()}"
        return tpu, problem, f"{RUN}%pip install libtpu==0.0.21.1"
    if pids := " ".join(sorted(chip_holders(chip))):
        return tpu, f"process {pids} holds the chip", f"shut its kernel down, or {RUN}!kill {pids}"
    if "tensorflow" in sys.modules and os.environ.get("TPU_LOAD_LIBRARY") == "0":
        return tpu, "TensorFlow was imported with TPU_LOAD_LIBRARY=0", "remove that and restart."
    return tpu, "", ""


def connect(tpu: str | None = None, virtual_replicas: int = 1):
    """A `TPUStrategy` if a TPU answers; else say why not, what mends it, and return the GPUs or virtual replicas.

    Built in notebooks/01_connect_to_tpu.ipynb. `tpu` is a name, an address ("grpc://10.0.0.2:8470") or "local" for
    chips in this machine; left out, TPU_NAME is read, then chips are looked for. An address has `PATIENCE` seconds to
    answer. `virtual_replicas` stand in where there is neither TPU nor GPU. Raises `Refused` as `virtual_strategy` does.
    """
    check_parameters(tpu=tpu, virtual_replicas=virtual_replicas)
    with quietly():
        import tensorflow as tf
    import grpc  # TensorFlow brings it

    (tpu, problem, remedy), late = find_tpu(tpu), ""
    if not problem:
        patience, _ = socket.getdefaulttimeout(), socket.setdefaulttimeout(PATIENCE)
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=tpu)
            if (address := resolver.master()).startswith("grpc://"):  # TensorFlow's own wait is endless
                with grpc.insecure_channel(address.removeprefix("grpc://")) as channel:
                    channel.unary_unary("/tensorflow.WorkerService/GetStatus")(b"", PATIENCE, wait_for_ready=True)
            late = "; it is too late to divide the CPU"
            tf.config.experimental_connect_to_cluster(resolver)
            tf.tpu.experimental.initialize_tpu_system(resolver)
            strategy = tf.distribute.TPUStrategy(resolver)
            print(f"TPU {tpu!r}: {strategy.num_replicas_in_sync} replica(s).")
            return strategy
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told
            said = re.sub(r"(?s)^Graph exec.*>\n", "", getattr(error, "details", error.__str__)()).partition("\n")[0]
            words = said.replace("Deadline Exceeded", f"no answer in {PATIENCE} s")
            problem = f"it did not start, {type(error).__name__}: {words}{late}"
            remedy = "restart kernel or runtime (is it up? !gcloud compute tpus tpu-vm list --zone=-)."
        finally:
            socket.setdefaulttimeout(patience)
    gpus = tf.config.list_physical_devices("GPU")
    strategy = tf.distribute.MirroredStrategy() if gpus else virtual_strategy(1 if late else virtual_replicas)
    blind = " (GPU: %pip install 'tensorflow[and-cuda]')" if os.path.exists("/dev/nvidia0") else ""
    count = strategy.num_replicas_in_sync
    used = f"{len(gpus)} GPU(s)" if gpus else f"{count} virtual replica(s) of this CPU{blind}"
    print(f"TPU {tpu!r} is not used" if tpu else "No TPU", end=f": {problem}.\n")
    print(f"Training on {used} instead. To use a TPU: {remedy}")
    return strategy


if "tensorflow" not in sys.modules:
    if importlib.util.find_spec("tf_keras"):
        os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
    if find_tpu("local")[1]:
        os.environ.setdefault("TPU_LOAD_LIBRARY", "0")


def __getattr__(name: str):
    """What describes, explains and measures is in tpu_measure.py: from here it is found there."""
    if name in ("describe", "explain", "throughput", "diagnose", "tune_batch_size"):
        _check(bool(importlib.util.find_spec("tpu_measure")), f"{name} is in tpu_measure.py: put it beside this file.")
        import tpu_measure

        return getattr(tpu_measure, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_data(dataset: str = "digits") -> tuple[tuple, tuple]:
    """((x_train, y_train), (x_val, y_val)) of "digits" (scikit-learn's, from 8×8) or "mnist" (downloaded by Keras).

    Built in notebooks/02_build_input_pipeline.ipynb. uint8 [n, 28, 28, 1], int32 [n]. Raises `Refused`, also offline.
    """
    check_parameters(dataset=dataset)
    import numpy as np
    import tensorflow as tf
    from scipy import ndimage  # scikit-learn brings it
    from sklearn import datasets, model_selection

    if dataset == "digits":
        small, labels = datasets.load_digits(return_X_y=True)
        images = ndimage.zoom(small.reshape(-1, 8, 8), (1, 3.5, 3.5), order=1, mode="nearest", grid_mode=True)
        images = np.rint(images / 16 * 255).astype("uint8")[..., np.newaxis]
        parts = {"test_size": 0.2, "random_state": 0, "stratify": labels}
        split = model_selection.train_test_split(images, labels.astype("int32"), **parts)
        return (split[0], split[2]), (split[1], split[3])
    patience, _ = socket.getdefaulttimeout(), socket.setdefaulttimeout(PATIENCE)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the progress bar
            parts = tf.keras.datasets.mnist.load_data()
    except Exception as error:  # noqa: BLE001 - Keras raises a bare Exception when a download fails
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise Refused(f"dataset='mnist' could not be downloaded ({reason}): go online, or dataset='digits'.") from None
    finally:
        socket.setdefaulttimeout(patience)
    return tuple((images[..., None], labels.astype("int32")) for images, labels in parts)


def _check_augmented(images, key, is_tensor) -> None:
    known = is_tensor(key) or _shape(key, "iu") == (2,)
    _check(known, f"key={reprlib.repr(key)} is no key: pass two whole numbers.")
    known = is_tensor(images) or len(_shape(images, "iuf") or ()) == 4
    wrong = f"images={reprlib.repr(images)} cannot be used: pass an array of numbers, [n, height, width, channels]."
    _check(known, wrong)


def augment(images, key):
    """Each image turned by up to ±12°, scaled by up to ±12 % and shifted by up to ±2 pixels.

    Built in notebooks/02_build_input_pipeline.ipynb. `images` [n, height, width, channels]; `key` int [2]: the same key
    makes the same changes on any machine. Returns float32 of the same shape and range of values.
    """
    import tensorflow as tf

    _check_augmented(images, key, tf.is_tensor)
    count, height, width, _ = images.shape
    turn, scale, right, down = tf.unstack(tf.random.stateless_uniform([4, count], key, -1.0, 1.0))
    cos, sin = (1 + 0.12 * scale) * tf.cos(0.21 * turn), (1 + 0.12 * scale) * tf.sin(0.21 * turn)
    x, y = (width - 1) / 2, (height - 1) / 2  # the middle, which is turned about and then moved
    none = tf.zeros_like(turn)
    matrix = [cos, -sin, x - cos * x + sin * y + 2 * right, sin, cos, y - sin * x - cos * y + 2 * down, none, none]
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=tf.cast(images, tf.float32),
        transforms=tf.stack(matrix, axis=1),
        output_shape=[height, width],
        fill_value=0.0,
        interpolation="BILINEAR",
    )


def _check_places(place) -> None:
    accepted = getattr(getattr(place, "dtype", None), "name", "") == "int64" and len(place.shape) == 1
    _check(accepted, f"place={reprlib.repr(place)} cannot be used: pass an array of int64 [n].")


def shuffled(place, count: int, seed: int):
    """Which of `count` examples stands at each place of an endless row of epochs, each of them in another order.

    Built in notebooks/02_build_input_pipeline.ipynb. `place` int64 [n]; returns int64 [n]. Every epoch has each example
    once. No buffer: the order follows from place, seed and TensorFlow's version alone. RandomIndexShuffle reads one
    byte of each number of its key, so seed and epoch are mixed into three; its default of 4 rounds is too few.
    """
    import tensorflow as tf

    check_parameters(count=count, seed=seed)
    _check_places(place)
    mixed = place // count * 0x1E3779B97F4A7C15 + tf.constant(seed, tf.int64) * 0x3F58476D1CE4E5B9
    key = tf.bitwise.right_shift(mixed[:, tf.newaxis], tf.constant([32, 40, 48], tf.int64))
    return tf.raw_ops.RandomIndexShuffle(index=place % count, seed=key, max_index=count - 1, rounds=16)


def _check_images(images, labels, kinds: str) -> None:
    shape, dtype = _shape(images, "iuf") or (), getattr(images, "dtype", type(images).__name__)
    _check(len(shape) == 4 and 0 not in shape, f"images has {shape=}: pass an array [n, height, width, channels].")
    _check(dtype == "uint8", f"images has {dtype=!s}: pass an array of uint8, 0…255, which make_dataset scales.")
    wrong = f"labels has shape={_shape(labels, kinds)}: pass an array of a number for each of {len(images):,} images."
    _check(_shape(labels, kinds) == shape[:1], wrong)


def make_dataset(
    images, labels, global_batch_size, *, training=True, augmented=True, classes=0, replicas=1, seed=0,
    dtype="float32", start=0
):  # fmt: skip
    """Shuffle indices, gather, augment, scale, cut into batches, prefetch: whole batches, all of one static shape.

    Built in notebooks/02_build_input_pipeline.ipynb. `images` uint8 [n, height, width, channels] become `dtype` [batch,
    height, width, channels], 0…1 ("uint8": 0…255); `labels` [n] stay as they are, or with `classes` become one-hot
    float32 [batch, classes]. For training endless, each epoch in another order, `augmented`, and the same for the same
    seed; else one pass in order, which says how many examples it leaves out. `start`: steps already taken, to go on
    after them. Raises `Refused` for anything else.
    """
    check_parameters(global_batch_size=global_batch_size, replicas=replicas, seed=seed, dtype=dtype)
    check_parameters(classes=classes, start=start)
    import tensorflow as tf

    _check_kind(bool, training=training, augmented=augmented)
    _check_images(images, labels, "iu" if classes else "iuf")
    _check(global_batch_size <= len(images), f"{global_batch_size=} exceeds the data: pass at most {len(images)}.")
    _check(global_batch_size % replicas == 0, f"{global_batch_size=} is not divisible by {replicas=}: pass a multiple.")
    count, size = len(images), global_batch_size
    batches = 2**20 // (math.prod(images.shape[1:]) * size)  # in 1 MiB: so many are prepared together
    portion = size * max(1, batches if training else 1)
    several = [portion // size] if portion > size else []
    with tf.device("CPU:0"):  # the data stay on the host
        images, labels = tf.constant(images), tf.constant(labels)
    if not training and count % size:
        print(f"{count % size} of {count:,} examples fill no batch: left out.")

    def gather(number):
        place = number * portion + tf.range(portion, dtype=tf.int64)
        place = shuffled(place, count, seed) if training else place
        return tf.gather(images, place), tf.gather(labels, place)

    def change(number, batch):
        return augment(batch[0], tf.stack([seed, number])), batch[1]

    def scale(images, labels):  # and cut the portion into batches
        images = images if dtype == "uint8" else tf.cast(images, tf.float32) / 255
        batch = tf.cast(images, dtype), tf.one_hot(labels, classes) if classes else labels
        return tuple(tf.reshape(array, [*several, size, *array.shape[1:]]) for array in batch)

    parallel = {"num_parallel_calls": tf.data.AUTOTUNE}
    first, rest = divmod(start * size, portion)
    numbers = tf.data.Dataset.counter(first) if training else tf.data.Dataset.range(first, count // size)
    dataset = numbers.map(gather, **parallel)
    dataset = dataset.enumerate(first).map(change, **parallel) if training and augmented else dataset
    dataset = dataset.map(scale, **parallel)
    dataset = dataset.unbatch() if several else dataset
    dataset = dataset.skip(rest // size) if rest else dataset
    return dataset.prefetch(tf.data.AUTOTUNE)
