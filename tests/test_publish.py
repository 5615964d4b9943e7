"""Notebooks opened alone: `make publish`, `make standalone`, `make kaggle`, and the Setup cell they are about."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import nbformat
import papermill
import pytest
from conftest import NOTEBOOKS, ROOT
from test_notebooks import LONG, NAMES, TRAINING, printed, random_parameters, shortened

REPO = "ada/tpu-kit"
FILES = ("tpu_helpers.py", "tpu_compiler.py", "recorded/predictions.json")
BESIDE = {"01_connect_to_tpu": ["tpu_measure.py"], "08_keep_your_work": ["tpu_keep.py"]}
BESIDE |= {"09_when_it_breaks": ["tpu_measure.py"], "10_scale_out": ["tpu_measure.py"]}
BESIDE |= {"12_your_own_model": ["tpu_measure.py", "tpu_keep.py"]}
PROGRAMS = {"10_scale_out": ("tools/data_service.py",)}
ALL = (*FILES, "tpu_measure.py", "tpu_keep.py", "tools/data_service.py", "kit.mplstyle")
ASKING = [name for name in NAMES if name[:2] in ("05", "06", "07", "09", "10", "11", "12")]  # which need all three


def needed(name):
    return (
        FILES[0],
        *BESIDE.get(name, ()),
        *(FILES[1:] if name in ASKING else ()),
        *PROGRAMS.get(name, ()),
        "kit.mplstyle",
    )


@pytest.fixture
def kit(tmp_path):
    """A copy of the repository, to publish."""
    copy = tmp_path / "kit"
    for folder in ("notebooks", "tools"):
        shutil.copytree(
            ROOT / folder, copy / folder, ignore=shutil.ignore_patterns(".ipynb_checkpoints", "__pycache__")
        )
    for file in ("README.md", *ALL):
        (copy / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, copy / file)
    return copy


def publish(kit, *arguments):
    return subprocess.run(
        [sys.executable, "-S", kit / "tools" / "publish.py", *arguments],  # -S: with no package but Python's own
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
    )


def contents(kit):
    return {path: path.read_bytes() for path in [kit / "README.md", *sorted((kit / "notebooks").glob("*.ipynb"))]}


def setup(path):
    """The source of the Setup cell."""
    (cell,) = [cell for cell in nbformat.read(path, 4).cells if "setup" in cell.metadata.get("tags", [])]
    return cell.source


# --- make publish


def test_publishing_twice_changes_nothing_and_it_can_be_taken_back(kit):
    assert publish(kit, "links", "").returncode == 0
    unpublished = contents(kit)
    assert publish(kit, "links", REPO, "v1.0.0").returncode == 0
    once = contents(kit)
    assert all(once[path] != unpublished[path] for path in once)
    assert publish(kit, "links", REPO, "v1.0.0").returncode == 0
    assert contents(kit) == once
    assert publish(kit, "links", REPO, "v1.1.0").returncode == 0
    assert f"{REPO}/v1.0.0".encode() not in b"".join(contents(kit).values())
    assert publish(kit, "links", "").returncode == 0
    assert contents(kit) == unpublished


def test_a_fresh_clone_is_either_published_throughout_or_links_to_nobody(kit):
    """And if it is, `make publish` with the same names would change nothing but the fingerprint of a newer helper."""
    found = {re.search(r'SOURCE = "([^"]*)"', setup(path))[1] for path in NOTEBOOKS}
    assert len(found) == 1
    before = contents(kit)
    (source,) = found
    repo, _, tag = source.removeprefix("https://raw.githubusercontent.com/").rpartition("/")
    publish(kit, "links", repo, tag)
    without = [
        {path: re.sub(rb"\b[0-9a-f]{64}\b", b"", content) for path, content in each.items()}
        for each in (before, contents(kit))
    ]
    assert without[0] == without[1]
    assert (b"colab.research.google.com/github" in b"".join(before.values())) == bool(source)


def test_badges_lead_to_the_repository_at_its_tag(kit):
    publish(kit, "links", REPO, "v1.0.0")
    for path in (kit / "notebooks").glob("*.ipynb"):
        title = nbformat.read(path, 4).cells[0].source
        assert re.findall(r"\]\((https://[^)]+" + REPO + r"[^)]+)\)", title) == [
            f"https://colab.research.google.com/github/{REPO}/blob/v1.0.0/notebooks/{path.name}",
            f"https://kaggle.com/kernels/welcome?src=https://github.com/{REPO}/blob/v1.0.0/notebooks/{path.name}",
            f"https://mybinder.org/v2/gh/{REPO}/v1.0.0?urlpath=lab/tree/notebooks/{path.name}",
        ]
        assert title.count("![Open in") == 3
        assert (kit / "README.md").read_text().count(f"blob/v1.0.0/notebooks/{path.name}") == 2


def test_the_readme_leads_to_the_book(kit):
    publish(kit, "links", "Ada/tpu-kit", "v1.0.0")
    assert "<https://ada.github.io/tpu-kit/>" in (kit / "README.md").read_text()
    publish(kit, "links", "")
    assert "github.io" not in (kit / "README.md").read_text()


def test_the_stamps_are_the_files_own_fingerprints(kit):
    publish(kit, "links", REPO, "v1.0.0")
    for path in (kit / "notebooks").glob("*.ipynb"):
        stamps = dict(re.findall(r'^    "(.+)": "(.*)",$', setup(path), re.MULTILINE))
        assert stamps == {file: hashlib.sha256((kit / file).read_bytes()).hexdigest() for file in needed(path.stem)}
        assert f'SOURCE = "https://raw.githubusercontent.com/{REPO}/v1.0.0"' in setup(path)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["links", "tpu-kit", "v1"], "REPO='tpu-kit' is no repository"),
        (["links", "https://github.com/a/b", "v1"], "REPO='https://github.com/a/b' is no repository"),
        (["links", REPO], "TAG='' is no tag"),
        (["links", REPO, "v 1"], "TAG='v 1' is no tag"),
        (["links", REPO, "v1/"], "TAG='v1/' is no tag"),
        (["links", "ada/tpu-kit.git", "v1"], "REPO='ada/tpu-kit.git' is no repository"),
        (["links", "ada/..", "v1"], "REPO='ada/..' is no repository"),
        (["kaggle", "", "04_fit"], "KAGGLE_USER='' is no name"),
        (["kaggle", "ada", "04"], "NOTEBOOK='04' is unknown: pass one of 01_connect_to_tpu,"),
    ],
)
def test_bad_names_are_refused_and_nothing_is_written(kit, arguments, part):
    before = contents(kit)
    result = publish(kit, *arguments)
    assert result.returncode == 1
    assert result.stderr.startswith(f"Refused: {part}")
    assert result.stderr.count("\n") == 1
    assert contents(kit) == before


def make(*arguments):
    environment = {name: value for name, value in os.environ.items() if name not in ("REPO", "TAG")}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", ["publish", "standalone", "exercises", "kaggle"])
def test_publishing_needs_no_set_up(command):
    """What make would run, for a .venv that is not there: nothing that installs."""
    planned = make("--dry-run", command, "REPO=ada/tpu-kit", "VENV=/no/such/venv").stdout
    assert "tools/publish.py" in planned
    assert "venv" not in planned


def test_make_publish_says_how_if_it_is_not_told_where():
    result = make("publish")
    assert result.returncode != 0
    assert "make publish REPO=owner/name TAG=v1.0.0" in result.stdout


def test_what_is_given_to_make_is_not_run(tmp_path):
    result = make("publish", f'REPO=a`touch {tmp_path}/harm`"b', "TAG=v1")
    assert "is no repository: pass OWNER/NAME" in result.stderr
    assert not (tmp_path / "harm").exists()


def test_ruff_is_content_with_published_notebooks(kit):
    shutil.copy(ROOT / "pyproject.toml", kit)
    publish(kit, "links", "a-rather-long-name-of-an-owner/learn-tensorflow-on-tpus", "v10.20.30")
    result = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "."], cwd=kit, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


def test_without_a_place_in_the_readme_nothing_is_written(kit):
    (kit / "README.md").write_text("# Mine\n")
    before = contents(kit)
    assert "README.md has no place for the links" in publish(kit, "links", REPO, "v1.0.0").stderr
    assert contents(kit) == before


# --- a stamped notebook, alone in an empty folder, that fetches its helper


@pytest.fixture
def stamped(kit, tmp_path):
    """Notebooks that fetch their helper from this machine, and the folder that is served."""
    folder = tmp_path / "served" / REPO / "v1.0.0"
    folder.mkdir(parents=True)
    for file in ALL:
        (folder / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, folder / file)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "served")
    handler.func.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        publish(kit, "links", REPO, "v1.0.0", f"--raw=http://127.0.0.1:{server.server_port}")
        yield kit / "notebooks", folder
        server.shutdown()


def alone(notebook, tmp_path):
    """Executed in an empty folder."""
    empty = tmp_path / "alone"
    empty.mkdir(exist_ok=True)
    shutil.copy(notebook, empty)
    result = papermill.execute_notebook(
        empty / notebook.name, empty / "result.ipynb", cwd=empty, kernel_name="python3", progress_bar=False
    )
    return empty, result


def setup_of(notebook):
    """The same notebook with this cell only."""
    content = nbformat.read(notebook, 4)
    content.cells = [cell for cell in content.cells if "setup" in cell.metadata.get("tags", [])]
    assert len(content.cells) == 1
    nbformat.write(content, notebook)
    return notebook


def refusal(notebook, tmp_path):
    """What the reader sees of the cell that fails: the first one."""
    with pytest.raises(papermill.PapermillExecutionError) as error:
        alone(notebook, tmp_path)
    assert error.value.exec_count == 1
    return "\n".join(error.value.traceback)


@pytest.mark.parametrize("name", NAMES)
def test_a_stamped_notebook_sets_itself_up_alone(name, stamped, tmp_path):
    """The cell that does it. The rest runs alone below, as a standalone notebook."""
    notebooks, _ = stamped
    empty, _ = alone(setup_of(notebooks / f"{name}.ipynb"), tmp_path)
    for file in map(Path, needed(name)):
        assert (empty / file.name).read_bytes() == (ROOT / file).read_bytes()


def test_a_tampered_helper_is_refused_and_not_run(stamped, tmp_path):
    notebooks, served = stamped
    (served / "tpu_helpers.py").write_text(f"open({str(tmp_path / 'harm')!r}, 'w')\n")
    seen = refusal(notebooks / "04_fit.ipynb", tmp_path)
    assert re.fullmatch(r"NotFound: http://\S+/tpu_helpers.py has been changed, so none of it was run: .+\.", seen)
    assert not (tmp_path / "harm").exists()
    assert not (tmp_path / "alone" / "tpu_helpers.py").exists()


def answer_nonsense(server):
    while True:
        caller, _ = server.accept()
        caller.sendall(b"nonsense\r\n\r\n")
        caller.close()


@pytest.mark.parametrize("how", ["no such file", "no network", "nonsense", "unpublished"])
def test_without_the_helper_one_sentence_says_what_to_do(how, stamped, kit, tmp_path, monkeypatch):
    notebooks, served = stamped
    (served / "tpu_helpers.py").unlink()
    if how == "no network":
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        monkeypatch.setenv("no_proxy", "")
    if how == "nonsense":
        server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=answer_nonsense, args=[server], daemon=True).start()
        publish(kit, "links", REPO, "v1.0.0", f"--raw=http://127.0.0.1:{server.getsockname()[1]}")
    if how == "unpublished":
        publish(kit, "links", "")
    seen = refusal(notebooks / "01_connect_to_tpu.ipynb", tmp_path)
    where = "no address to fetch it from: " if how == "unpublished" else "none from http://"
    assert seen.startswith(f"NotFound: no tpu_helpers.py here, and {where}")
    assert seen.endswith(": upload it beside this notebook, or open the standalone notebook, which has it inside.")
    assert "\n" not in seen


def test_a_helper_of_your_own_is_used_and_said_to_differ(stamped, tmp_path):
    notebooks, _ = stamped
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "tpu_helpers.py").write_text((ROOT / "tpu_helpers.py").read_text() + "\n# mine\n")
    _, result = alone(setup_of(notebooks / "01_connect_to_tpu.ipynb"), tmp_path)
    assert "tpu_helpers.py differs from http://" in printed(result)


# --- make standalone


@pytest.fixture(scope="module")
def standalone(tmp_path_factory):
    copy = tmp_path_factory.mktemp("standalone")
    for folder in ("notebooks", "tools"):
        shutil.copytree(ROOT / folder, copy / folder)
    for file in ALL:
        (copy / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, copy / file)
    for command in ("standalone", "exercises"):
        result = publish(copy, command)
        assert result.returncode == 0, result.stderr
    return copy / "build" / "standalone"


def offline(command):
    """Without any network but the machine's own address; where Linux allows it to nobody, behind a dead proxy."""
    isolated = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    allowed = shutil.which("unshare") and subprocess.run([*isolated, "true"], capture_output=True, check=False)
    return [*isolated, *command] if allowed and allowed.returncode == 0 else command


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_with_exercises_to_solve_runs_alone_without_a_network(name, standalone, tmp_path):
    """A standalone one without solutions, on two replicas: one of the suite's five random sets of parameters."""
    source = standalone.parent / "exercises" / f"{name}_exercises.ipynb"
    if name in LONG:
        shortened(source, tmp_path, LONG[name])
    else:
        shutil.copy(source, tmp_path)
    chosen, bad = random_parameters(name, 1)
    assert not bad
    parameters = [text for key, value in chosen.items() for text in ("-p", key, str(value))]
    command = [sys.executable, "-m", "papermill", source.name, "result.ipynb", "-k", "python3", *parameters]
    dead = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    result = subprocess.run(
        offline(command), cwd=tmp_path, env=os.environ | dead, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    said = printed(nbformat.read(tmp_path / "result.ipynb", 4))
    assert name not in TRAINING or f"Training on {chosen['virtual_replicas']} virtual replica(s)" in said
    for file in map(Path, needed(name)):
        assert (tmp_path / file.name).read_bytes() == (ROOT / file).read_bytes()
    assert len(re.findall(r"^Not yet: .{20,}\.$", said, re.MULTILINE)) == 2, "both stubs are told what to do"
    assert "Right: " not in said


@pytest.mark.parametrize("name", NAMES)
def test_exercises_have_stubs_and_checks_but_no_solutions(name, standalone):
    """That the solutions pass, nbval shows in test_notebooks.py; that the stubs do not, the run above."""
    source = standalone.parent / "exercises" / f"{name}_exercises.ipynb"
    content, complete = nbformat.read(source, 4), nbformat.read(standalone / f"{name}.ipynb", 4)
    nbformat.validate(content)
    tags = [tag for cell in content.cells for tag in cell.metadata.get("tags", [])]
    assert tags.count("exercise") == tags.count("exercise-check") == 2
    assert "solution" not in tags
    assert len(content.cells) == len(complete.cells) - 2
    assert not [cell for cell in content.cells if cell.get("outputs") or cell.get("execution_count")]
    solutions = [cell.source for cell in complete.cells if "solution" in cell.metadata.get("tags", [])]
    left = "\n".join(cell.source for cell in content.cells)
    assert len(solutions) == 2
    assert not [solution for solution in solutions if solution in left]


@pytest.mark.parametrize("name", NAMES)
def test_a_standalone_notebook_is_tidy(name, standalone):
    content = nbformat.read(standalone / f"{name}.ipynb", 4)
    nbformat.validate(content)
    code = [cell for cell in content.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for file, cell in zip(needed(name), code, strict=False):
        assert cell.source.startswith(f"%%writefile {Path(file).name}\n")
        assert cell.metadata["jupyter"] == {"source_hidden": True}
    assert "setup" in code[len(needed(name))].metadata.tags
    prose = "\n".join(cell.source for cell in content.cells if cell.cell_type == "markdown")
    assert not re.findall(r"\]\((?!https?:|#)[^)]*\)", prose), "a link to a file that is not there"


# --- make kaggle


def test_a_folder_for_kaggle_has_what_push_needs(kit):
    result = publish(kit, "kaggle", "ada", "04_fit")
    assert result.returncode == 0, result.stderr
    folder = kit / "build" / "kaggle"
    metadata = json.loads((folder / "kernel-metadata.json").read_text())
    assert metadata["id"] == "ada/04-fit"
    assert len(metadata["title"]) >= 5, "Kaggle asks for five characters"
    assert metadata["machine_shape"] == "TpuV5E8"
    first = nbformat.read(folder / metadata["code_file"], 4).cells[0].source
    assert "%pip install tensorflow-tpu" in first
    assert "kaggle kernels push -p build/kaggle" in result.stdout
