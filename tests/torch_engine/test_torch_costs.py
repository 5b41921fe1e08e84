"""What an iteration of the PyTorch engine costs a rank, against products written out by hand."""

from typing import Any

import pytest

from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.torch_engine.costs import costs

VALUES = {"num_envs": 16, "num_steps": 8, "device": "cuda", "network": {"hidden_sizes": [32, 16]}}
PPO = {"num_minibatches": 2, "num_epochs": 3}
ACTOR = 4 * 32 + 32 * 16 + 16 * 2
CRITIC = 4 * 32 + 32 * 16 + 16 * 1
PARAMETERS = ACTOR + CRITIC + 2 * (32 + 16) + 3


def costs_of(devices=1, **changes: Any):
    return costs(resolve(Config.model_validate(VALUES | {"ppo": PPO} | changes), devices), "cuda", None, devices)


def products(found, name):
    (part,) = [x for x in found.parts if x.name == name]
    return sum(k.flops * k.calls for k in part.kernels if k.kind == "matmul")


def test_products_are_those_of_the_networks():
    found = costs_of()
    assert products(found, "rollout") == 2 * ACTOR * 16 * 8
    # the critic also looks at what follows the last step; the value head is padded to two columns
    assert products(found, "evaluate") == pytest.approx(2 * (ACTOR * 16 * 8 + (CRITIC + 16) * 16 * 9), rel=0.02)
    # forwards, and backwards by weights and inputs but for the first layer's
    forward = ACTOR + CRITIC + 16
    assert products(found, "gradients") == pytest.approx(3 * 16 * 8 * (6 * forward - 2 * 2 * 4 * 32), rel=0.02)


def test_half_of_the_shards_cost_half_as_much():
    one, two = costs_of(1), costs_of(2)
    assert (one.shards, two.shards) == (8, 4)
    for name in ("rollout", "gradients"):
        assert products(one, name) == 2 * products(two, name)
    assert one.parts[3].bytes == two.parts[3].bytes


def test_memory_is_of_what_is_held():
    found = costs_of().memory
    assert found["parameters"] == 4 * PARAMETERS
    assert found["moments"] == 8 * PARAMETERS
    assert found["gradients"] == 4 * PARAMETERS * (2 * 8 + 1)
    assert found["rollout"] == 16 * 8 * (2 * 16 + 40)
    assert costs_of(8).memory["gradients"] == 4 * PARAMETERS * 3


def test_images_are_taken_shard_by_shard():
    found = costs_of(2, env="lockstep/GridWorldPixels-v0", network={"image": {"kind": "simple"}, "hidden_sizes": [8]})
    (part,) = [x for x in found.parts if x.name == "gradients"]
    assert part.grows == "count"
    assert products(found, "gradients") > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"network": {"recurrent": "lstm", "recurrent_size": 8, "hidden_sizes": [8]}},
        {"network": {"recurrent": "gru", "recurrent_size": 8, "hidden_sizes": [8]}},
        {"algorithm": "grpo", "grpo": {"group_size": 2, "kl_coef": 0.1}},
        {"reduction": "fast"},
        {"precision": "bf16"},
        {"ppo": PPO | {"gradient_accumulation": 2}},
    ],
    ids=str,
)
def test_every_kind_of_run_is_counted(changes):
    found = costs_of(2, **changes)
    assert all(part.flops > 0 and part.calls > 0 for part in found.parts)


def test_the_host_steps_environments_unless_the_device_does():
    assert costs_of().host_steps
    assert not costs_of(env={"id": "lockstep/CartPole-v1", "backend": "tensor"}).host_steps
