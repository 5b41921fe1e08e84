"""What XLA makes of whole iterations for accelerators: compiled for them on a machine that has none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks.compiled import collectives_in, doubles_in_loops

ROOT = Path(__file__).parents[2]
LIBTPU = Path(sys.prefix) / "libtpu"
POD = ("v5e:2x4", "cartpole,wide,pixels,lstm,fsdp")
LARGE_POD = ("v5e:16x16", "cartpole")
MOST_TEMPORARIES = {"cartpole": 1e7, "lstm": 2e7, "pixels": 2e7, "wide": 4e7, "fsdp": 4e7}

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def compiled():
    """Programs by (devices, case, reduction), compiled once in processes of their own."""
    if not LIBTPU.is_dir():
        pytest.skip("make test-all installs libtpu, XLA's compiler for TPUs")
    found = {}
    for topology, cases in (POD, LARGE_POD):
        command = [sys.executable, "-m", "benchmarks.compiled", "tpu", topology, "--cases", cases, "--json"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(LIBTPU)])}
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=900)
        assert done.returncode == 0, done.stderr[-2000:]
        for line in done.stdout.splitlines():
            row = json.loads(line)
            found[row["devices"], row["case"], row["reduction"]] = row
    return found


def test_an_exact_step_of_a_small_policy_is_one_gather(compiled):
    row = compiled[8, "cartpole", "exact"]
    assert row["sums"] == "gather"
    assert list(row["in_step"]) == ["all-gather"]
    count, size = row["in_step"]["all-gather"]
    assert count == 1
    assert size == pytest.approx(8 * 4 * row["parameters"], rel=0.01)


@pytest.mark.parametrize("case", ["wide", "lstm"])
def test_an_exact_step_of_a_large_policy_moves_two_parameters_for_each(compiled, case):
    row = compiled[8, case, "exact"]
    assert row["sums"] == "slices"
    assert {kind: count for kind, (count, _) in row["in_step"].items()} == {"all-to-all": 1, "all-gather": 1}
    assert sum(size for _, size in row["in_step"].values()) <= 2.1 * 4 * row["parameters"]


def test_on_a_large_pod_a_small_policy_is_sliced_too(compiled):
    row = compiled[256, "cartpole", "exact"]
    assert row["sums"] == "slices"
    assert row["in_step"]["all-to-all"][1] < 256 * 4 * row["parameters"] / 20


@pytest.mark.parametrize("case", ["8 cartpole", "8 wide", "8 pixels", "8 lstm", "256 cartpole"])
def test_a_fast_step_is_one_all_reduce(compiled, case):
    devices, name = case.split()
    row = compiled[int(devices), name, "fast"]
    assert list(row["in_step"]) == ["all-reduce"]
    count, size = row["in_step"]["all-reduce"]
    assert count == 1
    assert size == pytest.approx(4 * row["parameters"], rel=0.02)


def test_fsdp_scatters_gradients(compiled):
    step = compiled[8, "fsdp", "fast"]["in_step"]
    assert {kind: count for kind, (count, _) in step.items()} == {"all-gather": 2, "reduce-scatter": 2, "all-reduce": 1}


def test_nothing_calls_the_host_nor_computes_twice_as_wide_in_a_loop_over_time(compiled):
    assert len(compiled) == 11
    for row in compiled.values():
        assert row["callbacks"] == 0
        assert row["doubles"] == 0


def test_the_state_keeps_its_memory_and_a_device_needs_little_more(compiled):
    for row in compiled.values():
        assert row["donated"] >= row["state"]
        assert row["temporaries"] < MOST_TEMPORARIES[row["case"]]


def test_wide_numbers_in_a_loop_over_time_would_be_seen():
    def over_time(x, inner):
        return jax.lax.scan(lambda c, now: (c, inner(now)), x[0], x)[1]

    def wide(now):
        return (now.astype(jnp.float64) * 2.0).astype(jnp.float32)

    with jax.enable_x64(True):
        x = jax.ShapeDtypeStruct((4,), jnp.float32)
        assert doubles_in_loops(jax.make_jaxpr(lambda x: over_time(x, wide))(x).jaxpr) == 2
        assert doubles_in_loops(jax.make_jaxpr(lambda x: over_time(x, lambda now: now * 2))(x).jaxpr) == 0
        assert doubles_in_loops(jax.make_jaxpr(wide)(x).jaxpr) == 0


def test_collectives_of_a_text_are_counted():
    text = """
      %a = f32[8,100]{1,0} all-gather(%x), metadata={op_name="jit(f)/while/body/closed_call/all_gather"}
      %b = (f32[10]{0}, f32[10]{0}) all-reduce(%y, %z), metadata={op_name="jit(f)/gather"}
      %c = f32[10]{0} add(%y, %z)
      %d = f32[5]{0} all-gather(%v), frontend_attributes={chain_id="0"}
      %e = f32[5]{0} all-gather(%v), frontend_attributes={chain_id="0"}
    """
    every, step = collectives_in(text)
    assert every == {"all-gather": (2, 3220), "all-reduce": (1, 80)}
    assert step == {"all-gather": (1, 3200)}
