"""The kit in environments that hold what the hosts hold, with the real packages: `make test-hosts`.

Each host has an environment in .hosts/, made once; a second one holds the same after notebook 01 has run its own
install section there. Colab and Kaggle run Python 3.13 and 3.12; here it is whatever runs this suite. There is no chip:
where a case needs one, the place where its device file is looked for is an empty file, and nothing else is faked.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from conftest import ENVIRONMENT, NOTEBOOKS, ROOT

import tpu_helpers

pytestmark = pytest.mark.hosts
HOSTS = ROOT / ".hosts"
TO_RUN = [
    "papermill>=2.6",
    "ipykernel>=6",
    "matplotlib>=3.8",
    "scikit-learn>=1.5",
]  # what runs notebooks; hosts have it
HOLDS = {  # facts about the hosts: Colab's and Kaggle's own lists of packages, August 2026
    "colab": ["keras==3.13.2", "jax==0.7.2", "libtpu==0.0.21.1", "protobuf==7.35.1"],
    "kaggle": ["tensorflow-cpu==2.20.0", "keras>=3,<4", "libtpu==0.0.17"],
    "unpinned": ["tensorflow-tpu==2.20.0"],
    "compiler": [
        "tensorflow==2.20.*",
        "tf-keras==2.20.*",
        "jax==0.7.2",
        "jaxlib==0.7.2",
        "libtpu==0.0.21.1",
        "pytest>=8",
    ],
    "tensorflow-2.20": ["tensorflow==2.20.*", "tf-keras==2.20.*"],
    "tensorflow-2.21": ["tensorflow==2.21.*", "tf-keras==2.21.*"],
}
OURS = ("TF_USE_LEGACY_KERAS", "TPU_LOAD_LIBRARY", "TPU_NAME", "TF_CPP_MIN_LOG_LEVEL", "PYTHONPATH")
SMALL = {"01_connect_to_tpu": {}, "04_fit": {"per_replica_batch_size": 8, "epochs": 2, "virtual_replicas": 1}}
each_name = pytest.mark.parametrize("name", SMALL)


def call(environment, *command, cwd=ROOT, **variables):
    """The environment's own Python, with none of this suite's variables."""
    inherited = {name: value for name, value in ENVIRONMENT.items() if name not in OURS}
    path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [environment / "bin" / "python", *command],
        env=inherited | {"PATH": path, "MPLBACKEND": "agg"} | variables,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def python(environment, code, **variables):
    result = call(environment, "-c", code, **variables)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.strip()


def pip(environment, *arguments):
    result = call(environment, "-m", "pip", "--disable-pip-version-check", *arguments)
    assert result.returncode == 0 or arguments[0] == "check", result.stderr[-3000:]
    return result.stdout


@contextlib.contextmanager
def locked(name):
    """Only one of the suite's workers at a time."""
    HOSTS.mkdir(exist_ok=True)
    with open(HOSTS / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def share(folder):
    """Large files that several environments hold lie on the disk once: hard links into .hosts/files, by content."""
    store = HOSTS / "files"
    store.mkdir(exist_ok=True)
    for path in [Path(root) / name for root, _, names in os.walk(folder) for name in names]:
        if path.is_symlink() or path.stat().st_size < 50_000 or path.suffix == ".pyc":
            continue
        with path.open("rb") as file:
            same = store / hashlib.file_digest(file, "sha256").hexdigest()
        try:
            os.link(path, same)
        except FileExistsError:
            mode, link = path.stat().st_mode, store / "link"
            if same.stat().st_mode == mode and not same.samefile(path):
                link.unlink(missing_ok=True)  # of a run that was stopped
                os.link(same, link)
                link.replace(path)


def kept(name, holds, make):
    """The environment of that name: made now, unless it is there and holds the same."""
    folder, note = HOSTS / name, HOSTS / f"{name}.json"
    holds = json.dumps([sys.version, *holds], indent=0)
    with locked(name):  # another worker may be making it
        if not note.exists() or note.read_text() != holds:
            shutil.rmtree(folder, ignore_errors=True)
            note.unlink(missing_ok=True)
            free = shutil.disk_usage(HOSTS).free / 1e9
            assert free > 6, f"{free:.1f} GB free: an environment needs 6 while it is made. Make room: make clean"
            with locked("files"):
                if not (HOSTS / "files").exists():  # what this suite's own environment holds need not lie here again
                    share(Path(sys.prefix) / "lib")
            make(folder)
            with locked("files"):
                share(folder)
            note.write_text(holds)
    return folder


def host(name):
    def make(folder):
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip(folder, "install", "--quiet", *HOLDS[name], *TO_RUN)

    return kept(name, [*HOLDS[name], *TO_RUN], make)


def after_install(name, install, after="after"):
    """A copy of the host (by hard links; pip replaces files, and never writes into one) in which `install` has run."""
    before = host(name)

    def make(folder):
        shutil.copytree(before, folder, symlinks=True, copy_function=os.link)
        install(folder)

    files = ["tools/publish.py", "tpu_helpers.py", "notebooks/01_connect_to_tpu.ipynb"]
    content = hashlib.sha256(b"".join((ROOT / file).read_bytes() for file in files)).hexdigest()
    return kept(f"{name}-{after}", [*HOLDS[name], *TO_RUN, content], make)


def run_notebook(environment, name, folder, chip=False, variables=None, source=ROOT / "notebooks", **parameters):
    """Papermill, alone in a folder with the helpers; gives the process and all that a reader would see."""
    helper = (ROOT / "tpu_helpers.py").read_text()
    if chip:
        (folder / "accel0").touch()
        helper = helper.replace('"/dev/accel0"', repr(str(folder / "accel0")))
    (folder / "tpu_helpers.py").write_text(helper)
    for file in ("tpu_measure.py", "kit.mplstyle"):
        shutil.copy(ROOT / file, folder)
    shutil.copy(source / f"{name}.ipynb", folder)
    given = [part for key, value in (SMALL.get(name, {}) | parameters).items() for part in ("-p", key, str(value))]
    command = ["-m", "papermill", f"{name}.ipynb", "result.ipynb", "-k", "python3", "--log-level", "ERROR", *given]
    result = call(environment, *command, cwd=folder, **(variables or {}))
    seen = []
    for cell in nbformat.read(folder / "result.ipynb", as_version=4).cells:
        for output in cell.get("outputs", []):
            seen.append(output.get("text") or "\n".join(output.get("traceback", [])))
    return result, re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(filter(None, seen)))


def install_section(folder):
    """Notebook 01 itself, asked to install: the reader's own way."""
    work = folder / "work"
    work.mkdir()
    result, seen = run_notebook(folder, "01_connect_to_tpu", work, install=True)
    assert result.returncode == 0, seen[-3000:] + result.stderr[-3000:]
    assert "tf.keras is tf_keras" in seen


def kaggle_push(folder):
    """What `make kaggle` makes to be pushed: a notebook that carries its helper and installs before anything else."""
    work = folder / "work"
    shutil.copytree(ROOT / "tools", work / "tools")
    shutil.copytree(ROOT / "notebooks", work / "notebooks")
    for file in ("tpu_helpers.py", "kit.mplstyle"):
        shutil.copy(ROOT / file, work)
    subprocess.run([sys.executable, work / "tools" / "publish.py", "kaggle", "ada", "04_fit"], check=True)
    result, seen = run_notebook(folder, "notebook", work / "build", source=work / "build" / "kaggle")
    assert result.returncode == 0, seen[-3000:] + result.stderr[-3000:]
    assert "TensorFlow 2.20.0, tf.keras is tf_keras" in seen


INSTALLS = {"colab": install_section, "kaggle": kaggle_push}


def names_fit(environment):
    """What TensorFlow looks for and what libtpu exports: by the helper, and by the linker's own table where nm is."""
    find = "from importlib.util import find_spec; print(find_spec({!r}).submodule_search_locations[0])"
    tensorflow, libtpu = (python(environment, find.format(name)) for name in ("tensorflow", "libtpu"))
    called = tpu_helpers.tpu_functions(f"{tensorflow}/libtensorflow_cc.so.2")
    offered = tpu_helpers.tpu_functions(f"{libtpu}/libtpu.so")
    assert len(called) > 100
    if shutil.which("nm"):
        table = subprocess.run(["nm", "-D", "--defined-only", f"{libtpu}/libtpu.so"], capture_output=True, check=True)
        exported = {line.split()[-1].partition(b"@")[0] for line in table.stdout.splitlines()}
        assert called & exported == called & offered, "the names in the file are not those that the linker finds"
    return called <= offered


# --- Colab: keras, jax and libtpu, no TensorFlow


@each_name
@pytest.mark.parametrize("chip", [True, False])
def test_colab_before_says_what_to_install(name, chip, tmp_path):
    result, seen = run_notebook(host("colab"), name, tmp_path, chip)
    assert result.returncode != 0
    assert f"Refused: TensorFlow is not installed here: {tpu_helpers.RUN}" in seen
    assert (tpu_helpers.INSTALL in seen.partition("Refused")[2]) == chip
    assert "Traceback" not in seen


def test_connect_says_it_too():
    result = call(host("colab"), "-c", "import tpu_helpers; tpu_helpers.connect()", TPU_NAME="local")
    said = result.stderr.partition("tpu_helpers.Refused: ")[2].strip()
    assert said == f"TensorFlow is not installed here: {tpu_helpers.RUN}{tpu_helpers.INSTALL}"


@each_name
def test_kaggle_before_trains_on_its_cpu_and_says_why(name, tmp_path):
    result, seen = run_notebook(host("kaggle"), name, tmp_path, chip=True)
    assert result.returncode == 0, result.stderr
    assert "TPU 'local' is not used: TensorFlow was built without TPUs (tensorflow-cpu 2.20.0)." in seen
    assert tpu_helpers.INSTALL in seen
    assert "virtual replica(s) of this CPU instead" in seen


AFTER = {"colab": ("libtpu==0.0.21.1", "protobuf==7.35.1", "keras==3.13.2"), "kaggle": ("libtpu==0.0.17",)}
each_after = pytest.mark.parametrize("name", AFTER)


@each_after
def test_the_install_section_leaves_a_libtpu_that_tensorflow_can_drive(name):
    environment = after_install(name, INSTALLS[name])
    frozen = pip(environment, "freeze", "--all")
    assert "tensorflow-tpu==2.20.0" in frozen.replace("tensorflow_tpu", "tensorflow-tpu")
    assert "tensorflow-cpu" not in frozen.replace("tensorflow_cpu", "tensorflow-cpu")
    for package in AFTER[name]:
        assert f"{package}\n" in frozen, "the host's own version should have stayed"
    assert names_fit(environment)


@each_after
def test_what_pip_complains_of_after_it_is_explained(name):
    complaints = pip(after_install(name, INSTALLS[name]), "check").strip().splitlines()
    notebook = nbformat.read(ROOT / "notebooks" / "01_connect_to_tpu.ipynb", as_version=4)
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for complaint in complaints:
        assert complaint in prose, f"pip check says {complaint!r}, and notebook 01 does not explain it"
    assert complaints, "the notebook explains a complaint that is no longer there"


@each_after
def test_tensorflow_is_imported_within_15_seconds_after_it(name):
    began = time.perf_counter()
    said = python(after_install(name, INSTALLS[name]), "import tpu_helpers, tensorflow; print(tensorflow.__version__)")
    assert said == "2.20.0"
    assert time.perf_counter() - began < 15


@each_after
def test_tf_keras_trains_after_it(name, tmp_path):
    result, seen = run_notebook(after_install(name, INSTALLS[name]), "04_fit", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "tf.keras is tf_keras" in seen
    assert "validation accuracy:" in seen


@each_after
def test_after_it_nothing_is_in_the_way_of_a_chip_but_that_there_is_none(name, tmp_path):
    """TPU_SKIP_MDS_QUERY as on Colab; without it libtpu asks a metadata server that is not here, for minutes."""
    environment = after_install(name, INSTALLS[name])
    result, seen = run_notebook(environment, "01_connect_to_tpu", tmp_path, True, {"TPU_SKIP_MDS_QUERY": "1"})
    assert result.returncode == 0, result.stderr
    assert "in the way: nothing" in seen
    assert "TPU 'local' is not used: it did not start, " in seen
    assert re.search(r"RET_CHECK failure|No TPU platform|TPUs not found", seen), "TensorFlow's own words"


# --- tensorflow-tpu as pip installs it, with a libtpu that is too new


def test_a_libtpu_that_is_too_new_ends_the_process_unless_it_is_noticed_before(tmp_path):
    environment = host("unpinned")
    assert not names_fit(environment)
    plain = call(environment, "-c", "import tensorflow; print('imported')", cwd=tmp_path)
    assert plain.returncode != 0
    assert "not available in this library" in plain.stderr
    result, seen = run_notebook(environment, "01_connect_to_tpu", tmp_path, chip=True)
    assert result.returncode == 0, result.stderr
    version = re.search(r"libtpu==(\S+)", pip(environment, "freeze"))[1]
    diagnosis = rf"libtpu {re.escape(version)} \(\S+\) lacks \d+ of \d+ functions TensorFlow calls, such as Tpu"
    assert re.search(f"TPU 'local' is not used: {diagnosis}", seen)
    assert f"{tpu_helpers.RUN}%pip install libtpu==0.0.21.1" in seen


def test_the_remedy_for_it_is_one(tmp_path):
    remedy = ["install", "--quiet", "libtpu==0.0.21.1"]
    environment = after_install("unpinned", lambda folder: pip(folder, *remedy))
    assert names_fit(environment)
    _, seen = run_notebook(environment, "01_connect_to_tpu", tmp_path, True, {"TPU_SKIP_MDS_QUERY": "1"})
    assert "in the way: nothing" in seen


def test_the_install_section_mends_two_tensorflows_in_one_place():
    """What is left when tensorflow-cpu was installed beside tensorflow-tpu, or the other way round."""

    def make(folder):
        pip(folder, "install", "--quiet", "tensorflow-cpu==2.20.0")
        said = python(folder, "import tpu_helpers; print(tpu_helpers.describe())")
        assert "several TensorFlow packages" in said
        install_section(folder)

    environment = after_install("unpinned", make, "both")
    assert "tensorflow-cpu" not in pip(environment, "freeze").replace("_", "-")
    assert names_fit(environment)


# --- plain TensorFlow


@each_name
@pytest.mark.parametrize("keras", ["tf_keras", "keras"])
@pytest.mark.parametrize("version", ["2.20", "2.21"])
def test_plain_tensorflow(version, keras, name, tmp_path):
    variables = {} if keras == "tf_keras" else {"TF_USE_LEGACY_KERAS": "0"}
    result, seen = run_notebook(host(f"tensorflow-{version}"), name, tmp_path, variables=variables)
    assert result.returncode == 0, result.stderr
    assert f"TensorFlow {version}." in seen
    assert f"tf.keras is {keras}\n" in seen
    assert "No TPU: no chip at /dev/accel0 or /dev/vfio/0" in seen


# --- the TPU compiler


def test_the_compiler_of_colab():
    """Colab's jax and libtpu, which are older than those of requirements-compiler.txt: all compiler tests."""
    result = call(host("compiler"), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_compiler.py")
    assert result.returncode == 0, result.stdout[-3000:]
    assert "skipped" not in result.stdout.splitlines()[-1]


def test_a_tensorflow_for_tpus_says_where_to_ask_instead():
    """It cannot lower a step for a CPU, where every question begins."""
    code = """
import tpu_compiler
from tpu_helpers import Refused, quietly
with quietly():
    import tensorflow as tf

def build():
    model = tf.keras.Sequential([tf.keras.layers.Input((8,)), tf.keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    return model

try:
    tpu_compiler.compile_for_tpu(build, "v5e-8", 8)
except Refused as refused:
    print(refused)
print(tpu_compiler.compile_for_tpu(build, "v5e-8", 64, name="the kit's CNN").recorded)
"""
    said = python(after_install("colab", install_section), code).splitlines()
    assert "tensorflow-tpu 2.20.0 cannot lower a step for a CPU" in said[0]
    assert "python3 -m venv apart" in said[0]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", said[1])


# --- Binder


def binder():
    """What repo2docker does with binder/: requirements.txt, then postBuild."""
    files = sorted((ROOT / "binder").iterdir())

    def make(folder):
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip(folder, "install", "--quiet", "--requirement", ROOT / "binder" / "requirements.txt")
        path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        subprocess.run([ROOT / "binder" / "postBuild"], env=os.environ | {"PATH": path}, check=True, cwd=ROOT)

    return kept("binder", [file.read_text() for file in files], make)


MEMORY = """
import re, sys, nbformat
from pathlib import Path
from nbclient import NotebookClient
content = nbformat.read(sys.argv[1], as_version=4)
client = NotebookClient(content, kernel_name="python3", timeout=300)
with client.setup_kernel():
    for number, cell in enumerate(content.cells):
        client.execute_cell(cell, number)
    status = Path(f"/proc/{client.km.provisioner.pid}/status").read_text()
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's count of resident memory")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_binder_each_kernel_stays_under_1500_megabytes(notebook):
    """Resident memory at its peak, the whole notebook with its defaults; Binder promises 1 GB and kills at 2."""
    result = call(binder(), "-c", MEMORY, notebook, cwd=notebook.parent)
    assert result.returncode == 0, result.stderr[-3000:]
    peak = int(result.stdout.split()[-1])
    assert 0.2e9 < peak < 1.5e9


def test_binder_follows_the_rules_of_repo2docker():
    """repo2docker itself reads binder/ and writes the Dockerfile; only building it would need Docker."""
    needs = ["jupyter-repo2docker>=2024.7"]

    def make(folder):
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip(folder, "install", "--quiet", *needs)

    result = call(
        kept("repo2docker", needs, make),
        *("-m", "repo2docker", "--no-build", "--debug", "--user-id", "1000", "--user-name", "jovyan", str(ROOT)),
    )
    assert result.returncode == 0, result.stderr[-3000:]
    dockerfile = result.stdout + result.stderr
    assert 'install --no-cache-dir -r "binder/requirements.txt"' in dockerfile
    assert "RUN ./binder/postBuild" in dockerfile
    assert "Building conda environment for python=3.11" in dockerfile
