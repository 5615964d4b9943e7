"""Every notebook end to end: by papermill from the repository's folder, and by nbval from the notebook's own."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import papermill
import pytest
from conftest import NOTEBOOKS, ROOT

NAMES = [notebook.stem for notebook in NOTEBOOKS]
TRAINING = [name for name in NAMES if name != "07_ask_the_tpu_compiler"]  # on replicas of this machine
SMALL = {  # few steps: these runs are about the number of replicas
    "01_connect_to_tpu": {},
    "02_build_input_pipeline": {"per_replica_batch_size": 4},
    "03_build_model_in_scope": {"per_replica_batch_size": 2, "steps": 3},
    "04_fit": {"per_replica_batch_size": 8, "epochs": 2},
    "05_tune_batch_size": {"per_replica_batch_size": 8, "largest_per_replica_batch_size": 32, "epochs": 2},
    "06_enable_mixed_bfloat16": {"per_replica_batch_size": 8, "epochs": 1},
    "07_ask_the_tpu_compiler": {},
}
MEASURED = ("See where a step's time goes", "Run several steps in one execution", "Race")  # in 04_fit


def shortened(source: Path, target: Path, wanted: Callable[[str], bool]) -> Path:
    """A copy of the notebook, in the folder `target`, of the sections whose heading is wanted."""
    notebook, cells, heading = nbformat.read(source, 4), [], ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (found := re.match("## (.*)", cell.source)):
            heading = found.group(1)
        cells += [cell] if wanted(heading) else []
    assert len(cells) < len(notebook.cells), "no such section"
    notebook.cells = cells
    nbformat.write(notebook, target / source.name)
    return target / source.name


def execute(name: str, folder: Path, without: tuple[str, ...] = (), **parameters: object) -> nbformat.NotebookNode:
    notebook = ROOT / "notebooks" / f"{name}.ipynb"
    unknown = set(parameters) - set(papermill.inspect_notebook(notebook))
    assert not unknown, f"{name} has no parameter {unknown}: papermill would only warn"
    return papermill.execute_notebook(
        shortened(notebook, folder, lambda heading: heading not in without) if without else notebook,
        folder / "result.ipynb",
        parameters=parameters,
        cwd=ROOT,
        kernel_name="python3",
        execution_timeout=300,
        progress_bar=False,
    )


def printed(notebook: nbformat.NotebookNode) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(output.text for output in outputs if output.output_type == "stream")


@pytest.mark.parametrize("name", NAMES)
def test_nbval_runs_it_and_finds_the_compared_outputs_as_stored(name):
    nbval = ["--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=300"]
    plain = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *nbval, *plain, f"notebooks/{name}.ipynb"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    assert re.search(r"\d+ passed", result.stdout)


def test_fit_reaches_97_percent_on_held_out_digits(tmp_path):
    """The default seed is the default run's own business; this is another one."""
    said = printed(execute("04_fit", tmp_path, MEASURED, seed=1))
    accuracy = float(re.search(r"validation accuracy: ([\d.]+)%", said).group(1))
    assert accuracy >= 97


@pytest.mark.parametrize("virtual_replicas", [2, 8])  # 1 is the default
@pytest.mark.parametrize("name", TRAINING)
def test_runs_on_any_number_of_replicas(name, virtual_replicas, tmp_path):
    said = printed(execute(name, tmp_path, virtual_replicas=virtual_replicas, **SMALL[name]))
    assert f"Training on {virtual_replicas} virtual replica(s)" in said


def numbers_of(folder: Path, seed: int) -> list[str]:
    """Every loss and accuracy that an epoch ends with, in `fit` and in the notebook's own loop."""
    said = printed(execute("04_fit", folder, MEASURED, seed=seed, **SMALL["04_fit"]))
    ends = [line for line in re.split(r"[\r\n]", said) if "val_loss" in line or "in this loop" in line]
    return re.findall(r"(?:loss|accuracy):? [\d.]+", "\n".join(ends))


def test_the_same_seed_gives_the_same_numbers(tmp_path):
    first, again, other = (numbers_of(tmp_path, seed) for seed in (3, 3, 4))
    assert len(first) > 5
    assert first == again
    assert first != other


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_explained(name):
    parameters = papermill.inspect_notebook(ROOT / "notebooks" / f"{name}.ipynb")
    assert parameters
    assert all(parameter["help"] for parameter in parameters.values()), "papermill shows these comments as help"


def refusal_of(name: str, folder: Path, **parameters: object) -> tuple[int, str]:
    """The first cell that fails, by its number among the code cells, and what the reader sees of it."""
    with pytest.raises(papermill.PapermillExecutionError):
        execute(name, folder, **parameters)
    cells = [cell for cell in nbformat.read(folder / "result.ipynb", as_version=4).cells if cell.cell_type == "code"]
    for number, cell in enumerate(cells):
        for output in cell.outputs:
            if output.output_type == "error":
                return number, "\n".join(output.traceback)
    raise AssertionError("no cell failed")


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_parameter_is_one_sentence_in_the_first_cells(name, tmp_path):
    parameter = "virtual_replicas" if name in TRAINING else "per_replica_batch_size"
    number, seen = refusal_of(name, tmp_path, **{parameter: 0})
    assert number <= 5  # papermill's own cells among them
    assert seen.startswith(f"Refused: {parameter}=0 cannot be used:")
    assert "\n" not in seen


def test_a_batch_larger_than_the_data_is_one_sentence(tmp_path):
    _, seen = refusal_of("04_fit", tmp_path, per_replica_batch_size=1000)
    assert seen == "Refused: global_batch_size=2000 exceeds the data: pass at most 1437."


def test_mnist_without_a_network_is_one_sentence_in_the_notebook(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    _, seen = refusal_of("04_fit", tmp_path, dataset="mnist")
    assert seen.startswith("Refused: dataset='mnist' could not be downloaded (")
    assert "\n" not in seen


@pytest.mark.parametrize("tpu", ["grpc://127.0.0.1:9", "no-such-tpu", "local"])
def test_a_tpu_that_is_not_there_does_not_hold_up_the_first_notebook(tpu, tmp_path, monkeypatch):
    """A name is asked for at a metadata server that takes the call and says nothing."""
    server = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.setenv("no_proxy", "*")
    helper = (ROOT / "tpu_helpers.py").read_text()
    (tmp_path / "tpu_helpers.py").write_text(helper.replace("PATIENCE = 30", "PATIENCE = 2"))
    result = papermill.execute_notebook(
        NOTEBOOKS[0], tmp_path / "result.ipynb", {"tpu": tpu}, cwd=tmp_path, kernel_name="python3", progress_bar=False
    )
    server.close()
    assert "strategy: none" in printed(result)
    assert f"TPU '{tpu}' is not used: " in printed(result)
    assert "Training on 8 virtual replica(s) of this CPU instead." in printed(result)
