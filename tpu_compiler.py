"""Ask the real TPU compiler, on a machine without a TPU: does a Keras model compile, does it fit, what bounds it?

    report = compile_for_tpu(build_model, tpu="v5e-8", per_replica_batch_size=128, policy="mixed_bfloat16")
    table = sweep(build_model, ["v5e-8", "v6e-8"], [64, 256, 1024])

    python tpu_compiler.py my_model.keras --tpu v5e-8 --per-replica-batch 64,128,256 --policy both

TensorFlow traces one replica's `train_step` on the CPU and lowers it to HLO; libtpu, which holds the compiler that
every TPU uses, compiles that for any slice. Needs `pip install -r requirements-compiler.txt` (Linux x86-64); elsewhere,
reports recorded earlier are shown. All figures are *predicted*. Explained in notebooks/07_ask_the_tpu_compiler.ipynb.
Needs tpu_helpers.py beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import html
import importlib
import importlib.util
import itertools
import json
import linecache
import math
import os
import platform
import re
import reprlib
import subprocess
import sys
import tempfile
import time
import types
import warnings
import zipfile
from pathlib import Path
from typing import NamedTuple

from tpu_helpers import Refused, check_parameters, installed, quietly

POLICIES = ("float32", "mixed_bfloat16")
TESTED = "jax 0.10.2 with libtpu 0.0.52, jax 0.7.2 with libtpu 0.0.21.1"
INSTALL = "pip install jax jaxlib libtpu"  # as requirements-compiler.txt does
APART = f"python3 -m venv apart, then apart/bin/pip install tensorflow tf-keras, apart/bin/{INSTALL}"
RECORDED = [Path(__file__).resolve().parent / place for place in ("recorded/predictions.json", "predictions.json")]
GIB = 2**30
MOST = 1000  # topologies, batch sizes or policies in one sweep


class Generation(NamedTuple):
    """A chip: peak TFLOP/s in bfloat16, GiB of HBM, GB/s of HBM and of all links to other chips (ICI) together."""

    tflops: float
    hbm_gib: float
    hbm_gb_per_s: float
    ici_gb_per_s: float  # sent, over all links at once
    replicas: int  # on one chip: one for each TensorCore, where the compiler does not join them to one


# From docs.cloud.google.com/tpu/docs/v3 to v6e, November 2026; v2 from jax/_src/tpu_info.py (github.com/jax-ml/jax),
# which differs for v3 (140 TFLOP/s, 825 GB/s). ICI: half of what the docs call bidirectional (v5e, v5p, v6e); v4: 6
# links of 50 (Jouppi et al. 2023); v3: 4 of 100 (jax-ml.github.io/scaling-book), where others say 70; v2: 4 of 62, for
# which no source could be read. Replicas of v4: 2 a chip, as in Google's MLPerf 0.7 run on v4-16.
GENERATIONS = {
    "v2": Generation(46, 16, 716, 248, 2),
    "v3": Generation(123, 32, 900, 400, 2),
    "v4": Generation(275, 32, 1200, 300, 2),
    "v5e": Generation(197, 16, 819, 200, 1),
    "v5p": Generation(459, 95, 2765, 600, 1),
    "v6e": Generation(918, 32, 1638, 400, 1),
}
# Names as users know them. The number counts TensorCores up to v5p (two a chip), chips in v5e and v6e.
_CUBES = {8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4", 256: "4x4x8", 512: "4x8x8"}
_SQUARES = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_SHAPES = {
    "v2": {8: "2x2", 32: "4x4", 128: "8x8", 256: "8x16", 512: "16x16"},
    "v3": {8: "2x2", 32: "4x4", 64: "4x8", 128: "8x8", 256: "8x16", 512: "16x16"},
    "v4": _CUBES,
    "v5e": _SQUARES,
    "v5p": _CUBES,
    "v6e": _SQUARES,
}
TOPOLOGIES = {f"{kind}-{n}": f"{kind}:{shape}" for kind, shapes in _SHAPES.items() for n, shape in shapes.items()}


class Unsupported(Refused):
    """What a TPU refuses: the compiler's own `words`, the `layer` and the `line` at fault ("" if it does not say)."""

    def __init__(self, sentence: str, words: str = "", layer: str = "", line: str = ""):
        super().__init__(sentence)
        self.words, self.layer, self.line = words, layer, line


def _amount(value: float, unit: str) -> str:
    """3.2e9, "FLOP" → "3.2 GFLOP": three digits that count."""
    power = max(-3, min(5, math.floor(math.log10(value) / 3))) if value else 0
    prefix = {-3: "n", -2: "µ", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T", 5: "P"}[power]
    return f"{value / 1000**power:.3g} {prefix}{unit}"


def _gib(value: float) -> str:
    power = 3 if value >= 0.1 * GIB else 2 if value >= 2**17 else 1
    return f"{value / 1024**power:.3g} {' KMG'[power]}iB"


def _rate(value: float) -> str:
    return f"{float(f'{value:.3g}'):,.0f}"


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """What the TPU compiler makes of one training step. Figures are *predicted*, bytes and FLOPs per replica and step.

    `fits` is the compiler's own answer; where it is False, `words` are its own, and the figures of the program are 0.
    """

    name: str
    tpu: str
    policy: str
    per_replica_batch_size: int
    replicas: int
    parameters: int  # numbers in the model's weights
    compiler: str  # its versions
    fits: bool = True
    words: str = ""
    flops: float = 0.0
    accessed_bytes: float = 0.0  # in HBM and in the chip's own memory (VMEM), as the compiler counts
    hbm_bytes: float = 0.0  # of these, those that come from HBM or go there, padding included
    estimate: float = 0.0  # the compiler's own, in seconds, unknown costs put right; 0: cannot be believed
    argument_bytes: int = 0  # weights, optimizer state, batch
    temporary_bytes: int = 0  # activations, gradients
    output_bytes: int = 0  # that do not take an argument's place
    program_bytes: int = 0
    all_reduces: tuple = ()  # (bytes, arrays) of each
    padding: tuple = ()  # (layer, bytes, padded bytes), the worst first
    stored_bytes: int = 0  # all that the program's instructions write
    padded_bytes: int = 0  # the same with padding
    instructions: tuple = ()  # (padded bytes written, what), the largest first
    loops: int = 0  # of which nobody knows how often they turn: counted once
    compile_seconds: float = 0.0  # measured
    recorded: str = ""  # the date, if this is no compilation of now
    hlo: bytes = dataclasses.field(default=b"", repr=False)  # what TensorFlow lowered

    @property
    def generation(self) -> Generation:
        return GENERATIONS[self.tpu.partition("-")[0]]

    @property
    def chips(self) -> int:
        return self.replicas // self.generation.replicas or 1

    @property
    def global_batch_size(self) -> int:
        return self.per_replica_batch_size * self.replicas

    @property
    def hbm_needed(self) -> int:
        """Bytes of HBM for a replica; where it does not fit, what the compiler says it would need."""
        if not self.fits and (said := re.search(r"(?:HLO temporaries \(|Used )([\d.]+)([KMGT])", self.words)):
            return int(float(said[1]) * 1024 ** ("KMGT".index(said[2]) + 1))
        if not self.fits and (said := re.search(r"Allocation \(size=(\d+)\)", self.words)):  # libtpu 0.0.21.1
            return int(said[1])
        return self.argument_bytes + self.temporary_bytes + self.output_bytes + self.program_bytes

    @property
    def hbm_there(self) -> float:
        """Bytes of HBM that a replica has, the share that the runtime keeps for itself included."""
        return self.generation.hbm_gib * GIB / self.generation.replicas

    @property
    def intensity(self) -> float:
        """FLOPs for each byte of HBM traffic; from `ridge` on, arithmetic is the limit."""
        return self.flops / self.hbm_bytes if self.hbm_bytes else 0.0

    @property
    def ridge(self) -> float:
        """Peak FLOP/s over HBM bytes/s: the roofline's corner (Williams et al. 2009, doi 10.1145/1498765.1498785)."""
        return 1000 * self.generation.tflops / self.generation.hbm_gb_per_s

    @property
    def all_reduce_bytes(self) -> int:
        return sum(size for size, _ in self.all_reduces)

    @property
    def bounds(self) -> dict[str, float]:
        """Seconds that a step takes at least, for four reasons; the largest is the prediction.

        compute: FLOPs at the chip's peak. memory: HBM bytes at its bandwidth. cost model: the compiler's own estimate
        goes through the program instruction by instruction, but counts accesses to VMEM like those to HBM: of it,
        the share of HBM. interconnect: each chip sends 2 (n - 1) / n of the all-reduced bytes (ring; Patarasuk and Yuan
        2009, doi 10.1016/j.jpdc.2008.09.002), here as if all links worked and nothing waited.
        """
        chip, chips = self.generation, self.chips
        return {
            "compute": self.flops * chip.replicas / (1e12 * chip.tflops),
            "memory": self.hbm_bytes * chip.replicas / (1e9 * chip.hbm_gb_per_s),
            "cost model's HBM share": self.estimate * min(1.0, self.hbm_bytes / (self.accessed_bytes or 1)),
            "interconnect": 2 * (chips - 1) / chips * self.all_reduce_bytes / (1e9 * chip.ici_gb_per_s),
        }

    @property
    def bound_by(self) -> str:
        """ "compute", "memory" or "interconnect", by the roofline."""
        roofline = {name: value for name, value in self.bounds.items() if name != "cost model's HBM share"}
        return max(roofline, key=roofline.get)

    @property
    def step_seconds(self) -> float:
        """A step takes this long or longer: the largest of `bounds`."""
        return max(self.bounds.values())

    @property
    def cost_seconds(self) -> float:
        """A step by the compiler's cost model as it stands: as if VMEM were as slow as HBM. To compare one step with
        another; where the estimate cannot be believed, the roofline of all bytes that it counts."""
        chip = self.generation
        memory = self.accessed_bytes * chip.replicas / (1e9 * chip.hbm_gb_per_s)
        return max(self.estimate or memory, self.step_seconds)

    @property
    def examples_per_second(self) -> float:
        """Of the whole slice, at most; if the input pipeline gives as many."""
        return self.global_batch_size / self.step_seconds if self.fits else 0.0

    @property
    def cost_examples_per_second(self) -> float:
        """Of the whole slice, by the cost model (`cost_seconds`)."""
        return self.global_batch_size / self.cost_seconds if self.fits else 0.0

    @property
    def padding_share(self) -> float:
        """Share of the written bytes that only fills tiles (8 × 128 numbers)."""
        return 1 - self.stored_bytes / self.padded_bytes if self.padded_bytes else 0.0

    def title(self) -> str:
        batch = (
            f"{self.replicas} replica(s) × {self.per_replica_batch_size:,} = global batch {self.global_batch_size:,}"
        )
        return f"{self.name} on {self.tpu} ({self.chips} chip(s)): {batch}, {self.policy}"

    def origin(self) -> str:
        when = f"recorded on {self.recorded}, " if self.recorded else ""
        return f"predicted by the TPU compiler ({when}{self.compiler}), not measured"

    def rows(self) -> dict[str, str]:
        """What the report says, line by line."""
        there = f"{self.hbm_there / GIB:.4g} GiB of HBM a replica"
        if not self.fits:
            return {"does not fit": f"needs {_gib(self.hbm_needed)}, there are {there}", "its words": self.words}
        arguments, temporaries = _gib(self.argument_bytes), _gib(self.temporary_bytes)
        others = f"outputs {_gib(self.output_bytes)}, program {_gib(self.program_bytes)}"
        parts = f"arguments {arguments}, temporaries {temporaries}, {others}"
        seconds = {name: _amount(value, "s") for name, value in self.bounds.items()}
        if not self.estimate:
            seconds.pop("cost model's HBM share")
        if self.chips == 1:
            seconds.pop("interconnect")
        limits = ", ".join(f"{name} {value}" for name, value in seconds.items())
        roofline = sorted((value, name) for name, value in self.bounds.items() if name != "cost model's HBM share")
        times = roofline[-1][0] / roofline[-2][0] if roofline[-2][0] else math.inf
        by = f"{self.bound_by} bound, {times:.2g} times the {roofline[-2][1]} limit" if times < 1e4 else self.bound_by
        most, by_cost = self.examples_per_second, self.cost_examples_per_second
        arrays = sum(count for _, count in self.all_reduces)
        reduces = f"{_amount(self.all_reduce_bytes, 'B')}, {arrays} array(s) in {len(self.all_reduces)} operation(s)"
        worst = [f"{name} {1 - size / padded:.0%}" for name, size, padded in self.padding[:3]]
        rows = {
            "fits": f"{_gib(self.hbm_needed)} of {there} ({parts})",
            "FLOPs": f"{_amount(self.flops, 'FLOP')} per replica and step",
            "HBM traffic": f"{_amount(self.hbm_bytes, 'B')} per replica and step",
            "intensity": f"{self.intensity:.3g} FLOP/byte; from {self.ridge:.3g} on, arithmetic is the limit",
            "step": f"at least {_amount(self.step_seconds, 's')} ({limits}); by the cost model "
            f"{_amount(self.cost_seconds, 's')}",
            "roofline": by,
            "examples/s": f"at most {_rate(most)} for the slice, {_rate(most / self.chips)} per chip; by cost model "
            f"{_rate(by_cost)} and {_rate(by_cost / self.chips)} (predicted; "
            "interconnect counted as overlapped, input pipeline left out)",
            "all-reduce": reduces if self.replicas > 1 else "none, there is one replica",
            "padding": f"{self.padding_share:.0%} of what is written fills tiles"
            + "".join(f"; {row}" for row in worst),
        }
        if self.step_seconds < 1e-3:
            short = (
                "set by the host: so short a step waits to be started (steps_per_execution helps); for the chip alone "
            )
            rows["examples/s"] = short + rows["examples/s"]
        if self.loops:
            rows["loops"] = f"{self.loops} that turn as often as the data says, counted once: the step takes longer"
        return rows

    def __str__(self) -> str:
        rows = "\n".join(f"  {name:12} {text}" for name, text in self.rows().items())
        return f"{self.title()}\n  {self.origin()}\n{rows}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        cell = "<tr><th style='text-align:left'>{}</th><td style='text-align:left'>{}</td></tr>"
        rows = "".join(cell.format(html.escape(name), html.escape(text)) for name, text in self.rows().items())
        title = f"<b>{html.escape(self.title())}</b><br>{html.escape(self.origin())}"
        return f"<div>{title}<table>{rows}</table></div>"

    def to_json(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "hlo"}

    @classmethod
    def from_json(cls, content: dict) -> Report:
        lists = ("all_reduces", "padding", "instructions")
        return cls(**content | {name: tuple(map(tuple, content.get(name, ()))) for name in lists})


# --- lowering: one replica's train_step becomes HLO


def _slice_strategy(replicas: int):
    """A strategy for one device that counts as `replicas`; its all-reduces stay in the program, as TPUStrategy's do.

    TPUStrategy reduces in `StrategyExtended._reduce_to`, by an op that has no CPU kernel; this one has, and becomes the
    same all-reduce. Private names of TensorFlow: _reduce_to, _num_replicas_in_sync (tested with 2.20 and 2.21).
    """
    import tensorflow as tf

    strategy = tf.distribute.OneDeviceStrategy("/device:CPU:0")
    keys = iter(range(1, 2**31))

    class Slice(type(strategy.extended)):
        _num_replicas_in_sync = replicas

        def _reduce_to(self, reduce_op, value, destinations, options):
            total = tf.raw_ops.CollectiveReduceV2(
                input=tf.convert_to_tensor(value),  # TPUs reduce an Embedding's sparse gradient as a dense one, too
                group_size=replicas,
                group_key=1,
                instance_key=next(keys),
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
            )
            return total / replicas if reduce_op == tf.distribute.ReduceOp.MEAN else total

    strategy.extended.__class__ = Slice
    return strategy


@contextlib.contextmanager
def _global_policy(policy: str | None):
    """Both Keras packages that may be in use take the policy, and take it back."""
    import tensorflow as tf

    modules = {id(m): m for m in (tf.keras, sys.modules.get("keras"), sys.modules.get("tf_keras")) if m}.values()
    before = [(module.mixed_precision, _policy_name(module.mixed_precision)) for module in modules]
    try:
        for mixed_precision, old in before:
            mixed_precision.set_global_policy(policy or old)
        yield
    finally:
        for mixed_precision, old in before:
            mixed_precision.set_global_policy(old)


def _policy_name(mixed_precision) -> str:
    current = getattr(mixed_precision, "global_policy", None) or mixed_precision.dtype_policy
    return current().name


def _is_model(model) -> bool:
    return hasattr(model, "train_step") and hasattr(model, "compile")


def _keras_of(model):
    """The Keras package that a model comes from."""
    legacy = any(kind.__module__.startswith("tf_keras.") for kind in type(model).__mro__)
    return importlib.import_module("tf_keras" if legacy else "keras")


def _is_on_jax(model) -> bool:
    keras = _keras_of(model)
    return hasattr(keras, "backend") and getattr(keras.backend, "backend", str)() == "jax"


def _all_layers(model) -> list:
    """The model's layers, those within nested models included."""
    layers = []
    for layer in getattr(model, "layers", []):
        layers += [layer, *_all_layers(layer)]
    return layers


def _policy_of(model) -> str:
    names = {getattr(getattr(layer, "dtype_policy", None), "name", "float32") for layer in _all_layers(model)}
    return next((name for name in sorted(names) if name.startswith("mixed")), "float32")


def _rebuilt(model, policy: str | None, scope):
    """The same model from its configuration, computing with `policy`; as in notebook 6, its last layers in float32."""
    remedy = "pass the function that builds and compiles it instead of the model"
    last = {name.partition("/")[0] for name in getattr(model, "output_names", None) or [model.layers[-1].name]}

    def clone(layer):
        config = layer.get_config()
        if policy and "dtype" in config and layer.name not in last and not _all_layers(layer):
            config["dtype"] = policy
        return type(layer).from_config(config)

    try:
        compiled = model.get_compile_config()  # reads variables, so outside the scope
        with scope():
            new = _keras_of(model).models.clone_model(model, clone_function=clone)
            if type(new) is not type(model):
                raise TypeError(f"the copy is a {type(new).__name__}, not a {type(model).__name__}")
            new.compile_from_config(compiled)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        reason = str(error).strip().partition("\n")[0]
        raise Refused(f"model={model.name!r} cannot be rebuilt from its configuration ({reason}): {remedy}.") from None
    return new


def _build(model, strategy, policy: str | None):
    """(compiled model, its policy): built by the function in the strategy's scope, or the model itself."""
    scope = strategy.scope
    if not _is_model(model):
        with scope(), _global_policy(policy):
            model = model()
    elif any(len(getattr(_tensor(v), "values", ())) for v in model.variables) or policy not in (
        None,
        _policy_of(model),
    ):
        model = _rebuilt(model, policy, scope)
    else:
        scope = contextlib.nullcontext
    if not _is_model(model):
        raise Refused(f"model gave {model!r}: pass a compiled Keras model, or a function that returns one.")
    if not getattr(model, "optimizer", None):
        raise Refused(
            f"model={model.name!r} is not compiled: call model.compile(...) first, in the function that builds it."
        )
    if model.built and not getattr(model.optimizer, "built", False):
        with scope():
            model.optimizer.build(model.trainable_variables)
    return model, policy or _policy_of(model)


def _tensor(variable):
    """TensorFlow's variable inside Keras 3's."""
    value = getattr(variable, "value", variable)
    return variable if callable(value) else value


def _specs(model, data, batch: int):
    """(inputs, labels) as TensorSpecs whose first dimension is `batch`: of `data`, else what the model states."""
    import tensorflow as tf

    remedy = "pass data=, a dataset or one batch (inputs, labels), from which shapes and dtypes are taken"

    def spec(shape, dtype, what):
        if any(size is None for size in shape):
            shown = ", ".join(["batch", *map(str, shape)])
            raise Refused(f"{what} has the dynamic shape [{shown}], and a TPU's program has one fixed shape: {remedy}.")
        return tf.TensorSpec([batch, *shape], dtype)

    if data is not None:
        try:
            element = data.element_spec if hasattr(data, "element_spec") else data
            if isinstance(element, list):
                element = tuple(element)
            return tf.nest.map_structure(lambda x: spec(list(x.shape)[1:], x.dtype, "data"), element)
        except (AttributeError, TypeError, ValueError) as error:
            if isinstance(error, Refused):
                raise
            raise Refused(
                f"data={type(data).__name__} has no shapes and dtypes: pass a dataset or one batch."
            ) from None
    if not getattr(model, "inputs", None) or not getattr(model, "outputs", None):
        raise Refused(f"model={model.name!r} does not state the shapes of its inputs: {remedy}.")
    inputs = [spec(list(x.shape)[1:], x.dtype, f"input {x.name.partition(':')[0]!r}") for x in model.inputs]
    losses, names = getattr(model, "loss", None), list(getattr(model, "output_names", []))
    if isinstance(losses, dict):
        losses = [losses.get(name) for name in names]
    losses = list(losses) if isinstance(losses, list | tuple) else [losses] * len(model.outputs)
    if None in losses:
        raise Refused(
            f"model={model.name!r} was compiled without a loss for each output, so labels are unknown: {remedy}."
        )
    labels = []
    for output, loss in zip(model.outputs, losses, strict=True):
        name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
        shape, sparse = list(output.shape)[1:], "sparse" in name.lower()
        labels.append(spec(shape[:-1] if sparse else shape, "int32" if sparse else "float32", "the output"))
    single = [values[0] if len(values) == 1 else values for values in (inputs, labels)]
    return tuple(tuple(value) if isinstance(value, list) else value for value in single)


MEANINGS = {
    r"No registered '(String|Print|As|Regex|Read|Write|Decode|Encode)\w*' OpKernel": (
        "a TPU computes with numbers alone: strings, files, images to decode and prints belong to the host",
        "move that into the tf.data pipeline, or print what the step returns",
    ),
    r"No registered '\w*PyFunc\w*' OpKernel": (
        "Python cannot run on a TPU",
        "write it with TensorFlow's operations, or move it into the tf.data pipeline",
    ),
    r"No registered '\w+' OpKernel": (
        "there is no such operation on a TPU",
        "write it with other operations, or move it into the tf.data pipeline",
    ),
    r"must be a compile-time constant|defined\. Found None|dynamic|Dynamic": (
        "a shape that depends on the data, and a TPU's program has fixed shapes",
        "keep the shape: tf.where(mask, x, 0) instead of boolean_mask, a constant instead of a computed size",
    ),
    r"is_initialized|LookupTable": (
        "the step uses a table or a resource that is no variable, which a TPU cannot hold",
        "look up in the tf.data pipeline",
    ),
    r"RESOURCE_EXHAUSTED|Ran out of memory": (
        "the program does not fit into the chip",
        "take a smaller per-replica batch or mixed_bfloat16",
    ),
}


def _refusal(error: str, layers: list[str]) -> Unsupported:
    """The compiler's words, what they mean, the layer and the line at fault, the remedy."""
    said = re.sub(r"^Failed getting HLO text: '?", "", error.strip())
    patterns = (r"No registered '\w+' OpKernel", r"[^\n]*?compile-time constant", r"[^\n]+")
    found = next(filter(None, (re.search(pattern, said) for pattern in patterns)), None)
    words = found.group().strip(" .'") if found else "it said nothing"
    path = re.search(r"\{\{node ([^}]+)\}\}|node `([^`]+)`", said)
    layer = _layer_in((path and (path[1] or path[2])) or "", layers)
    line = ""
    for file, number, function in re.findall(r'File "([^"]+)", line (\d+), in (\S+)', said):
        if not re.search(r"site-packages|tf_keras/|keras/src/|tensorflow/python|tpu_compiler\.py", file):
            known = next((name for name in linecache.cache if name.endswith(file.lstrip("."))), file)
            source = linecache.getline(known, int(number)).strip()
            place = f"{Path(file).name}, line {number}" if "ipykernel" not in known else f"line {number} of its cell"
            line = f"{place}, in {function}: {source}" if source else f"{place}, in {function}"
    meaning, remedy = next(
        (text for pattern, text in MEANINGS.items() if re.search(pattern, said)),
        ("the compiler did not accept the step", "change what it names"),
    )
    where = "; ".join(text for text in (layer and f"layer {layer!r}", line) if text)
    sentence = f"this step cannot be compiled for a TPU: {words}. It means: {meaning}"
    return Unsupported(f"{sentence}{f' (at fault: {where})' if where else ''}. Remedy: {remedy}.", words, layer, line)


def _layer_in(path: str, layers) -> str:
    """The layer in an operation's name: "gradient_tape/model/dense_1/MatMul", Keras 3's "…_1", JAX's "jvp(dense_1)"."""
    for part in reversed(re.split(r"[/()]", path)):
        for name in (part, re.sub(r"_\d+$", "", part)):
            if name in layers:
                return name
    return ""


def _lower(model, specs, strategy) -> tuple[bytes, str]:
    """HLO of one replica's `train_step`, serialised and as text; nothing is computed, the weights stay as they are."""
    import tensorflow as tf

    @tf.function(jit_compile=True, autograph=False)
    def step(*tensors):
        batch = tf.nest.pack_sequence_as(specs, tensors)
        return strategy.run(lambda *data: model.train_step(data), args=batch)

    with (
        warnings.catch_warnings(),
        _silenced(),
    ):  # device_name is to be replaced by platform_name, which takes no variables yet
        warnings.simplefilter("ignore")
        try:
            lowered = step.experimental_get_compiler_ir(*tf.nest.flatten(specs))
            return tuple(lowered(stage=s, device_name="/device:CPU:0") for s in ("hlo_serialized", "hlo"))
        except Exception as error:  # a model's own code runs here, and may raise anything
            if "registered transfer manager" in str(error):
                raise Refused(_cannot_lower()) from None
            if isinstance(error, MemoryError | tf.errors.ResourceExhaustedError):
                raise Refused("this machine has too little memory to trace the step: pass a smaller batch.") from None
            raise _refusal(str(error), [layer.name for layer in _all_layers(model)]) from error


def _lower_jax(model, specs, replicas: int) -> tuple[bytes, str]:
    """The same of a Keras 3 model on JAX, as `keras.distribution.DataParallel` runs it.

    One program for the whole slice, the batch divided, weights on each chip. Private name of Keras: _symbolic_build
    (tested with 3.13 and 3.15).
    """
    import jax
    import numpy as np
    import tensorflow as tf
    from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

    def shape_of(array, *axes, times=1):
        first, *rest = array.shape or (1,)
        shape = (first * times, *rest) if array.shape else ()
        dtype = getattr(array.dtype, "as_numpy_dtype", array.dtype)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    mesh = AbstractMesh((replicas,), ("batch",))
    try:

        def zeros(spec):  # that take no memory
            return np.broadcast_to(np.zeros((), spec.dtype.as_numpy_dtype), spec.shape)

        model._symbolic_build(data_batch=tf.nest.map_structure(zeros, specs))
        trained = model.trainable_variables, model.non_trainable_variables, model.optimizer.variables
        state = [[shape_of(each) for each in kind] for kind in (*trained, model.metrics_variables)]
        batch = tf.nest.map_structure(lambda spec: shape_of(spec, "batch", times=replicas), specs)
        traced = jax.jit(model.train_step, donate_argnums=0).trace(tuple(state), batch)
        lowered = traced.lower(lowering_platforms=("tpu",))
        return lowered.as_text(debug_info=True).encode(), lowered.as_text()
    except Exception as error:  # a model's own code runs here, and may raise anything
        if "_symbolic_build" in str(error):
            raise Refused(f"this Keras has no longer what is needed ({error}): tested are 3.13 and 3.15.") from None
        if isinstance(error, MemoryError):
            raise Refused("this machine has too little memory to trace the step: pass a smaller batch.") from None
        raise _refusal(str(error), [layer.name for layer in _all_layers(model)]) from error


@contextlib.contextmanager
def _silenced():
    """Keep what TensorFlow writes below Python's reach off the screen: what matters comes as an exception."""
    stderr = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def _cannot_lower() -> str:
    here = installed("tensorflow-tpu")
    return f"{here} cannot lower a step for a CPU, which comes first: ask in a place of its own, {APART}."


# --- asking: a process of its own, a cache, recorded reports


def missing() -> str:
    """Why the compiler cannot be asked here, and the remedy; "" if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"libtpu is made for Linux on x86-64, this is {platform.system()} on {platform.machine()}: use Colab."
    if absent := [name for name in ("jax", "jaxlib", "libtpu") if not importlib.util.find_spec(name)]:
        return f"{', '.join(absent)} not installed: {INSTALL}"
    return _cannot_lower() if installed("tensorflow-tpu") else ""


def versions() -> str:
    return installed("libtpu", "jax", "jaxlib")


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TPU_COMPILER_CACHE") or Path(home) / "tpu_compiler")


def _store(path: Path, content: dict | list) -> None:
    """Whole or not at all; a full disk or a read-only home costs the cache, not the report."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
            lines = [json.dumps(each, ensure_ascii=False) for each in content] if isinstance(content, list) else []
            file.write("[\n" + ",\n".join(lines) + "\n]\n" if lines else json.dumps(content) + "\n")
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except OSError as error:
        print(f"Not kept for the next time: {error}. Another folder: TPU_COMPILER_CACHE=/path/to/it")


def _load(path: Path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _ask(hlo: bytes, text: str, topology: str, layers: list[str], time_limit: float, cache: bool) -> dict:
    """The compiler's answer, from a process of its own or from the cache."""
    told = {"topology": topology, "layers": layers, "divided": text.startswith("module")}  # JAX's, for all chips
    numbered = r"a_inference_\w+?__\.\d+|, metadata=\{[^}]*\}"  # functions and layers, anew each time
    program = re.sub(numbered, "", text)
    reading = Path(__file__).read_bytes().partition(b"# --- the compiler's")[2].partition(b"# --- many reports")[0]
    parts = [program.encode(), topology.encode(), versions().encode(), reading]
    key = hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]
    kept = _cache_folder() / f"{key}.json"
    if cache and (answer := _load(kept)) and len(answer["layers"]) == len(layers):
        return _renamed(answer, layers)
    quiet = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOAD_LIBRARY": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "step.hlo").write_bytes(hlo)
        Path(folder, "told.json").write_text(json.dumps(told))
        began = time.perf_counter()
        try:
            ended = subprocess.run(
                [sys.executable, __file__, "--worker", folder],
                env=os.environ | quiet,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=time_limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Refused(
                f"{time_limit=:g} s were not enough to compile for {topology}: pass more, or a smaller model."
            ) from None
        answer = _load(Path(folder, "answer.json"))
    if answer is None:
        last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        how = f"signal {-ended.returncode}" if ended.returncode < 0 else f"status {ended.returncode}"
        raise Refused(
            f"the compiler's process ended with {how} ({last[0][:300]}): tested are {TESTED}, here is {versions()}."
        )
    answer |= {"compile_seconds": round(time.perf_counter() - began, 2), "layers": layers}
    if cache and "refused" not in answer:  # what is missing may be there the next time
        _store(kept, answer)
    return _renamed(answer, layers)


def _renamed(answer: dict, layers: list[str]) -> dict:
    """An answer about the same model built earlier, with the names that its layers have now."""
    new = dict(zip(answer.pop("layers"), layers, strict=True))
    padding = [(new.get(name, name), *numbers) for name, *numbers in answer.get("padding", [])]
    renamed = [(size, re.sub(r"\w+", lambda n: new.get(n[0], n[0]), t)) for size, t in answer.get("instructions", [])]
    return answer | {"padding": padding, "instructions": renamed}


def _shown(value: object) -> str:
    """Short, and on one line."""
    return " ".join(reprlib.repr(value).split())


def _check_request(tpu, batch, policy) -> None:
    if not isinstance(tpu, str) or tpu.replace("v5litepod", "v5e") not in TOPOLOGIES:
        raise Refused(f"tpu={_shown(tpu)} is unknown: pass one of {', '.join(TOPOLOGIES)}.")
    check_parameters(per_replica_batch_size=batch)
    if policy is not None and (not isinstance(policy, str) or policy not in POLICIES):
        known = ", ".join(map(repr, POLICIES))
        raise Refused(f"policy={_shown(policy)} is unknown: pass {known}, or None for the model's own.")


def _count(model) -> int:
    return sum(math.prod(weight.shape) for weight in model.weights)


def _from_records(model, name, tpu, batch, policy) -> Report | None:
    """The report that was recorded under this name, if there is one."""
    records = next((content for path in RECORDED if (content := _load(path))), [])
    wanted = {"name": name, "tpu": tpu, "per_replica_batch_size": batch, "policy": policy or "float32"}
    found = next((record for record in records if all(record[field] == wanted[field] for field in wanted)), None)
    if found and _is_model(model) and _count(model) != found["parameters"]:
        of = f"a model of {found['parameters']:,} parameters, and this one has {_count(model):,}"
        raise Refused(f"the recorded report of {name!r} is of {of}: pass another name=.")
    return found and Report.from_json(found)


def _record(report: Report) -> None:
    """Into the file that `make notebooks` names, for machines where the compiler cannot be asked."""
    if path := os.environ.get("TPU_COMPILER_RECORD"):
        fields = ("name", "tpu", "per_replica_batch_size", "policy")
        shorter = {"instructions": report.instructions[:6], "padding": report.padding[:6], "compile_seconds": 0.0}
        new = dataclasses.replace(report, recorded=datetime.date.today().isoformat(), **shorter).to_json()
        new, records = json.loads(json.dumps(new)), _load(Path(path)) or []
        if not any(old | {"recorded": new["recorded"]} == new for old in records):
            others = [old for old in records if any(old[field] != new[field] for field in fields)]
            _store(Path(path), sorted([*others, new], key=lambda record: [record[field] for field in fields]))


def compile_for_tpu(
    model,
    tpu: str = "v5e-8",
    per_replica_batch_size: int = 128,
    policy: str | None = None,
    *,
    data=None,
    name: str | None = None,
    time_limit: float = 600,
    cache: bool = True,
    recorded: bool = False,
) -> Report:
    """What the TPU compiler makes of the training step that TPUStrategy would run: does it fit, what bounds it?

    Explained in notebooks/07_ask_the_tpu_compiler.ipynb. `model`: a compiled Keras model (tf-keras or Keras 3), or
    better the function that builds and compiles one. `tpu`: one of `TOPOLOGIES`. `policy`: "float32", "mixed_bfloat16",
    or None for the model's own. `data`: a dataset or a batch (inputs, labels), where the model does not state their
    shapes. `name`: under which the report is recorded, and looked up where the compiler cannot be asked. `time_limit`
    in seconds; `cache=False` compiles anew, `recorded=True` takes a recorded report, if there is one. A step that is
    too large gives a report with `fits=False`. Raises `Unsupported` for what a TPU cannot do, `Refused` for bad input
    and for a missing compiler.
    """
    _check_request(tpu, per_replica_batch_size, policy)
    if not isinstance(time_limit, int | float) or not time_limit > 0:
        raise Refused(f"time_limit={_shown(time_limit)} cannot be used: pass a number of seconds above 0.")
    tpu = tpu.replace("v5litepod", "v5e")
    if not _is_model(model) and not callable(model):
        raise Refused(f"model={_shown(model)} is neither a compiled Keras model nor a function that builds one.")
    named, name = name, name or getattr(model, "name", None) or getattr(model, "__name__", "model")
    why = missing()
    if (recorded or why) and (found := _from_records(model, name, tpu, per_replica_batch_size, policy)):
        return found
    kind, _, shape = TOPOLOGIES[tpu].partition(":")
    replicas = math.prod(map(int, shape.split("x"))) * GENERATIONS[kind].replicas
    with quietly():
        import tensorflow as tf

        tf.config.list_physical_devices()
    if tf.distribute.has_strategy():
        raise Refused(
            "compile_for_tpu() was called inside strategy.scope(): call it outside, it makes a slice of its own."
        )
    strategy = _slice_strategy(replicas)
    model, policy = _build(model, strategy, policy)
    specs, on_jax = _specs(model, data, per_replica_batch_size), _is_on_jax(model)
    hlo, text = _lower_jax(model, specs, replicas) if on_jax else _lower(model, specs, strategy)  # says what cannot be
    if why:
        what = f"{name!r} on {tpu} with per-replica batch {per_replica_batch_size}, {policy}"
        raise Refused(f"the TPU compiler cannot be asked here, and nothing is recorded of {what}: {why}")
    layers = [model.name, *(layer.name for layer in _all_layers(model) if type(layer).__name__ != "InputLayer")]
    answer = _ask(hlo, text, TOPOLOGIES[tpu], layers, time_limit, cache)
    if refused := answer.pop("refused", ""):
        raise Refused(f"{refused}: tested are {TESTED}, here is {versions()}.")
    if (words := answer.get("words", "")) and answer.pop("fatal", False):
        raise _refusal(words, layers)
    same = {"name": name, "tpu": tpu, "policy": policy, "per_replica_batch_size": per_replica_batch_size}
    report = Report.from_json(
        same | answer | {"replicas": replicas, "parameters": _count(model), "compiler": versions()}
    )
    if report.fits and replicas > 1 and not report.all_reduces and model.trainable_variables:
        raise Refused(
            f"the step has no all-reduce: what it is made of has changed (tested: TensorFlow 2.20, 2.21; {TESTED})."
        )
    if report.fits and report.hbm_needed > report.hbm_there:
        words = f"arguments and temporaries together ({_gib(report.hbm_needed)}) exceed the HBM"
        report = dataclasses.replace(report, fits=False, words=words)
    report = dataclasses.replace(report, estimate=_believed(report), hlo=hlo)
    if named:
        _record(report)
    return report


def _believed(report: Report) -> float:
    """The compiler's estimate if it can be: not far below the roofline of all bytes that it counts, nor far above
    computing and moving them one after the other (libtpu 0.0.21.1 says four times that); else 0."""
    chip = report.generation
    compute = report.flops * chip.replicas / (1e12 * chip.tflops)
    memory = report.accessed_bytes * chip.replicas / (1e9 * chip.hbm_gb_per_s)
    return report.estimate if 0.5 * max(compute, memory) <= report.estimate <= 2 * (compute + memory) else 0.0


def measured() -> list[dict]:
    """What came back from TPUs: the files that benchmarks/on_a_tpu.py wrote, from recorded/measured."""
    files = sorted((RECORDED[0].parent / "measured").glob("*.json"))
    return [content for file in files if (content := _load(file)) and content.get("on_a_tpu")]


# --- the compiler's process: the only place with private names of jax and jaxlib


def _worker(folder: Path) -> dict:
    """Compile folder/step.hlo; runs in a process of its own, without TensorFlow. Private names: all under jax._src."""
    told = json.loads((folder / "told.json").read_text())
    try:
        import numpy as np
        from jax._src.interpreters import mlir
        from jax._src.lib import _jax, xla_client
        from jax._src.lib.mlir import ir
        from jax.experimental import topologies

        one = {"chips_per_host_bounds": (1, 1, 1)} if told["topology"].endswith(":1x1") else {}
        devices = topologies.get_topology_desc(platform="tpu", topology_name=told["topology"], **one).devices
        options = xla_client.CompileOptions()
        build = options.executable_build_options
        numbers = np.array([[device.id] for device in devices])
        if told["divided"]:
            numbers, build.use_spmd_partitioning, build.use_shardy_partitioner = numbers.T, True, True
        for each in (options, build):
            each.num_replicas, each.num_partitions = numbers.shape
        build.device_assignment = xla_client.DeviceAssignment.create(numbers)
        client, device_list = devices[0].client, xla_client.DeviceList(tuple(devices))
        to_stablehlo = _jax.mlir.hlo_to_stablehlo
    except (ImportError, AttributeError, TypeError) as error:
        return {"refused": f"this jax has no longer what is needed ({error})"}
    except Exception as error:  # noqa: BLE001 - XlaRuntimeError, whose place has moved
        held = " (another process holds the TPU's lock: end it)" if "lockfile" in str(error) else ""
        return {"refused": f"libtpu does not start{held}: {str(error).splitlines()[0]}"}
    with mlir.make_ir_context():
        step = (folder / "step.hlo").read_bytes()
        module = ir.Module.parse(step.decode() if told["divided"] else to_stablehlo(step))
        _drop_copies(module.body.operations)
        try:
            try:
                program = client.compile(module, device_list, options)
            except TypeError:  # jax 0.7 wants bytes
                program = client.compile(mlir.module_to_bytecode(module), device_list, options)
        except Exception as error:  # noqa: BLE001 - XlaRuntimeError, whose place has moved
            said = str(error).strip()
            too_large = "RESOURCE_EXHAUSTED" in said or "Ran out of memory" in said
            words = re.sub(r"\s+", " ", re.split(r"\n\n| HLO module:", said)[0])[:600]
            return {"fits": False, "words": words} if too_large else {"words": said[:4000], "fatal": True}
    costs, memory = program.cost_analysis(), program.get_compiled_memory_stats()
    costs = costs[0] if isinstance(costs, list) else costs
    text = program.hlo_modules()[0].to_string()
    found = analyse(text, told["layers"][1:])
    unknown = text.count("custom_call_target=")  # each is booked as -1 s
    return {
        "flops": costs.get("flops", 0.0) + found.pop("loop_flops"),
        "accessed_bytes": costs.get("bytes accessed", 0.0),
        "estimate": max(0.0, costs.get("optimal_seconds", 0.0) + unknown),
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "output_bytes": max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes),
        "program_bytes": memory.generated_code_size_in_bytes,
        **found,
    }


def _drop_copies(operations) -> None:
    """hlo_to_stablehlo leaves `mhlo.copy` behind, an identity that the compiler does not know."""
    for operation in list(operations):
        for region in operation.regions:
            for block in region.blocks:
                _drop_copies(block.operations)
        if operation.operation.name == "mhlo.copy":
            operation.operation.results[0].replace_all_uses_with(operation.operation.operands[0])
            operation.operation.erase()


# --- reading a compiled program

_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.-]+) = (.*?) ([\w-]+)\((.*)$")
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "while", "conditional", "call"}
_PARTS = ("dynamic-slice", "gather", "slice")  # read some of their first operand


def sizes(array: str) -> tuple[int, int, bool]:
    """(bytes, padded bytes, in HBM?) of arrays such as "bf16[128,100]{1,0:T(8,128)(2,1)S(1)}", of a tuple together.

    A TPU stores arrays in tiles; T(8,128) means that the last dimension (the first one named in the braces) is filled
    to a multiple of 128, the one before to a multiple of 8 (openxla.org/xla/tiled_layout). S(1) is VMEM, in the chip.
    """
    exact = padded = 0
    in_hbm = True
    for kind, dimensions, layout in _ARRAY.findall(array):
        shape = [int(size) for size in dimensions.split(",") if size]
        order, _, rest = layout.partition(":")
        minor = [shape[int(place)] for place in order.split(",") if place] or [1]
        tile = [int(size) for size in (re.findall(r"T\(([\d,]+)\)", rest) or [""])[0].split(",") if size]
        for place, size in enumerate(reversed(tile)):
            minor += [1] * (place + 1 - len(minor))
            minor[place] = -(-minor[place] // size) * size
        bits = _BITS.get(kind) or int(re.search(r"\d+", kind).group())
        exact += math.prod(shape) * bits // 8
        padded += math.prod(minor) * bits // 8
        in_hbm = in_hbm and not re.search(r"S\([1-9]", rest)
    return exact, padded, in_hbm


def _computations(text: str) -> tuple[dict, str]:
    """{computation: {instruction: (array, opcode, operands, rest, root?)}} and the name of the first to run."""
    found, entry, current = {}, "", {}
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%([\w.-]+) .*\{$", line):
            current = found.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif instruction := _INSTRUCTION.match(line):
            root, name, array, opcode, rest = instruction.groups()
            operands = re.findall(r"%([\w.-]+)", re.split(r"\), |\)$", rest)[0])
            current[name] = (array, opcode, operands, rest, bool(root))
    return found, entry


def _partly_read(computation: dict, number: int) -> int | None:
    """Bytes that a fusion reads of its operand, if it only reads parts of it; None: all."""
    parameter = next(
        (n for n, (_, op, _, rest, _) in computation.items() if op == "parameter" and rest.startswith(f"{number})")), ""
    )
    users = [(array, op, operands) for array, op, operands, *_ in computation.values() if parameter in operands]
    if users and all(op in _PARTS and operands[0] == parameter for _, op, operands in users):
        return sum(sizes(array)[1] for array, *_ in users)
    return None


def _traffic(instruction, computation: dict, computations: dict) -> int:
    """Bytes that an instruction reads from HBM and writes there, padding included."""
    array, opcode, operands, rest, _ = instruction
    if opcode.endswith(("-done", "-update")) or (opcode == "custom-call" and re.search("Bitcast|Allocate", rest)):
        return 0
    if opcode in ("copy-start", "slice-start"):  # moves an array, or a part of one, between HBM and VMEM
        source = computation.get(operands[0], (array,))[0]
        moved = _arrays(array)[opcode == "slice-start"]  # (to, from, …) or ((from), to, …)
        return sizes(moved)[1] * (sizes(source)[2] + sizes(moved)[2])
    called = re.search(r"calls=%([\w.-]+)", rest)
    fused = computations.get(called[1], {}) if called else {}
    total = sum(size for _, size, in_hbm in map(sizes, _arrays(array)) if in_hbm)
    for number, operand in enumerate(operands):
        source = computation.get(operand)
        if source:
            part = _partly_read(fused, number) if fused else None
            read = (
                [part] if part is not None else [size for _, size, in_hbm in map(sizes, _arrays(source[0])) if in_hbm]
            )
            total += sum(read) if part is None or sizes(source[0])[2] else 0
    return total


def _arrays(text: str) -> list[str]:
    return [found.group() for found in _ARRAY.finditer(text)]


def _turns(loop: str, computations: dict) -> int:
    """How often a loop turns: what the compiler says, or the constant that its condition compares with; 0: unknown."""
    if said := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop):
        return int(said[1])
    condition = computations.get(re.search(r"condition=%([\w.-]+)", loop)[1], {})
    root = next((parts for parts in condition.values() if parts[4]), None)
    if root and root[1] == "compare" and "direction=LT" in root[3] and (limit := condition.get(root[2][1])):
        return int(re.match(r"\d+", limit[3]).group()) if limit[1] == "constant" else 0
    return 0


def _products(computation: dict, computations: dict) -> float:
    """FLOPs of a computation's matrix products and convolutions: 2 × outputs × the factors that each sums up."""
    total = 0.0
    for array, opcode, operands, rest, _ in computation.values():
        if opcode == "convolution" and operands[1] in computation:
            kernel = [int(size) for size in _ARRAY.search(computation[operands[1]][0])[2].split(",") if size]
            features = re.search(r"dim_labels=\w+_(\w+)->", rest)[1].index("o")
            outputs = math.prod(int(size) for size in _ARRAY.search(array)[2].split(",") if size)
            total += 2 * outputs * math.prod(kernel) / kernel[features]
        elif inner := re.search(r"calls=%([\w.-]+)", rest):
            total += _products(computations.get(inner[1], {}), computations)
    return total


def analyse(text: str, layers: list[str]) -> dict:
    """HBM traffic, all-reduces, padding by layer, largest instructions and loops of a compiled program's text.

    The compiler counts the FLOPs of a loop's body once; `loop_flops` are those of its other turns.
    """
    computations, entry = _computations(text)
    hbm = stored = padded = loops = 0
    loop_flops = 0.0
    reduces, by_layer, largest, known = [], {}, [], set(layers)
    todo = [(entry, 1)]
    while todo:
        name, turns = todo.pop()
        computation = computations.get(name, {})
        loop_flops += (turns - 1) * _products(computation, computations)
        for instruction in computation.values():
            array, opcode, operands, rest, _ = instruction
            for inner in re.findall(r"(?:body|to_apply|true_computation|false_computation)=%([\w.-]+)", rest):
                if opcode in ("while", "call", "conditional"):
                    count = _turns(rest, computations) if opcode == "while" else 1
                    loops += not count
                    todo.append((inner, turns * (count or 1)))
            if opcode in _FREE:
                continue
            hbm += turns * _traffic(instruction, computation, computations)
            if opcode in ("all-reduce", "all-reduce-start"):
                arrays = [computation[operand][0] for operand in operands if operand in computation]
                reduces.append((turns * sum(sizes(a)[0] for a in arrays), len(arrays)))
            if opcode.endswith(("-start", "-done")) or opcode in ("copy", "custom-call"):
                continue
            path = (re.search(r'op_name="([^"]*)"', rest) or [None, ""])[1]
            exact, filled, _ = sizes(array)
            stored, padded = stored + exact, padded + filled
            if layer := _layer_in(path, known):
                before = by_layer.get(layer, (0, 0))
                by_layer[layer] = (before[0] + exact, before[1] + filled)
            largest.append((filled, f"{' '.join(_arrays(array)[:2])}  {opcode}  {path or '?'}"))
    worst = sorted(((name, *size) for name, size in by_layer.items()), key=lambda row: row[1] - row[2])
    return {
        "hbm_bytes": float(hbm),
        "all_reduces": reduces,
        "padding": worst[:12],
        "stored_bytes": stored,
        "padded_bytes": padded,
        "instructions": sorted(largest, reverse=True)[:12],
        "loops": loops,
        "loop_flops": loop_flops,
    }


# --- many reports


class Sweep(list):
    """Reports of `sweep`, as a table; `recommendation` says which to take and why."""

    @property
    def recommendation(self) -> str:
        """For each TPU, the smallest per-replica batch within 5 % of the most examples/s by the cost model; why."""
        lines = []
        for tpu in dict.fromkeys(report.tpu for report in self):
            fitting = [report for report in self if report.tpu == tpu and report.fits]
            if not fitting:
                lines.append(f"{tpu}: nothing fits; try smaller batches.")
                continue
            most = max(report.cost_examples_per_second for report in fitting)
            near = [report for report in fitting if report.cost_examples_per_second >= 0.95 * most]
            best = min(near, key=lambda report: (report.per_replica_batch_size, -report.cost_examples_per_second))
            batch, share = best.per_replica_batch_size, best.hbm_needed / best.hbm_there
            rates = f"{_rate(best.cost_examples_per_second)} of {_rate(most)}"
            lines.append(
                f"{tpu}: per-replica batch {batch:,}, {best.policy}: the smallest within 5 % of the most examples/s "
                f"(predicted, by the cost model: {rates}); {best.bound_by} bound, {share:.0%} of the HBM."
            )
        return "\n".join(lines)

    def table(self) -> list[list[str]]:
        """Header and rows; with the models' names where there are several."""
        lines = [
            ["tpu", "policy", "per replica", "global", "HBM", "step ≥", "examples/s ≤", "by cost model", "bound by"]
        ]
        for report in self:
            start = [report.tpu, report.policy, f"{report.per_replica_batch_size:,}", f"{report.global_batch_size:,}"]
            share = f"{report.hbm_needed / report.hbm_there:.0%}"
            if report.fits:
                rates = [_rate(report.examples_per_second), _rate(report.cost_examples_per_second)]
                lines.append([*start, share, _amount(report.step_seconds, "s"), *rates, report.bound_by])
            else:
                lines.append([*start, share, "does not fit", "", "", ""])
        if len({report.name for report in self}) > 1:
            names = ["model", *(report.name for report in self)]
            lines = [[name, *line] for name, line in zip(names, lines, strict=True)]
        return lines

    def origin(self) -> str:
        compilers = dict.fromkeys(report.compiler for report in self)
        days = sorted({report.recorded for report in self} - {""})
        when = (
            f", {sum(bool(report.recorded) for report in self)} of {len(self)} recorded on {days[-1]}" if days else ""
        )
        return f"predicted by the TPU compiler ({'; '.join(compilers)}{when}), not measured"

    def __str__(self) -> str:
        lines = self.table()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([self.origin(), *rows])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *rows = self.table()
        made = ["".join(f"<th>{html.escape(text)}</th>" for text in head)]
        made += ["".join(f"<td>{html.escape(text)}</td>" for text in row) for row in rows]
        body = "".join(f"<tr>{row}</tr>" for row in made)
        return f"<div>{html.escape(self.origin())}<table>{body}</table></div>"


def _bar(total: int, shown: bool):
    """A progress bar; where there is no tqdm (papermill brings it), nothing but what is being compiled for."""
    if importlib.util.find_spec("tqdm"):
        from tqdm import tqdm

        return tqdm(total=total, disable=not shown, leave=False, file=sys.stdout, unit="program")
    say = types.SimpleNamespace(set_description=print if shown else str, update=lambda: None)
    return contextlib.nullcontext(say)


def _listed(name: str, values) -> list:
    """One value or several, as a list."""
    if isinstance(values, str | bytes):
        return [values]
    try:
        values = list(itertools.islice(values, MOST + 1))
    except TypeError:  # not several
        return [values]
    if not 0 < len(values) <= MOST:
        there = f"more than {MOST:,}" if values else "empty"
        raise Refused(f"{name} is {there}: pass at least one, and {MOST:,} at most.")
    return values


def sweep(
    model,
    tpus=("v5e-8",),
    batch_sizes=(128,),
    policies=POLICIES,
    *,
    largest: bool = False,
    progress: bool = True,
    **options,
) -> Sweep:
    """Reports for each of `tpus`, `policies` and per-replica `batch_sizes`; `largest=True` adds the largest that fits.

    Used in notebooks/05_tune_batch_size.ipynb and 06. `options` as for `compile_for_tpu`, which says what is raised;
    all names and numbers are checked before the first compilation.
    """
    given = {"tpus": tpus, "batch_sizes": batch_sizes, "policies": policies}
    tpus, sizes_, policies = (_listed(name, values) for name, values in given.items())
    for request in itertools.product(tpus, sizes_, policies):
        _check_request(*request)
    sizes_ = sorted(set(sizes_))
    reports = Sweep()
    with _bar(len(tpus) * len(policies) * len(sizes_), progress) as bar:
        for tpu in tpus:
            for policy in policies:
                bar.set_description(f"compiling for {tpu}")
                for size in sizes_:
                    reports.append(compile_for_tpu(model, tpu, size, policy, **options))
                    bar.update()
                if largest:
                    reports += largest_batch(model, tpu, policy, reports[-len(sizes_) :], **options)
    return reports


def largest_batch(model, tpu: str, policy: str | None, reports=(), *, share: float = 0.1, **options) -> list[Report]:
    """Two reports: of the largest per-replica batch found that fits, and of one at most a tenth larger, that does not.

    Both answers are the compiler's own. `reports` are those already there. Where to ask next follows from the HBM
    needed on both sides, and leaves out at least a quarter of what is in between; all batches are multiples of 8.
    """
    asked = {report.per_replica_batch_size: report for report in reports}
    size = 128
    while True:
        if size not in asked:
            asked[size] = compile_for_tpu(model, tpu, size, policy, **options)
        low = max((n for n in asked if asked[n].fits), default=0)
        high = min((n for n in asked if not asked[n].fits), default=0)
        if (high and high <= low * (1 + share) + 8) or low >= 2**22:
            break
        there = (asked[low] if low else asked[high]).hbm_there
        need = asked[low].hbm_needed if low else 0
        if not high:
            size = int(min(8 * low, max(2 * low, 1.1 * low * there / need)))
        else:
            slope = (asked[high].hbm_needed - need) / (high - low)
            guess = low + (there - need) / slope if slope > 0 else 0
            size = int(min(max(guess, low + (high - low) / 4), high - (high - low) / 4))
        size = max(low + 8, size // 8 * 8)
    known = {report.per_replica_batch_size for report in reports}
    return [asked[size] for size in (low, high) if size in asked and size not in known]


# --- command line


def _from_text(text: str):
    """The model in a .keras file, or the function that "module:function" names."""
    if text.endswith((".keras", ".h5")):
        if not Path(text).is_file():
            raise Refused(f"model={text!r} is not there: pass the path of a .keras file, or module:function.")
        with contextlib.suppress(zipfile.BadZipFile, KeyError), zipfile.ZipFile(text) as file:
            saved_with = json.loads(file.read("metadata.json")).get("keras_version", "")
            os.environ["TF_USE_LEGACY_KERAS"] = "1" if saved_with.startswith("2.") else "0"
        with quietly():
            import tensorflow as tf

        try:
            return tf.keras.models.load_model(text)
        except Exception as error:  # noqa: BLE001 - Keras raises many kinds
            reason = str(error).strip().partition("\n")[0]
            raise Refused(f"model={text!r} cannot be loaded ({reason}): pass module:function instead.") from None
    module, _, function = text.partition(":")
    sys.path.insert(0, os.getcwd())
    with quietly():
        import tensorflow  # noqa: F401
    try:
        return getattr(importlib.import_module(module), function)
    except Exception as error:  # noqa: BLE001 - the module is the user's
        remedy = "pass the path of a .keras file, or module:function as in my_models:build"
        raise Refused(f"model={text!r} cannot be imported ({type(error).__name__}: {error}): {remedy}.") from None


def main(arguments: list[str] | None = None) -> int:
    """0: all fit, 1: one does not fit or is refused by the compiler, 2: bad input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a .keras file of a compiled model, or module:function that builds one")
    parser.add_argument("--tpu", default="v5e-8", help="one or more of the known names, with commas (default: v5e-8)")
    parser.add_argument("--per-replica-batch", default="128", help="one or more sizes, with commas (default: 128)")
    parser.add_argument(
        "--policy", default="model", choices=("model", "both", *POLICIES), help="default: the model's own"
    )
    parser.add_argument("--largest", action="store_true", help="also look for the largest batch that fits")
    parser.add_argument("--time-limit", type=float, default=600, help="seconds for one compilation (default: 600)")
    parser.add_argument("--no-cache", action="store_true", help="compile anew")
    parser.add_argument("--json", action="store_true", help="all figures, for programs")
    given = parser.parse_args(arguments)
    policies = {"model": (None,), "both": POLICIES}.get(given.policy, (given.policy,))
    tpus = given.tpu.split(",")
    try:
        try:
            batches = [int(size) for size in given.per_replica_batch.split(",")]
        except ValueError:
            wrong = given.per_replica_batch
            raise Refused(f"--per-replica-batch {wrong}: pass whole numbers, with commas between.") from None
        for request in itertools.product(tpus, batches, policies):
            _check_request(*request)
        if why := missing():
            raise Refused(f"the TPU compiler cannot be asked here: {why}")
        options = {"largest": given.largest, "time_limit": given.time_limit, "cache": not given.no_cache}
        shown = sys.stderr.isatty() and not given.json
        reports = sweep(_from_text(given.model), tpus, batches, policies, progress=shown, **options)
    except Refused as refused:
        print(f"{type(refused).__name__}: {refused}", file=sys.stderr)
        return 1 if isinstance(refused, Unsupported) else 2
    if given.json:
        derived = ("chips", "global_batch_size", "hbm_needed", "hbm_there", "intensity", "bounds", "bound_by")
        derived += ("step_seconds", "cost_seconds", "examples_per_second", "cost_examples_per_second", "padding_share")
        made = [report.to_json() | {name: getattr(report, name) for name in derived} for report in reports]
        print(json.dumps(made, indent=1, default=list))
    else:
        print(*reports, sep="\n\n") if len(reports) < 3 else print(reports, reports.recommendation, sep="\n\n")
    return int(not all(report.fits for report in reports if report.per_replica_batch_size in batches))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        place = Path(sys.argv[2])
        place.joinpath("answer.json").write_text(json.dumps(_worker(place)))
    else:
        sys.exit(main())
