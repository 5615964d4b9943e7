"""Every notebook end to end: by papermill from the repository's folder, and by nbval from the notebook's own."""

from __future__ import annotations

import random
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import papermill
import pytest
from conftest import NOTEBOOKS, ROOT
from papermill.parameterize import parameterize_notebook

NAMES = [notebook.stem for notebook in NOTEBOOKS]
TRAINING = [name for name in NAMES if name != "07_ask_the_tpu_compiler"]  # on replicas of this machine
SMALL = {"per_replica_batch_size": 16, "epochs": 2}  # few steps of 04_fit
MEASURED = ("See where a step's time goes", "Run several steps in one execution", "Race")  # in 04_fit
OTHERS = (*MEASURED, "Look at the mistakes", "Save on many replicas, load on one", "Your turn")
LONG = {  # sections that the run with the defaults has time for, and the nightly ones
    "02_build_input_pipeline": ("Measure", "Find the bottleneck: `diagnose()`"),
    "04_fit": MEASURED,
    "05_tune_batch_size": ("Do not mistake fast for good", "Write it into your own configuration"),
    "08_keep_your_work": ("Stop before it is too late",),
    "10_scale_out": ("Restart the dispatcher", "Ask the learning rate to come along"),
    "12_your_own_model": ("Tune the batch size", "Interrupt it, and go on"),
}


def shortened(source: Path, target: Path, without: tuple[str, ...]) -> Path:
    """A copy of the notebook, in the folder `target`, without the sections of these headings."""
    notebook, cells, heading = nbformat.read(source, 4), [], ""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (found := re.match("## (.*)", cell.source)):
            heading = found.group(1)
        cells += [] if heading in without else [cell]
    assert len(cells) < len(notebook.cells), "no such section"
    notebook.cells = cells
    nbformat.write(notebook, target / source.name)
    return target / source.name


def path_of(name: str) -> Path:
    return ROOT / "notebooks" / f"{name}.ipynb"


def execute(name: str, folder: Path, without: tuple[str, ...] = (), **parameters: object) -> nbformat.NotebookNode:
    notebook = path_of(name)
    unknown = set(parameters) - set(papermill.inspect_notebook(notebook))
    assert not unknown, f"{name} has no parameter {unknown}: papermill would only warn"
    return papermill.execute_notebook(
        shortened(notebook, folder, without) if without else notebook,
        folder / "result.ipynb",
        parameters=parameters,
        cwd=ROOT,
        kernel_name="python3",
        execution_timeout=300,
        progress_bar=False,
    )


def printed(notebook: nbformat.NotebookNode) -> str:
    """What the cells print, each from a line of its own; one cell's text may arrive in pieces."""
    streams = [[o.text for o in cell.get("outputs", []) if o.output_type == "stream"] for cell in notebook.cells]
    return "\n".join("".join(pieces) for pieces in streams if pieces)


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
    said = printed(execute("04_fit", tmp_path, OTHERS, seed=1))
    accuracy = float(re.search(r"validation accuracy: ([\d.]+)%", said).group(1))
    assert accuracy >= 97


def numbers_of(folder: Path, seed: int) -> list[str]:
    """Every loss and accuracy that an epoch ends with, in `fit` and in the notebook's own loop."""
    said = printed(execute("04_fit", folder, OTHERS, seed=seed, **SMALL))
    ends = [line for line in re.split(r"[\r\n]", said) if "val_loss" in line or "in this loop" in line]
    return re.findall(r"(?:loss|accuracy):? [\d.]+", "\n".join(ends))


def test_the_same_seed_gives_the_same_numbers(tmp_path):
    first, again, other = (numbers_of(tmp_path, seed) for seed in (3, 3, 4))
    assert len(first) > 5
    assert first == again
    assert first != other


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_explained(name):
    parameters = papermill.inspect_notebook(path_of(name))
    assert parameters
    assert all(parameter["help"] for parameter in parameters.values()), "papermill shows these comments as help"


def refusal_of(name: str, folder: Path, **parameters: object) -> tuple[int, str]:
    """The first cell that fails, by its number among the code cells, and what the reader sees of it."""
    with pytest.raises(papermill.PapermillExecutionError):
        execute(name, folder, **parameters)
    return failure_in(folder / "result.ipynb")


def failure_in(result: Path) -> tuple[int, str]:
    """The first cell that failed, by its number among the code cells, and what the reader sees of it."""
    cells = [cell for cell in nbformat.read(result, as_version=4).cells if cell.cell_type == "code"]
    for number, cell in enumerate(cells):
        for output in cell.outputs:
            if output.output_type == "error":
                return number, "\n".join(output.traceback)
    raise AssertionError("no cell failed")


# --- random parameters

KINDS = {  # of every parameter of a notebook: usual values, and values that none should take
    "virtual_replicas": ([1, 2, 3, 4, 8], [0, -1, 65, 2.5, "two", None, True]),
    "per_replica_batch_size": ([3, 8, 16, 24, 32], [0, -4, 1.5, "8", None, 2**31]),
    "largest_per_replica_batch_size": ([16, 32], [0, -1, "large", None]),
    "epochs": ([1, 2], [0, -1, 0.5, "one", None, 10**9]),
    "steps": ([1, 2, 5], [0, -2, 1.5, "all", None]),
    "workers": ([1, 2, 3], [0, -1, 9, 2.5, "two", None]),
    "seed": ([0, 1, 12345, 2**31 - 1], [-1, 0.5, "zero", None, 2**31]),
    "save_every": ([1, 3, 10, 1000], [0, -1, 2.5, "often", None]),
    "dataset": (["digits"], ["", "cifar", 3, None, ["digits"]]),
    "tpu": ([None, "local"], [3, True, ["local"]]),
    "install": ([False], []),
}
KINDS_OF = {  # some notebooks; the sizes that 05 measures are all between its two
    "05_tune_batch_size": {"per_replica_batch_size": ([8, 16], [0, -4, 1.5, "8", None, 2**31])},
    "07_ask_the_tpu_compiler": {
        "tpu": (["v5e-8", "v6e-8", "v5e-1"], ["v5e-7", "", 8, None]),
        "per_replica_batch_size": ([64, 128], [0, "many", -1, None]),
    },
    "12_your_own_model": {
        "model": (["kit"], ["Resnet50", "", 3, None]),
        "tpu": (["v5e-8", "v6e-8", "v5e-1"], ["v5e-7", "", 8, None]),
    },
}
REPLICAS = [2, 3, 8, 1, 4]  # of the good sets, in turns; the suite's is the first, as most notebooks' default is 8


def kinds_of(name: str) -> dict[str, tuple[list, list]]:
    kinds = KINDS | KINDS_OF.get(name, {})
    return {parameter: kinds[parameter] for parameter in sorted(papermill.inspect_notebook(path_of(name)))}


def random_parameters(name: str, number: int) -> tuple[dict, list[str]]:
    """The notebook's parameters of this number, always the same, and which of them are bad: one, or none.

    None in every other set; of the first five, which are the suite's, in 1 alone.
    """
    rng = random.Random(f"{name} {number}")
    kinds = kinds_of(name)
    chosen = {parameter: rng.choice(kinds[parameter][0]) for parameter in kinds}
    if "virtual_replicas" in chosen:
        chosen["virtual_replicas"] = REPLICAS[number // 2 % len(REPLICAS)]
    good = number % 2 if number > 4 else number == 1
    bad = rng.sample([parameter for parameter in kinds if kinds[parameter][1]], 0 if good else 1)
    return chosen | {parameter: rng.choice(kinds[parameter][1]) for parameter in bad}, bad


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(5, 30))
@pytest.mark.parametrize("name", NAMES)
def test_random_parameters(name, number, tmp_path):
    """Runs, or stops in its first cells with a sentence naming the parameter. (1: standalone, in test_publish.py.)"""
    chosen, bad = random_parameters(name, number)
    without = MEASURED if name == "04_fit" else ()  # eight replicas on two cores tell nothing about speed
    try:
        said = printed(execute(name, tmp_path, without, **chosen))
        assert not bad, f"{chosen} should be refused for {bad}"
        assert name not in TRAINING or f"Training on {chosen['virtual_replicas']} virtual replica(s)" in said
    except papermill.PapermillExecutionError:
        place, seen = failure_in(tmp_path / "result.ipynb")
        assert seen.startswith("Refused: "), (chosen, seen)
        assert "\n" not in seen, chosen
        assert place <= 8, f"{chosen} should be refused in the first cells"  # papermill's among them
        assert all(parameter in seen for parameter in bad), (chosen, seen)


@pytest.mark.parametrize("name", NAMES)
def test_bad_parameters_are_refused_in_one_sentence_in_the_first_cells(name):
    """The suite's random sets but 1, then each bad value alone; in one process, as what is refused leaves no trace."""
    notebook = papermill.iorw.load_notebook_node(str(path_of(name)))
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    given = next(number for number, cell in enumerate(code) if "parameters" in cell.metadata.tags)
    cases = [random_parameters(name, number) for number in (0, 2, 3, 4)]
    cases += [({parameter: value}, [parameter]) for parameter, (_, bad) in kinds_of(name).items() for value in bad]
    client = nbclient.NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(ROOT)}})
    with client.setup_kernel():
        for cell in code[: given + 1]:
            client.execute_cell(cell, 0)
        for chosen, bad in cases:
            cells = parameterize_notebook(notebook, chosen, kernel_name="python3", language="python").cells
            injected = next(cell for cell in cells if "injected-parameters" in cell.metadata.tags)
            seen = ""
            for cell in [code[given], injected, *code[given + 1 : 8]]:
                try:
                    client.execute_cell(cell, 0)
                except nbclient.exceptions.CellExecutionError:
                    seen = "\n".join(next(o.traceback for o in cell.outputs if o.output_type == "error"))
                    break
            assert seen.startswith("Refused: "), (chosen, seen)
            assert "\n" not in seen, chosen
            assert bad[0] in seen, (chosen, seen)


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
    for file in ("tpu_measure.py", "kit.mplstyle"):
        shutil.copy(ROOT / file, tmp_path)
    after = ("Count the replicas", "Run something on every replica", "Deal out a batch", "Your turn")
    notebook = shortened(NOTEBOOKS[0], tmp_path, after)
    result = papermill.execute_notebook(
        notebook, tmp_path / "result.ipynb", {"tpu": tpu}, cwd=tmp_path, kernel_name="python3", progress_bar=False
    )
    server.close()
    assert "strategy: none" in printed(result)
    assert f"TPU '{tpu}' is not used: " in printed(result)
    assert "Training on 8 virtual replica(s) of this CPU instead." in printed(result)
