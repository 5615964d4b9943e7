"""connect(): what it finds, what it says, what it falls back to. Each case in a process of its own.

There is no TPU here. The cases with a chip fake it at the outermost edge only, the device file and the environment;
TensorFlow's own attempt to start it, and its failure, are real.
"""

from __future__ import annotations

import pytest
from test_helpers import run_python

CONNECT = """
import os, tpu_helpers
with tpu_helpers.quietly():
    import tensorflow as tf
{between}
try:
    strategy = tpu_helpers.connect({arguments})
    print("REPLICAS", strategy.num_replicas_in_sync, type(strategy).__name__)
{after}
except tpu_helpers.Refused as error:
    print("REFUSED", error)
"""


def connect(arguments="", between="", after="", **environment):
    code = CONNECT.format(arguments=arguments, between=between, after=after)
    result = run_python(code, **({"TPU_NAME": ""} | environment))
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("replicas", [1, 3, 12])
def test_without_a_tpu_it_says_why_and_what_mends_it(replicas):
    said = connect(f"virtual_replicas={replicas}")
    assert "No TPU: no chip at /dev/accel0 or /dev/vfio/0" in said
    assert f"Training on {replicas} virtual replica(s)" in said
    assert "pip install tensorflow-tpu" in said
    assert f"REPLICAS {replicas} MirroredStrategy" in said


@pytest.mark.parametrize("how", ["argument", "environment", "device file"])
def test_a_tpu_that_does_not_start_is_named_with_tensorflows_own_words(how):
    said = {
        "argument": lambda: connect("tpu='local', virtual_replicas=4"),
        "environment": lambda: connect("virtual_replicas=4", TPU_NAME="local"),
        "device file": lambda: connect("virtual_replicas=4", between="os.path.exists = '/dev/accel0'.__eq__"),
    }[how]()
    assert "No TPU: TPU 'local' did not start, NotFoundError: " in said
    assert "ConfigureDistributedTPU" in said
    assert "REPLICAS 1" in said


def test_replicas_asked_for_too_late_are_refused():
    said = connect("virtual_replicas=2", between="tf.constant(1) + 1")
    assert "REFUSED virtual_replicas=2 comes too late" in said
    assert "restart the kernel" in said


def test_one_replica_is_never_too_late():
    assert "REPLICAS 1" in connect(between="tf.constant(1) + 1")


def test_connecting_again_may_ask_for_another_number():
    after = "    print([tpu_helpers.connect(virtual_replicas=n).num_replicas_in_sync for n in (8, 1, 2)])"
    assert "[8, 1, 2]" in connect("virtual_replicas=2", between="", after="    tf.constant(1) + 1\n" + after)


@pytest.mark.parametrize("arguments", ["virtual_replicas=0", "virtual_replicas=2.0", "virtual_replicas=65", "tpu=3"])
def test_bad_arguments_are_refused_before_tensorflow_is_needed(arguments):
    said = connect(arguments)
    assert said.startswith(f"REFUSED {arguments}")


def test_virtual_replicas_are_real_ones():
    """Each has its own variable, and an all-reduce gives everyone the sum."""
    after = """
    with strategy.scope():
        variable = tf.Variable(1.0)
    assert len({copy.device for copy in strategy.experimental_local_results(variable)}) == 4
    @tf.function
    def total():
        def each():
            context = tf.distribute.get_replica_context()
            return context.all_reduce("SUM", tf.cast(context.replica_id_in_sync_group, tf.float32))
        return strategy.run(each)
    print("SUMS", [float(value) for value in strategy.experimental_local_results(total())])"""
    assert "SUMS [6.0, 6.0, 6.0, 6.0]" in connect("virtual_replicas=4", after=after)
