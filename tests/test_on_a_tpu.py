"""benchmarks/on_a_tpu.py, run for real on virtual replicas; of a TPU only what needs none: names and the picture."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

import tpu_compiler

PROGRAM = ROOT / "benchmarks" / "on_a_tpu.py"
MODELS = ["the kit's MLP", "the kit's CNN"]
HONEST = "These figures are a CPU's: they prove the mechanism, not a TPU's speed"


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("on_a_tpu", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def call(*arguments, **options):
    """The program, from a folder that is not the repository's."""
    command = [sys.executable, PROGRAM, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", check=False, **options)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(folder, environment, result, content) of a small run that comes to its end, or to that of its 12 seconds."""
    folder = tmp_path_factory.mktemp("on_a_tpu")
    environment = {name: value for name, value in os.environ.items() if name not in ("TPU_NAME", "TPU_COMPILER_RECORD")}
    environment |= {"TPU_COMPILER_CACHE": str(folder / "cache")}
    small = ("--per-replica-batch", 8, "--policies", "mixed_bfloat16", "--minutes", 0.2)
    result = call(*small, "--out", folder / "out", env=environment)
    assert result.returncode == 0, result.stderr
    (path,) = (folder / "out").glob("*.json")
    return folder / "out", environment, result, json.loads(path.read_text())


def test_it_says_before_and_after_that_the_figures_are_a_cpus_and_where_they_are(ran):
    folder, _, result, content = ran
    assert "No TPU: " in result.stdout
    assert f"{HONEST}.\n" in result.stdout
    assert result.stdout.endswith(f"{HONEST}, and are not collected.\n")
    assert "To share it" not in result.stdout
    for ending in ("json", "png"):
        assert f"{folder}/{content['date']}-cpu.{ending}\n" in result.stdout
    assert (folder / f"{content['date']}-cpu.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".png"], "something is left over"
    assert not re.search("Warning|Traceback|cuInit", result.stderr)


def test_the_json_says_what_was_measured_where_and_with_what(ran):
    content = ran[3]
    names = ["schema", "on_a_tpu", "date", "host", "slice", "generation", "replicas", "versions", "steps_per_execution"]
    assert list(content) == [*names, "minutes", "rows", "left_out"]
    expected = {"schema": 1, "on_a_tpu": False, "slice": "", "generation": "", "replicas": 2, "minutes": 0.2}
    assert {name: content[name] for name in expected} == expected
    assert content["host"] in ("own", "Colab", "Kaggle", "Binder")
    assert re.fullmatch(r"tensorflow.* \d+\.\d+\.\d+.*", content["versions"]["TensorFlow"])
    keras = content["versions"]["Keras"].split()[0]
    assert content["steps_per_execution"] == {"tf-keras": 4, "keras": 1}[keras]
    cases = [(row["model"], row["policy"], row["per_replica_batch_size"]) for row in content["rows"]]
    cases += [tuple(case.values()) for case in content["left_out"]]
    assert cases == [(model, "mixed_bfloat16", 8) for model in MODELS]
    for private in (os.environ.get("HOME", "/root"), str(ROOT), os.uname().nodename):
        assert f'"{private}' not in json.dumps(content)
        assert f"{private}/" not in json.dumps(content)


def test_each_row_holds_the_measured_figures_and_no_ratio_on_a_cpu(ran):
    _, _, result, content = ran
    assert content["rows"]
    for row in content["rows"]:
        assert (row["fits"], row["words"], row["global_batch_size"], row["ratio"]) == (True, "", 16, None)
        measured = row["measured"]
        assert 0 < measured["lowest"] <= measured["median"] <= measured["highest"]
        (line,) = [line for line in result.stdout.splitlines() if line.startswith(row["model"])]
        assert f"measured {measured['median']:,.0f} (" in line


def test_a_prediction_is_made_where_the_compiler_is_and_said_to_be_for_another_machine(ran):
    _, _, result, content = ran
    if why := tpu_compiler.missing():
        assert f"No prediction: {why}" in result.stdout
        assert all((row["predicted"], row["predicted_for"]) == (None, "") for row in content["rows"])
        return
    for row in content["rows"]:
        assert row["predicted_for"] == "v5e-8"
        assert 0 < row["predicted"]["cost_model"] <= row["predicted"]["at_most"]
        assert row["prediction_note"].startswith("predicted by the TPU compiler (")
        assert row["prediction_note"].endswith("for another machine than this one")
        assert f"predicted for v5e-8, another machine: at most {row['predicted']['at_most']:,.0f}" in result.stdout


def test_a_used_up_budget_names_what_is_left_out_and_a_second_run_overwrites_nothing(ran):
    folder, environment, _, _ = ran
    first = {path: path.read_bytes() for path in folder.iterdir()}
    small = ("--per-replica-batch", "16,8,8", "--policies", "float32", "--minutes", 0.001, "--virtual-replicas", 1)
    result = call(*small, "--out", folder, env=environment)
    assert result.returncode == 0, result.stderr
    assert all(path.read_bytes() == before for path, before in first.items())
    (path,) = set(folder.glob("*.json")) - set(first)
    assert path.name.endswith("-cpu-2.json")
    assert path.with_suffix(".png").exists()
    again = json.loads(path.read_text())
    assert len(again["rows"]) == again["replicas"] == 1
    left = [(model, "float32", size) for size in (8, 16) for model in MODELS][1:]
    assert [tuple(case.values()) for case in again["left_out"]] == left
    said = "; ".join(f"{model}, {policy}, {size}" for model, policy, size in left)
    assert f"Left out, since 0.001 minute(s) are used up or you interrupted: {said}.\n" in result.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process cannot be held to so much memory")
def test_what_does_not_fit_is_recorded_in_its_own_words_and_the_next_case_goes_on(tmp_path):
    def hold():
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (2**36, 2**36))

    small = ("--per-replica-batch", 2**30, "--policies", "float32", "--minutes", 5)
    environment = os.environ | {"TPU_COMPILER_CACHE": str(tmp_path / "cache")}
    result = call(*small, "--out", tmp_path / "out", env=environment, preexec_fn=hold)
    assert result.returncode == 0, result.stderr
    (path,) = (tmp_path / "out").glob("*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["model"] for row in rows] == MODELS
    for row in rows:
        assert (row["fits"], row["measured"], row["predicted"], row["ratio"]) == (False, None, None, None)
        assert re.search(r"MemoryError: Unable to allocate .* TiB", row["words"])
        assert f"does not fit, measured: {row['words']}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--minutes", "soon"), "--minutes soon cannot be used: pass a number above 0."),
        (("--minutes", "0"), "--minutes 0 cannot be used: pass a number above 0."),
        (("--per-replica-batch", "8,,16"), "per_replica_batch_size='' cannot be used: pass a whole number from 1 to"),
        (("--per-replica-batch", "0"), "per_replica_batch_size=0 cannot be used: pass a whole number from 1 to"),
        (("--virtual-replicas", "65"), "virtual_replicas=65 cannot be used: pass a whole number from 1 to 64."),
        (("--policies", "float32,float8"), "--policies float8 is unknown: pass float32, mixed_bfloat16"),
        (("--slice", "v5e-9"), "--slice v5e-9 is unknown: pass one of v2-8, "),
        (("--out", str(PROGRAM)), f"--out {PROGRAM} cannot be written to ("),
    ],
)
def test_bad_input_is_refused_in_one_sentence_before_tensorflow_is_imported(arguments, said):
    code = "import atexit, runpy, sys; atexit.register(lambda: print('tensorflow' in sys.modules))"
    code += "; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    command = [sys.executable, "-c", code, PROGRAM, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    assert (result.returncode, result.stdout) == (2, "False\n")
    assert result.stderr.startswith(f"Refused: {said}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("accelerator", "devices", "generation"),
    [
        ("v5litepod-8", [], "v5e"),
        ("v5e-8", ["0x005e"], "v5e"),
        ("V6E-1", [], "v6e"),
        ("v5p-16", [], "v5p"),
        ("v3-8", ["0x0027"], "v3"),
        ("", ["0x0063"] * 8, "v5e"),
        ("", ["0x1234", "0x005e"], "v4"),
        ("", ["0x0027"], ""),  # v2 or v3
        ("", ["0x0076"], ""),  # TPU7x, for which there is no prediction
        ("tpu7x-8", [], ""),
        ("", [], ""),
    ],
)
def test_the_generation_is_the_accelerators_else_that_of_the_chips(program, accelerator, devices, generation):
    assert program.generation_name(accelerator, devices) == generation


@pytest.mark.parametrize(
    ("generation", "replicas", "name"),
    [("v5e", 8, "v5e-8"), ("v5e", 1, "v5e-1"), ("v3", 8, "v3-8"), ("v5p", 4, "v5p-8"), ("v5e", 3, ""), ("", 8, "")],
)
def test_the_slice_has_as_many_replicas_as_are_used(program, generation, replicas, name):
    assert program.slice_name(generation, replicas) == name


def test_every_known_slice_is_found_by_its_replicas(program):
    for name in tpu_compiler.TOPOLOGIES:
        assert program.slice_name(name.partition("-")[0], program.replicas_of(name)) == name


def test_a_slice_given_by_hand_must_have_the_replicas_of_the_tpu(program):
    assert program.find_slice("v3-8", 8) == ("v3", "v3-8")
    with pytest.raises(
        program.Refused, match=r"--slice v5e-8 has 8 replica\(s\), and this TPU 4: pass another, or none\."
    ):
        program.find_slice("v5e-8", 4)


def test_where_the_compiler_cannot_be_asked_there_is_a_recorded_prediction_or_a_reason(program, tf, monkeypatch):
    """As under tensorflow-tpu, which is not installed beside the suite's TensorFlow."""
    monkeypatch.setattr(tpu_compiler, "missing", lambda: "it is not here.")
    record = next(r for r in json.loads(tpu_compiler.RECORDED[0].read_text()) if r["name"] in MODELS and r["fits"])
    case = (record["tpu"], record["name"], record["policy"], record["per_replica_batch_size"])
    found = program.predicted_fields(*case)
    assert found["predicted"]["at_most"] > 0
    assert f"recorded on {record['recorded']}" in found["prediction_note"]
    found = program.predicted_fields(*case[:3], 12345)
    assert (found["predicted"], found["predicted_for"]) == (None, record["tpu"])
    assert found["prediction_note"].endswith("and the compiler cannot be asked here: it is not here.")


def test_the_words_lose_this_machines_folders(program):
    said = "OOM at /job:localhost/replica:0/task:0/device:CPU:0, see /home/me/x/y.py\nand more"
    assert program.in_one_line(said) == "OOM at /job:localhost/replica:0/task:0/device:CPU:0, see …/y.py"


@pytest.mark.parametrize("on_a_tpu", [True, False])
def test_predictions_are_drawn_for_a_tpu_only(program, on_a_tpu, tmp_path):
    """With invented figures, since there is no TPU to get some from."""
    rows = [
        {"model": model, "policy": policy, "per_replica_batch_size": size}
        | {"measured": {"median": 2.0 * size, "lowest": 1.0 * size, "highest": 2.5 * size} if size < 512 else None}
        | {"predicted": {"at_most": 9.0 * size, "cost_model": 4.0 * size}}
        for model in MODELS
        for policy in ("float32", "mixed_bfloat16")
        for size in (32, 128, 512)
    ]
    content = {"on_a_tpu": on_a_tpu, "slice": "v5e-8", "date": "2000-01-01", "replicas": 8, "rows": rows}
    figure = program.draw(tmp_path / "picture.png", content, "TPU" if on_a_tpu else "CPU")
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert sum("predicted" in label for label in labels) == (2 if on_a_tpu else 0)
    assert sum("measured" in label for label in labels) == 2
    honest = "a CPU's figures: they prove the mechanism, not a TPU's speed"
    assert (honest in figure.get_suptitle()) is not on_a_tpu


def test_it_trains_the_notebooks_own_models(program, tf):
    cells = json.loads((ROOT / "notebooks" / "04_fit.ipynb").read_text())["cells"]
    (source,) = ("".join(cell["source"]) for cell in cells if cell["source"][:1] == ["def build_model():\n"])
    known = {"tf": tf}
    exec(source, known)

    def shape_of(model):
        return [(type(layer).__name__, [tuple(weight.shape) for weight in layer.weights]) for layer in model.layers]

    assert shape_of(program.compiled("the kit's CNN")) == shape_of(known["build_model"]())
    assert shape_of(program.compiled("the kit's MLP"))[-2:] == [
        ("Dense", [(784, 128), (128,)]), ("Dense", [(128, 10), (10,)]),
    ]  # fmt: skip
