"""Which collectives an iteration has, by the engines' rules; what they take on a link."""

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.envs.describe import describe
from lockstep.planning.collectives import Link, collectives, sent_bytes
from lockstep.training.costs import Collective

TERMS = 5


def config_of(devices=1, **changes: Any):
    values = {"num_envs": 8, "num_steps": 16, "ppo": {"num_minibatches": 2, "num_epochs": 3}} | changes
    return resolve(Config.model_validate(values), devices)


def of_steps(config, parameters, devices):
    found = collectives(config, describe(config.env), parameters, devices)
    return [x for x in found if x.purpose in ("gradients", "parameters")]


def test_one_device_has_none():
    config = config_of()
    assert collectives(config, describe(config.env), 1000, 1) == ()


def test_a_small_sum_is_one_gather_a_step():
    # six steps; two nodes of 4 * (1000 + 5) bytes
    assert of_steps(config_of(), 1000, 2) == [Collective("all-gather", "gradients", 6.0, 2 * 4 * 1005)]


def test_uneven_ranks_send_more_nodes():
    # 8 shards on 3 ranks: 3, 3, 2 shards, which are 2, 2 and 1 nodes; all send as many as the most
    assert of_steps(config_of(), 1000, 3) == [Collective("all-gather", "gradients", 6.0, 3 * 2 * 4 * 1005)]


def test_a_large_sum_goes_by_slices():
    size = 4.0 * (1_000_000 + TERMS)
    assert of_steps(config_of(), 1_000_000, 4) == [
        Collective("all-to-all", "gradients", 6.0, size),
        Collective("all-gather", "gradients", 6.0, size),
    ]


def test_fast_is_one_all_reduce():
    config = config_of(reduction="fast")
    assert of_steps(config, 1000, 4) == [Collective("all-reduce", "gradients", 6.0, 4 * 1005)]


def test_periods_average_parameters_and_moments():
    config = config_of(reduction="fast", sync_period=4)
    assert of_steps(config, 1000, 4) == [Collective("all-reduce", "parameters", 2.0, 4 * (3000 + TERMS + 2))]


def test_fsdp_gathers_parameters_and_scatters_gradients():
    config = config_of(reduction="fast", fsdp=True)
    kinds = [(x.kind, x.count, x.bytes) for x in of_steps(config, 1000, 4)]
    assert kinds == [("all-gather", 12.0, 4000.0), ("reduce-scatter", 6.0, 1000.0), ("all-reduce", 6.0, 20.0)]


def test_statistics_and_episodes_are_one_gather_each():
    config = config_of(proof={"interval": 0})
    rest = [x for x in collectives(config, describe(config.env), 1000, 2) if x.purpose != "gradients"]
    # of each of 8 shards 3 numbers of 6 minibatches and 8 more, in float64
    assert [(x.purpose, x.count) for x in rest] == [("statistics", 1.0), ("episodes", 1.0)]
    assert rest[0].bytes == 8 * 8 * (3 * 6 + 8)


@pytest.mark.parametrize(
    ("settings", "size", "compiled"),
    [
        # benchmarks/results/plan-examples.json: Humanoid, GridWorldPixels
        (
            {
                "num_envs": 256,
                "num_steps": 256,
                "ppo": {"num_minibatches": 32, "num_epochs": 10},
                "normalize": {"observations": True, "returns": True},
            },
            348,
            4_124_672,
        ),
        ({"num_envs": 4096, "num_steps": 128, "ppo": {"num_minibatches": 4, "num_epochs": 4}}, 0, 112_640),
    ],
)
def test_statistics_of_engine_jax_are_those_of_its_compiled_program(settings, size, compiled):
    config = resolve(Config.model_validate({"engine": "jax", "num_shards": 256, **settings}), 256)
    described: Any = SimpleNamespace(observation=SimpleNamespace(vector_size=size))
    (found,) = (x for x in collectives(config, described, 1000, 256) if x.purpose == "statistics")
    assert found.bytes == compiled


def test_devices_that_own_unequally_many_shards_send_as_much_as_the_one_with_most():
    for engine, numbers in (("torch", 9 * (3 * 6 + 8)), ("jax", 9 * (3 * 6 + 6) + 3)):
        config = config_of(engine=engine)
        (found,) = (x for x in collectives(config, describe(config.env), 1000, 3) if x.purpose == "statistics")
        assert found.bytes == 8 * numbers


@pytest.mark.parametrize(
    ("kind", "sent"), [("all-gather", 750), ("all-to-all", 750), ("all-reduce", 1500), ("reduce-scatter", 3000)]
)
def test_what_a_device_of_four_sends(kind, sent):
    assert sent_bytes(Collective(kind, "", 1, 1000), 4) == sent


def test_what_hosts_send_one_another():
    link = Link(1000.0, 0.0, network=400.0, per_host=4)  # a card of 100 for each device
    ring, exchange = (Collective(kind, "", 1, 800.0) for kind in ("all-gather", "all-to-all"))
    assert link.transfer(ring, 8) == pytest.approx(800 * 7 / 8 / 400)
    # four devices have 4/8 of 800 bytes each for the other host
    assert link.transfer(exchange, 8) == link.transfer(ring, 8, direct=True) == pytest.approx(4 * 400 / 400)
    assert Link(100.0, 0.0, network=400.0, per_host=4).transfer(ring, 8) == pytest.approx(7.0)
