"""benchmarks/speed.py without its clock: that it runs, how it counts, and that the README says what was recorded."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys

import numpy as np
import pytest
from conftest import ROOT

PROGRAM = ROOT / "benchmarks" / "speed.py"


@pytest.fixture(scope="module")
def speed():
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("speed", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def test_the_readme_says_what_was_recorded(speed):
    readme, content = (ROOT / "README.md").read_text(), json.loads(speed.RECORDED.read_text())
    _, start, rest = readme.partition(speed.MARKERS[0])
    section, end, _ = rest.partition(speed.MARKERS[1])
    assert start
    assert end
    assert section == speed.performance(content)
    assert content["ratios"] == json.loads(json.dumps(speed.ratios(content["samples"], content["tune"]["runs"])))


def test_a_section_recorded_anew_takes_the_place_of_the_old_one(speed, monkeypatch):
    before = json.loads((ROOT / "recorded" / "speed.json").read_text())
    monkeypatch.setattr(speed, "machine", lambda load: before["machine"])
    given = speed.parse(["--record", "--only", "helpers"])
    slower = {name: [rate / 2 for rate in rates] for name, rates in before["samples"]["helpers"]["128"].items()}
    new = {"date": "2999-01-01", "samples": {"helpers": {"128": slower}}, "again": 3, "tune": {}}
    after = speed.merged(given, new)
    assert after["samples"] == before["samples"] | new["samples"]
    assert after["ratios"] == before["ratios"], "both are half as fast"
    assert after["tune"] == before["tune"]
    assert after["date"].endswith("(helpers: 2999-01-01)")


def test_a_ratio_is_computed_within_each_round(speed):
    """The machine was twice as fast in the second round: the ratio of the medians would be 2.2."""
    rates = {"listing": [10.0, 30.0, 10.0], "kit, uint8": [30.0, 66.0, 31.0]}
    rates |= dict.fromkeys(("kit, float32", "kit, augmented"), rates["listing"])
    for batch, target, met in (("128", ">= 2.5", True), ("1024", ">= 4", False)):
        (row,) = (row for row in speed.ratios({"pipeline": {batch: rates}}, []) if row["of"] == "kit, uint8")
        assert (row["median"], row["lowest"], row["highest"]) == (3.0, 2.2, 3.1)
        assert (row["target"], row["met"]) == (target, met)


def test_the_kits_fit_is_its_faster_row(speed):
    rates = {"kit, XLA": [10.0, 40.0, 30.0], "kit, no XLA": [20.0, 20.0, 20.0], "PyTorch, indexed": [20.0, 20.0, 30.0]}
    (row,) = speed.ratios({"fit": {"128": rates}}, [])
    assert (row["of"], row["median"], row["met"]) == ("kit, XLA", 1.0, False)  # > 1 is asked for
    machine = dict.fromkeys(("cpu", "cores", "versions", "load_before"), "")
    content = {"ratios": [row], "missing": [], "rounds": 3, "date": "", "machine": machine, "again": 4}
    line = "| fit | 128 | kit, XLA / PyTorch, indexed | 1.00 (0.50 … 2.00) | > 1 | not met |\n"
    assert line in speed.performance(content)
    assert "(its pulse, notebook 5): 4; of four" in speed.performance(content)


def test_of_ten_choices_the_worst_is_judged(speed):
    runs = [{"rate": 1.0, "seconds": 0.2}] * 9 + [{"rate": 0.9, "seconds": 0.3}]
    rate, seconds = speed.ratios({}, runs)
    assert (rate["median"], rate["lowest"], rate["met"]) == (1.0, 0.9, False)
    assert (seconds["highest"], seconds["met"]) == (0.3, True)


def small(speed, *arguments):
    given = speed.parse(["--small", "--rounds", "1", *map(str, arguments)])
    given.batch = 64
    return given


@pytest.fixture(scope="module")
def folder(speed, tf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("jpeg")
    speed.write_jpegs(small(speed, "--folder", folder))
    return folder


def test_decode_gives_pictures_of_one_shape_each_number_another(speed, tf, folder):
    record = next(iter(tf.data.TFRecordDataset(sorted(map(str, folder.iterdir()))[0])))
    numbers = tf.range(20, dtype=tf.int64)
    pictures, labels = zip(*(speed.decode(number, record) for number in numbers), strict=True)
    assert all((picture.shape, picture.dtype) == ((224, 224, 3), tf.uint8) for picture in pictures)
    assert len({picture.numpy().tobytes() for picture in pictures}) == len(pictures)
    again, label = speed.decode(numbers[7], record)
    assert np.array_equal(again, pictures[7])
    assert label == labels[7] == 0
    parts = np.stack([speed.crop([375, 500], tf.random.stateless_uniform([4], [0, number])) for number in range(20)])
    corner, kept = parts[:, :2], parts[:, 2:]
    assert (kept >= np.array([224, 299])).all()  # 60 % of each side
    assert (corner >= 0).all()
    assert (corner + kept <= np.array([375, 500])).all()
    assert (np.ptp(parts, axis=0) > 30).all()


@pytest.mark.parametrize("stage", ["resize", "flip", "crop", "batch"])
def test_leaving_a_stage_out_changes_what_the_pipeline_gives(speed, tf, folder, stage, monkeypatch):
    given, first = small(speed, "--folder", folder), {}

    def keep(dataset, steps, turn):
        batch = next(iter(dataset))
        first[given.name] = batch if tf.is_tensor(batch) else batch[0]

    monkeypatch.setattr(speed, "consume", keep)
    for given.name in ("kit", f"kit without {stage}"):
        speed.jpeg(given, None)
    whole, without = first.values()
    assert whole.shape == (64, 224, 224, 3)
    assert without.shape == ((64, 3) if stage == "batch" else whole.shape)
    assert stage == "batch" or not np.array_equal(whole, without)


@pytest.mark.parametrize("name", ["crop", "decode"])
def test_notebook_2_shows_the_same_function(name):
    from test_sources import bare, code_cells

    def functions(source):
        return [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name]

    shown = [node for cell in code_cells("02_build_input_pipeline") for node in functions(cell.source)]
    assert [bare(node) for node in shown] == [bare(node) for node in functions(PROGRAM.read_text())]


@pytest.mark.parametrize(
    "name",
    [
        "pipeline: listing",
        "pipeline: kit, float32",
        "fit: listing, Keras 3",
        "fit: kit, XLA",
        "fit: PyTorch, indexed",
        "fit: JAX",
    ],
)
def test_a_worker_answers_each_round(speed, name):
    needed = {"fit: PyTorch, indexed": "torch", "fit: JAX": "jax"}.get(name, "tensorflow")
    if not importlib.util.find_spec(needed):
        pytest.skip(f"{needed} is not installed: it is a peer, and optional")
    with speed.worker(small(speed), name, batch=128) as (process, answer):
        assert answer() == {"ready": True}
        for _ in range(2):
            print("go", file=process.stdin, flush=True)
            assert answer()["rate"] > 0
    assert process.returncode == 0


def test_a_missing_peer_is_one_sentence_and_the_rest_runs(speed, monkeypatch, capsys):
    workers = {"pipeline": {"PyTorch, indexed": None, "kit, uint8": None}}  # the first one is not known to the process
    monkeypatch.setattr(speed, "WORKERS", workers)
    rates = speed.side_by_side(small(speed), "pipeline", 128, "")
    assert list(rates) == ["kit, uint8"]
    assert len(rates["kit, uint8"]) == 1
    assert "Without PyTorch, indexed: KeyError: 'PyTorch, indexed' (pip install" in capsys.readouterr().out


def test_a_turn_in_a_slow_phase_is_repeated(speed, monkeypatch):
    given = small(speed)
    given.tries, given.pulses = 5, iter([True, False, True, True, True])  # before, after the first turn, …
    monkeypatch.setattr(speed, "calm", lambda beats: next(given.pulses, True))
    monkeypatch.setattr(speed, "WORKERS", {"pipeline": {"kit, uint8": None}})
    rates = speed.side_by_side(given, "pipeline", 128, "")
    assert given.again == ["kit, uint8"] * 2, "the turn it came in, and the one it was seen before"
    assert len(rates["kit, uint8"]) == 1


def test_calm_knows_a_slow_phase(speed, monkeypatch):
    pulses = iter([(90.0, 80.0), (25.0, 100.0), (46.0, 80.0)])
    monkeypatch.setattr(speed.tpu_measure, "pulse", lambda: next(pulses))
    beats = []
    assert [speed.calm(beats) for _ in range(3)] == [True, False, True]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--only", "fit,jpg"], "Refused: --only jpg is unknown: pass some of pipeline,fit,jpeg,helpers,tune.\n"),
        (["--rounds", "0"], "Refused: --rounds 0 cannot be used: pass 1 or more.\n"),
        (["--record", "--small"], "Refused: --record keeps no figures that mean nothing: leave out --small.\n"),
        (
            ["--record", "--only", "fit", "--rounds", "7"],
            "Refused: --record: recorded/speed.json has other rounds: leave out --only.\n",
        ),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(speed, capsys, arguments, sentence):
    assert speed.main(arguments) == 2
    assert capsys.readouterr().err == sentence
