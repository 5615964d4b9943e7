"""The Makefile's commands and the program behind `make run` and `make notebooks`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import nbformat
import pytest
from conftest import ROOT

PROGRAM = ROOT / "tools" / "notebooks.py"


def write_notebook(path, *sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells.insert(0, nbformat.v4.new_markdown_cell("# One\n\nRuns in 0 s (recorded: …), reads in 0 minutes."))
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), path)
    return path


@pytest.fixture
def kit(tmp_path):
    """A repository with two notebooks of its own, so that nothing here is overwritten."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "notebooks").mkdir()
    shutil.copy(PROGRAM, tmp_path / "tools")
    bar = "import sys\nsys.stdout.write('1/2')\nsys.stdout.write('\\r2/2\\n')"
    write_notebook(tmp_path / "notebooks" / "01_good.ipynb", "print(6 * 7)", bar)
    write_notebook(tmp_path / "notebooks" / "02_bad.ipynb", "1 / 0", "print('never')")
    return tmp_path


def call(kit, action):
    return subprocess.run(
        [sys.executable, kit / "tools" / "notebooks.py", action], capture_output=True, text=True, cwd="/", check=False
    )


def test_run_says_of_each_notebook_how_long_what_became_of_it_and_where_it_lies(kit):
    result = call(kit, "run")
    good, bad = [line for line in result.stdout.splitlines() if line[:2] in ("01", "02")]
    assert good.split()[2:] == ["s", "ok", "build/01_good.ipynb"]
    assert "FAILED" in bad
    assert "ZeroDivisionError" in bad
    assert result.returncode == 1
    assert "cells" in result.stderr, "no progress bar"
    assert "Warning" not in result.stderr
    assert "WARNING" not in result.stderr
    assert "42" in (kit / "build" / "01_good.ipynb").read_text()


def test_regenerate_stores_what_is_seen_and_nothing_of_a_failed_run(kit):
    before = (kit / "notebooks" / "02_bad.ipynb").read_bytes()
    assert call(kit, "regenerate").returncode == 1
    assert (kit / "notebooks" / "02_bad.ipynb").read_bytes() == before
    head, first, second = nbformat.read(kit / "notebooks" / "01_good.ipynb", as_version=4).cells
    assert re.search(r"Runs in [1-9]\d* s \(recorded: \d+ CPU cores, \w+ \d{4}\), reads in 1 minutes\.", head.source)
    assert (first.execution_count, first.outputs[0].text) == (1, "42\n")
    assert second.outputs[0].text == "2/2\n"
    assert first.metadata == {}


def make(*arguments, **environment):
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False
    )


def test_a_second_call_does_not_install_again(tmp_path):
    ready = tmp_path / "venv" / "ready"
    first = make("--dry-run", "run", f"VENV={ready.parent}")
    assert "pip install" in first.stdout
    ready.parent.mkdir()
    ready.touch()
    again = make("--dry-run", "run", f"VENV={ready.parent}")
    assert "pip install" not in again.stdout
    assert "tools/notebooks.py run" in again.stdout


def test_without_a_suitable_python_it_says_which_one_is_needed(tmp_path):
    result = make("setup", f"VENV={tmp_path}/venv", "PYTHON=")
    assert result.returncode != 0
    assert "No Python from 3.11 to 3.13 found" in result.stdout


def test_continuous_integration_runs_the_same_command():
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_cheat_sheets_code_runs_from_top_to_bottom(tmp_path):
    """With the kit's model and digits, in a process of its own."""
    sheet = (ROOT / "book" / "cheatsheet.md").read_text()
    blocks = re.findall(r"(?s)```python\n(.*?)```", sheet)
    assert len(blocks) >= 10
    cells = nbformat.read(ROOT / "notebooks" / "04_fit.ipynb", 4).cells
    model = next(cell.source for cell in cells if cell.source.startswith("def build_model"))
    blocks[0] += "\n(x_train, y_train), _ = load_data()\n" + model
    (tmp_path / "sheet.py").write_text("\n".join(blocks))
    result = subprocess.run(
        [sys.executable, "sheet.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "predicted" in result.stdout
    assert "measured" in result.stdout
