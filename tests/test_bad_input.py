"""A thousand arguments for every public helper: each call works, or is refused in one sentence, and leaves nothing."""

from __future__ import annotations

import itertools
import os
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

import tpu_compiler
import tpu_helpers
import tpu_measure
from tpu_helpers import Refused, make_dataset
from tpu_keep import LOCKS, Keep

IMAGES = np.zeros((12, 28, 28, 1), "uint8")
LABELS = np.arange(12, dtype="int32")
PLACES = np.arange(5)
numbers = some.one_of(some.integers(), some.integers(-3, 40), some.floats(), some.booleans())
texts = some.one_of(some.text(max_size=20), some.binary(max_size=20))
arrays = some.sampled_from([IMAGES, LABELS, IMAGES[0], IMAGES / 255, LABELS * 1.5, np.array(3), np.array([]), PLACES])
simple = some.one_of(some.none(), numbers, texts, arrays, some.sampled_from([np.int64(4), np.float32(2), object(), {}]))
anything = some.one_of(simple, some.lists(simple, max_size=3), some.dictionaries(texts, simple, max_size=2))


def choose(**usual):
    """Arguments of which some are as they should be, some are anything."""
    return some.fixed_dictionaries({name: some.one_of(some.just(value), anything) for name, value in usual.items()})


def attempt(function, *positional, **named):
    """Whether it worked; else it was refused, in one sentence of the kit's own."""
    before = set(os.listdir())
    try:
        function(*positional, **named)
        worked = True
    except Refused as refusal:
        worked, said = False, str(refusal)
        assert re.match(r"^\S.*[.:!\w'\])]$", said, re.DOTALL), said
        assert "\n" not in said, said
        assert len(said) < 600, said
    assert set(os.listdir()) == before, "a file was left behind"
    return worked


def thousand(arguments):
    """Run a test with a thousand cases, the same ones each time."""
    options = {"max_examples": 1000, "derandomize": True, "deadline": None, "database": None}
    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return lambda test: settings(**options, suppress_health_check=quiet)(given(arguments)(test))


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch, tf):
    monkeypatch.chdir(tmp_path)


@thousand(choose(dataset="digits", epochs=3, seed=0, dtype="float32", classes=2))
def test_check_parameters(given):
    attempt(tpu_helpers.check_parameters, **given)


@thousand(choose(replicas=2))
def test_virtual_strategy(given):
    attempt(tpu_helpers.virtual_strategy, **given)


@thousand(some.lists(some.one_of(some.sampled_from(["numpy", "no-such"]), anything), max_size=3))
def test_installed(given):
    attempt(tpu_helpers.installed, *given)


@thousand(choose(library=__file__))
def test_tpu_functions(given):
    attempt(tpu_helpers.tpu_functions, **given)


@thousand(choose(chip="/dev/accel0"))
def test_chip_holders(given):
    attempt(tpu_helpers.chip_holders, **given)


@thousand(choose(tpu="local"))
def test_find_tpu(given):
    attempt(tpu_helpers.find_tpu, **given)


def is_name(value):
    """A name of a TPU is asked for in the network, for half a minute; that of a folder is made."""
    return isinstance(value, str) and value not in ("", "local", "kept")


@thousand(choose(tpu="local", virtual_replicas=2).filter(lambda given: not is_name(given["tpu"])))
def test_connect(given):
    attempt(tpu_helpers.connect, **given)


@thousand(choose(strategy=None))
def test_describe(given):
    attempt(tpu_measure.describe, **given)


@thousand(choose(error=ValueError("x")))
def test_explain(given):
    attempt(tpu_measure.explain, **given)


@thousand(choose(dataset="digits").filter(lambda given: str(given["dataset"]) != "mnist"))
def test_load_data(given):
    attempt(tpu_helpers.load_data, **given)


@thousand(choose(images=IMAGES, key=[1, 2]))
def test_augment(given):
    attempt(tpu_helpers.augment, **given)


@thousand(choose(place=PLACES, count=12, seed=0))
def test_shuffled(given):
    attempt(tpu_helpers.shuffled, **given)


DATASET = {"images": IMAGES, "labels": LABELS, "global_batch_size": 4, "training": True, "augmented": True}
DATASET |= {"classes": 0, "replicas": 1, "seed": 0, "dtype": "float32", "start": 0}


@thousand(choose(**DATASET))
def test_make_dataset(given):
    attempt(tpu_helpers.make_dataset, **given)


# --- what measures


@pytest.fixture(scope="module")
def usual(tf):
    """A dataset, and a compiled model for it."""
    strategy = tpu_helpers.virtual_strategy(2)
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Input((28, 28, 1)), tf.keras.layers.Flatten()])
        model.add(tf.keras.layers.Dense(2))
        model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ranged, ragged = tf.data.Dataset.range(9), tf.data.Dataset.range(9).batch(4)
    return model, [
        make_dataset(IMAGES, LABELS % 2, 4, replicas=2),
        ranged,
        ragged,
        tf.data.Dataset.from_tensors({"x": 1.0}),
    ]


def refused(function, **given):
    assert not attempt(function, **given)


@thousand(choose(batches=itertools.repeat(0), global_batch_size=4, step=None, steps=2, repeats=1))
def test_throughput(given):
    attempt(tpu_measure.throughput, **given)


@thousand(some.one_of(some.integers(0, 3), anything))
def test_pipeline_stages(usual, given):
    sets = usual[1]
    known = isinstance(given, int) and 0 <= given < len(sets)
    attempt(tpu_measure.pipeline_stages, sets[given] if known else given)


@thousand(choose(steps=1, seconds=0.1, tpu=None, dataset=None, model=None))
def test_time_step_and_diagnose(usual, given):
    """Either the dataset or the model is none, so that none is measured a thousand times."""
    given["dataset"] = usual[1][0] if given["dataset"] is None else given["dataset"]
    step = {"dataset": given["dataset"], "model": given["model"], "steps": given["steps"]}
    refused(tpu_measure.time_step, **step)
    refused(tpu_measure.diagnose, **{name: given[name] for name in ("dataset", "model", "tpu", "seconds")})


@thousand(choose(train=lambda size, clock: None, per_replica_batch_sizes=[8, 16], replicas=2))
def test_tune_batch_size(given):
    refused(tpu_measure.tune_batch_size, **given)  # the function trains nothing, which is refused, too


@thousand(choose(paths=["no.tfrecord"], parse=lambda record: record))
def test_check_shards(given):
    refused(tpu_measure.check_shards, **given)


# --- what keeps, and what asks the compiler


@thousand(choose(folder="kept", every=2, kept=2).filter(lambda given: not is_name(given["folder"])))
def test_keep(given):
    os.makedirs("kept", exist_ok=True)
    LOCKS.clear()
    attempt(Keep, **given)


@thousand(choose(model=None, data=None))
def test_keep_restore(usual, given):
    given["data"] = usual[1][0] if given["data"] is None else given["data"]
    os.makedirs("kept", exist_ok=True)
    LOCKS.clear()
    refused(Keep("kept", every=1).restore, **given)


ASKED = {"tpu": "v5e-8", "per_replica_batch_size": 128, "policy": "float32", "data": None, "name": None}
ASKED |= {"time_limit": 600, "cache": True, "recorded": False}


@thousand(some.tuples(anything, choose(**ASKED)))
def test_compile_for_tpu(given):
    """The model is never one, so that none is compiled a thousand times."""
    refused(tpu_compiler.compile_for_tpu, model=given[0], **given[1])


SWEPT = {"tpus": ["v5e-8"], "batch_sizes": [128], "policies": "float32", "time_limit": 600, "progress": False}


@thousand(some.tuples(anything, choose(**SWEPT)))
def test_sweep(given):
    refused(tpu_compiler.sweep, model=given[0], **given[1])


def test_a_sweep_over_an_endless_list_is_refused():
    with pytest.raises(Refused, match="batch_sizes is more than 1,000"):
        tpu_compiler.sweep(None, batch_sizes=itertools.count(1))
