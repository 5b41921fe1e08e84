"""The PyTorch engine's optimiser step, learning rate and advantage normalisation against the float64 reference."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep import reference
from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.core.shards import ShardPlan
from lockstep.torch_engine.batch import Batch
from lockstep.torch_engine.gradients import Gradient, norm_of
from lockstep.torch_engine.minibatches import (
    advantage_moments,
    epoch_minibatches,
    minibatch_indices,
    minibatch_statistics,
)
from lockstep.torch_engine.nets.parameters import FlatParameters, WholeAdam, fused_adam
from lockstep.torch_engine.plain.adam import host_adam
from lockstep.torch_engine.update import adapted_learning_rate, clip_and_step
from lockstep.training.limits import LEARNING_RATE_LIMITS

SHAPES = {"weight": (3, 2), "bias": (3,)}
SIZE = 9


BOTH = pytest.mark.parametrize("on_host", [False, True], ids=["PyTorch's Adam", "NumPy's"])


def optimised(parameters: np.ndarray, config: Config, on_host: bool = False) -> Any:
    """As much of a training state as an optimiser step needs, holding these parameters."""
    flat = FlatParameters(SHAPES, torch.device("cpu"))
    flat.flat.copy_(torch.from_numpy(parameters))
    betas, eps = config.ppo.adam_betas, config.ppo.adam_eps
    rule = partial(host_adam, betas=betas, epsilon=eps)
    if not on_host:
        rule = partial(fused_adam, options={"betas": betas, "eps": eps})
    return SimpleNamespace(parameters=flat, optimizer=WholeAdam(flat, rule), optimizer_steps=0)


def of(gradient: np.ndarray) -> Gradient:
    """A reduced gradient without loss terms, in memory of its own."""
    vector = torch.from_numpy(gradient.copy())
    return Gradient(vector, torch.zeros(0), norm_of(vector))


def config_of(**ppo: Any) -> Config:
    return resolve(Config.model_validate({"num_envs": 8, "num_steps": 4, "ppo": {"num_minibatches": 2} | ppo}))


@st.composite
def step_sequences(draw):
    """Parameters, and gradients and learning rates of a few steps; gradients small and large."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    steps = draw(st.integers(1, 6))
    gradients = [rng.normal(size=SIZE) * 10.0 ** rng.uniform(-3, 2) for _ in range(steps)]
    return rng.normal(size=SIZE), gradients, (10.0 ** rng.uniform(-4, -1, steps)).tolist()


@BOTH
@given(
    sequence=step_sequences(),
    max_norm=st.sampled_from([None, 0.5, 3.0]),
    betas=st.sampled_from([(0.9, 0.999), (0.8, 0.95)]),
    eps=st.sampled_from([1e-5, 1e-8]),
)
def test_clipped_adam_steps_are_the_references(on_host, sequence, max_norm, betas, eps):
    parameters, gradients, learning_rates = sequence
    state = optimised(parameters, config_of(adam_betas=betas, adam_eps=eps), on_host)
    expected, m, v = parameters.astype(np.float32).astype(np.float64), np.zeros(SIZE), np.zeros(SIZE)
    moved = 0.0
    for number, (gradient, lr) in enumerate(zip(gradients, learning_rates, strict=True), 1):
        single = gradient.astype(np.float32)
        norm = of(single).norm
        clip_and_step(state, of(single), max_norm, lr)
        (clipped,), expected_norm = reference.clip_by_global_norm([single], np.inf if max_norm is None else max_norm)
        expected, m, v = reference.adam_step(expected, clipped, m, v, number, lr, betas[0], betas[1], eps)
        moved += lr
        assert norm == pytest.approx(expected_norm, rel=1e-6)
        np.testing.assert_allclose(state.parameters.flat.numpy(), expected, rtol=1e-6, atol=1e-4 * moved)
    adam = state.optimizer.moments()
    np.testing.assert_allclose(adam["exp_avg"].numpy(), m, rtol=1e-4, atol=1e-6 * np.abs(m).max())
    np.testing.assert_allclose(adam["exp_avg_sq"].numpy(), v, rtol=1e-4)
    assert state.optimizer_steps == len(gradients) == int(adam["step"])


@pytest.mark.parametrize("learning_rate", [1e-3, torch.tensor(1e-3)], ids=["a number", "a tensor"])
def test_a_step_has_the_bytes_of_pytorchs_optimiser(learning_rate):
    rng = np.random.default_rng(0)
    ours = optimised(rng.normal(size=SIZE), config_of())
    parameters, ppo = ours.parameters.flat.clone().requires_grad_(), config_of().ppo
    theirs: Any = torch.optim.Adam([parameters], betas=ppo.adam_betas, eps=ppo.adam_eps, fused=True)
    theirs.param_groups[0]["lr"] = learning_rate
    for skipped in (None, torch.tensor(0.0), torch.tensor(1.0), None):
        gradient = torch.from_numpy(rng.normal(size=SIZE).astype(np.float32))
        parameters.grad, theirs.found_inf = gradient.clone(), skipped
        before = ours.parameters.flat.clone()
        ours.optimizer.step(gradient, learning_rate, skipped)
        theirs.step()
        assert torch.equal(ours.parameters.flat, parameters)
        assert torch.equal(ours.parameters.flat, before) == (skipped is not None and bool(skipped))
        for name, moment in ours.optimizer.moments().items():
            assert torch.equal(moment, theirs.state[parameters][name])


@BOTH
def test_a_first_step_by_hand_with_and_without_clipping(on_host):
    # |g| = 5: clipped to norm 1 it is (0.6, 0.8). After one step m = 0.1 g and v = 0.001 g^2, so that Adam moves each
    # parameter by lr * sign(g) (eps aside); clipping shows in the moments.
    gradient = np.zeros(SIZE, np.float32)
    gradient[:2] = 3.0, 4.0
    for max_norm, expected in ((None, [0.3, 0.4]), (1.0, [0.06, 0.08]), (10.0, [0.3, 0.4])):
        state = optimised(np.zeros(SIZE), config_of(), on_host)
        assert of(gradient).norm == 5.0
        clip_and_step(state, of(gradient), max_norm, 0.01)
        assert state.parameters.flat[:3].tolist() == pytest.approx([-0.01, -0.01, 0.0], rel=1e-3)
        assert state.optimizer.moments()["exp_avg"][:2].tolist() == pytest.approx(expected)


@BOTH
def test_a_step_reaches_the_named_views_and_takes_the_learning_rate_it_is_given(on_host):
    state = optimised(np.zeros(SIZE), config_of(learning_rate=0.5), on_host)
    clip_and_step(state, of(np.ones(SIZE, np.float32)), None, 0.01)
    assert state.parameters.views["bias"].tolist() == pytest.approx([-0.01] * 3, rel=1e-3)


@given(st.floats(1e-6, 1e-1), st.floats(0, 1), st.floats(1e-4, 1e-1))
def test_adapted_learning_rate_is_the_references(learning_rate, kl, desired_kl):
    low, high = LEARNING_RATE_LIMITS
    expected = reference.adaptive_learning_rate(learning_rate, kl, desired_kl, low, high)
    assert adapted_learning_rate(learning_rate, kl, desired_kl) == expected


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(0.0, 1e-3), (1e-14, 1e-3), (0.0049, 1.5e-3), (0.005, 1e-3), (0.02, 1e-3), (0.0201, 1e-3 / 1.5)],
)
def test_adapted_learning_rate_by_hand(kl, expected):
    assert adapted_learning_rate(1e-3, kl, 0.01) == pytest.approx(expected)


# --- Advantage normalisation ------------------------------------------------------------------------------------------


def batch_of(advantages: np.ndarray) -> Batch:
    """A batch whose other columns don't matter."""
    tensor = torch.from_numpy(advantages)
    empty = torch.zeros_like(tensor)
    return Batch(empty.unsqueeze(-1), empty, empty, tensor)


def normalised(config: Config, advantages: np.ndarray, plan: ShardPlan) -> tuple[np.ndarray, np.ndarray]:
    """Advantages of a rank's minibatches as the loss sees them, and their indices: `[epochs, minibatches, k, rows]`."""
    owned = slice(plan.shards.start, plan.shards.stop)
    batch, indices = batch_of(advantages[owned]), minibatch_indices(config, plan, 3)
    everyone = advantage_moments(batch_of(advantages), minibatch_indices(config, ShardPlan(8, plan.num_shards), 3))
    local = advantage_moments(batch, indices)
    statistics, state = minibatch_statistics(config, local, everyone), optimised(np.zeros(SIZE), config)
    state.net = SimpleNamespace(custom=None)
    out = []
    for epoch in range(config.ppo.num_epochs):
        minibatches = epoch_minibatches(state, batch, indices, statistics, epoch, config, plan)
        out.append([minibatch["advantages"].numpy() for minibatch in minibatches])
    assert (statistics.counts == 16).all()
    return np.array(out), indices


def picked(advantages: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """The advantages that indices `[…, k, rows]` choose, without normalisation."""
    return np.stack([advantages[s][indices[:, :, s]] for s in range(len(advantages))], 2)


@st.composite
def advantage_tables(draw, shards):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    table = rng.normal(size=(shards, 32 // shards)) + rng.normal(size=(shards, 1)) * draw(st.sampled_from([0.0, 5.0]))
    return table.astype(np.float32)


@given(st.sampled_from([1, 2, 8]).flatmap(advantage_tables))
def test_global_normalisation_is_over_the_whole_minibatch(advantages):
    plan, config = ShardPlan(8, len(advantages)), config_of(num_epochs=2)
    ours, indices = normalised(config, advantages, plan)
    raw = picked(advantages, indices)
    for epoch, minibatch in np.ndindex(raw.shape[:2]):
        count, mean, m2 = reference.moments(raw[epoch, minibatch].ravel())
        expected = reference.normalize_advantages(raw[epoch, minibatch], mean.item(), m2.item(), count)
        np.testing.assert_allclose(ours[epoch, minibatch], expected, rtol=1e-5, atol=1e-5)


@given(advantage_tables(8))
def test_local_normalisation_is_over_each_shards_part_and_another(advantages):
    plan = ShardPlan(8, 8)
    ours, indices = normalised(config_of(advantage_normalization="local", num_epochs=2), advantages, plan)
    raw = picked(advantages, indices)
    for where in np.ndindex(raw.shape[:3]):
        count, mean, m2 = reference.moments(raw[where])
        expected = reference.normalize_advantages(raw[where], mean.item(), m2.item(), count)
        rounding = 1e-6 * np.abs(raw[where]).max() / raw[where].std()
        np.testing.assert_allclose(ours[where], expected, rtol=1e-5, atol=1e-5 + rounding)
    over_all, _ = normalised(config_of(num_epochs=2), advantages, plan)
    assert not np.allclose(ours, over_all, atol=1e-3)


@given(advantage_tables(8))
def test_off_leaves_advantages_as_they_are(advantages):
    ours, indices = normalised(config_of(advantage_normalization="off"), advantages, ShardPlan(8, 8))
    np.testing.assert_array_equal(ours, picked(advantages, indices))


@given(advantage_tables(8), st.sampled_from(["global", "local", "off"]))
def test_a_shard_gets_the_same_bits_whichever_rank_owns_it(advantages, kind):
    config = config_of(advantage_normalization=kind)
    alone, _ = normalised(config, advantages, ShardPlan(8, 8))
    for world_size in (2, 4, 8):
        ranks = [normalised(config, advantages, ShardPlan(8, 8, world_size, r))[0] for r in range(world_size)]
        np.testing.assert_array_equal(np.concatenate(ranks, 2), alone)
