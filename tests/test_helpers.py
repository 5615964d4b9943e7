"""tpu_helpers and tpu_measure: what each helper returns, and how it refuses."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
import types

import numpy as np
import pytest
from conftest import ROOT

import tpu_helpers
import tpu_measure
from tpu_helpers import Refused, make_dataset, shuffled
from tpu_measure import calm, diagnose, how_sure, next_size, pipeline_stages, throughput, time_step, tune_batch_size

IMAGES = np.arange(20 * 28 * 28, dtype=np.uint32).astype("uint8").reshape(20, 28, 28, 1)
LABELS = np.arange(20, dtype="int32")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Python in a process of its own, for what is decided when TensorFlow starts."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def assert_one_sentence(refusal: pytest.ExceptionInfo, *parts: str) -> None:
    sentence = str(refusal.value)
    assert "\n" not in sentence
    assert sentence.endswith(".")
    assert ":" in sentence, "no remedy after a colon"
    for part in parts:
        assert part in sentence


# --- the module itself


def test_import_needs_no_tensorflow_and_picks_tf_keras():
    code = "import os, sys, tpu_helpers; print('tensorflow' in sys.modules, os.environ['TF_USE_LEGACY_KERAS'])"
    environment = {name: value for name, value in os.environ.items() if name != "TF_USE_LEGACY_KERAS"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False", "1"]


def test_import_respects_the_callers_choice_of_keras():
    result = run_python("import os, tpu_helpers; print(os.environ['TF_USE_LEGACY_KERAS'])", TF_USE_LEGACY_KERAS="0")
    assert result.stdout.strip() == "0"


def test_module_is_small():
    assert len((ROOT / "tpu_helpers.py").read_text().splitlines()) <= 400


def test_what_measures_is_found_from_tpu_helpers_too():
    assert tpu_helpers.tune_batch_size is tpu_measure.tune_batch_size
    with pytest.raises(AttributeError, match="no attribute 'tune_batch'"):
        _ = tpu_helpers.tune_batch


def test_quietly_drops_chatter_and_passes_on_the_rest():
    code = """
import os, sys, tpu_helpers
with tpu_helpers.quietly():
    import tensorflow
    os.write(2, b"W0000 something that matters\\n")
"""
    result = run_python(code)
    assert result.returncode == 0
    assert result.stderr == "W0000 something that matters\n"


@pytest.mark.parametrize("tpu", ["", "local"])
def test_quietly_says_what_to_install_where_tensorflow_is_missing(tpu):
    code = """
import sys, tpu_helpers
sys.modules["tensorflow"] = None
with tpu_helpers.quietly():
    import tensorflow
"""
    said = run_python(code, TPU_NAME=tpu).stderr.partition("Refused: ")[2]
    assert said.startswith(f"TensorFlow is not installed here: {tpu_helpers.RUN}")
    assert (tpu_helpers.INSTALL in said) == bool(tpu)
    assert "%pip install" in said


def test_quietly_lets_errors_through():
    with pytest.raises(ZeroDivisionError), tpu_helpers.quietly():
        _ = 1 / 0


# --- parameters

GOOD = {"dataset": "mnist", "virtual_replicas": 64, "epochs": np.int64(3), "seed": 0, "dtype": "bfloat16"}
BAD = {
    "dataset": ("cifar", None, 3, ["digits"]),
    "dtype": ("float64", np.float32),
    "virtual_replicas": (0, -1, 65, 2.0, "2", True, None),
    "per_replica_batch_size": (0, -8, 8.5, float("nan"), 2**31, "all"),
    "epochs": (0, 1e3),
    "seed": (-1, 2**31, 0.5),
}


def test_good_parameters_are_accepted():
    tpu_helpers.check_parameters(**GOOD)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_parameters_are_refused_by_name_and_value(name, value):
    with pytest.raises(Refused) as refusal:
        tpu_helpers.check_parameters(**{name: value})
    assert_one_sentence(refusal, f"{name}={value!r}")


# --- data


def test_digits_are_real_and_a_fixed_fifth_is_held_out():
    (x_train, y_train), (x_val, y_val) = tpu_helpers.load_data("digits")
    assert (x_train.shape, x_val.shape) == ((1437, 28, 28, 1), (360, 28, 28, 1))
    assert {x_train.dtype.name, x_val.dtype.name} == {"uint8"}
    assert {y_train.dtype.name, y_val.dtype.name} == {"int32"}
    assert x_train.min() == 0
    assert x_train.max() == 255
    assert np.bincount(y_val).min() >= 34, "a class is missing from the validation set"
    again = tpu_helpers.load_data()
    assert np.array_equal(again[1][0], x_val)


def test_no_digit_is_both_in_training_and_in_validation():
    (x_train, _), (x_val, _) = tpu_helpers.load_data()
    seen = {image.tobytes() for image in x_train}
    assert not any(image.tobytes() in seen for image in x_val)


def test_enlarged_digits_are_still_recognisable():
    """The simplest classifier there is, so that the enlargement cannot have mixed up pixels or labels."""
    from sklearn.neighbors import KNeighborsClassifier

    (x_train, y_train), (x_val, y_val) = tpu_helpers.load_data()
    nearest = KNeighborsClassifier(1).fit(x_train.reshape(len(x_train), -1), y_train)
    assert nearest.score(x_val.reshape(len(x_val), -1), y_val) > 0.97


def test_mnist_without_a_network_is_one_sentence_within_seconds(tmp_path):
    code = "import tpu_helpers\ntry: tpu_helpers.load_data('mnist')\nexcept tpu_helpers.Refused as error: print(error)"
    began = time.perf_counter()
    result = run_python(code, KERAS_HOME=str(tmp_path), HOME=str(tmp_path), https_proxy="http://127.0.0.1:9")
    assert time.perf_counter() - began < 30
    assert result.stdout.startswith("dataset='mnist' could not be downloaded (")
    assert "URL fetch failure" in result.stdout, "Keras's own words"
    assert "dataset='digits'" in result.stdout
    assert len(result.stdout.splitlines()) == 1


def test_mnist_has_the_shapes_of_the_digits(tf, monkeypatch):
    """The download itself is replaced: it needs a network."""
    parts = ((IMAGES[..., 0], LABELS.astype("uint8")), (IMAGES[:5, ..., 0], LABELS[:5].astype("uint8")))
    monkeypatch.setattr(tf.keras.datasets.mnist, "load_data", lambda: parts)
    (x_train, y_train), (x_val, _) = tpu_helpers.load_data("mnist")
    assert (x_train.shape, x_val.shape) == ((20, 28, 28, 1), (5, 28, 28, 1))
    assert (x_train.dtype, y_train.dtype) == ("uint8", "int32")


# --- the pipeline


def test_training_batches_have_one_static_shape_and_the_asked_dtype(tf):
    for dtype in tpu_helpers.CHOICES["dtype"]:
        dataset = make_dataset(IMAGES, LABELS, 8, dtype=dtype)
        images, labels = dataset.element_spec
        assert (images.shape, labels.shape) == ((8, 28, 28, 1), (8,))
        assert images.dtype == dtype
        assert dataset.cardinality() == tf.data.INFINITE_CARDINALITY
        values = np.asarray(next(iter(dataset))[0], "float32")
        assert 0 <= values.min() < values.max() <= (255 if dtype == "uint8" else 1)


def test_bytes_are_those_of_the_images(tf):
    images, labels = next(make_dataset(IMAGES, LABELS, 20, augmented=False, dtype="uint8").as_numpy_iterator())
    assert np.array_equal(images, IMAGES[labels])


def test_labels_become_one_hot_where_classes_are_given(tf):
    for training in (True, False):
        _, labels = next(make_dataset(IMAGES, LABELS, 4, training=training, classes=20).as_numpy_iterator())
        assert labels.shape == (4, 20)
        assert labels.dtype == "float32"
        assert (labels.sum(axis=1) == 1).all()


def test_shuffled_gives_every_example_once_in_each_epoch_from_any_place(tf):
    for count in (1, 2, 7, 100):
        epochs = shuffled(np.arange(5 * count), count, seed=3).numpy().reshape(5, count)
        assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
        middle = np.arange(2 * count + 1, 4 * count)
        assert np.array_equal(shuffled(middle, count, seed=3), epochs.ravel()[middle])


def test_shuffled_is_a_shuffle(tf):
    """Neither an epoch, nor the next one, nor another seed's, nor the neighbour says where an example stands."""
    count = 20_000
    order = shuffled(np.arange(2 * count), count, seed=0).numpy()
    other = shuffled(np.arange(count), count, seed=1).numpy()
    pairs = {"place": np.arange(count), "next epoch": order[count:], "other seed": other}
    pairs["neighbour"] = np.roll(order[:count], 1)
    for name, values in pairs.items():
        assert abs(np.corrcoef(order[:count], values)[0, 1]) < 0.03, name  # four standard deviations
    by_seed = np.stack([shuffled(np.arange(10), 10, seed=seed).numpy() for seed in range(1000)])
    by_epoch = shuffled(np.arange(10 * 1000), 10, seed=0).numpy().reshape(1000, 10)
    for orders in (by_seed, by_epoch):
        assert len({tuple(order) for order in orders}) > 990, "orders come again"
        times = np.stack([np.bincount(column, minlength=10) for column in orders.T])  # 100 expected each
        assert ((times - 100) ** 2 / 100).sum() < 81 + 5 * (2 * 81) ** 0.5, "chi-square"


def test_replicas_share_a_global_batch(tf):
    strategy = tpu_helpers.virtual_strategy(2)
    batches = iter(strategy.experimental_distribute_dataset(make_dataset(IMAGES, LABELS, 8, replicas=2)))
    for _ in range(2):  # both within the first epoch
        images, labels = next(batches)
        assert [part.shape for part in strategy.experimental_local_results(images)] == [(4, 28, 28, 1)] * 2
        parts = [part.numpy() for part in strategy.experimental_local_results(labels)]
        assert len(set(np.concatenate(parts))) == 8


def test_each_epoch_has_every_example_once_in_a_new_order(tf):
    labels = [batch.tolist() for _, batch in make_dataset(IMAGES, LABELS, 10).take(6).as_numpy_iterator()]
    epochs = [labels[0] + labels[1], labels[2] + labels[3], labels[4] + labels[5]]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_same_seed_gives_the_same_examples(tf):
    def first_three(seed):
        batches = make_dataset(IMAGES, LABELS, 6, seed=seed).take(3).as_numpy_iterator()
        return np.concatenate([images.ravel() for images, _ in batches])

    assert np.array_equal(first_three(5), first_three(5))
    assert not np.array_equal(first_three(5), first_three(6))


@pytest.mark.parametrize("start", [0, 1, 3, 167, 168, 200])  # of images this small, 1 MiB has 167 batches of 8
@pytest.mark.parametrize("training", [True, False])
def test_a_dataset_can_start_after_any_step(start, training, tf):
    images, labels = np.tile(IMAGES, (80, 1, 1, 1)), np.arange(1600)
    options = {"training": training, "seed": 5}
    whole = make_dataset(images, labels, 8, **options).skip(start).take(3)
    for expected, found in zip(whole, make_dataset(images, labels, 8, **options, start=start), strict=False):
        assert np.array_equal(expected[0], found[0])
        assert np.array_equal(expected[1], found[1])


def test_a_dataset_that_starts_late_prepares_nothing_before(tf):
    """No price: step 10^9 comes as soon as the first."""
    images, _ = next(iter(make_dataset(IMAGES, LABELS, 8, start=10**9)))
    assert images.shape == (8, 28, 28, 1)


def test_augmentation_differs_between_epochs(tf):
    one = make_dataset(IMAGES[:1], LABELS[:1], 1)
    first, second = (images for images, _ in one.take(2).as_numpy_iterator())
    assert not np.array_equal(first, second)


def test_validation_is_one_pass_in_order_as_it_is(tf, capsys):
    batches = list(make_dataset(IMAGES, LABELS, 5, training=False).as_numpy_iterator())
    assert capsys.readouterr().out == ""
    assert np.array_equal(np.concatenate([labels for _, labels in batches]), LABELS)
    np.testing.assert_allclose(np.concatenate([images for images, _ in batches]), IMAGES / 255, atol=1e-6)


def test_validation_says_what_it_leaves_out(tf, capsys):
    batches = make_dataset(IMAGES, LABELS, 8, training=False)
    assert "4 of 20 examples" in capsys.readouterr().out
    assert len(list(batches)) == 2


def test_augment_keeps_shape_range_and_key(tf):
    images = IMAGES[3:7] // 2
    changed = tpu_helpers.augment(images, [1, 2]).numpy()
    assert changed.shape == images.shape
    assert changed.dtype == "float32"
    assert images.min() - 1e-3 <= changed.min()
    assert changed.max() <= images.max() + 1e-3
    assert np.array_equal(changed, tpu_helpers.augment(images, [1, 2]))
    assert not np.array_equal(changed, tpu_helpers.augment(images, [1, 3]))


def test_augment_changes_each_image_of_a_batch_in_its_own_way(tf):
    changed = tpu_helpers.augment(np.repeat(IMAGES[:1], 8, axis=0), [0, 0]).numpy()
    assert len({image.tobytes() for image in changed}) == 8


def test_augment_moves_the_middle_by_two_pixels_at_most(tf):
    image = np.zeros((29, 29, 1), "float32")
    image[14, 14] = 1.0
    for changed in tpu_helpers.augment(np.repeat(image[np.newaxis], 50, axis=0), [0, 0]):
        row, column = np.unravel_index(np.argmax(changed), (29, 29))
        assert max(abs(row - 14), abs(column - 14)) <= 3  # two pixels, times the scale


REFUSED_DATASETS = {
    "zero batch": ({"global_batch_size": 0}, "global_batch_size=0"),
    "negative batch": ({"global_batch_size": -4}, "global_batch_size=-4"),
    "fractional batch": ({"global_batch_size": 2.5}, "global_batch_size=2.5"),
    "batch larger than the data": ({"global_batch_size": 21}, "global_batch_size=21 exceeds the data"),
    "batch that replicas cannot share": ({"global_batch_size": 6, "replicas": 4}, "not divisible by replicas=4"),
    "no replicas": ({"replicas": 0}, "replicas=0"),
    "unknown dtype": ({"dtype": "int8"}, "dtype='int8'"),
    "negative seed": ({"seed": -1}, "seed=-1"),
    "negative classes": ({"classes": -1}, "classes=-1"),
    "negative start": ({"start": -1}, "start=-1"),
    "images without channels": ({"images": IMAGES[..., 0]}, "images has shape=(20, 28, 28)"),
    "a list of images": ({"images": [1, 2]}, "images has shape=(2,)"),
    "images already scaled": ({"images": IMAGES / 255}, "images has dtype=float64"),
    "labels of another length": ({"labels": LABELS[:-1]}, "labels has shape=(19,)"),
}


@pytest.mark.parametrize(("change", "part"), REFUSED_DATASETS.values(), ids=REFUSED_DATASETS)
def test_make_dataset_refuses(change, part):
    arguments = {"images": IMAGES, "labels": LABELS, "global_batch_size": 4} | change
    with pytest.raises(Refused) as refusal:
        make_dataset(**arguments)
    assert_one_sentence(refusal, part)


# --- measurement


def test_throughput_times_the_pipeline_and_the_step():
    calls = []

    def step(batch):
        calls.append(batch)
        time.sleep(0.002)
        return 0.0

    rate = throughput(itertools.repeat("batch"), 10, step, steps=4, repeats=3)
    assert len(calls) == 4 * (3 + 1), "the first window is warm-up"
    assert 0 < rate.lowest <= rate.median <= rate.highest <= 10 / 0.002


def test_throughput_of_a_dataset(tf):
    assert throughput(make_dataset(IMAGES, LABELS, 4), 4, steps=3, repeats=2).median > 0


def test_throughput_refuses_batches_that_end(tf):
    with pytest.raises(Refused) as refusal:
        throughput(make_dataset(IMAGES, LABELS, 4, training=False), 4, steps=4, repeats=2)
    assert_one_sentence(refusal, "ended after 1 of steps=4")


@pytest.mark.parametrize("change", [{"steps": 0}, {"repeats": -1}, {"global_batch_size": 0.5}])
def test_throughput_refuses(change):
    with pytest.raises(Refused) as refusal:
        throughput(**({"batches": itertools.repeat(0), "global_batch_size": 1} | change))
    assert_one_sentence(refusal, next(iter(change)))


def compiled_mlp(tf, strategy=None, **options):
    layers = tf.keras.layers
    with (strategy or tf.distribute.get_strategy()).scope():
        model = tf.keras.Sequential([layers.Input((28, 28, 1)), layers.Flatten(), layers.Dense(20)])
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"], **options)
        model.optimizer.build(model.trainable_variables)
    return model


def slow_pipeline(tf):
    def slowly(image, label):
        tf.numpy_function(lambda: time.sleep(0.002), [], [])  # as a disk would: it does not depend on the load
        return image, label

    data = tf.data.Dataset.from_tensor_slices((IMAGES / 255, LABELS)).shuffle(20).repeat()
    return data.map(slowly).batch(4, drop_remainder=True).prefetch(2)


def test_pipeline_stages_are_those_that_were_written_with_their_examples(tf):
    names = ["tensorslice", "shuffle", "repeat", "map(slowly)", "batch", "prefetch"]
    stages = pipeline_stages(slow_pipeline(tf))
    assert [name for name, _, _ in stages] == names
    assert [examples for _, _, examples in stages] == [1, 1, 1, 1, 4, 4]
    kit = pipeline_stages(make_dataset(IMAGES, LABELS, 4))
    assert [name for name, _, _ in kit][-3:] == ["map(scale)", "unbatch", "prefetch"]
    assert {examples for _, _, examples in kit} == {4, 2**20 // 784 // 4 * 4}
    for _, dataset, _ in stages + kit:
        next(iter(dataset))  # each can be run


def test_pipeline_stages_without_tensorflows_private_names_are_one(tf):
    dataset = slow_pipeline(tf)
    alone = types.SimpleNamespace(element_spec=dataset.element_spec)
    assert pipeline_stages(alone) == [("simplenamespace", alone, 4)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_diagnose_blames_the_slow_stage_and_changes_nothing(tf, capsys, replicas):
    model = compiled_mlp(tf, tpu_helpers.virtual_strategy(replicas))
    optimizer = model.optimizer
    state = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    before = [variable.numpy() for variable in [*model.variables, *state]]
    found = diagnose(slow_pipeline(tf), model, seconds=0.05)
    assert found.slowest == "map(slowly)"
    assert found.pipeline.median < found.step.median
    said = capsys.readouterr().out
    assert "The pipeline holds up the training, most of all map(slowly): " in said
    assert "tf.data.AUTOTUNE" in said
    after = [variable.numpy() for variable in [*model.variables, *state]]
    assert all(np.array_equal(old, new) for old, new in zip(before, after, strict=True))


def test_diagnose_says_that_the_step_is_slower(tf, capsys):
    one_batch = tf.data.Dataset.from_tensors((IMAGES[:4] / 255, LABELS[:4])).repeat()
    found = diagnose(one_batch, compiled_mlp(tf), seconds=0.02)
    assert found.pipeline.median > found.step.median
    assert "The step holds up the training: the pipeline gives " in capsys.readouterr().out


def test_time_step_counts_all_steps_of_an_execution(tf):
    data = make_dataset(IMAGES, LABELS, 4)
    one, many = (time_step(data, compiled_mlp(tf, steps_per_execution=n)).median for n in (1, 10))
    assert one < 10 * many
    assert many > one / 2, "several steps in a call should not be counted as one"


REFUSED_DIAGNOSES = {
    "no dataset": ({"dataset": [1, 2]}, "dataset is a list"),
    "no batches": ({"dataset": lambda tf: tf.data.Dataset.from_tensors((0, 1))}, "dataset has elements of shape ()"),
    "batches of unknown size": (
        {"dataset": lambda tf: tf.data.Dataset.from_tensor_slices(([0], [1])).batch(2)},
        "drop_remainder=True",
    ),
    "no labels": ({"dataset": lambda tf: tf.data.Dataset.from_tensors(0)}, "pass (inputs, labels)"),
    "not compiled": ({"model": lambda tf: tf.keras.Sequential([tf.keras.layers.Dense(1)])}, "optimizer=None"),
    "no model": ({"model": 3}, "model=3"),
    "unknown TPU": ({"tpu": "v9-8"}, "tpu='v9-8' is unknown"),
    "no time": ({"seconds": 0}, "seconds=0"),
}


@pytest.mark.parametrize(("change", "part"), REFUSED_DIAGNOSES.values(), ids=REFUSED_DIAGNOSES)
def test_diagnose_refuses(tf, change, part):
    arguments = {"dataset": make_dataset(IMAGES, LABELS, 4), "model": compiled_mlp(tf)} | change
    arguments = {name: value(tf) if type(value) is type(trainer) else value for name, value in arguments.items()}
    with pytest.raises(Refused) as refusal:
        diagnose(**arguments)
    assert_one_sentence(refusal, part)


def trainer(tf, epochs=4):
    """A real, tiny training for `tune_batch_size`; `compare` makes a matrix of batch × batch."""

    def train(size, clock):
        layers = tf.keras.layers
        compare = layers.Lambda(lambda x: tf.reduce_mean(tf.matmul(x, x, transpose_b=True), axis=1, keepdims=True))
        model = tf.keras.Sequential([layers.Input((1,)), layers.Dense(1), compare])
        model.compile("sgd", "mse")
        data = tf.data.Dataset.from_tensors((tf.ones([size, 1]), tf.ones([size, 1]))).repeat()
        model.fit(data, steps_per_epoch=2, epochs=epochs, callbacks=[clock], verbose=0)

    return train


@pytest.fixture
def simulate(tf, monkeypatch):
    """Makes a training whose clock sees epochs that last as `speed(size)` says, with noise; it takes no real time.

    The machine's pulse falls to 20 of 100 GB/s, and the speed to six tenths, in the epochs that `slow(epoch)` names.
    """
    now, runs, beat = [0.0], [], [100.0]

    def simulated(speed, noise=0.0, slow=lambda epoch: False):
        random, all_epochs = np.random.default_rng(0), itertools.count()

        def train(size, clock):
            clock.set_params({"steps": 1})
            clock.set_model(type("Model", (), {"stop_training": False})())
            runs.append(size)
            for epoch in range(20):
                beat[0] = 20.0 if slow(next(all_epochs)) else 100.0
                clock.on_epoch_begin(epoch)
                now[0] += size / speed(size) * (1 + noise * random.exponential()) / (0.6 if beat[0] < 100 else 1)
                clock.on_epoch_end(epoch)
                if clock.model.stop_training:
                    break

        monkeypatch.setattr(tpu_measure.time, "perf_counter", lambda: now[0])
        monkeypatch.setattr(tpu_measure, "pulse", lambda: (beat[0], 90.0))
        return train, runs

    return simulated


SIZES = [8, 16, 32, 64, 128, 256, 512, 1024]
CURVES = {
    "rises": lambda size: size / (1 + size / 500),
    "falls": lambda size: 1e3 - size / 2,
    "peak at 64": lambda size: 1e3 - abs(np.log2(size) - 6) * 100,
    "flat": lambda size: 1e3,
}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_tune_batch_size_climbs_to_the_fastest(simulate, curve, noise):
    train, runs = simulate(CURVES[curve], noise)
    tuned = tune_batch_size(train, SIZES, 1)
    speeds = {size: CURVES[curve](size) for size in SIZES}
    assert speeds[tuned.per_replica_batch_size] >= (0.95 - noise / 2) * max(speeds.values())
    assert len(runs) <= 8
    assert {row.per_replica_batch_size for row in tuned.rows} == set(runs)
    assert tuned.sure > 0.9 - 4 * noise


@pytest.mark.parametrize("start", range(0, 12, 2))
@pytest.mark.parametrize("curve", CURVES)
def test_tune_batch_size_counts_no_epoch_of_a_slow_phase(simulate, curve, start):
    """Ten epochs at six tenths of the speed, with no other noise, change nothing in what it finds."""
    train, _ = simulate(CURVES[curve], slow=lambda epoch: start <= epoch < start + 10)
    tuned = tune_batch_size(train, SIZES, 1)
    speeds = {size: CURVES[curve](size) for size in SIZES}
    assert speeds[tuned.per_replica_batch_size] >= 0.95 * max(speeds.values())
    for row in tuned.rows:
        assert row.lowest == pytest.approx(speeds[row.per_replica_batch_size])


def test_tune_batch_size_on_a_machine_that_is_always_slow(simulate, capsys):
    train, runs = simulate(CURVES["peak at 64"], slow=lambda epoch: True)
    tuned = tune_batch_size(train, SIZES, 1)
    assert tuned.per_replica_batch_size == 64
    assert len(runs) <= 9, "most sizes are not measured twice"
    assert "in a slow phase of the machine" in capsys.readouterr().out


def test_calm_leaves_out_what_was_measured_in_a_slow_phase():
    beats = [(100, 90), (20, 90)]
    assert calm([[(5, 100), (3, 20), (5, 90)]], beats) == [[5, 5]]
    assert calm([[(5, 100), (3, 20)]], beats) == [], "one epoch is not enough: once more"
    assert calm([[(5, 100), (3, 20)], [(3, 20), (3, 20)]], beats) == [[5, 3], [3, 3]], "but not for ever"
    assert calm([[(3, 20), (3, 20)]], [(20, 90)] * 21) == [[3, 3]], "a machine that has no other state"


def test_pulse_is_of_this_machine():
    together, alone = tpu_measure.pulse()
    assert 0.1 < together < 1e5
    assert 0.1 < alone < 1e4


def test_next_size_starts_in_the_middle_and_ends():
    assert next_size([8, 16, 32], {}, 0) == 16
    assert next_size([8, 16, 32], {16: [[1, 1, 1]]}, 1) == 32
    assert next_size([8, 16, 32], {16: [[2, 2, 2]], 32: [[1, 1, 1]]}, 2) == 8
    assert next_size([8, 16, 32], {16: [[2, 2, 2]], 32: [[0.9, 0.9, 9]], 8: [[1, 1, 1]]}, 3) is None
    assert next_size([], {}, 0) is None


def test_how_sure_falls_where_two_sizes_overlap():
    assert how_sure({8: [[100, 101, 102]], 16: [[200, 201, 202], [203]]}) == (16, 1)
    best, sure = how_sure({8: [[100, 100, 118, 119]], 16: [[90, 99, 100, 117]]})
    assert best == 8
    assert 0.3 < sure < 0.99


def test_how_sure_falls_where_trainings_of_one_size_differ():
    """Epochs within a training agree to the digit, but two trainings do not: that counts."""
    assert how_sure({8: [[100] * 3] * 2, 16: [[94] * 3] * 2}) == (8, 1)
    best, sure = how_sure({8: [[80] * 3, [100] * 3], 16: [[94] * 3] * 2})
    assert best == 8
    assert 0.5 < sure < 0.9


def test_next_size_goes_on_until_it_is_sure():
    known = {4: [[1, 1, 1]], 8: [[80, 100, 100, 119]] * 2, 16: [[80, 99, 100, 117]] * 2}
    assert next_size([4, 8, 16], {size: known[size] for size in (8, 16)}, 4) == 4
    assert next_size([4, 8, 16], known, 5) is None, "five trainings of three sizes are enough"
    once = {16: [[2, 2, 2]], 32: [[1.5, 1.5, 1.5]], 8: [[1, 1, 1]]}
    assert next_size([4, 8, 16, 32, 64], once, 3) == 16, "and then 32: that may have been bad luck"
    assert next_size([4, 8, 16, 32, 64], once | {32: [[1.5, 1.5, 1.5]] * 2}, 3) is None
    assert next_size([1, 2, 4, 8, 16, 32, 64], known, 5) in (8, 16), "here they are not, and it is not sure"


def test_tune_batch_size_prints_and_returns_what_it_measured(tf, capsys):
    tuned = tune_batch_size(trainer(tf), [16, 8, 16], replicas=2)
    assert [(row.per_replica_batch_size, row.global_batch_size) for row in tuned.rows] == [(8, 16), (16, 32)]
    assert all(0 < row.lowest <= row.median <= row.highest for row in tuned.rows)
    assert tuned.per_replica_batch_size in (8, 16)
    assert 0 < tuned.sure <= 1
    printed = capsys.readouterr().out.splitlines()
    assert "measured" in printed[0]
    assert "sure by resampling, measured" in printed[-1]


def test_tune_batch_size_stops_cleanly_where_memory_ends(tf, capsys):
    """TensorFlow's own out-of-memory error, which it gives after ten seconds of waiting for memory to be freed."""
    tuned = tune_batch_size(trainer(tf), [8, 2**24, 2**25], replicas=1)
    assert [row.per_replica_batch_size for row in tuned.rows] == [8]
    printed = capsys.readouterr().out
    assert "16777216   does not fit" in printed
    assert "ResourceExhaustedError: OOM when allocating tensor" in printed


def test_tune_batch_size_where_nothing_fits(tf, capsys):
    def train(size, clock):
        np.ones([2**24, 2**24], "float32")

    assert tune_batch_size(train, [8, 16], replicas=1) == (None, 0, [])
    assert capsys.readouterr().out.count("Unable to allocate") == 2


def test_tune_batch_size_passes_on_other_errors(tf):
    def train(size, clock):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tune_batch_size(train, [8], replicas=1)


@pytest.mark.parametrize("sizes", [[], [0], [8, -1], [1.5], [8, 2**40]])
def test_tune_batch_size_refuses_sizes_before_any_work(sizes):
    def train(size, clock):
        raise AssertionError("work was done")

    with pytest.raises(Refused) as refusal:
        tune_batch_size(train, sizes, replicas=1)
    assert_one_sentence(refusal, "per_replica_batch_size")


def test_tune_batch_size_refuses_too_few_epochs(tf):
    with pytest.raises(Refused) as refusal:
        tune_batch_size(trainer(tf, epochs=2), [8], replicas=1)
    assert_one_sentence(refusal, "ran too few epochs")


# --- shards


def write_shard(tf, path, count, feature="image"):
    with tf.io.TFRecordWriter(str(path)) as file:
        for number in range(count):
            value = tf.train.Feature(int64_list=tf.train.Int64List(value=[number]))
            file.write(tf.train.Example(features=tf.train.Features(feature={feature: value})).SerializeToString())
    return path


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


DAMAGED = {
    "truncated": (lambda tf, path: path.write_bytes(path.read_bytes()[:-5]), ", record 8: truncated record at"),
    "corrupt": (lambda tf, path: flip_a_byte(path), ", record 4: corrupted record at"),
    "empty": (lambda tf, path: path.write_bytes(b""), "has no records: write it anew, or leave it out."),
    "other schema": (
        lambda tf, path: write_shard(tf, path, 3, "picture"),
        "record 0: Feature: image (data type: int64) is required but could not be found: read it",
    ),
    "no records": (lambda tf, path: path.write_bytes(b"<html>not found</html>"), "record 0: corrupted record at 0"),
    "missing": (lambda tf, path: path.unlink(), "is not there"),
}


@pytest.mark.parametrize(("damage", "part"), DAMAGED.values(), ids=DAMAGED)
def test_check_shards_names_the_file_and_the_remedy(damage, part, tf, tmp_path):
    def parse(record):
        return tf.io.parse_single_example(record, {"image": tf.io.FixedLenFeature([], tf.int64)})

    good, bad = (write_shard(tf, tmp_path / f"{name}.tfrecord", 9) for name in ("good", "bad"))
    assert tpu_measure.check_shards([good, bad], parse) == 18
    damage(tf, bad)
    with pytest.raises(Refused) as refusal:
        tpu_measure.check_shards([good, bad], parse)
    assert_one_sentence(refusal, part)
    assert str(refusal.value).startswith(str(bad))
