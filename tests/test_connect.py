"""find_tpu(), connect() and describe(): what they find, say and fall back to. Each case in a process of its own.

There is no TPU here. A chip is faked at the outermost edge only: the place where its device file is looked for, the PCI
bus, the address. What TensorFlow then does is real. test_hosts.py has the packages of the real hosts.
"""

from __future__ import annotations

import concurrent.futures
import socket
import subprocess
import sys
import time

import pytest
from test_helpers import run_python

import tpu_helpers
import tpu_measure

CONNECT = """
import os, sys, tpu_helpers
with tpu_helpers.quietly():
    import tensorflow as tf
{between}
try:
    strategy = tpu_helpers.connect({arguments})
    print("REPLICAS", strategy.num_replicas_in_sync, type(strategy).__name__)
{after}
except tpu_helpers.Refused as error:
    print("REFUSED", error)
"""


def connect(arguments="", between="", after="", **environment):
    code = CONNECT.format(arguments=arguments, between=between, after=after)
    result = run_python(code, **({"TPU_NAME": ""} | environment))
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def chip(tmp_path, monkeypatch):
    """A device file, where this process looks for one."""
    path = tmp_path / "accel0"
    path.touch()
    monkeypatch.setattr(tpu_helpers, "CHIPS", (str(path), "/dev/vfio/0"))
    monkeypatch.delenv("TPU_NAME", raising=False)
    return path


@pytest.mark.parametrize("replicas", [1, 3, 12])
def test_without_a_tpu_it_says_why_and_what_mends_it(replicas):
    said = connect(f"virtual_replicas={replicas}")
    assert "No TPU: no chip at /dev/accel0 or /dev/vfio/0" in said
    assert f"Training on {replicas} virtual replica(s)" in said
    assert said.count(tpu_helpers.CHOOSE) == 1
    assert "pip" not in said, "on a laptop the three lines would take a working TensorFlow away"
    assert f"REPLICAS {replicas} MirroredStrategy" in said


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_a_local_tpu_without_a_chip(how):
    said = connect("tpu='local'") if how == "argument" else connect(TPU_NAME="local")
    assert "TPU 'local' is not used: no chip at /dev/accel0 or /dev/vfio/0" in said


def test_a_chip_and_a_tensorflow_without_tpu_support(chip):
    said = connect("virtual_replicas=4", between=f"tpu_helpers.CHIPS = ({str(chip)!r}, '')")
    assert "was built without TPUs" in said
    assert tpu_helpers.INSTALL in said
    assert "REPLICAS 4" in said, "nothing was started, so the CPU can still be divided"


def test_a_chip_and_no_tensorflow(chip, monkeypatch):
    monkeypatch.setattr(tpu_helpers.importlib.util, "find_spec", lambda name: None)
    assert tpu_helpers.find_tpu() == ("local", "TensorFlow is not installed", tpu_helpers.RUN + tpu_helpers.INSTALL)


def write_libraries(folder, monkeypatch, called, offered):
    """A TensorFlow and a libtpu that consist of names."""
    for package, file, names in [("tensorflow", "libtensorflow_cc.so.2", called), ("libtpu", "libtpu.so", offered)]:
        (folder / package).mkdir()
        (folder / package / file).write_bytes(b"\0".join([b"ELF", *names, b"end"]))
        (folder / package / "__init__.py").touch()
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    find = lambda name: tpu_helpers.importlib.machinery.PathFinder.find_spec(name, [str(folder)])  # noqa: E731
    monkeypatch.setattr(tpu_helpers.importlib.util, "find_spec", find)


def test_a_libtpu_that_lacks_functions(chip, tmp_path, monkeypatch):
    write_libraries(tmp_path, monkeypatch, [b"TpuCompile_Run", b"TpuNode_New", b"TpuNode_Free"], [b"TpuNode_New"])
    name, problem, remedy = tpu_helpers.find_tpu()
    assert name == "local"
    assert problem.endswith("lacks 2 of 3 functions TensorFlow calls, such as TpuCompile_Run")
    assert remedy.endswith("%pip install libtpu==0.0.21.1")


@pytest.mark.parametrize("path", ["/no/such/file", "/tmp", "/dev/null"])
def test_a_path_to_libtpu_that_leads_nowhere_is_named(path, chip, tmp_path, monkeypatch):
    write_libraries(tmp_path, monkeypatch, [b"TpuNode_New"], [b"TpuNode_New"])
    monkeypatch.setenv("TPU_LIBRARY_PATH", path)
    assert f"({path}) lacks 1 of 1 functions" in tpu_helpers.find_tpu()[1]


def test_nothing_in_the_way(chip, tmp_path, monkeypatch):
    write_libraries(tmp_path, monkeypatch, [b"TpuNode_New"], [b"TpuNode_New", b"TpuNode_Free"])
    monkeypatch.setenv("TPU_LOAD_LIBRARY", "1")
    assert tpu_helpers.find_tpu() == ("local", "", "")


def test_a_chip_that_another_process_holds(chip, tmp_path, monkeypatch):
    write_libraries(tmp_path, monkeypatch, [b"TpuNode_New"], [b"TpuNode_New"])
    code = f"import sys; file = open({str(chip)!r}); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        _, problem, remedy = tpu_helpers.find_tpu()
        other.stdin.close()
    assert problem == f"process {other.pid} holds the chip"
    assert remedy.endswith(f"!kill {other.pid}")
    with open(chip):
        assert str(other.pid) not in tpu_helpers.chip_holders(str(chip)), "it has ended"
        assert not tpu_helpers.chip_holders(str(chip)), "this process itself does not count"


def test_a_tensorflow_imported_without_libtpu_has_to_be_imported_again(chip, tmp_path, monkeypatch):
    write_libraries(tmp_path, monkeypatch, [b"TpuNode_New"], [b"TpuNode_New"])
    monkeypatch.setenv("TPU_LOAD_LIBRARY", "0")
    monkeypatch.setitem(sys.modules, "tensorflow", sys.modules.get("tensorflow", tpu_helpers))
    assert "imported with TPU_LOAD_LIBRARY=0" in tpu_helpers.find_tpu()[1]
    assert tpu_helpers.find_tpu()[2] == "remove that and restart."


@pytest.mark.parametrize(("environment", "expected"), [({}, "0"), ({"TPU_LOAD_LIBRARY": "1"}, "1")])
def test_without_a_tpu_tensorflow_is_told_not_to_search_for_one_unless_you_decided(environment, expected):
    code = "import os, tpu_helpers; print(os.environ['TPU_LOAD_LIBRARY'])"
    assert run_python(code, **environment).stdout == expected + "\n"


@pytest.mark.parametrize("listening", [True, False])
def test_an_address_that_does_not_answer_has_a_time_limit(listening):
    """With `listening` something takes the call and says nothing, which TensorFlow itself waits for without end."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listening:
            server.listen()
        address = f"grpc://127.0.0.1:{server.getsockname()[1]}"
        said = connect(f"tpu={address!r}, virtual_replicas=4", between="tpu_helpers.PATIENCE = 2")
    assert f"TPU '{address}' is not used: it did not start" in said
    assert "no answer in 2 s" in said
    assert "gcloud compute tpus" in said
    assert "REPLICAS 4 MirroredStrategy" in said, "TensorFlow was not started: the CPU can still be divided"


@pytest.mark.parametrize("handles", [True, False])
def test_a_server_that_is_not_tensorflow(handles):
    """With `handles` it takes TensorFlow's first question and never answers; without, it does not know it."""
    grpc = pytest.importorskip("grpc")

    class Silent(grpc.GenericRpcHandler):
        def service(self, _):
            return grpc.unary_unary_rpc_method_handler(lambda *_: time.sleep(6)) if handles else None

    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2), handlers=[Silent()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    said = connect(f"'grpc://127.0.0.1:{port}', virtual_replicas=4", between="tpu_helpers.PATIENCE = 2")
    server.stop(None)
    assert "did not start" in said
    assert ("no answer in 2 s" in said) == handles
    assert "REPLICAS 4" in said


def test_a_metadata_server_that_never_answers_has_a_time_limit():
    with socket.create_server(("127.0.0.1", 0)) as server:
        metadata = f"127.0.0.1:{server.getsockname()[1]}"
        said = connect("'my-tpu'", between="tpu_helpers.PATIENCE = 2", GCE_METADATA_IP=metadata, no_proxy="*")
    assert "TPU 'my-tpu' is not used: it did not start, " in said
    assert "timed out" in said


def test_a_server_that_answers_and_has_no_tpu():
    """A TensorFlow server in a process of its own: connecting is real, and so are its words."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    code = f"""
import sys, tensorflow as tf
server = tf.distribute.Server({{"worker": [{address!r}]}}, job_name="worker", task_index=0)
print("up", flush=True)
sys.stdin.read()"""
    quiet = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", code], **quiet) as server:
        assert server.stdout.readline() == b"up\n"
        after = """
    with strategy.scope():
        variable = tf.Variable(1.0)
    print("DEVICE", strategy.experimental_local_results(variable)[0].device)"""
        said = connect(f"'grpc://{address}', virtual_replicas=4", after=after)
        server.stdin.close()
    assert f"TPU 'grpc://{address}' is not used: it did not start, NotFoundError: TPUs not found in the cluster" in said
    assert "it is too late to divide the CPU" in said
    assert "REPLICAS 1" in said
    assert "DEVICE /job:localhost/" in said, "this CPU, not the server's"


def test_a_name_that_nobody_knows_is_told_in_tensorflows_own_words():
    said = connect("'no-such-tpu'", GCE_METADATA_IP="127.0.0.1:9", no_proxy="*")
    assert "TPU 'no-such-tpu' is not used: it did not start" in said
    assert "REPLICAS 1" in said


def test_gpus_come_before_the_cpu():
    """The list of GPUs is faked; without one, MirroredStrategy itself takes the CPU."""
    fake = """
real = tf.config.list_physical_devices
tf.config.list_physical_devices = lambda kind=None: ["GPU:0", "GPU:1"] if kind == "GPU" else real(kind)"""
    said = connect("virtual_replicas=4", between=fake)
    assert "Training on 2 GPU(s) instead." in said
    assert "REPLICAS 1 MirroredStrategy" in said


def test_a_gpu_that_tensorflow_cannot_use_is_not_passed_over_in_silence():
    """The driver's device file is faked."""
    fake = (
        "exists = tpu_helpers.os.path.exists; tpu_helpers.os.path.exists = lambda p: p == '/dev/nvidia0' or exists(p)"
    )
    said = connect("virtual_replicas=2", between=fake)
    assert "Training on 2 virtual replica(s) of this CPU (GPU: %pip install 'tensorflow[and-cuda]') instead." in said


def test_replicas_asked_for_too_late_are_refused():
    said = connect("virtual_replicas=2", between="tf.constant(1) + 1")
    assert "REFUSED virtual_replicas=2 comes too late" in said
    assert "restart the kernel" in said


def test_one_replica_is_never_too_late():
    assert "REPLICAS 1" in connect(between="tf.constant(1) + 1")


def test_connecting_again_may_ask_for_another_number():
    after = "    print([tpu_helpers.connect(virtual_replicas=n).num_replicas_in_sync for n in (8, 1, 2)])"
    assert "[8, 1, 2]" in connect("virtual_replicas=2", between="", after="    tf.constant(1) + 1\n" + after)


@pytest.mark.parametrize("arguments", ["virtual_replicas=0", "virtual_replicas=2.0", "virtual_replicas=65", "tpu=3"])
def test_bad_arguments_are_refused_before_tensorflow_is_needed(arguments):
    said = connect(arguments)
    assert said.startswith(f"REFUSED {arguments}")


def test_virtual_replicas_are_real_ones():
    """Each has its own variable, and an all-reduce gives everyone the sum."""
    after = """
    with strategy.scope():
        variable = tf.Variable(1.0)
    assert len({copy.device for copy in strategy.experimental_local_results(variable)}) == 4
    @tf.function
    def total():
        def each():
            context = tf.distribute.get_replica_context()
            return context.all_reduce("SUM", tf.cast(context.replica_id_in_sync_group, tf.float32))
        return strategy.run(each)
    print("SUMS", [float(value) for value in strategy.experimental_local_results(total())])"""
    assert "SUMS [6.0, 6.0, 6.0, 6.0]" in connect("virtual_replicas=4", after=after)


# --- describe


@pytest.fixture
def pci(tmp_path, monkeypatch):
    """Writes a PCI bus with these devices, each a pair of vendor and device id."""

    def write(*devices):
        for number, (vendor, device) in enumerate(devices):
            folder = tmp_path / "pci" / f"0000:00:{number:02}.0"
            folder.mkdir(parents=True)
            (folder / "vendor").write_text(vendor + "\n")
            (folder / "device").write_text(device + "\n")
        monkeypatch.setattr(tpu_measure, "PCI", str(tmp_path / "pci"))

    return write


def rows(text):
    return {line[:12].strip(): line[13:] for line in text.splitlines()}


def test_describe_a_machine_without_a_tpu(monkeypatch):
    monkeypatch.delenv("TPU_NAME", raising=False)
    for host in tpu_measure.HOSTS:
        monkeypatch.delenv(host, raising=False)
    table = rows(tpu_measure.describe())
    assert table["host"] == "your own"
    assert table["TPU"].startswith("none (")
    assert table["TensorFlow"].startswith("tensorflow")
    assert table["Python"].startswith(f"{sys.version.split()[0]} on {sys.platform}, ")


def test_describe_says_what_is_unusual(chip, pci, monkeypatch):
    pci(*[("0x1ae0", "0x0063")] * 8, ("0x1ae0", "0x0042"), ("0x8086", "0x0063"))  # eight v5e, a network card, another's
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    table = rows(tpu_measure.describe())
    assert table["host"] == "Kaggle"
    assert table["TPU"] == "local (chips on the PCI bus: 8 × v5e, 16 GiB of HBM)"
    assert "was built without TPUs" in table["unusual"]
    assert "TPU_ACCELERATOR_TYPE=v5litepod-8" in table["environment"]


def test_describe_finds_a_chip_without_a_device_file(pci, monkeypatch):
    monkeypatch.delenv("TPU_NAME", raising=False)
    pci(("0x1ae0", "0x006f"))
    table = rows(tpu_measure.describe())
    assert table["TPU"] == "none (chips on the PCI bus: 1 × v6e, 32 GiB of HBM)"
    assert "no device file" in table["unusual"]


def test_describe_notices_two_tensorflows_and_keras_3(tf, monkeypatch):
    several = {"tensorflow", "tensorflow-tpu"}
    real = tpu_measure.installed
    both = lambda *names: "tensorflow 2.21.0, tensorflow-tpu 2.20.0" if several <= {*names} else real(*names)  # noqa: E731
    monkeypatch.setattr(tpu_measure, "installed", both)
    unusual = rows(tpu_measure.describe())["unusual"]
    assert "overwrite each other's files" in unusual
    assert ("Keras 3" in unusual) == (tf.keras.Model.__module__.split(".")[0] == "keras")


@pytest.mark.parametrize(("variable", "part"), [("1", "asks for tf-keras, which is not"), ("0", "is Keras 3")])
def test_describe_needs_no_keras(variable, part, monkeypatch):
    monkeypatch.setattr(tpu_measure, "installed", lambda *names: "")
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", variable)
    table = rows(tpu_measure.describe())
    assert part in table["unusual"]
    assert table["Keras"].startswith("not installed")


def test_describe_is_found_in_tpu_helpers_too():
    assert tpu_helpers.describe is tpu_measure.describe


def test_describe_refuses_what_is_no_strategy():
    with pytest.raises(tpu_helpers.Refused, match="strategy='TPU' is no strategy"):
        tpu_measure.describe("TPU")


def test_describe_names_strategy_and_replicas(tf):
    said = rows(tpu_measure.describe(tpu_helpers.virtual_strategy(2)))
    assert said["strategy"] == "MirroredStrategy, 2 replica(s)"
    assert f"tf.keras is {tf.keras.Model.__module__.split('.')[0]}" in said["Keras"]
