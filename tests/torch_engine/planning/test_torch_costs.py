"""What an iteration of the PyTorch engine costs a rank, against products written out by hand."""

import json
from typing import Any

import pytest
import torch

from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.envs.arrays import ARRAY_ENVIRONMENTS
from lockstep.torch_engine.envs.tensor_arrays import TensorArrays
from lockstep.torch_engine.planning.costs import costs
from lockstep.training.costs import Costs

VALUES = {"num_envs": 16, "num_steps": 8, "device": "cuda", "network": {"hidden_sizes": [32, 16]}}
PPO = {"num_minibatches": 2, "num_epochs": 3}
ACTOR = 4 * 32 + 32 * 16 + 16 * 2
CRITIC = 4 * 32 + 32 * 16 + 16 * 1
PARAMETERS = ACTOR + CRITIC + 2 * (32 + 16) + 3


def costs_of(devices=1, platform="cuda", fewer: tuple[int, ...] = (), **changes: Any):
    values = VALUES | {"ppo": PPO, "device": platform} | changes
    run = Config.model_validate(values)
    return costs({n: resolve(run, n) for n in (*fewer, devices)}, platform, None)


def products(found, name):
    kernels = [k for x in found.parts if x.name == name for k in x.kernels]
    return sum(k.flops * k.calls for k in kernels if k.kind == "matmul")


def of_part(found, name, shards, kind="bytes"):
    """What a part costs a device of so many shards: ``bytes``, or ``calls`` of kernels."""
    return sum(getattr(x, kind) for x in found.of_shards(shards) if x.name == name)


def test_products_are_those_of_the_networks():
    found = costs_of()
    assert products(found, "rollout") == 2 * ACTOR * 16 * 8
    # the critic also looks at what follows the last step; the value head is padded to two columns
    assert products(found, "evaluate") == pytest.approx(2 * (ACTOR * 16 * 8 + (CRITIC + 16) * 16 * 9), rel=0.02)
    # forwards, and backwards by weights and inputs but for the first layer's; sums over rows by biases, and of the
    # loss's five terms with what goes back, are products with ones
    forward, sums = ACTOR + CRITIC + 16, 2 * (32 + 16 + 2) + 2 * 5
    assert products(found, "gradients") == 3 * 16 * 8 * (6 * forward - 2 * 2 * 4 * 32 + 2 * sums)


def test_half_of_the_shards_cost_half_as_much():
    one, two = costs_of(1), costs_of(2)
    assert (one.shards, two.shards) == (8, 4)
    for name in ("rollout", "gradients"):
        assert products(one, name) == 2 * products(two, name)
    assert of_part(one, "optimizer", 4) == of_part(two, "optimizer", 4)


def test_memory_is_of_what_is_held():
    found = costs_of().memory
    assert found["parameters"] == 4 * PARAMETERS
    assert found["moments"] == 8 * PARAMETERS
    assert found["gradients"] == 4 * PARAMETERS * (2 * 8 + 1)
    assert found["rollout"] == 16 * 8 * (3 * 16 + 40)
    assert costs_of(8).memory["gradients"] == 4 * PARAMETERS * 3


IMAGES: dict[str, Any] = {
    "env": "lockstep/GridWorldPixels-v0",
    "network": {"image": {"kind": "simple"}, "hidden_sizes": [8]},
}


@pytest.mark.parametrize("changes", [{}, IMAGES, {"reduction": "fast", "fsdp": True}])
def test_memory_of_fewer_devices_is_that_of_a_plan_for_so_many(changes):
    found = costs_of(8, fewer=(1, 2), **changes)
    assert found.fewer == {n: costs_of(n, **changes).memory for n in (1, 2)}
    assert Costs.of_json(json.loads(json.dumps(found.to_json()))) == found


def test_gradients_of_images_are_taken_shard_by_shard_on_a_gpu():
    found = costs_of(2, **IMAGES)
    assert [x.grows for x in found.parts if x.name == "gradients"] == ["count", "size"]
    assert [x.grows for x in found.parts if x.name == "evaluate"] == ["count", "size"]
    assert products(found, "gradients") > 0


def test_gradients_of_images_are_branches_of_a_graph_that_hold_what_each_takes():
    found, launched = costs_of(**IMAGES), costs_of(cuda_graphs=False, **IMAGES)
    parts = [x for x in found.parts if x.grows == "count"]
    assert [(x.name, x.beside) for x in parts] == [("evaluate", 1), ("gradients", 8)]
    size = found.memory["parameters"]
    assert (found.memory["gradients"], launched.memory["gradients"]) == (size * (2 * 8 + 8), size * (2 + 8))
    assert found.memory["activations"] > 6 * launched.memory["activations"]
    assert costs_of(2, **IMAGES).memory["gradients"] == size * (2 + 4)  # launched, on several ranks
    many: dict[str, Any] = {"num_envs": 65536, **IMAGES}
    assert [x.beside for x in costs_of(**many).parts if x.name == "gradients"] == [1, 1]


def test_a_step_of_a_rollout_takes_the_images_of_all_shards():
    exact, fast = costs_of(**IMAGES), costs_of(reduction="fast", **IMAGES)
    assert of_part(exact, "rollout", 8, "calls") == of_part(fast, "rollout", 8, "calls")
    assert of_part(exact, "rollout", 8, "calls") == of_part(exact, "rollout", 1, "calls")
    assert of_part(exact, "rollout", 8, "flops") == 8 * of_part(exact, "rollout", 1, "flops")
    half = costs_of(platform="cpu", precision="bf16", **IMAGES)
    assert [x.grows for x in half.parts if x.name == "rollout"] == ["count"]


def test_a_single_image_goes_through_the_networks_twice():
    found, alone = costs_of(1, num_envs=8, **IMAGES), costs_of(8, num_envs=8, **IMAGES)
    one, two, four = (of_part(found, "rollout", n, "flops") for n in (1, 2, 4))
    assert one == two == four / 2
    assert [of_part(alone, "rollout", n, "flops") for n in (1, 2, 4)] == [one, two, four]


def test_gradients_of_images_are_taken_of_several_shards_at_once_on_a_cpu():
    here, there = costs_of(platform="cpu", **IMAGES), costs_of(cuda_graphs=False, **IMAGES)
    assert of_part(here, "gradients", 8, "calls") < of_part(there, "gradients", 8, "calls") / 2
    assert products(here, "gradients") == pytest.approx(products(there, "gradients"), rel=0.05)
    assert here.memory["activations"] > there.memory["activations"]
    lone: dict[str, Any] = {"num_envs": 8, "num_steps": 4, "ppo": PPO | {"num_minibatches": 4}}  # one image of a shard
    half: dict[str, Any] = {"precision": "bf16"}
    for changes in (lone, half):
        found = costs_of(platform="cpu", **IMAGES, **changes)
        assert found.memory["gradients"] == found.memory["parameters"] * (2 + 8)


def test_shards_too_large_to_be_computed_twice_are_taken_one_by_one():
    large: dict[str, Any] = {"network": {"hidden_sizes": [1024, 1024]}, "num_envs": 1024}
    fast = {**large, "reduction": "fast"}
    for changes, grows in (({}, "size"), (large, "count"), (fast, "size")):
        assert [x.grows for x in costs_of(**changes).parts if x.name == "rollout"] == [grows]


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


TENSOR = {"id": "lockstep/CartPole-v1", "backend": "tensor"}


def test_environments_on_the_device_are_stepped_there():
    def stepped(steps, **changes):
        found = costs_of(num_steps=steps, env=TENSOR, **changes)
        return of_part(found, "environments", 8, "calls"), of_part(found, "environments", 8)

    once, more = stepped(8), stepped(16)
    assert more == (2 * once[0], 2 * once[1])
    assert once[0] / 8 > 50  # physics of some 30 operations, the episodes' random numbers, and what is kept
    assert once[1] / 8 > 16 * 4 * 4 * 4  # at least four copies of sixteen rows of four floats
    normalized = stepped(8, normalize={"observations": True})
    assert normalized[0] > once[0]
    assert of_part(costs_of(), "environments", 8, "calls") == 0  # the host's


@pytest.mark.parametrize("name", ARRAY_ENVIRONMENTS)
def test_every_array_environment_is_counted(name):
    network = {"image": {"kind": "simple"}, "hidden_sizes": [8]} if "Pixels" in name else {"hidden_sizes": [8]}
    found = costs_of(8, env={"id": name, "backend": "tensor"}, num_steps=2, network=network, ppo=PPO)
    assert found.notes == ()
    assert of_part(found, "environments", 1, "calls") > 0


def test_no_environment_is_drawn_for_when_steps_are_counted(monkeypatch):
    """A plan may be of millions of environments, and each draw takes some microseconds."""

    class NoDraws:
        def generator(self, *key):
            raise AssertionError(f"drawn: {key}")

    monkeypatch.setattr("lockstep.torch_engine.envs.tensor_arrays.KeyedDraws", NoDraws)
    assert of_part(costs_of(env=TENSOR), "environments", 8, "calls") > 0
    with pytest.raises(AssertionError, match="drawn"):
        TensorArrays(ARRAY_ENVIRONMENTS[TENSOR["id"]](), 0, range(4), 500, torch.device("cpu"))


def test_a_simulator_is_left_out_and_noted(monkeypatch):
    monkeypatch.setattr("lockstep.torch_engine.planning.costs.ARRAY_ENVIRONMENTS", {})
    found = costs_of(env=TENSOR)
    assert of_part(found, "environments", 8, "calls") == 0
    assert found.notes == (
        "lockstep/CartPole-v1: what its own steps launch on the device can't be counted, and isn't in the times",
    )
    assert Costs.of_json(json.loads(json.dumps(found.to_json()))) == found


def test_advantages_are_taken_back_step_by_step():
    few, many = (of_part(costs_of(num_steps=n), "evaluate", 8, "calls") for n in (8, 16))
    assert many - few == pytest.approx(8 * 5, abs=8)  # five kernels a step


@pytest.mark.parametrize(("shards", "floats", "rounds"), [(1, 0, 0), (2, 3, 1), (4, 9, 2), (8, 21, 3)])
def test_a_device_adds_the_gradients_of_its_shards(shards, floats, rounds):
    """Each addition reads two gradients and writes one, of parameters and five terms."""
    exact, fast = costs_of(), costs_of(reduction="fast")
    steps = 3 * 2
    both = [of_part(x, "optimizer", shards) for x in (exact, fast)]
    assert both[0] - both[1] == pytest.approx(steps * floats * 4 * (PARAMETERS + 5))
    both = [of_part(x, "optimizer", shards, "calls") for x in (exact, fast)]
    assert both[0] - both[1] == pytest.approx(steps * rounds)


def test_a_step_takes_its_minibatch_and_its_decisions():
    found, steps = costs_of(), 3 * 2
    assert of_part(found, "optimizer", 8, "calls") / steps > 20  # what is decided on the device
    taken = found.parts[4]
    # observations, actions, log-probabilities, advantages, values and returns, the indices, and the normalisation
    assert taken.calls / steps == 4 + 6 + 2
    assert taken.grows == "size"


NORMALIZED = {"normalize": {"observations": True}}


@pytest.mark.parametrize(
    ("changes", "copies"),
    [
        ({}, 3),
        ({"num_shards": 1}, 3),
        (NORMALIZED, 3),
        ({"env": TENSOR}, 4),
        ({"env": TENSOR, **NORMALIZED}, 5),
        ({"platform": "cpu"}, 3),
        ({"platform": "cpu", "num_shards": 1}, 2),
        ({"platform": "cpu", **NORMALIZED}, 4),
        ({"platform": "cpu", "env": TENSOR}, 4),
    ],
    ids=str,
)
def test_observations_are_held_several_times(changes, copies):
    assert costs_of(**changes).memory["rollout"] == 16 * 8 * (copies * 16 + 40)


def test_images_are_held_twice_on_a_cpu():
    here, there = (costs_of(platform=name, **IMAGES).memory["rollout"] for name in ("cpu", "cuda"))
    assert there - here == (here - 16 * 8 * 40) / 2


def test_fsdp_holds_whole_gradients_and_the_parameters_that_it_gathered():
    found = costs_of(4, reduction="fast", fsdp=True).memory
    assert found["parameters"] == PARAMETERS
    assert found["gathered"] == 4 * PARAMETERS
    assert found["gradients"] == 3 * 4 * PARAMETERS
    assert not costs_of(4, reduction="fast").memory["gathered"]


def test_a_loss_of_ones_own_is_counted_unless_it_decides_by_numbers():
    own = costs_of(ppo=PPO | {"loss": "users_losses:penalised"})
    assert of_part(own, "gradients", 8, "calls") > of_part(costs_of(ppo=PPO), "gradients", 8, "calls")
    with pytest.raises(ValueError, match=r"^ppo\.loss: users_losses:branching can't be counted on shapes alone \("):
        costs_of(ppo=PPO | {"loss": "users_losses:branching"})


def kinds(found, name):
    """Operations of a part's products by kind."""
    kernels = [k for x in found.parts if x.name == name for k in x.kernels if k.kind != "vector"]
    return {kind: sum(k.flops * k.calls for k in kernels if k.kind == kind) for kind in {k.kind for k in kernels}}


def test_heads_are_float32_where_the_rest_is_bfloat16():
    full, half = costs_of(), costs_of(precision="bf16")
    assert kinds(full, "rollout") == {"matmul": 2 * ACTOR * 16 * 8}
    head = 16 * 2
    assert kinds(half, "rollout") == {"matmul_bf16": 2 * (ACTOR - head) * 16 * 8, "matmul": 2 * head * 16 * 8}
    # gradients of both heads (the value's padded to two columns), and sums over rows, see above
    sums = 2 * (32 + 16 + 2) + 2 * 5
    assert kinds(half, "gradients")["matmul"] == 3 * 16 * 8 * (6 * 2 * head + 2 * sums)
    assert sum(kinds(half, "gradients").values()) == products(full, "gradients")


@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_recurrent_and_convolutional_layers_are_bfloat16_too(core):
    for changes, outputs in (
        ({"network": {"recurrent": core, "recurrent_size": 8, "hidden_sizes": [8]}}, 2),
        ({**IMAGES}, 4),
    ):
        found = kinds(costs_of(precision="bf16", **changes), "rollout")
        assert found["matmul"] == 2 * 8 * outputs * 16 * 8
        assert found["matmul_bf16"] > 0


def test_a_users_network_is_bfloat16_as_a_whole():
    found = costs_of(precision="bf16", network={"custom": "users_nets:Tiny"})
    assert set(kinds(found, "rollout")) == {"matmul_bf16"}


def test_states_are_forgotten_once_a_step_beside_the_sampling_of_actions():
    core: dict[str, Any] = {"network": {"recurrent": "gru", "recurrent_size": 8, "hidden_sizes": [8]}}

    def forgotten(shards=8, **changes):
        return [x.calls for x in costs_of(**changes).of_shards(shards) if not x.sampling]

    assert forgotten(**core) == [7.0]  # marks go up with the observations of the step after
    assert forgotten(env=TENSOR, **core) == [8.0]
    large: dict[str, Any] = {"network": core["network"] | {"recurrent_size": 1024}, "num_envs": 1024}
    assert forgotten(**large) == forgotten(4, **large) == [7.0]
    assert forgotten() == []
