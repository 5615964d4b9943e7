"""tpu_keep: a training that is killed, interrupted, robbed of its disk, or given damaged files. Real processes."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

import tpu_helpers
from tpu_helpers import Refused, make_dataset
from tpu_keep import Keep, put, read_newest, write

EVERY = 5  # tests/killed.py keeps every 5 steps


def of(entries, key):
    return [entry[key] for entry in entries if key in entry]


def test_a_training_killed_25_times_is_one_that_nobody_killed():
    """On two replicas. Kills at any moment, soon after a file was kept, and while one is written."""
    command = [sys.executable, "tests/killed.py", "2", "25"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout)
    lives, undisturbed = [life["entries"] for life in found["lives"]], found["undisturbed"]
    assert [life["status"] for life in found["lives"]] == [-signal.SIGKILL] * 25 + [0], found["log"][-2000:]
    assert found["parts"] >= 3, "too few were killed while they wrote"

    assert of(lives[-1], "bits") == of(undisturbed, "bits"), "the end is another one"

    done = 0
    for life in lives:
        for start in of(life, "start"):
            assert done - EVERY <= start <= done + 1, "more than a save interval was lost"  # + 1: not yet reported
        done = max([done, *of(life, "step")])

    expected = {entry["epoch"]: entry for entry in undisturbed if "epoch" in entry}
    ended = [entry for life in lives for entry in life if "epoch" in entry]
    assert len(expected) == 16
    assert len(ended) >= 14  # killed between the last step of an epoch and its report, it is not reported
    assert all(entry == expected[entry["epoch"]] for entry in ended), "metrics of an epoch are others"


# --- files


@pytest.fixture
def two_files(tmp_path):
    """step-1 and step-2, of random numbers."""
    rng = np.random.default_rng(0)
    contents = [{f"state-{i:05d}": rng.normal(size=(1, 40)).astype("float32") for i in range(5)} for _ in range(2)]
    for step, arrays in enumerate(contents, 1):
        write(str(tmp_path / f"step-{step:09d}.npz"), arrays)
    return tmp_path, contents


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def truncate(content, rng):
    return content[: rng.randrange(len(content))]


def overwrite(content, rng):
    begin, count = rng.randrange(len(content)), rng.choice([1, 16, 512])
    return content[:begin] + rng.randbytes(count) + content[begin + count :]


@pytest.mark.parametrize("damage", [truncate, overwrite])
def test_a_damaged_file_is_set_aside_and_the_one_before_is_used(damage, two_files, tmp_path, capsys):
    folder, (older, newer) = two_files
    path, rng, unharmed = folder / "step-000000002.npz", random.Random(0), 0
    content = path.read_bytes()
    for _ in range(400):
        path.write_bytes(damage(content, rng))
        found = read_newest(str(folder))
        said = capsys.readouterr().out
        if found["state-00000"][0, 0] == newer["state-00000"][0, 0]:  # a byte that means nothing, such as a date
            assert same(found, newer)
            assert not said
            unharmed += 1
        else:
            assert same(found, older)
            assert said.startswith(f"{path} cannot be read (")
            assert said.endswith("): the one before it is used.\n")
            (folder / "step-000000002.npz.broken").rename(path)
    assert unharmed < 200


def test_no_file_that_can_be_read_is_a_refusal_and_nothing_is_lost(two_files):
    folder, _ = two_files
    for path in folder.glob("*.npz"):
        path.write_bytes(b"")
    with pytest.raises(Refused, match="has no file that can be read: delete it to start anew"):
        read_newest(str(folder))
    assert len(list(folder.glob("*.broken"))) == 2


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "step-000000001.npz"
    write(str(path), {"a": np.ones(3)})
    content = path.read_bytes()
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); import signal;"
    code = f"{limit} signal.signal(signal.SIGXFSZ, signal.SIG_IGN); import numpy, tpu_keep; "
    code += "tpu_keep.write(sys.argv[1], {'a': numpy.ones(3000)})"
    result = subprocess.run([sys.executable, "-c", code, path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "File too large" in result.stderr
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == [path.name]


# --- training, in this process


def compiled(tf, strategy, units=4, normalized=True, dropout=False, **options):
    layers = tf.keras.layers
    with strategy.scope():
        tf.keras.utils.set_random_seed(0)
        hidden = [layers.Flatten(), layers.Dense(units), *[layers.BatchNormalization()] * normalized]
        hidden += [layers.Dropout(0.5, seed=1)] * dropout
        model = tf.keras.Sequential([layers.Input((28, 28, 1)), *hidden, layers.Dense(10)])
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], **options)
    return model


@pytest.fixture(scope="module")
def digits():
    return tpu_helpers.load_data()[0]


def train(tf, digits, folder, steps, replicas=2, every=4, callbacks=(), **options):
    """A training of one epoch up to `steps`, from where it was: (model, steps it began with)."""
    strategy = tpu_helpers.virtual_strategy(replicas)
    model = compiled(tf, strategy, **options)
    keep = Keep(str(folder), every=every)
    with strategy.scope():
        start = keep.restore(model, make_dataset(*digits, 16, replicas=replicas))
    data = make_dataset(*digits, 16, replicas=replicas, start=start)
    if start < steps:
        model.fit(data, steps_per_epoch=steps - start, callbacks=[*callbacks, keep], verbose=0)
    return model, start


def predicted(model, digits):
    return model.predict(digits[0][:32] / 255.0, verbose=0)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 1), (1, 2)])
def test_another_number_of_replicas_predicts_the_same(saved_by, loaded_by, tf, digits, tmp_path):
    model, _ = train(tf, digits, tmp_path, 4, replicas=saved_by, normalized=False)
    other, start = train(tf, digits, tmp_path, 4, replicas=loaded_by, normalized=False)
    assert start == 4
    np.testing.assert_allclose(predicted(model, digits), predicted(other, digits), rtol=1e-6, atol=1e-6)


def test_sums_and_means_survive_another_number_of_replicas(tf):
    strategy = tpu_helpers.virtual_strategy(2)
    with strategy.scope():
        options = {"synchronization": tf.VariableSynchronization.ON_READ, "trainable": False}
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM, **options)
        mean = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN, **options)
    saved = np.array([1.0, 2.0, 3.0, 6.0], "float32")
    for variable, expected in ((total, 12.0), (mean, 3.0)):
        put(variable, strategy, saved)
        assert float(variable.numpy()) == expected


def test_bfloat16_survives_numpy(tf, tmp_path):
    variable = tf.Variable([1.5, 2.5], dtype=tf.bfloat16)
    write(str(tmp_path / "step-000000001.npz"), {"a": variable.numpy()[np.newaxis]})
    other = tf.Variable([0.0, 0.0], dtype=tf.bfloat16)
    put(other, tf.distribute.get_strategy(), read_newest(str(tmp_path))["a"])
    assert other.numpy().tolist() == [1.5, 2.5]


def test_dropout_goes_on_as_it_would_have_or_it_is_said_that_it_does_not(tf, digits, tmp_path, capsys):
    def weights(*parts):
        folder = tmp_path / str(parts)
        for steps in parts:
            model, _ = train(tf, digits, folder, steps, normalized=False, dropout=True)
        return model.get_weights()

    whole, stopped = weights(8), weights(4, 8)
    if "goes on with other numbers than without a stop" not in capsys.readouterr().out:
        assert tf.keras.Model.__module__.startswith("keras.")
        assert all(np.array_equal(one, other) for one, other in zip(whole, stopped, strict=True))


@pytest.mark.parametrize("folder", ["", None, 3])
def test_refuses_what_is_no_folder(folder):
    with pytest.raises(Refused, match="folder="):
        Keep(folder, every=1)


def test_refuses_a_file_in_the_folders_place(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(Refused, match="cannot be used"):
        Keep(str(tmp_path / "file"), every=1)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("options", [{"every": 0}, {"every": 2.5}, {"every": 1, "kept": 0}])
def test_refuses_numbers(options, tmp_path):
    with pytest.raises(Refused, match="whole number from 1"):
        Keep(str(tmp_path / "new"), **options)
    assert not (tmp_path / "new").exists()


def test_refuses_the_files_of_another_model(tf, digits, tmp_path):
    train(tf, digits, tmp_path, 4)
    with pytest.raises(Refused, match="is of another model"):
        train(tf, digits, tmp_path, 4, units=5)


def test_refuses_a_model_that_is_not_compiled_or_not_in_scope(tf, digits, tmp_path):
    keep = Keep(str(tmp_path), every=1)
    model = compiled(tf, tpu_helpers.virtual_strategy(2))
    with pytest.raises(Refused, match="restore it there, too"):
        keep.restore(model, make_dataset(*digits, 16))
    with pytest.raises(Refused, match="not compiled"):
        keep.restore(tf.keras.Sequential([tf.keras.layers.Dense(1)]), make_dataset(*digits, 16))
    with pytest.raises(Refused, match="data is a list"):
        keep.restore(model, [])


def test_keeps_the_newest_two_only(tf, digits, tmp_path):
    train(tf, digits, tmp_path, 14, every=3)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000000012.npz", "step-000000014.npz"]


def test_counts_steps_that_are_run_several_in_one_execution(tf, digits, tmp_path):
    train(tf, digits, tmp_path, 16, every=8, steps_per_execution=4)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000000008.npz", "step-000000016.npz"]


def test_a_learning_rate_that_was_lowered_stays_low(tf, digits, tmp_path):
    lower = tf.keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: lower.model.optimizer.learning_rate.assign(0.001)
    )
    train(tf, digits, tmp_path, 4, callbacks=[lower])
    model, _ = train(tf, digits, tmp_path, 4)
    assert float(model.optimizer.learning_rate.numpy()) == np.float32(0.001)


def test_weights_that_are_no_numbers_do_not_replace_those_that_are(tf, digits, tmp_path, capsys):
    def spoil(batch, logs):
        if batch == 9:
            weight = poison.model.trainable_variables[0]
            weight.assign(weight.numpy() * np.nan)

    poison = tf.keras.callbacks.LambdaCallback(on_train_batch_end=spoil)
    train(tf, digits, tmp_path, 14, callbacks=[poison, tf.keras.callbacks.TerminateOnNaN()])
    assert "a weight is no longer a number" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000000004.npz", "step-000000008.npz"]


# --- training, in processes of their own


def start_training(folder):
    code = "import sys; sys.path.insert(0, 'tests'); import killed; killed.train(sys.argv[1], 1, epochs=1000)"
    command = [sys.executable, "-u", "-c", code, str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def read_until(process, part):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if part in line:
            return lines
    raise AssertionError("".join(lines) + process.stderr.read()[-2000:])


def test_sigterm_is_a_checkpoint_and_out_and_a_second_run_is_refused_meanwhile(tmp_path):
    process = start_training(tmp_path)
    read_until(process, '"step": 7}')
    second = start_training(tmp_path)
    assert second.wait(60) == 1
    refusal = second.stderr.read().strip().splitlines()[-1]
    assert refusal.endswith(
        f"folder={str(tmp_path)!r} is used by process {process.pid}: wait until it ends, or pass another folder."
    )
    process.terminate()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    steps = [json.loads(line)["step"] for line in said.splitlines() if line.startswith('{"step"')]
    assert f"SIGTERM: step {steps[-1]} is kept in {tmp_path}." in said
    third = start_training(tmp_path)
    read_until(third, f'{{"start": {steps[-1]}}}')
    third.kill()
    third.wait()


FULL = """import sys, os; sys.path.insert(0, "tests"); import killed, tpu_keep
killed.train(sys.argv[1], 1)
print("newest:", max(os.listdir(sys.argv[1])), len(tpu_keep.read_newest(sys.argv[1])))"""
FILL = """mount -t tmpfs -o size=4m tmpfs $1; $2 -u -c "$3" $1 & training=$!
until ls $1/step-*.npz >/dev/null 2>&1; do sleep 0.01; done
dd if=/dev/zero of=$1/other bs=1k 2>/dev/null; wait $training"""


def test_a_disk_that_fills_up_does_not_end_the_training(tmp_path):
    """A real one of 4 MiB, in a mount namespace of its own, so that it is gone with the processes."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount")
    command = ["unshare", "-rm", "sh", "-c", FILL, "sh", str(tmp_path), sys.executable, FULL]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert re.search(r"Step \d+ is not kept in .* \(.*No space left on device.*\): what was kept before", result.stdout)
    assert '"bits"' in result.stdout, "it did not train to the end"
    newest, arrays = re.search(r"newest: step-(\d+).npz (\d+)", result.stdout).groups()
    assert 0 < int(newest) < 350
    assert int(arrays) > 10
