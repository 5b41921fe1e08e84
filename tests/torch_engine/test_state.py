"""The training state: what it starts from, and that its arrays and counters survive a checkpoint exactly."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_runs import CPU, actions_of, described, plan_of, reduced, small_config, small_state, vectors

from lockstep.config.run import Config
from lockstep.core.shards import ShardPlan
from lockstep.core.spaces import Leaf, ObservationLayout
from lockstep.torch_engine.state import (
    TrainState,
    init_state,
    initial_parameters,
    load_state_arrays,
    make_net,
    state_arrays,
)
from lockstep.torch_engine.update import clip_and_step
from lockstep.training.session import counters, load_counters

NORMALIZED = {"observations": True, "returns": True}
PARAMETERS = [f"{net}.{layer}.{kind}" for net in ("actor", "critic") for layer in (0, 1) for kind in ("weight", "bias")]


def stepped(config: Config, discrete: bool = True, steps: int = 3) -> TrainState:
    """A state after a few optimiser steps with random gradients, and a few merged samples."""
    state = small_state(config, described(discrete))
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        gradient = torch.randn(state.parameters.flat.shape, generator=generator)
        clip_and_step(state, reduced(gradient), 0.5, 0.01)
    rng = np.random.default_rng(0)
    for normalizer in (state.observation_normalizer, state.return_normalizer):
        if normalizer is not None:
            normalizer.moments.merge(7, *rng.random((2, len(normalizer.moments.mean))))
    if state.observation_normalizer is not None:
        state.observation_normalizer.freeze()
    return state


def as_saved(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What comes back from files: other memory, another order."""
    return {name: arrays[name].copy() for name in sorted(arrays, reverse=True)}


def assert_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert list(ours) == list(theirs)
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype
        assert array.tobytes() == theirs[name].tobytes(), name


# --- Arrays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("discrete", [True, False], ids=["discrete", "continuous"])
def test_names_are_bare_and_layouts_those_of_linear_layers(discrete):
    parameters = PARAMETERS if discrete else [*PARAMETERS, "log_std"]
    arrays = state_arrays(stepped(small_config(normalize=NORMALIZED), discrete))
    groups = ("policy/", "optimizer/exp_avg/", "optimizer/exp_avg_sq/")
    expected = [group + name for group in groups for name in parameters] + ["optimizer/step"]
    for normalizer in ("observations", "returns"):
        expected += [f"normalizers/{normalizer}.{part}" for part in ("count", "mean", "m2")]
    assert list(arrays) == expected
    assert arrays["policy/actor.0.weight"].shape == arrays["optimizer/exp_avg/actor.0.weight"].shape == (8, 4)
    assert arrays["policy/critic.1.weight"].shape == (1, 8)
    assert {a.dtype.name for name, a in arrays.items() if not name.startswith("normalizers/")} == {"float32"}
    assert {a.dtype.name for name, a in arrays.items() if name.startswith("normalizers/")} == {"float64"}


@pytest.mark.parametrize("normalize", [{}, NORMALIZED], ids=["plain", "normalised"])
@pytest.mark.parametrize("discrete", [True, False], ids=["discrete", "continuous"])
def test_arrays_come_back_bit_for_bit_and_training_goes_on_from_them(discrete, normalize):
    config = small_config(normalize=normalize)
    state, fresh = stepped(config, discrete), init_state(config, described(discrete), plan_of(config), CPU)
    saved = as_saved(state_arrays(state))
    assert any(not np.array_equal(saved[name], array) for name, array in state_arrays(fresh).items())
    load_state_arrays(fresh, saved)
    assert_same(state_arrays(fresh), state_arrays(state))
    for one in (state, fresh):
        clip_and_step(one, reduced(torch.ones_like(one.parameters.flat)), 0.5, 0.01)
    assert_same(state_arrays(fresh), state_arrays(state))
    if normalize:
        assert state.observation_normalizer is not None
        assert fresh.observation_normalizer is not None
        observation = np.ones((1, 4), np.float32)
        ours, theirs = fresh.observation_normalizer(observation), state.observation_normalizer(observation)
        np.testing.assert_array_equal(ours, theirs)


def test_without_the_moments_training_would_go_elsewhere():
    """The negative of going on: the optimiser's part of the arrays matters."""
    config = small_config()
    state, other = stepped(config), stepped(config)
    other.optimizer.moments()["exp_avg"].zero_()
    for one in (state, other):
        clip_and_step(one, reduced(torch.ones_like(one.parameters.flat)), 0.5, 0.01)
    assert not torch.equal(state.parameters.flat, other.parameters.flat)


def test_arrays_are_copies_in_both_directions():
    state = stepped(small_config(normalize=NORMALIZED))
    arrays = state_arrays(state)
    before = as_saved(arrays)
    clip_and_step(state, reduced(torch.ones_like(state.parameters.flat)), 0.5, 0.01)
    for normalizer in (state.observation_normalizer, state.return_normalizer):
        assert normalizer is not None
        normalizer.moments.merge(1, normalizer.moments.mean + 1, normalizer.moments.m2)
    assert_same(arrays, {name: before[name] for name in arrays})
    load_state_arrays(state, arrays)
    arrays["policy/actor.0.weight"][:] = 0.0
    arrays["normalizers/observations.mean"][:] = 0.0
    assert state.parameters.views["actor.0.weight"].any()
    assert state_arrays(state)["normalizers/observations.mean"].any()


BROKEN = {
    "a shape": lambda a: {**a, "policy/actor.0.weight": a["policy/actor.0.weight"].T},
    "a moment's shape": lambda a: {**a, "optimizer/exp_avg/actor.0.bias": np.zeros(3, np.float32)},
    "a parameter too few": lambda a: {k: v for k, v in a.items() if k != "policy/critic.1.bias"},
    "a parameter too many": lambda a: {**a, "policy/actor.9.bias": np.zeros(3, np.float32)},
    "no moments": lambda a: {k: v for k, v in a.items() if "exp_avg_sq" not in k},
    "no step": lambda a: {k: v for k, v in a.items() if k != "optimizer/step"},
    "no normaliser": lambda a: {k: v for k, v in a.items() if not k.startswith("normalizers/observations")},
    "a normaliser's shape": lambda a: {**a, "normalizers/observations.mean": np.zeros(7)},
}


@pytest.mark.parametrize("what", BROKEN)
def test_arrays_of_another_config_are_refused(what):
    config = small_config(normalize=NORMALIZED)
    with pytest.raises(ValueError, match="doesn't fit this config"):
        load_state_arrays(small_state(config, described()), BROKEN[what](state_arrays(stepped(config))))


def test_what_is_refused_changes_nothing():
    config = small_config(normalize=NORMALIZED)
    state = small_state(config, described())
    before = as_saved(state_arrays(state))
    with pytest.raises(ValueError, match=r"normalizers/observations\.mean"):
        load_state_arrays(state, BROKEN["a normaliser's shape"](state_arrays(stepped(config))))
    assert_same(state_arrays(state), {name: before[name] for name in state_arrays(state)})


def test_parameters_of_another_network_are_refused():
    arrays = state_arrays(stepped(small_config()))
    with pytest.raises(ValueError, match="doesn't fit this config: policy/"):
        load_state_arrays(small_state(small_config(network={"hidden_sizes": (9,)}), described()), arrays)
    with pytest.raises(ValueError, match="doesn't fit this config: policy/"):
        load_state_arrays(small_state(small_config(), described(discrete=False)), arrays)


# --- Counters ---------------------------------------------------------------------------------------------------------


def test_counters_survive_json_exactly():
    config = small_config()
    state, fresh = stepped(config), small_state(config, described())
    state.iteration, state.global_step, state.learning_rate = 7, 2**40, 0.1 + 0.2
    state.recent.extend(np.array([[0.0, 1.0, 1 / 3, 12.0, 1.0], [2.0, 0.0, -1e-17, 3.0, 0.0]]))
    load_counters(fresh, json.loads(json.dumps(counters(state))))
    assert counters(fresh) == counters(state)
    assert (fresh.iteration, fresh.global_step, fresh.optimizer_steps) == (7, 2**40, 3)
    assert fresh.learning_rate == 0.1 + 0.2
    assert list(fresh.recent.window) == [(1 / 3, 12, 1), (-1e-17, 3, 0)]
    assert counters(fresh) != counters(small_state(config, described()))


# --- The start --------------------------------------------------------------------------------------------------------


def test_the_first_parameters_depend_on_the_seed_and_not_on_the_rank():
    config = small_config(num_shards=4)
    first = state_arrays(init_state(config, described(), ShardPlan(8, 4), CPU))
    last_rank = state_arrays(init_state(config, described(), ShardPlan(8, 4, 4, 3), CPU))
    assert_same(first, last_rank)
    other = state_arrays(init_state(config.model_copy(update={"seed": 1}), described(), ShardPlan(8, 4), CPU))
    assert not np.array_equal(first["policy/actor.0.weight"], other["policy/actor.0.weight"])


def test_the_first_parameters_have_the_gains_of_ppo():
    config = small_config(network={"hidden_sizes": (4,), "log_std_init": -0.5})
    arrays = initial_parameters(config, make_net(config, vectors(4), actions_of(False, 3)))
    for name, gain in (("actor.0", 2**0.5), ("actor.1", 0.01), ("critic.0", 2**0.5), ("critic.1", 1.0)):
        weight = arrays[f"{name}.weight"].astype(np.float64)
        np.testing.assert_allclose(weight @ weight.T, gain**2 * np.eye(len(weight)), atol=1e-6)
        assert not arrays[f"{name}.bias"].any()
    assert arrays["log_std"].tolist() == [-0.5] * 3


def test_a_standard_deviation_by_state_begins_where_the_config_says():
    config = small_config(network={"hidden_sizes": (4,), "log_std_init": -0.5, "state_dependent_std": True})
    arrays = initial_parameters(config, make_net(config, vectors(4), actions_of(False, 3)))
    assert arrays["actor.1.bias"].tolist() == [0.0] * 3 + [-0.5] * 3
    assert "log_std" not in arrays


def test_what_observes_no_numbers_cannot_be_normalised():
    config = small_config(normalize={"observations": True})
    indices = ObservationLayout((Leaf("", "one_hot", (), (5,), (0,)),))
    with pytest.raises(ValueError, match=r"normalize\.observations: .* observes no numbers"):
        init_state(config, replace(described(), observation=indices), plan_of(config), CPU)


def test_normalisers_are_there_where_the_config_wants_them():
    for normalize, present in (
        ({}, (False, False)),
        ({"observations": True}, (True, False)),
        (NORMALIZED, (True, True)),
    ):
        state = small_state(small_config(normalize=normalize), described())
        assert (state.observation_normalizer is not None, state.return_normalizer is not None) == present
