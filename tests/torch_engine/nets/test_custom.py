"""Networks of the user's own: called as functions, their dropout keyed, what can't be used refused in one line."""

import os
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from small_runs import (
    alone,
    described,
    joined,
    not_normalised,
    plan_of,
    random_batch,
    seeded,
    shards_gradients,
    small_config,
    small_state,
)
from small_worlds import Lantern
from users_nets import OfParts, Tiny

from lockstep.config.run import Config
from lockstep.core.shards import ShardPlan
from lockstep.core.spaces import action_layout, observation_layout
from lockstep.envs.description import EnvDescription
from lockstep.torch_engine.gradients import exact_gradient, fast_gradient
from lockstep.torch_engine.minibatches import epoch_minibatches, minibatch_indices
from lockstep.torch_engine.nets import nets
from lockstep.torch_engine.setup.choose_mode import choose_mode
from lockstep.torch_engine.setup.self_check import by_shard, shard_invariant
from lockstep.torch_engine.state import check_networks, initial_parameters, make_net, state_arrays

LANTERN = EnvDescription(
    "small_worlds:Lantern-v0", observation_layout(Lantern.observation_space), action_layout(Lantern.action_space)
)


def custom_config(name: str, kwargs: dict | None = None, **changes) -> Config:
    return small_config(network={"custom": f"users_nets:{name}", "custom_kwargs": kwargs or {}}, **changes)


def complaint(config: Config, description: EnvDescription) -> str:
    with pytest.raises(ValueError) as caught:
        make_net(config, description.observation, description.action)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"network.custom: {config.network.custom} ") or str(caught.value).startswith(
        f"network.custom: {config.network.custom}:"
    )
    return str(caught.value)


def test_the_networks_are_the_module():
    state = small_state(custom_config("Tiny"), described())
    x = torch.randn(2, 5, 4, generator=seeded(0))
    assert set(state.net.shapes()) == {
        f"{layer}.{kind}" for layer in ("body.0", "actor", "critic") for kind in ("weight", "bias")
    }
    module = Tiny(x, 3)
    module.load_state_dict(state.parameters.views)
    with torch.no_grad():
        output, values = module(x)
        weights = state.parameters.expanded(2)
        torch.testing.assert_close(nets.actor(state.net, weights, x), output)
        torch.testing.assert_close(nets.critic(state.net, weights, x), values[..., 0])
        both = nets.actor_critic(state.net, weights, x)
        module.load_state_dict({name: w + 0.1 for name, w in module.state_dict().items()})
        assert not torch.allclose(module(x)[0], output, atol=1e-3)
    assert torch.equal(both[0], nets.actor(state.net, weights, x))
    assert both[1] is not None


def test_the_first_parameters_are_the_modules_own_keyed_by_the_seed():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    config = custom_config("Tiny")
    drawn = [initial_parameters(c, make_net(c, described().observation, described().action)) for c in (config, config)]
    other = config.model_copy(update={"seed": 1})
    third = initial_parameters(other, make_net(other, described().observation, described().action))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(np.array_equal(drawn[0][name], drawn[1][name]) for name in drawn[0])
    assert not np.array_equal(drawn[0]["actor.weight"], third["actor.weight"])
    assert drawn[0]["actor.weight"].dtype == np.float32


def test_continuous_actions_get_a_standard_deviation_of_ours():
    state = small_state(custom_config("Tiny"), described(discrete=False))
    assert state.net.shapes()["log_std"] == (3,)
    assert "policy/log_std" in state_arrays(state)


def test_a_module_gets_the_parts_of_a_dict_by_name():
    config = custom_config("OfParts")
    state = small_state(config, LANTERN)
    Lantern.observation_space.seed(0)
    observations = [Lantern.observation_space.sample() for _ in range(4)]
    rows = torch.from_numpy(np.stack([LANTERN.observation.encode(o) for o in observations])).unsqueeze(0)
    output, values = nets.actor_critic(state.net, state.parameters.expanded(1), rows)
    parts = {
        "view/camera": torch.from_numpy(np.stack([o["view"]["camera"] for o in observations])),
        "speed": torch.from_numpy(np.stack([o["speed"] for o in observations])),
        "colour": torch.tensor([int(o["colour"]) + 1 for o in observations]),
    }
    module = OfParts(parts, 2)
    module.load_state_dict(state.parameters.views)
    expected = module(parts)
    torch.testing.assert_close(output[0], expected[0])
    assert values is not None
    torch.testing.assert_close(values[0], expected[1])
    assert not torch.allclose(expected[0], module(parts | {"colour": (parts["colour"] + 1) % 3})[0], atol=1e-3)


def test_buffers_lie_where_the_observations_do():
    state = small_state(custom_config("Shifted"), described())
    custom, x = state.net.custom, torch.randn(1, 5, 4, generator=seeded(0))
    assert custom is not None
    weights = state.parameters.expanded(1)
    output, values = nets.actor_critic(state.net, weights, x)
    assert values is not None
    elsewhere = {name: w.to("meta") for name, w in weights.items()}
    for _ in range(2):
        there = nets.actor_critic(state.net, elsewhere, x.to("meta"))
        assert [part.device.type for part in there if part is not None] == ["meta"] * 2
        assert [part.shape for part in there if part is not None] == [output.shape, values.shape]
    assert torch.equal(nets.actor_critic(state.net, weights, x)[0], output)
    plain = Tiny(x, 3)
    plain.load_state_dict(state.parameters.views)
    torch.testing.assert_close(output, 0.5 * plain(x + torch.linspace(-1.0, 1.0, 4))[0])


def test_parameters_may_have_any_names():
    """DDP and FSDP want a module whose parameters have no dots in their names."""
    gradients = {}
    for reduction in ("exact", "fast"):
        config = custom_config("Crowded", reduction=reduction)
        state = small_state(config, described())
        columns = random_batch(config, state.net).columns()
        columns |= {"dropout_seed": torch.zeros((config.shards, 1), dtype=torch.int64)}
        make = fast_gradient if reduction == "fast" else partial(exact_gradient, mode="loop")
        vector = make(state, config, alone(config))(columns, 16).vector
        gradients[reduction] = state.parameters.split(vector)
    for name, expected in gradients["exact"].items():
        torch.testing.assert_close(gradients["fast"][name], expected)
        assert expected.any()
    assert {"body.0.weight", "body_0_weight", "net"} <= set(gradients["fast"])


@pytest.mark.parametrize("how", ["mapped", "mapped in pairs", "one shard", "several at once"])
def test_a_network_that_works_in_place_leaves_observations_as_they_are(how):
    count = 3 if how in ("mapped", "several at once") else 1
    rows = torch.randn(count, 6, 4, generator=seeded(0))[:, :5]  # as a rollout's without its last ones
    outputs = []
    for in_place in (True, False):
        state = small_state(custom_config("Scaling", {"in_place": in_place}), described())
        state.net.custom.map_over_shards(how.startswith("mapped"), how.endswith("pairs") and not in_place)
        given = rows.clone()
        with torch.no_grad():
            outputs.append(nets.actor_critic(state.net, state.parameters.expanded(count), given))
        assert torch.equal(given, rows)
    (output, values), (expected, its_values) = outputs
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(values, its_values)


# --- Shards in one call ----------------------------------------------------------------------------------------------


MAPPED_NOT = "can't be mapped over shards, tried on random observations ("


def mode_of(config: Config):
    """How a run's shards are called, and its state."""
    state = small_state(config, described())
    return choose_mode(state, config, alone(config)), state


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("name", ["Tiny", "OneOutput", "Varied"])
def test_shards_are_one_call_of_a_network_that_can_be_mapped_over_them(name, pairs):
    config = custom_config(name) if name != "OneOutput" else custom_config("Tiny", {"units": 1})
    mode, state = mode_of(config)
    assert mode == "batched"
    assert state.net.custom.batched
    assert state.net.custom.one_by_one is None
    state.net.custom.map_over_shards(True, pairs)
    batch, source = random_batch(config, state.net).columns(), shards_gradients(state, config)
    batch |= {"dropout_seed": torch.zeros((config.shards, 1), dtype=torch.int64)}
    assert shard_invariant(lambda part: source(part, 16), config.shards, batch)
    x = torch.randn(config.shards, 5, 4, generator=seeded(0))
    output, values = nets.actor_critic(state.net, state.parameters.expanded(config.shards), x)
    assert values is not None
    for shard in range(config.shards):
        alone_, value = nets.actor_critic(state.net, state.parameters.expanded(1), x[shard : shard + 1].clone())
        assert torch.equal(output[shard : shard + 1], alone_)
        assert value is not None
        assert torch.equal(values[shard : shard + 1], value)
    state.net.custom.map_over_shards(False)
    by_itself = nets.actor_critic(state.net, state.parameters.expanded(1), x[:1].clone())
    torch.testing.assert_close(by_itself, (output[:1], values[:1]))


@pytest.mark.parametrize(
    ("name", "kwargs", "why"),
    [
        ("Tiny", {"dropout": 0.3}, "has Dropout"),
        ("Convolved", {}, "has Conv1d"),
        (
            "Split",
            {},
            MAPPED_NOT + "vmap: It looks like you're attempting to use a Tensor in some data",
        ),
        ("Forgetful", {}, MAPPED_NOT + "vmap: called random operation while in randomness error mode"),
        ("Renormed", {}, MAPPED_NOT + "There is a performance drop"),
        ("Halved", {}, "uses "),
        pytest.param("Compiled", {}, "is compiled", marks=pytest.mark.filterwarnings("ignore::DeprecationWarning")),
        ("Smooth", {}, "uses silu, which may round a number by its place in memory"),
    ],
)
def test_one_that_cannot_is_called_shard_by_shard_and_says_why(name, kwargs, why):
    mode, state = mode_of(custom_config(name, kwargs))
    assert mode == "loop"
    assert not state.net.custom.batched
    assert state.net.custom.one_by_one.startswith(why)
    assert not state.net.custom.module.training  # dropout is off again


def test_bits_that_would_change_keep_shards_apart(monkeypatch):
    monkeypatch.setattr("lockstep.torch_engine.setup.choose_mode.shards_invariant_here", lambda *_: False)
    mode, state = mode_of(custom_config("Tiny"))
    assert mode == "loop"
    assert not state.net.custom.batched
    assert state.net.custom.one_by_one == "batched would change a shard's bits on this machine"


@pytest.mark.parametrize("passes", ["alone", "in pairs", "on another rank in pairs"])
def test_what_a_single_shard_changes_alone_it_does_not_in_a_pair(monkeypatch, passes):
    config = custom_config("Tiny")
    state, communicator = small_state(config, described()), alone(config)
    alone_passes = passes != "in pairs"
    where = "lockstep.torch_engine.setup.choose_mode.shards_invariant_here"
    monkeypatch.setattr(where, lambda state, _: alone_passes or state.net.custom.pairs)
    if passes == "on another rank in pairs":
        monkeypatch.setattr(communicator, "gather_ranks", lambda x: torch.cat([x.unsqueeze(0), torch.tensor([[2]])]))
    assert choose_mode(state, config, communicator) == "batched"
    assert state.net.custom.batched
    assert state.net.custom.pairs == (passes != "alone")


def test_parameters_of_another_type_are_not_trained_but_loaded_where_they_were():
    config, description = custom_config("Precise"), described()
    net = make_net(config, description.observation, description.action)
    assert net.custom is not None
    assert net.custom.initial_parameters()["scale"].dtype == np.float32
    with pytest.raises(ValueError) as caught:
        check_networks(config, description)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("network.custom: users_nets:Precise has a parameter scale of torch.float64, but parameters")


def test_in_bfloat16_nothing_is_mapped():
    mode, state = mode_of(custom_config("Tiny", precision="bf16"))
    assert mode == "loop"
    assert state.net.custom.one_by_one == "computes in bfloat16"


def test_another_rank_decides_too(monkeypatch):
    config = custom_config("Tiny")
    state, communicator = small_state(config, described()), alone(config)
    monkeypatch.setattr(communicator, "gather_ranks", lambda x: torch.tensor([[1], [0]]))
    assert choose_mode(state, config, communicator) == "loop"
    assert not state.net.custom.batched
    assert state.net.custom.one_by_one == "didn't pass the self-check on another rank"


def test_a_single_shard_is_called_as_it_is():
    mode, state = mode_of(custom_config("Tiny", num_shards=1))
    assert mode == "loop"
    assert not state.net.custom.batched
    assert state.net.custom.one_by_one is None


# --- Dropout ----------------------------------------------------------------------------------------------------------


def gradients_of(config: Config, world_size: int, iteration: int = 0) -> list[torch.Tensor]:
    """Each minibatch's gradient of every shard, `[shards, P + T]`, as the ranks compute them one after another."""
    state = small_state(config, described())
    state.iteration = iteration
    whole, ranks = random_batch(config, state.net), []
    for rank in range(world_size):
        plan = ShardPlan(config.envs, config.shards, world_size, rank)
        torch.manual_seed(rank)  # what a rank's global generator holds must not matter
        owned = slice(plan.shards.start, plan.shards.stop)
        mine = replace(whole, **{name: x[owned].clone() for name, x in whole.columns().items()})
        source = shards_gradients(state, config)
        parts = []
        indices, statistics = minibatch_indices(config, plan, 0), not_normalised(config)
        for epoch in range(config.ppo.num_epochs):
            for columns in epoch_minibatches(state, mine, indices, statistics, epoch, config, plan):
                parts.append(by_shard("loop", lambda part, source=source: source(part, 16), columns))
        ranks.append(parts)
    return [torch.cat(parts) for parts in zip(*ranks, strict=True)]


def test_dropout_is_keyed_by_shard_so_that_ranks_do_not_show():
    config = custom_config("Tiny", {"dropout": 0.5, "units": 32}, num_shards=4)
    one = gradients_of(config, 1)
    for world_size in (2, 3, 4):
        for ours, expected in zip(gradients_of(config, world_size), one, strict=True):
            assert torch.equal(ours, expected)
    assert not torch.equal(gradients_of(config, 1, iteration=1)[0], one[0])
    without = custom_config("Tiny", {"dropout": 0.0, "units": 32}, num_shards=4)
    assert not torch.allclose(gradients_of(without, 1)[0], one[0], atol=1e-4)


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_dropout_leaves_the_global_generator_as_it_was(reduction):
    """Else what a user's environment draws from it would tell which shards a rank computed last."""
    config = custom_config("Tiny", {"dropout": 0.5}, num_shards=4, reduction=reduction)
    state = small_state(config, described())
    columns = random_batch(config, state.net).columns() | {"dropout_seed": torch.zeros((4, 1), dtype=torch.int64)}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    make = fast_gradient if reduction == "fast" else partial(exact_gradient, mode="loop")
    first, second = (joined(make(state, config, alone(config))(columns, 16)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, second)


def test_dropout_that_fails_is_turned_off_and_leaves_the_generator_alone():
    state = small_state(custom_config("Tiny", {"dropout": 0.5}), described())
    before = torch.get_rng_state()

    def fail():
        with state.net.custom.dropout(7, torch.device("cpu")):
            assert torch.initial_seed() == 7
            assert state.net.custom.module.training
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(torch.get_rng_state(), before)
    assert not state.net.custom.module.training


def test_dropout_differs_between_shards_and_minibatches():
    config = custom_config("Tiny", {"dropout": 0.5}, num_shards=4)
    state, plan = small_state(config, described()), plan_of(small_config(num_shards=4))
    batch, indices = random_batch(config, state.net), minibatch_indices(config, plan, 0)
    seeds = [
        seed
        for epoch in range(2)
        for columns in epoch_minibatches(state, batch, indices, not_normalised(config), epoch, config, plan)
        for seed in columns["dropout_seed"].flatten().tolist()
    ]
    assert len(set(seeds)) == len(seeds) == 2 * 2 * 4


def test_there_is_no_dropout_in_rollout_and_evaluation():
    state = small_state(custom_config("Tiny", {"dropout": 0.5}), described())
    weights, x = state.parameters.expanded(1), torch.randn(1, 6, 4, generator=seeded(0))
    assert torch.equal(nets.actor(state.net, weights, x), nets.actor(state.net, weights, x))
    assert state.net.custom is not None
    state.net.custom.set_dropout(True)
    assert not torch.equal(
        nets.actor(state.net, weights, x)[0, 0],
        nets.actor(small_state(custom_config("Tiny", {"dropout": 0.5}), described()).net, weights, x)[0, 0],
    )


# --- What can't be used -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kwargs", "said"),
    [
        ("Missing", {}, "can't be imported: "),
        ("Tiny", {"layers": 3}, "unexpected keyword argument 'layers'"),
        (
            "Narrow",
            {},
            "gave outputs of shape (2, 2) and values of shape (2,) for 2 observations; needed are (2, 3) and",
        ),
        ("Tiny", {"critic": False}, "needed are (2, 3) and (2,)"),
        ("Statistical", {}, "keeps running statistics (body.3.running_mean), which would differ between ranks"),
    ],
)
def test_modules_that_are_refused(name, kwargs, said):
    assert said in complaint(custom_config(name, kwargs), described())


def test_a_module_that_fails_is_refused_by_the_kind_and_the_words_of_its_error():
    said = complaint(custom_config("Broken", {}), described())
    assert "users_nets:Broken: RuntimeError: " in said  # between them newer PyTorch names the operation
    assert "mat1 and mat2 shapes cannot be multiplied" in said


@pytest.mark.parametrize(
    ("kind", "returned"),
    [
        ("three", "a tuple of 3 (Tensor, Tensor, int)"),
        ("one", "a tuple of 1 (Tensor)"),
        ("text", "a tuple of 2 (Tensor, str)"),
        ("dict", "an object of type dict"),
        ("nothing", "None"),
    ],
)
def test_what_is_returned_otherwise_is_refused_by_what_is_needed(kind, returned):
    config = custom_config("Returning", {"kind": kind})
    assert complaint(config, described()) == (
        f"network.custom: users_nets:Returning returned {returned}; a tuple of outputs [n, 3] and values [n] is needed "
        "for n observations"
    )


def test_a_missing_critic_is_said_and_grpo_needs_none():
    config = custom_config("Returning", {"kind": "no values"})
    shapes = "gave outputs of shape (2, 3) and values of shape None for 2 observations; needed are (2, 3) and (2,)"
    assert complaint(config, described()) == f"network.custom: users_nets:Returning {shapes}"
    grpo = {"algorithm": "grpo", "num_envs": 16, "grpo": {"group_size": 4}}
    net = make_net(
        custom_config("Returning", {"kind": "no values"}, **grpo), described().observation, described().action
    )
    assert not net.critic
    line = complaint(custom_config("Returning", {"kind": "nothing"}, **grpo), described())
    assert line.endswith("returned None; a tensor of outputs [n, 3] is needed for n observations")


@pytest.mark.parametrize("mapped", [False, True])
def test_a_list_of_outputs_and_values_is_taken_as_a_tuple(mapped):
    results = []
    for name in ("Returning", "Tiny"):
        state = small_state(custom_config(name), described())
        state.net.custom.map_over_shards(mapped)
        rows = torch.randn(2 if mapped else 1, 5, 4, generator=seeded(0))
        results.append(nets.actor_critic(state.net, state.parameters.expanded(len(rows)), rows))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_a_module_that_is_not_there():
    config = small_config(network={"custom": "no_such_module:Net"})
    text = complaint(config, described())
    assert (
        "can't be imported: No module named 'no_such_module'; modules are looked for in the working directory" in text
    )
    assert text.endswith(f"{os.getcwd()}, and in those of PYTHONPATH")


def test_a_module_that_lacks_another_is_not_said_to_be_missing(tmp_path, monkeypatch):
    (tmp_path / "lacking.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    text = complaint(small_config(network={"custom": "lacking:Net"}), described())
    assert text.endswith("No module named 'no_such_module'")


def test_without_a_critic_a_module_is_for_grpo():
    config = custom_config("Tiny", {"critic": False}, algorithm="grpo", num_envs=16, grpo={"group_size": 4})
    net = make_net(config, described().observation, described().action)
    assert not net.critic
    assert set(net.shapes()) == {"body.0.weight", "body.0.bias", "actor.weight", "actor.bias"}
