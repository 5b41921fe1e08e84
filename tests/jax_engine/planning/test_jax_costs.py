"""What an iteration of the JAX engine costs a device, of the program that is compiled here."""

from typing import Any

import jax
import numpy as np
import pytest

from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.jax_engine.planning.costs import needed_bytes
from lockstep.jax_engine.shards.normalizers import Moments
from lockstep.jax_engine.statistics import UNROLLED_SHARDS, _merged
from lockstep.planning.counting import LIBTPU, can_compile, count_costs

VALUES = {"engine": "jax", "num_envs": 16, "num_steps": 8, "ppo": {"num_minibatches": 2, "num_epochs": 3}}
VALUES |= {"network": {"hidden_sizes": [32, 16]}}
ACTOR = 4 * 32 + 32 * 16 + 16 * 2
CRITIC = 4 * 32 + 32 * 16 + 16 * 1
PARAMETERS = ACTOR + CRITIC + 2 * (32 + 16) + 3


@pytest.fixture(scope="module")
def costs():
    """Of the first of two devices, 4 shards of 2 environments, which the program steps itself."""
    config = resolve(Config.model_validate(VALUES | {"env": "lockstep/CartPole-v1"}), 2)
    return count_costs({2: config}, "cpu", None)


def products(found, name):
    (part,) = [x for x in found.parts if x.name == name]
    return sum(k.flops * k.calls for k in part.kernels if k.kind == "matmul")


def test_products_are_those_of_the_networks(costs):
    assert products(costs, "rollout") == pytest.approx(2 * ACTOR * 8 * 8, rel=0.05)
    forward = ACTOR + CRITIC
    assert products(costs, "gradients") == pytest.approx(3 * 8 * 8 * (6 * forward - 2 * 2 * 4 * 32), rel=0.1)


def test_a_device_has_its_own_shards_and_no_collective(costs):
    assert costs.shards == 4
    assert costs.collectives == ()
    assert not costs.host_steps
    assert {part.name: part.grows for part in costs.parts} == {
        "rollout": "count",
        "evaluate": "count",
        "gradients": "count",
        "optimizer": "not",
    }


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_the_cpus_program_in_the_place_of_another_computes_what_that_would(reduction):
    """A CPU takes the gradient of so many samples in parts of 256, which the walk would count as so many shards."""
    many = {"env": "lockstep/CartPole-v1", "num_envs": 1024, "num_shards": 2, "reduction": reduction}
    config = resolve(Config.model_validate(VALUES | many), 1)
    whole = 3 * 1024 * 8 * (6 * (ACTOR + CRITIC) - 2 * 2 * 4 * 32)
    assert products(count_costs({1: config}, "cuda", None), "gradients") == pytest.approx(whole, rel=0.1)
    if reduction == "exact":
        assert products(count_costs({1: config}, "cpu", None), "gradients") < whole / 2


def test_memory_begins_with_parameters_and_moments(costs):
    assert costs.memory["parameters"] == 4 * PARAMETERS
    assert costs.memory["moments"] == 8 * PARAMETERS
    assert all(size >= 0 for size in costs.memory.values())
    assert costs.memory["rollout"] > 0


def test_statistics_of_many_shards_are_merged_where_only_shapes_are_known():
    """As in a plan: shapes alone lie there as float32."""
    moments: Any = Moments(*(jax.ShapeDtypeStruct(shape, np.float32) for shape in ((), (3,), (3,))))  # pyright: ignore[reportArgumentType]
    parts = jax.ShapeDtypeStruct((UNROLLED_SHARDS + 1, 3, 3), np.float32)
    found = jax.eval_shape(_merged, moments, parts)
    assert [x.shape for x in found] == [(), (3,), (3,)]


def test_what_an_engine_refuses_is_said_in_one_line():
    config = resolve(Config.model_validate(VALUES | {"normalize": {"observations": True}}), 1)
    images = config.model_copy(update={"env": config.env.model_copy(update={"id": "lockstep/GridWorldPixels-v0"})})
    with pytest.raises(ValueError, match=r"^normalize.observations: lockstep/GridWorldPixels-v0 observes no numbers"):
        count_costs({1: images}, "cpu", None)


def test_what_a_compiler_says_of_too_large_programs_is_read():
    said = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 33.5G of 15.75G hbm. Exceeded hbm capacity"
    assert needed_bytes(said, 1e9) == 33.5 * 1024**3
    beside = (
        "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (16.01G) exceeds available HBM (15.75G)."
    )
    assert needed_bytes(beside, 1e9) == 16.01 * 1024**3 + 1e9
    assert needed_bytes("INTERNAL: something else", 1e9) is None


@pytest.mark.long
def test_a_tpus_program_has_the_collectives_of_the_rules():
    """Compiled for a slice that isn't there: by gather, one an optimiser step."""
    if not LIBTPU.is_dir():
        pytest.skip("make test-all installs libtpu, XLA's compiler for TPUs")
    assert can_compile("jax", "tpu")
    config = resolve(Config.model_validate(VALUES | {"env": "lockstep/CartPole-v1", "device": "tpu"}), 8)
    found = count_costs({8: config}, "tpu", "v5e:2x4")
    assert found.source == "compiled for 8 x TPU v5 lite"
    steps = [x for x in found.collectives if x.count == 6.0]
    assert [(x.kind, x.bytes) for x in steps] == [("all-gather", 8 * 4 * (PARAMETERS + 5))]


def test_heads_are_float32_where_the_rest_is_bfloat16():
    config = resolve(Config.model_validate(VALUES | {"env": "lockstep/CartPole-v1", "precision": "bf16"}), 1)
    found, samples = count_costs({1: config}, "cpu", None), 16 * 8
    assert products(found, "rollout") == pytest.approx(2 * 16 * 2 * samples, rel=0.05)
    # the gradient by what goes into the value's only column is no product
    assert products(found, "gradients") == pytest.approx(3 * samples * (6 * 16 * 2 + 4 * 16), rel=0.15)
    rest = sum(k.flops * k.calls for x in found.parts for k in x.kernels if k.kind == "matmul_bf16")
    assert rest > 5 * products(found, "gradients")
