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
import itertools
import logging
import mmap
import numbers
import os
import re
import socket
import statistics
import sys
import tempfile
import time
from collections import namedtuple
from pathlib import Path

CHOICES = {"dataset": ("digits", "mnist"), "dtype": ("float32", "bfloat16", "float16")}
LIMITS = {"virtual_replicas": 64, "per_replica_batch_size": 2**30, "epochs": 10_000, "steps": 10**6, "seed": 2**31 - 1}
TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-tpu", "tf-nightly")  # each overwrites the others' files
CHIPS = ("/dev/accel0", "/dev/vfio/0")  # where TensorFlow's XLA looks for a TPU in this machine
PCI = "/sys/bus/pci/devices"  # where Linux lists them all
CHIP_KINDS = {"0x0027": "v2 or v3, 16 or 32", "0x005e": "v4, 32", "0x0062": "v5p, 95", "0x0063": "v5e, 16"}
CHIP_KINDS |= {"0x006f": "v6e, 32", "0x0076": "TPU7x, which TensorFlow does not support, 192"}
HOSTS = {"KAGGLE_KERNEL_RUN_TYPE": "Kaggle", "COLAB_RELEASE_TAG": "Colab", "BINDER_LAUNCH_HOST": "Binder"}
SHOWN = ("TPU_NAME", "TPU_ACC", "TPU_LOAD", "TPU_SKIP", "ISTPUVM", "TF_USE_LEGACY", *HOSTS)
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
        raise Refused(sentence)


def check_parameters(**parameters: object) -> None:
    """Refuse bad parameters by name, before any work: `check_parameters(dataset=dataset, epochs=epochs)`.

    Raises `Refused` for the first that is not one of `CHOICES`, or no whole number from 1 (`seed`: 0) to its `LIMITS`.
    """
    for name, value in parameters.items():
        if name in CHOICES:
            known = ", ".join(map(repr, CHOICES[name]))
            _check(isinstance(value, str) and value in CHOICES[name], f"{name}={value!r} is unknown: pass {known}.")
            continue
        least, most = int(name != "seed"), LIMITS.get(name, 2**40)
        accepted = isinstance(value, numbers.Integral) and not isinstance(value, bool) and least <= value <= most
        _check(accepted, f"{name}={value!r} cannot be used: pass a whole number from {least} to {most:,}.")


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
    there = [name for name in packages if any(importlib.metadata.distributions(name=name))]
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in there)


def tpu_functions(library: str) -> set[bytes]:
    """Names of libtpu's functions in a library: those libtensorflow_cc.so.2 calls, or libtpu.so offers.

    Built in notebooks/01_connect_to_tpu.ipynb. Comparing the two says whether they fit. Empty if there is no file.
    """
    if not os.path.isfile(library) or not os.path.getsize(library):
        return set()
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return set(re.findall(rb"\0(Tpu\w+_\w+)(?=\0)", content))


def chip_holders(chip: str) -> set[str]:
    """Pids of other processes that have a chip's device file open. Built in notebooks/01_connect_to_tpu.ipynb."""
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
    check_parameters(virtual_replicas=virtual_replicas)
    _check(tpu is None or isinstance(tpu, str), f"tpu={tpu!r} is not a name: pass a string, such as tpu='local'.")
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


def describe(strategy=None) -> str:
    """A table to paste into a bug report: host, TPU, replicas, HBM, versions, and what is unusual about them.

    Used in notebooks/01_connect_to_tpu.ipynb. Chips are told by their PCI ids (github.com/jax-ml/jax,
    jax/_src/hardware_utils.py); HBM is what docs.cloud.google.com/tpu/docs states for a chip, not read from it.
    """
    _check(strategy is None or hasattr(strategy, "num_replicas_in_sync"), f"{strategy=} is no strategy: pass one.")
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


if "tensorflow" not in sys.modules:
    if importlib.util.find_spec("tf_keras"):
        os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
    if find_tpu("local")[1]:
        os.environ.setdefault("TPU_LOAD_LIBRARY", "0")


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


def augment(image, key):
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
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=tf.cast(image, tf.float32)[tf.newaxis],
        transforms=tf.stack(matrix)[tf.newaxis],
        output_shape=[height, width],
        fill_value=0.0,
        interpolation="BILINEAR",
    )[0]


def make_dataset(images, labels, global_batch_size, *, training=True, replicas=1, seed=0, dtype="float32"):
    """Cache, shuffle, repeat, augment, batch, prefetch: batches that all have one static shape.

    Built in notebooks/02_build_input_pipeline.ipynb. `images` uint8 [n, height, width, channels] and `labels` [n]
    become `dtype` [global_batch_size, height, width, channels], 0…1, and labels [global_batch_size]. For training
    endless, shuffled anew each epoch and augmented, the same for the same `seed` and `tf.random.set_seed`; else one
    pass, in order, which says how many examples it leaves out. Raises `Refused` for anything else.
    """
    check_parameters(global_batch_size=global_batch_size, replicas=replicas, seed=seed, dtype=dtype)
    import numpy as np
    import tensorflow as tf

    _check(np.ndim(images) == 4, f"images has shape {np.shape(images)}: pass [n, height, width, channels].")
    _check(images.dtype == "uint8", f"images has dtype {images.dtype}: pass uint8, 0…255, scaled by make_dataset.")
    _check(len(labels) == len(images), f"labels has length {len(labels)}: pass one for each of {len(images):,} images.")
    _check(global_batch_size <= len(images), f"{global_batch_size=} exceeds the data: pass at most {len(images)}.")
    _check(global_batch_size % replicas == 0, f"{global_batch_size=} is not divisible by {replicas=}: pass a multiple.")
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


Throughput = namedtuple("Throughput", "median lowest highest")
BatchTiming = namedtuple("BatchTiming", "per_replica_batch_size global_batch_size median lowest highest")


def throughput(batches, global_batch_size: int, step=None, *, steps=20, repeats=5) -> Throughput:
    """Examples/s that `batches` gives, or that `step` takes when called with each: *measured*, median, lowest, highest.

    Built in notebooks/02_build_input_pipeline.ipynb. `batches`: a dataset or `itertools.repeat(batch)`; the first
    `steps` warm up. `step(batch)` returns a scalar, which is read after `steps`. Raises `Refused` if batches end early.
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


def tune_batch_size(train, per_replica_batch_sizes, replicas: int) -> list[BatchTiming]:
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
        clock = tf.keras.callbacks.LambdaCallback(on_epoch_end=lambda *_, ends=ends: ends.append(time.perf_counter()))
        try:
            train(size, clock)
        except (tf.errors.ResourceExhaustedError, MemoryError) as error:
            reason = re.search(r".*(OOM when|ut of memory|nable to allocate).*|$", str(error)).group()
            print(f"{size:11}   does not fit, so stopped here. {type(error).__name__}: {reason}")
            break
        _check(len(ends) >= 3, f"train({size}, clock) ran {len(ends)} epochs: fit 3 or more, with callbacks=[clock].")
        examples = size * replicas * clock.params["steps"]
        rates = [examples / (end - begin) for begin, end in itertools.pairwise(ends)]
        rows.append(BatchTiming(size, size * replicas, statistics.median(rates), min(rates), max(rates)))
        print(f"{size:11} {size * replicas:8}   {rows[-1].median:,.0f} ({min(rates):,.0f} … {max(rates):,.0f})")
    return rows
