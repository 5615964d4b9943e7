"""Hold the TPU compiler's predictions against published measurements, and time how long it takes to ask.

    python benchmarks/compiler.py            # ten minutes on 2 cores; writes benchmarks/compiler.md
    python benchmarks/compiler.py --record   # also the predictions that benchmarks/on_a_tpu.py shows beside its own

A prediction is a bound: at least what was measured, and not more than twice as much. The program fails if it is not.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import on_a_tpu

import tpu_compiler

# ResNet-50 on images of 224 × 224 in bfloat16: slice, per-replica batch, images/s, where, and what differs.
LOGS = "computed from the logs of github.com/mlcommons/training_results"
PUBLISHED = [
    ("v2-8", 128, 3186, "RiseML 2018 (blog.riseml.com, TPUv2 against V100)", "TF 1.7, synthetic data"),
    ("v2-8", 128, 4473, f"MLPerf 0.5, 2018, {LOGS}_v0.5, google/cloud_v2.8", "TF 1.12"),
    ("v3-8", 128, 7460, f"MLPerf 0.5, 2018, {LOGS}_v0.5, google/cloud_v3.8", "TF 1.12"),
    ("v3-32", 128, 32584, f"MLPerf 0.7, 2020, {LOGS}_v0.7, tpu-v3-32-TF2.0", "TF 2.0, LARS"),
    ("v4-16", 128, 27825, f"MLPerf 0.7, 2020, {LOGS}_v0.7, tpu-v4-16-TF", "TF 1, LARS, space-to-depth stem"),
]
LIMITS = {"the kit's MLP": 5, "the kit's CNN": 15, "ResNet-50": 120}  # seconds for one compilation on 2 cores


def resnet():
    import tensorflow as tf

    model = tf.keras.applications.ResNet50(weights=None, classifier_activation=None)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model


MODELS = {name: lambda name=name: on_a_tpu.compiled(name) for name in on_a_tpu.MODELS} | {"ResNet-50": resnet}


def held_against_published() -> list[str]:
    lines = ["| slice | global batch | predicted, at most | recorded | ratio | source | what differs |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for tpu, batch, images_per_second, source, differs in PUBLISHED:
        report = tpu_compiler.compile_for_tpu(resnet, tpu, batch, "mixed_bfloat16", name="ResNet-50")
        ratio = report.examples_per_second / images_per_second
        figures = f"{report.examples_per_second:,.0f} | {images_per_second:,} | {ratio:.2f}"
        lines.append(f"| {tpu} | {report.global_batch_size:,} | {figures} | {source} | {differs} |")
        print(lines[-1], flush=True)
        if not 1 <= ratio <= 2:
            raise SystemExit(f"{tpu}: the prediction is {ratio:.2f} times what was measured, not 1 to 2 times.")
    return lines


def timed() -> list[str]:
    lines = [
        "| model on v5e-8, per-replica batch 128 | policy | compiled in, measured | limit |",
        "| --- | --- | --- | --- |",
    ]
    for name, build in MODELS.items():
        for policy in tpu_compiler.POLICIES:
            report = tpu_compiler.compile_for_tpu(build, "v5e-8", 128, policy, cache=False)
            lines.append(f"| {name} | {policy} | {report.compile_seconds:.1f} s | {LIMITS[name]} s |")
            print(lines[-1], flush=True)
    return lines


def record() -> None:
    batches = [int(size) for size in on_a_tpu.BATCHES["TPU"].split(",")]
    for name in on_a_tpu.MODELS:
        print(tpu_compiler.sweep(MODELS[name], ["v5e-1", "v5e-8", "v6e-1"], batches, name=name), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="into recorded/predictions.json")
    if parser.parse_args().record:
        os.environ["TPU_COMPILER_RECORD"] = str(tpu_compiler.RECORDED[0])
        record()
    if why := tpu_compiler.missing():
        sys.exit(f"Refused: the TPU compiler cannot be asked here: {why}")
    where = f"{os.cpu_count()} CPU cores, {tpu_compiler.versions()}, {datetime.date.today().isoformat()}"
    compared, seconds = held_against_published(), timed()
    ratios = [float(line.split("|")[5]) for line in compared[2:]]
    typical = math.exp(sum(map(math.log, ratios)) / len(ratios))
    text = [
        "# Predictions held against published measurements",
        "",
        f"Written by `python benchmarks/compiler.py` (recorded: {where}).",
        "",
        "ResNet-50 on images of 224 × 224 in `mixed_bfloat16`, images/s of the whole slice. *Predicted* is the bound",
        "that `compile_for_tpu` gives for Keras's ResNet-50 with SGD; *recorded* is what others measured on TPUs. None",
        f"of it was measured here. Geometric mean of the ratios: {typical:.2f}.",
        "",
        *compared,
        "",
        "No published training throughput of a single v5e, v5p or v6e slice was found that Keras could repeat.",
        "",
        "## Time to ask, without the cache",
        "",
        *seconds,
        "",
    ]
    Path(ROOT / "benchmarks" / "compiler.md").write_text("\n".join(text))
    print("written: benchmarks/compiler.md")


if __name__ == "__main__":
    main()
