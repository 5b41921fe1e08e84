"""What an update decides: early stop by KL, learning rate, and what it does about numbers that aren't finite."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from small_runs import (
    alone,
    described,
    not_normalised,
    of_rank,
    plan_of,
    random_batch,
    reduced,
    run_ranks,
    small_config,
    small_state,
    statistics_of,
)
from torch import Tensor

from lockstep import reference
from lockstep.config.run import Config
from lockstep.core.errors import NonFiniteError
from lockstep.torch_engine.gradients import Gradient, GradientSource, exact_gradient
from lockstep.torch_engine.minibatches import minibatch_indices
from lockstep.torch_engine.state import TrainState, state_arrays
from lockstep.torch_engine.update import UpdateResult, update
from lockstep.training.limits import KL_NOISE, LEARNING_RATE_LIMITS
from lockstep.training.losses import TERMS


class ScriptedSource:
    """Gradients of ones and loss terms with the approximate KLs of a script, recording what the optimiser has done.

    Attributes:
        parameters: the flat parameters at each call; ``learning_rates`` likewise, as the last step left them.
    """

    def __init__(self, state: TrainState, kls: list[float]) -> None:
        self._state, self._kls, self._step, self._rate = state, kls, state.optimizer.step, 0.0
        state.optimizer.step = self._watched
        self.parameters: list[Tensor] = []
        self.learning_rates: list[float] = []

    def _watched(self, gradient: Tensor, learning_rate: float | Tensor, skipped: Tensor | None = None) -> None:
        self._rate = float(learning_rate)
        self._step(gradient, learning_rate, skipped)

    def __call__(self, columns: Mapping[str, Tensor], count: int) -> Gradient:
        kl = self._kls[len(self.parameters)]
        self.parameters.append(self._state.parameters.flat.clone())
        self.learning_rates.append(self._rate)
        terms = torch.zeros(len(TERMS))
        terms[TERMS.index("approx_kl")] = kl
        return reduced(torch.ones_like(self._state.parameters.flat), terms)


def run_script(
    config: Config, kls: list[float], global_step: int = 0
) -> tuple[TrainState, ScriptedSource, UpdateResult]:
    state = small_state(config, described())
    state.global_step = global_step
    source = ScriptedSource(state, kls)
    return state, source, updated(config, state, source)


def updated(config: Config, state: TrainState, source: GradientSource) -> UpdateResult:
    """An update of a whole batch whose advantages stay as they are."""
    batch, plan = random_batch(config, state.net), plan_of(config)
    return update(state, batch, minibatch_indices(config, plan, 0), not_normalised(config), config, plan, source)


# --- Early stop -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kls", "steps"),
    [([0.02, 0.0, 0.0, 0.0], 0), ([0.0, 0.01, 0.016, 0.0], 2), ([0.0, 0.0, 0.0, 0.2], 3)],
)
def test_an_update_stops_at_the_first_minibatch_beyond_the_target_without_applying_it(kls, steps):
    state, source, result = run_script(small_config(ppo={"target_kl": 0.01}), kls)
    assert result.stopped_by_kl
    assert result.steps == state.optimizer_steps == int(state.optimizer.moments()["step"]) == steps
    assert len(source.parameters) == steps + 1  # none is evaluated after the one that stopped it, in no epoch
    assert torch.equal(state.parameters.flat, source.parameters[-1])
    assert result.evaluated == steps + 1
    assert result.terms[TERMS.index("approx_kl")] == pytest.approx(sum(kls[: steps + 1]))


@pytest.mark.parametrize(("target", "kl"), [(None, 10.0), (0.01, 0.0149), (0.01, -1.0)])
def test_an_update_goes_on_below_one_and_a_half_times_the_target(target, kl):
    state, source, result = run_script(small_config(ppo={"target_kl": target}), [kl] * 4)
    assert not result.stopped_by_kl
    assert result.steps == state.optimizer_steps == 4
    assert not torch.equal(state.parameters.flat, source.parameters[-1])


def test_a_tiny_target_stops_a_real_update_once_the_policy_has_moved():
    config = small_config(ppo={"target_kl": 1e-9, "learning_rate": 0.1})
    state = small_state(config, described())
    before = state.parameters.flat.clone()
    source = exact_gradient(state, config, alone(config), "batched")
    result = updated(config, state, source)  # its old log-probabilities are another policy's
    assert (result.stopped_by_kl, result.steps) == (True, 0)
    assert torch.equal(state.parameters.flat, before)


def test_all_ranks_stop_at_the_same_step_by_the_global_kl():
    """Shard 0's policy has moved far and the others' not at all: the ranks' own KLs would disagree."""
    config = small_config(num_shards=4, ppo={"target_kl": 0.02, "num_epochs": 1})

    def rank(plan, communicator):
        state = small_state(config, described(), plan)
        batch, indices = of_rank(random_batch(config, state.net), plan), minibatch_indices(config, plan, 0)
        source = exact_gradient(state, config, communicator, "loop")
        with torch.no_grad():
            batch.log_probs[:] = state.policy.evaluate(batch.observations, batch.actions)[0]
            batch.log_probs[0] -= 0.0 if plan.rank else 1.0
        result = update(state, batch, indices, not_normalised(config), config, plan, source)
        return result.steps, result.stopped_by_kl

    for world_size in (3, 4):
        assert run_ranks(config, world_size, rank) == [(0, True)] * world_size


# --- Learning rate ----------------------------------------------------------------------------------------------------


def test_the_adaptive_schedule_follows_the_kl_of_every_minibatch():
    config = small_config(ppo={"schedule": "adaptive", "desired_kl": 0.01, "learning_rate": 1e-3})
    kls = [0.001, 0.0, 0.5, 0.03]
    state, source, result = run_script(config, kls)
    expected, lr = [], 1e-3
    for kl in kls:
        lr = reference.adaptive_learning_rate(lr, float(np.float32(kl)), 0.01, *LEARNING_RATE_LIMITS)
        expected.append(lr)
    assert expected == pytest.approx([1.5e-3, 1.5e-3, 1e-3, 1e-3 / 1.5])
    assert [*source.learning_rates[1:], state.learning_rate] == expected
    assert result.steps == 4


@pytest.mark.parametrize(
    ("kls", "rate", "steps"), [([0.03, 0.0, 0.0, 0.0], 1e-3 / 1.5, 0), ([0.001, 0.017, 0.0, 0.0], 1.5e-3, 1)]
)
def test_the_adaptive_learning_rate_follows_the_minibatch_that_stops_the_update_too(kls, rate, steps):
    """Or it would be raised by small divergences and never lowered by large ones."""
    config = small_config(ppo={"schedule": "adaptive", "desired_kl": 0.01, "target_kl": 0.01, "learning_rate": 1e-3})
    state, source, result = run_script(config, kls)
    assert (result.stopped_by_kl, result.steps) == (True, steps)
    assert state.learning_rate == pytest.approx(rate)
    assert torch.equal(state.parameters.flat, source.parameters[-1])


def test_a_kl_of_rounding_alone_changes_no_adaptive_learning_rate():
    config = small_config(ppo={"schedule": "adaptive", "desired_kl": 0.01, "learning_rate": 1e-3})
    state, source, _ = run_script(config, [1e-15, 3e-13, -2e-14, 0.99 * KL_NOISE * 0.01])
    assert [*source.learning_rates[1:], state.learning_rate] == [1e-3] * 4
    state, _, _ = run_script(config, [1.01 * KL_NOISE * 0.01] * 4)
    assert state.learning_rate == pytest.approx(1e-3 * 1.5**4)


def test_the_adaptive_learning_rate_is_kept_between_updates():
    config = small_config(ppo={"schedule": "adaptive", "learning_rate": 1e-3, "num_epochs": 1})
    state = small_state(config, described())
    updated(config, state, ScriptedSource(state, [1.0, 1.0]))
    source = ScriptedSource(state, [0.01, 0.01])
    updated(config, state, source)
    assert state.learning_rate == source.learning_rates[1] == pytest.approx(1e-3 / 1.5**2)


@pytest.mark.parametrize(("step", "share"), [(0, 1.0), (250, 0.75), (1000, 0.0), (1032, 0.0)])
def test_the_linear_schedule_falls_to_zero_over_the_runs_steps(step, share):
    config = small_config(total_steps=1000, ppo={"schedule": "linear", "learning_rate": 0.01})
    state, source, _ = run_script(config, [0.5] * 4, step)
    assert state.learning_rate == pytest.approx(0.01 * share)
    assert source.learning_rates[1:] == [state.learning_rate] * 3
    moved = (source.parameters[1] - source.parameters[0]).abs().max().item()
    assert moved == pytest.approx(0.01 * share, rel=1e-2)


def test_the_constant_schedule_stays():
    config = small_config(total_steps=1000, ppo={"schedule": "constant", "learning_rate": 0.01})
    state, source, _ = run_script(config, [0.5] * 4, 900)
    assert [*source.learning_rates[1:], state.learning_rate] == [0.01] * 4


# --- Numbers that aren't finite ---------------------------------------------------------------------------------------


def state_with_bad_sample(normalization: str, bad: float, where: tuple[int, int] | None):
    config = small_config(num_shards=4, ppo={"advantage_normalization": normalization})
    state = small_state(config, described())
    batch, indices = random_batch(config, state.net), minibatch_indices(config, plan_of(config), 0)
    if where is not None:
        minibatch, shard = where
        batch.advantages[shard, indices[0, minibatch, shard, 1]] = bad
    statistics = statistics_of(config, batch)
    source = exact_gradient(state, config, alone(config), "batched")
    return state, lambda: update(state, batch, indices, statistics, config, plan_of(config), source)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("normalization", ["global", "local", "off"])
def test_one_bad_advantage_ends_the_update_before_the_optimiser_has_seen_it(normalization, bad):
    state, run = state_with_bad_sample(normalization, bad, (0, 2))
    before = state_arrays(state)
    with pytest.raises(NonFiniteError, match=r"iteration 1, epoch 1, minibatch 1 \(policy_loss (nan|inf|-inf)"):
        run()
    for name, array in state_arrays(state).items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


def test_good_advantages_don_t():
    state, run = state_with_bad_sample("global", 0.0, None)
    before = state.parameters.flat.clone()
    assert run().steps == 4
    assert not torch.equal(state.parameters.flat, before)


def test_what_came_before_the_bad_minibatch_stays_applied():
    state, run = state_with_bad_sample("off", float("nan"), (1, 0))
    good, run_good = state_with_bad_sample("off", 0.0, None)
    with pytest.raises(NonFiniteError, match="epoch 1, minibatch 2"):
        run()
    run_good()
    assert state.optimizer_steps == int(state.optimizer.moments()["step"]) == 1
    assert torch.isfinite(state.parameters.flat).all()
    assert good.optimizer_steps == 4


@pytest.mark.parametrize("place", [0, -1, -len(TERMS)], ids=["a gradient", "the last term", "the first term"])
def test_a_gradient_or_any_term_that_is_not_finite_is_enough(place):
    config = small_config()
    state = small_state(config, described())
    combined = torch.ones(state.parameters.flat.numel() + len(TERMS))
    combined[place] = float("inf")
    size = state.parameters.flat.numel()
    with pytest.raises(NonFiniteError):
        updated(config, state, lambda *_: reduced(combined[:size], combined[size:]))
    assert state.optimizer_steps == 0


def test_all_ranks_end_at_the_same_step_when_one_of_them_has_the_bad_sample():
    config = small_config(num_shards=4, ppo={"advantage_normalization": "off"})

    def rank(plan, communicator):
        state = small_state(config, described(), plan)
        batch = of_rank(random_batch(config, state.net), plan)
        if plan.rank == 1:
            batch.advantages[0, 0] = float("nan")
        source = exact_gradient(state, config, communicator, "loop")
        indices, statistics = minibatch_indices(config, plan, 0), not_normalised(config)
        with pytest.raises(NonFiniteError) as error:
            update(state, batch, indices, statistics, config, plan, source)
        return str(error.value), state.optimizer_steps

    for world_size in (3, 4):
        assert len(set(run_ranks(config, world_size, rank))) == 1


# --- Coefficients of the loss -----------------------------------------------------------------------------------------

FALLING = {"entropy_schedule": "linear", "clip_schedule": "linear", "entropy_coef": 0.02, "value_clip_range": 0.4}


@pytest.mark.parametrize("activation", ["tanh", "silu"], ids=["by hand", "autograd"])
def test_an_update_with_scheduled_coefficients_is_that_of_the_coefficients_they_are_then(activation):
    """A quarter of the run is left; the learning rate is told to be the same."""
    network, rest = {"activation": activation}, {"learning_rate": 0.01, "num_epochs": 3}
    config = small_config(total_steps=1000, network=network, ppo=FALLING | rest)
    then = {"entropy_coef": 0.005, "value_clip_range": 0.1, "clip_range": 0.05}
    fixed = small_config(total_steps=1000, network=network, ppo=rest | then)
    untouched = small_config(total_steps=1000, network=network, ppo=rest | {"entropy_coef": 0.02})
    results, states = [], []
    for each in (config, fixed, untouched):
        state = small_state(each, described())
        state.global_step = 750
        results.append(updated(each, state, exact_gradient(state, each, alone(each), "batched")))
        states.append(state.parameters.flat)
    np.testing.assert_allclose(results[0].terms, results[1].terms, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(states[0], states[1], rtol=1e-5, atol=1e-6)
    assert (states[0] - states[2]).abs().max() > 1e-3
    assert results[0].coefficients == pytest.approx(then)
    record = results[0].metrics(config, 0.01)
    assert record == pytest.approx(
        results[1].metrics(fixed, 0.01) | {"train/entropy_coef": 0.005, "train/clip_range": 0.05}, rel=1e-5, abs=1e-6
    )
