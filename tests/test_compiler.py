"""The TPU compiler itself, without a TPU: real compilations, cache off. Skipped where libtpu cannot be installed."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import ENVIRONMENT, ROOT

import tpu_compiler
from tpu_compiler import GENERATIONS, TOPOLOGIES, Refused, Report, Unsupported, compile_for_tpu, sizes, sweep

compiled_for_real = pytest.mark.skipif(bool(tpu_compiler.missing()), reason=tpu_compiler.missing())
LEGACY = os.environ.get("TF_USE_LEGACY_KERAS") != "0"


def compiled(model, loss="mse", optimizer="sgd", **options):
    model.compile(optimizer, loss, **options)
    return model


@pytest.fixture
def layers(tf):
    return tf.keras.layers


@pytest.fixture
def logits_loss(tf):
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture
def mlp(tf, layers, logits_loss):
    """784-128-10, the kit's smallest."""

    def build():
        stack = [layers.Input((784,)), layers.Dense(128, activation="relu", name="hidden"), layers.Dense(10)]
        return compiled(tf.keras.Sequential(stack), logits_loss, "adam", metrics=["accuracy"])

    return build


@pytest.fixture
def dense(tf, layers):
    def build():
        return compiled(tf.keras.Sequential([layers.Input((8,)), layers.Dense(4, name="only")]))

    return build


def ask(model, tpu="v5e-8", batch=128, policy=None, **options):
    return compile_for_tpu(model, tpu, batch, policy, cache=False, **options)


# --- what it says


@compiled_for_real
def test_flops_of_an_mlp_agree_with_a_count_by_hand(mlp):
    report = ask(mlp)
    assert report.flops == pytest.approx(2 * 128 * (2 * 784 * 128 + 3 * 128 * 10), rel=0.1)
    assert report.parameters == 784 * 128 + 128 + 128 * 10 + 10


@compiled_for_real
def test_the_report_adds_up(mlp):
    report = ask(mlp)
    assert (report.replicas, report.chips, report.global_batch_size) == (8, 8, 1024)
    assert report.all_reduce_bytes == 4 * report.parameters
    assert report.argument_bytes > 3 * 4 * report.parameters  # weights and Adam's two moments, and the batch
    assert report.fits
    assert report.hbm_needed < report.hbm_there == 16 * 2**30
    assert 0 < report.hbm_bytes <= report.accessed_bytes
    assert report.step_seconds == max(report.bounds.values())
    assert report.examples_per_second == pytest.approx(1024 / report.step_seconds)
    assert report.cost_seconds >= report.step_seconds
    assert report.intensity == pytest.approx(report.flops / report.hbm_bytes)


@compiled_for_real
def test_the_report_says_that_it_is_predicted_in_text_and_html(dense):
    report = ask(dense)
    for text in (str(report), report._repr_html_()):
        assert "predicted by the TPU compiler (libtpu " in text
        assert "not measured" in text
        assert "v5e-8" in text
    assert Report.from_json(json.loads(json.dumps(report.to_json()))).rows() == report.rows()


@compiled_for_real
@pytest.mark.parametrize("tpu", ["v2-8", "v3-8", "v4-8", "v5e-1", "v5litepod-16", "v5p-8", "v6e-1", "v6e-8"])
def test_every_generation_compiles(tpu, dense):
    report = ask(dense, tpu)
    assert report.fits
    assert report.replicas == report.chips * report.generation.replicas


def test_names_count_what_their_generation_counts():
    for name, topology in TOPOLOGIES.items():
        kind, number = name.split("-")
        chips = math.prod(int(size) for size in topology.partition(":")[2].split("x"))
        assert chips == int(number) // (1 if kind in ("v5e", "v6e") else 2), name


@compiled_for_real
def test_the_compiler_knows_all_topologies_and_their_replicas():
    code = (
        "import json, sys\n"
        "from jax.experimental import topologies\n"
        "one = {'chips_per_host_bounds': (1, 1, 1)}\n"
        "def count(name):\n"
        "    more = one if name.endswith(':1x1') else {}\n"
        "    return len(topologies.get_topology_desc(platform='tpu', topology_name=name, **more).devices)\n"
        "print(json.dumps({name: count(name) for name in sys.argv[1:]}))\n"
    )
    quiet = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    environment = os.environ | quiet | {"TPU_LOAD_LIBRARY": "1"}
    said = subprocess.run(
        [sys.executable, "-c", code, *TOPOLOGIES.values()], env=environment, capture_output=True, text=True, check=True
    )
    for topology, devices in json.loads(said.stdout).items():
        kind, _, shape = topology.partition(":")
        assert devices == math.prod(map(int, shape.split("x"))) * GENERATIONS[kind].replicas, topology


@compiled_for_real
def test_bfloat16_halves_the_activations_and_leaves_the_gradients(tf, layers, logits_loss):
    def build():
        stack = [layers.Input((1024,)), *[layers.Dense(1024, activation="relu") for _ in range(3)], layers.Dense(10)]
        return compiled(tf.keras.Sequential(stack), logits_loss)

    full, half = (ask(build, "v3-8", 8192, policy) for policy in ("float32", "mixed_bfloat16"))
    assert (full.policy, half.policy) == ("float32", "mixed_bfloat16")
    assert half.hbm_bytes < 0.75 * full.hbm_bytes
    assert half.all_reduce_bytes == full.all_reduce_bytes
    assert tf.keras.mixed_precision.global_policy().name == "float32"


# --- the step is the user's own


@compiled_for_real
def test_a_custom_train_step_sees_the_slice_and_reduces_over_it(tf, layers):
    seen = []

    class Own(tf.keras.Model):
        def train_step(self, data):
            inputs, labels = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(inputs, training=True) - labels))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            context = tf.distribute.get_replica_context()
            seen.append(context.num_replicas_in_sync)
            return {"loss": context.all_reduce(tf.distribute.ReduceOp.MEAN, loss)}

    def build():
        inputs = layers.Input((32,))
        return compiled(Own(inputs, layers.Dense(8)(inputs)))

    report = ask(build, "v5e-16")
    assert set(seen) == {16}
    assert report.all_reduce_bytes == 4 * report.parameters + 4  # and the loss


@compiled_for_real
def test_batch_normalization_is_each_replicas_own_unless_synchronized(tf, layers):
    def build(synchronized):
        def made():
            normalization = layers.BatchNormalization(synchronized=synchronized)
            return compiled(tf.keras.Sequential([layers.Input((64,)), layers.Dense(64), normalization]))

        return made

    own, common = ask(build(False)), ask(build(True))
    assert own.all_reduce_bytes < common.all_reduce_bytes
    assert len(own.all_reduces) < len(common.all_reduces)


ON_JAX = """
import os
os.environ |= {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
import json
import tf_keras
import keras
from tpu_compiler import Refused, compile_for_tpu

def build(keras, normalised=True):
    layers = keras.layers
    norm = [layers.BatchNormalization()] if normalised else []
    stack = [layers.Input((128,)), layers.Dense(256, name="hidden"), *norm, layers.Dense(128)]
    model = keras.Sequential(stack)
    model.compile("adam", "mse", metrics=["mae"])
    return model

found = {}
for name, package in (("tf_keras", tf_keras), ("keras", keras)):
    for policy in ("float32", "mixed_bfloat16"):
        report = compile_for_tpu(lambda: build(package), "v5e-8", 256, policy, name="x")
        found[f"{name} {policy}"] = report.flops, report.hbm_bytes, len(report.all_reduces), report.fits
found["layers"] = [name for name, *_ in report.padding]
found["global policy"] = keras.config.dtype_policy().name
model = build(keras, normalised=False)
before = [weight.numpy().tolist() for weight in model.weights]
found["too large"] = compile_for_tpu(model, "v5e-8", 2**26, name="x").words
found["kept"] = before == [weight.numpy().tolist() for weight in model.weights]

def in_python(truth, guess):
    return (truth - guess) * float(guess.sum())

model.compile("sgd", in_python)
try:
    compile_for_tpu(model, "v5e-8", 8)
except Refused as error:
    found["refused"] = str(error)
print(json.dumps(found))
"""


@compiled_for_real
def test_a_model_on_jax_is_compiled_as_it_trains():
    """In a process of its own: Keras 3 takes one backend."""
    result = subprocess.run(
        [sys.executable, "-c", ON_JAX], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    for policy in ("float32", "mixed_bfloat16"):
        (flops, hbm, reduces, fits), (other_flops, other_hbm, other_reduces, other_fits) = (
            found[f"{name} {policy}"] for name in ("tf_keras", "keras")
        )
        assert other_flops == pytest.approx(flops, rel=0.03)
        assert other_hbm == pytest.approx(hbm, rel=0.15)
        assert fits
        assert other_fits
        assert reduces == 1
        assert other_reduces > 1  # BatchNormalization's, in the middle of the step
    assert "hidden" in found["layers"]
    assert found["global policy"] == "float32"
    assert "Ran out of memory in memory space hbm" in found["too large"] or "exceed" in found["too large"]
    assert found["kept"]
    assert "this step cannot be compiled for a TPU" in found["refused"]


@compiled_for_real
def test_two_inputs_and_two_outputs(tf, layers, logits_loss):
    def build():
        numbers, images = layers.Input((16,), name="numbers"), layers.Input((8, 8, 3), name="images")
        both = layers.Concatenate()([layers.Dense(32)(numbers), layers.Flatten()(layers.Conv2D(8, 3)(images))])
        outputs = [layers.Dense(10, name="kind")(both), layers.Dense(1, name="value")(both)]
        return compiled(tf.keras.Model([numbers, images], outputs), [logits_loss, "mse"])

    assert ask(build).fits


@compiled_for_real
def test_a_small_transformer_on_tokens(tf, layers, logits_loss):
    def build():
        tokens = layers.Input((32,), dtype="int32")
        x = layers.Embedding(500, 64)(tokens)
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 32)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(64)(layers.Dense(128, activation="gelu")(x)))
        return compiled(tf.keras.Model(tokens, layers.Dense(500, dtype="float32")(x)), logits_loss)

    report = ask(build, batch=32)
    tokens, products = 32 * 32, 500 * 64 + 4 * 64 * 64 + 2 * 64 * 128 + 2 * 32 * 64  # a token's multiplications
    assert report.flops == pytest.approx(6 * tokens * products, rel=0.2)
    assert report.all_reduce_bytes == 4 * report.parameters  # the embedding's gradient as a dense array


@compiled_for_real
@pytest.mark.parametrize("name", ["MobileNetV2", "ResNet50"])
def test_models_of_keras_applications(name, tf):
    def build():
        model = getattr(tf.keras.applications, name)(weights=None, input_shape=(32, 32, 3), classes=10)
        return compiled(model, "sparse_categorical_crossentropy")

    report = ask(build, batch=8, policy="mixed_bfloat16")
    assert report.fits
    assert report.padding
    assert report.all_reduce_bytes < 4 * report.parameters  # moving averages are not reduced


@compiled_for_real
def test_a_custom_layer_and_a_recurrent_one(tf, layers):
    class Scale(layers.Layer):
        def build(self, shape):
            self.factor = self.add_weight(shape=(shape[-1],), name="factor")

        def call(self, inputs):
            return inputs * tf.cast(self.factor, inputs.dtype)

    def build():
        return compiled(tf.keras.Sequential([layers.Input((20, 8)), layers.LSTM(32), Scale(), layers.Dense(4)]))

    report = ask(build)
    forward = 2 * 128 * 20 * (8 + 32) * 4 * 32  # 20 turns of the loop, not one
    assert report.flops > forward


@compiled_for_real
def test_a_subclassed_model_needs_data_and_takes_it(tf, layers):
    class Plain(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(4)

        def call(self, inputs):
            return self.dense(inputs)

    def build():
        return compiled(Plain())

    with pytest.raises(Refused, match=r"does not state the shapes of its inputs: pass data=, a dataset"):
        ask(build)
    batch = np.zeros((2, 16), "float32"), np.zeros((2, 4), "float32")
    assert ask(build, data=batch).fits
    assert ask(build, data=tf.data.Dataset.from_tensors(batch)).global_batch_size == 1024


# --- models that exist already


@compiled_for_real
def test_a_model_keeps_its_weights_and_can_be_trained_afterwards(dense):
    model = dense()
    before = model.get_weights()
    report = ask(model)
    assert all(np.array_equal(old, new) for old, new in zip(before, model.get_weights(), strict=True))
    assert int(model.optimizer.iterations.numpy()) == 0
    model.fit(np.ones((16, 8), "float32"), np.ones((16, 4), "float32"), verbose=0)
    assert ask(model).flops == report.flops


@compiled_for_real
def test_a_model_in_another_policy_is_a_copy_with_its_last_layer_in_float32(tf, layers):
    stack = [layers.Input((256,)), layers.Dense(256), layers.Dense(256)]
    model = compiled(tf.keras.Sequential(stack))
    report = ask(model, policy="mixed_bfloat16")
    assert report.policy == "mixed_bfloat16"
    assert {layer.compute_dtype for layer in model.layers} == {"float32"}
    copy = tpu_compiler._rebuilt(model, "mixed_bfloat16", tpu_compiler.contextlib.nullcontext)
    assert [layer.compute_dtype for layer in copy.layers] == ["bfloat16", "float32"]


@compiled_for_real
def test_a_model_of_a_strategy_is_rebuilt_or_refused(tf, dense):
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = dense()
    if LEGACY:
        assert ask(model).fits
    else:  # Keras 3 reads the other strategy's variables when it clones
        with pytest.raises(Refused, match="pass the function that builds and compiles it instead"):
            ask(model)


# --- what it refuses, before any work


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"tpu": "v5e-9"}, "tpu='v5e-9' is unknown: pass one of v2-8, "),
        ({"tpu": 8}, "tpu=8 is unknown: pass one of v2-8, "),
        ({"per_replica_batch_size": 0}, "per_replica_batch_size=0 cannot be used: pass a whole number from 1"),
        ({"per_replica_batch_size": 1.5}, "per_replica_batch_size=1.5 cannot be used"),
        ({"policy": "float16"}, "policy='float16' is unknown: pass 'float32', 'mixed_bfloat16', or None"),
        ({"model": "a.keras"}, "model='a.keras' is neither a compiled Keras model nor a function that builds one."),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence, dense):
    with pytest.raises(Refused) as refused:
        compile_for_tpu(**{"model": dense} | arguments)
    assert str(refused.value).startswith(sentence)
    assert "\n" not in str(refused.value)


@compiled_for_real
def test_models_that_cannot_be_asked_about(tf, layers, dense):
    with pytest.raises(Refused, match=r"is not compiled: call model.compile\(\.\.\.\) first"):
        ask(lambda: tf.keras.Sequential([layers.Input((4,)), layers.Dense(2)]))
    with pytest.raises(Refused, match=r"has the dynamic shape \[batch, None, None, 3\].*pass data="):
        ask(lambda: compiled(tf.keras.Sequential([layers.Input((None, None, 3)), layers.Conv2D(2, 3)])))
    with pytest.raises(Refused, match="model gave 1: pass a compiled Keras model"):
        ask(lambda: 1)
    with pytest.raises(Refused, match="data=int has no shapes and dtypes"):
        ask(dense, data=1)
    with tf.distribute.OneDeviceStrategy("CPU:0").scope(), pytest.raises(Refused, match="call it outside"):
        ask(dense)


def model_with(tf, layer):
    layers = tf.keras.layers
    return lambda: compiled(tf.keras.Sequential([layers.Input((8,)), layers.Dense(8), layer(), layers.Dense(4)]))


def refused_layers(tf):
    class Text(tf.keras.layers.Layer):
        def call(self, x):
            return x + tf.cast(tf.strings.length(tf.as_string(x)), x.dtype)

    class InPython(tf.keras.layers.Layer):
        def call(self, x):
            return tf.ensure_shape(tf.py_function(lambda values: 2 * values, [x], tf.float32), x.shape)

    class Counted(tf.keras.layers.Layer):
        def call(self, x):
            return x + tf.reduce_sum(tf.range(tf.reduce_sum(x)))

    class Picture(tf.keras.layers.Layer):
        def call(self, x):
            return x + tf.reduce_mean(tf.cast(tf.io.decode_jpeg(tf.io.read_file("a.jpg")), x.dtype))

    class Printed(tf.keras.layers.Layer):
        def call(self, x):
            tf.print(tf.reduce_sum(x))
            return x

    class Ragged(tf.keras.layers.Layer):
        def call(self, x):
            return x + tf.reduce_sum(tf.RaggedTensor.from_tensor(x, padding=0.0).to_tensor())

    return {layer.__name__: layer for layer in (Text, InPython, Counted, Picture, Printed, Ragged)}


@compiled_for_real
@pytest.mark.parametrize(
    ("name", "words", "meaning", "line"),
    [
        ("Text", "No registered 'AsString' OpKernel", "numbers alone", "tf.as_string(x)"),
        ("InPython", "No registered 'EagerPyFunc' OpKernel", "Python cannot run on a TPU", "tf.py_function("),
        ("Counted", "must be a compile-time constant", "fixed shapes", "tf.range("),
        ("Picture", "No registered 'ReadFile' OpKernel", "numbers alone", "tf.io.read_file("),
        ("Printed", "No registered 'StringFormat' OpKernel", "numbers alone", "tf.print("),
        ("Ragged", "No registered 'RaggedTensorToTensor' OpKernel", "no such operation", "tf.RaggedTensor"),
    ],
)
def test_a_refusal_has_words_meaning_layer_line_and_remedy(name, words, meaning, line, tf, capfd):
    with pytest.raises(Unsupported) as refused:
        ask(model_with(tf, refused_layers(tf)[name]))
    error = refused.value
    assert words in error.words
    assert error.layer.startswith({"InPython": "in_python"}.get(name, name.lower()))
    assert "test_compiler.py, line " in error.line
    assert line in error.line
    sentence = str(error)
    assert sentence.startswith("this step cannot be compiled for a TPU: ")
    assert meaning in sentence
    assert "Remedy: " in sentence
    assert "\n" not in sentence
    assert capfd.readouterr().err == ""


@compiled_for_real
def test_a_table_in_the_step_is_refused(tf):
    class Table(tf.keras.layers.Layer):
        def __init__(self):
            super().__init__()
            pairs = tf.lookup.KeyValueTensorInitializer([1], [2])
            self.table = tf.lookup.StaticHashTable(pairs, -1)

        def call(self, x):
            return x + tf.cast(self.table.lookup(tf.cast(x, tf.int32)), x.dtype)

    with pytest.raises(Unsupported, match=r"a table or a resource.*look up in the tf.data pipeline"):
        ask(model_with(tf, Table))


# --- memory


@pytest.fixture
def compare_all(tf, layers):
    """Compares all examples of a batch: memory grows with its square."""

    class CompareAll(layers.Layer):
        def call(self, features):
            return tf.reduce_sum(tf.tanh(tf.matmul(features, features, transpose_b=True)), axis=1, keepdims=True)

    def build():
        return compiled(tf.keras.Sequential([layers.Input((8,)), layers.Dense(8), CompareAll()]))

    return build


@compiled_for_real
def test_what_does_not_fit_is_the_compilers_own_answer(compare_all):
    report = ask(compare_all, "v5e-1", 2**18)
    assert not report.fits
    assert report.words.startswith("RESOURCE_EXHAUSTED")
    assert re.search("Ran out of memory|would exceed memory", report.words)
    assert report.hbm_needed > report.hbm_there
    assert report.examples_per_second == 0
    assert "does not fit" in str(report)


@compiled_for_real
def test_the_largest_batch_is_found_between_two_answers(compare_all):
    reports = sweep(compare_all, "v5e-1", [64], "float32", largest=True, progress=False, cache=False)
    most = max(report.per_replica_batch_size for report in reports if report.fits)
    least = min(report.per_replica_batch_size for report in reports if not report.fits)
    assert most < least <= 1.1 * most + 8
    assert 16e9 / 4 / 8 < most**2 < 16e9  # a matrix or a few of float32 fill 16 GB


@compiled_for_real
def test_sweep_gives_a_table_and_a_recommendation_with_its_reason(dense, capfd):
    table = sweep(dense, ["v5e-1", "v6e-1"], [8, 64], ["float32"], cache=False)
    assert [(report.tpu, report.per_replica_batch_size) for report in table] == [
        ("v5e-1", 8), ("v5e-1", 64), ("v6e-1", 8), ("v6e-1", 64),
    ]  # fmt: skip
    for text in (str(table), table._repr_html_()):
        assert "not measured" in text
        assert text.count("v5e-1") == 2
    advice = table.recommendation.splitlines()
    assert [line.partition(":")[0] for line in advice] == ["v5e-1", "v6e-1"]
    assert all("the smallest within 5 % of the most" in line and "predicted" in line for line in advice)
    said = capfd.readouterr()
    assert "compiling for v6e-1" in said.out
    assert said.err == ""


def test_sweep_checks_everything_first(dense):
    wrong = [{"tpus": ["v5e-1", "v9-1"]}, {"tpus": []}, {"tpus": 5}, {"policies": ["half"]}, {"policies": 5}]
    wrong += [{"batch_sizes": sizes} for sizes in ([8, -1], [8, "16"], [], None, "64", 1.5)]
    for arguments in [*wrong, {"time_limit": "soon"}, {"time_limit": 0}]:
        with pytest.raises(Refused, match="pass "):
            sweep(dense, **{"tpus": ["v5e-1"], "batch_sizes": [8]} | arguments)


# --- a process of its own, a cache, records


@compiled_for_real
def test_the_cache_answers_without_a_process(dense, tmp_path, monkeypatch):
    monkeypatch.setenv("TPU_COMPILER_CACHE", str(tmp_path))
    first = compile_for_tpu(dense, "v5e-1", 8)
    (kept,) = tmp_path.glob("*.json")
    with pytest.raises(Refused, match=r"time_limit=0.001 s were not enough"):
        compile_for_tpu(dense, "v5e-1", 16, time_limit=0.001)
    assert compile_for_tpu(dense, "v5e-1", 8, time_limit=0.001).rows() == first.rows()
    kept.write_text(kept.read_text()[:40])  # torn
    assert compile_for_tpu(dense, "v5e-1", 8).rows() == first.rows()


@compiled_for_real
def test_a_cache_that_cannot_be_written_costs_no_report(dense, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TPU_COMPILER_CACHE", str(tmp_path / "file" / "folder"))
    assert compile_for_tpu(dense, "v5e-1", 8).fits
    assert "Not kept for the next time" in capsys.readouterr().out


@compiled_for_real
def test_two_at_once(dense):
    found = {}

    def compile_one(tpu, hlo):
        found[tpu] = tpu_compiler._ask(hlo, "", TOPOLOGIES[tpu], [], 300, cache=False)

    hlo = ask(dense).hlo
    threads = [threading.Thread(target=compile_one, args=(tpu, hlo)) for tpu in ("v5e-8", "v6e-8")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {"v5e-8", "v6e-8"}
    assert all(answer["flops"] > 0 for answer in found.values())


@compiled_for_real
def test_a_compiler_that_dies_is_one_sentence(capfd):
    with pytest.raises(
        Refused, match=r"the compiler's process ended with (status|signal) \d+ \(.*tested are jax 0.10.2"
    ):
        tpu_compiler._ask(b"this is no program", "", TOPOLOGIES["v5e-1"], [], 60, cache=False)
    assert capfd.readouterr().err == ""


@compiled_for_real
def test_private_names_that_are_gone_are_one_sentence(dense, tmp_path, monkeypatch):
    """A jax that has none of them, in front of the real one."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("")
    hlo = ask(dense).hlo
    monkeypatch.setenv("TPU_COMPILER_CACHE", str(tmp_path / "cache"))
    with monkeypatch.context() as while_gone:
        while_gone.setenv("PYTHONPATH", str(tmp_path))
        answer = tpu_compiler._ask(hlo, "", TOPOLOGIES["v5e-8"], [], 60, cache=True)
    assert answer["refused"].startswith("this jax has no longer what is needed (")
    assert tpu_compiler._ask(hlo, "", TOPOLOGIES["v5e-8"], [], 60, cache=True)["flops"] > 0  # it was not kept


def test_where_the_compiler_cannot_be_a_recorded_report_is_shown(dense, monkeypatch):
    """As on a Mac; the name of the machine is made up, the records are those of the repository."""
    monkeypatch.setattr(tpu_compiler.platform, "machine", lambda: "arm64")
    report = compile_for_tpu(lambda: 1 / 0, "v5e-8", 64, "float32", name="the kit's CNN")
    assert report.recorded
    assert f"recorded on {report.recorded}, libtpu " in report.origin()
    with pytest.raises(Refused, match=r"nothing is recorded of 'build' on v5e-8 .*libtpu is made for Linux on x86-64"):
        compile_for_tpu(dense, "v5e-8", 64)
    with pytest.raises(
        Refused, match=r"the recorded report of .* is of a model of 56,714 parameters, and this one has 36"
    ):
        compile_for_tpu(dense(), "v5e-8", 64, name="the kit's CNN")


def recorded():
    return [Report.from_json(each) for each in json.loads((ROOT / "recorded" / "predictions.json").read_text())]


def test_records_are_marked_and_of_no_particular_machine():
    text = (ROOT / "recorded" / "predictions.json").read_text()
    assert not [place for place in ("/tmp/", "/root/", "/home/") if place in text]
    for report in recorded():
        assert report.recorded
        assert "libtpu" in report.compiler


def test_records_of_resnet_agree_with_a_count_of_flops_by_hand(tf):
    model = tf.keras.applications.ResNet50(weights=None)
    products = 0
    for layer in model.layers:
        if layer.__class__.__name__ in ("Conv2D", "Dense"):
            outputs = math.prod(layer.output.shape[1:-1]) if layer.__class__.__name__ == "Conv2D" else 1
            times = 2 if layer.name == "conv1_conv" else 3  # nobody needs the images' gradient
            products += times * outputs * math.prod(layer.kernel.shape)
    reports = [report for report in recorded() if report.name == "ResNet-50" and report.per_replica_batch_size <= 256]
    assert len(reports) > 5  # near the end of memory the compiler computes some activations twice
    for report in reports:
        assert report.flops / report.per_replica_batch_size == pytest.approx(2 * products, rel=0.1)


@compiled_for_real
def test_a_new_record_replaces_the_old_one(dense, tmp_path, monkeypatch):
    monkeypatch.setenv("TPU_COMPILER_RECORD", str(tmp_path / "records.json"))
    for batch in (8, 16, 8):
        compile_for_tpu(dense, "v5e-1", batch, name="small")
    records = json.loads((tmp_path / "records.json").read_text())
    assert [record["per_replica_batch_size"] for record in records] == [8, 16]


# --- reading a program


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        ("f32[8,128]{1,0:T(8,128)}", (4096, 4096, True)),
        ("f32[6,128]{1,0:T(8,128)}", (3072, 4096, True)),
        ("f32[784,100]{0,1:T(8,128)S(1)}", (313600, 104 * 896 * 4, False)),
        ("bf16[128,28,28,512]{3,0,2,1:T(8,128)(2,1)}", (128 * 28 * 28 * 512 * 2,) * 2 + (True,)),
        ("f32[]{:T(128)}", (4, 512, True)),
        ("pred[100]{0:T(512)}", (100, 512, True)),
        ("(f32[2]{0:T(128)}, s32[3]{0:T(128)})", (20, 1024, True)),
    ],
)
def test_sizes_by_hand(array, expected):
    assert sizes(array) == expected


def test_traffic_all_reduces_and_padding_of_a_program_by_hand():
    text = """HloModule m
ENTRY %main (a: f32[8,128], b: f32[6,128]) -> f32[6,128] {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0)
  %b = f32[6,128]{1,0:T(8,128)} parameter(1)
  %copy-start = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%a)
  %copy-done = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%copy-start)
  %all-reduce = f32[6,128]{1,0:T(8,128)} all-reduce(%b), replica_groups={{0,1}}, to_apply=%add
  ROOT %add.1 = f32[6,128]{1,0:T(8,128)} add(%all-reduce, %copy-done), metadata={op_name="model/dense_1/Add"}
}
"""
    found = tpu_compiler.analyse(text, ["dense_1"])
    assert found["hbm_bytes"] == 4096 + 2 * 4096 + 2 * 4096  # read a; read and write b; read and write the sum
    assert found["all_reduces"] == [(3072, 1)]
    assert found["padding"] == [("dense_1", 3072, 4096)]


# --- on the command line


def command(*arguments, cwd=ROOT, **environment):
    return subprocess.run(
        [sys.executable, ROOT / "tpu_compiler.py", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


MODULE = """
import tensorflow as tf

def small():
    layers = tf.keras.layers
    model = tf.keras.Sequential([layers.Input((8,)), layers.Dense(4)])
    model.compile("sgd", "mse")
    return model

class CompareAll(tf.keras.layers.Layer):
    def call(self, x):
        return tf.reduce_sum(tf.tanh(tf.matmul(x, x, transpose_b=True)), axis=1, keepdims=True)

def large():
    model = tf.keras.Sequential([tf.keras.layers.Input((8,)), tf.keras.layers.Dense(8), CompareAll()])
    model.compile("sgd", "mse")
    return model
"""


@compiled_for_real
def test_the_command_says_fits_does_not_fit_and_bad_input(dense, tmp_path):
    (tmp_path / "my_models.py").write_text(MODULE)
    dense().save(tmp_path / "my_model.keras")
    fits = command("my_model.keras", "--tpu", "v5e-8", "--per-replica-batch=64,128", "--policy", "both", cwd=tmp_path)
    assert fits.returncode == 0, fits.stderr
    assert fits.stdout.count("mixed_bfloat16") >= 2
    too_large = command("my_models:large", "--tpu=v5e-1", "--per-replica-batch", 2**18, "--json", cwd=tmp_path)
    assert too_large.returncode == 1
    (report,) = json.loads(too_large.stdout)
    assert report["fits"] is False
    assert re.search("Ran out of memory|would exceed memory", report["words"])
    given = ("--per-replica-batch=8,16,24", "--policy=both")  # all of these fit, what --largest adds does not
    largest = command("my_models:large", "--tpu=v5e-1", *given, "--largest", cwd=tmp_path)
    assert largest.returncode == 0, largest.stderr
    assert largest.stdout.count("does not fit") == 2
    refused = {
        ("no.keras",): "Refused: model='no.keras' is not there",
        ("my_models:nothing",): "Refused: model='my_models:nothing' cannot be imported",
        ("my_models:small", "--tpu=v5"): "Refused: tpu='v5' is unknown: pass one of v2-8",
        ("my_models:small", "--per-replica-batch=8,x"): "Refused: --per-replica-batch 8,x: pass whole numbers",
    }
    for arguments, sentence in refused.items():
        said = command(*arguments, cwd=tmp_path)
        assert said.returncode == 2, said.stdout
        assert sentence in said.stderr
        assert "Traceback" not in said.stderr


def test_importing_the_module_does_no_work():
    code = "import sys, tpu_compiler; print('tensorflow' in sys.modules, 'jax' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout == "False False\n"
