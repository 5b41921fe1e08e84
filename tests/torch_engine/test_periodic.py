"""Local steps with periodic averaging: when ranks meet, what they average, and what they decide then."""

import numpy as np
import pytest
import torch
from small_runs import (
    alone,
    described,
    joined,
    of_rank,
    plan_of,
    random_batch,
    run_ranks,
    small_config,
    small_state,
    statistics_of,
)

from lockstep.core.errors import NonFiniteError
from lockstep.core.fingerprint import fingerprints
from lockstep.torch_engine import periodic
from lockstep.torch_engine.gradients import fast_gradient, local_gradient
from lockstep.torch_engine.minibatches import minibatch_indices
from lockstep.torch_engine.periodic import update_periodically
from lockstep.torch_engine.state import state_arrays
from lockstep.torch_engine.update import update

NETS = pytest.mark.parametrize("activation", ["tanh", "silu"], ids=["by hand", "autograd"])


def config_of(sync_period=1, **changes):
    ppo = {"num_epochs": 2, "num_minibatches": 4, **changes.pop("ppo", {})}
    return small_config(reduction="fast", sync_period=sync_period, num_shards=4, num_steps=8, ppo=ppo, **changes)


def summing(communicator):
    """A communicator of threads whose all-reduces are counted."""
    communicator.reduced = 0

    def all_reduce(x):
        communicator.reduced += 1
        return communicator.gather_ranks(x).sum(0)

    communicator.all_reduce = all_reduce
    return communicator


def trained(config, world_size, spoil=None, seen=None):
    """An update on every rank; each returns its result, its state, and its number of all-reduces."""

    def rank(plan, communicator):
        communicator = summing(communicator) if world_size > 1 else communicator
        state = small_state(config, described(), plan)
        whole = random_batch(config, state.net)
        batch = of_rank(whole, plan)
        if spoil is not None:
            spoil(plan, batch)
        given = (state, batch, minibatch_indices(config, plan, 0), statistics_of(config, whole), config, plan)
        if config.sync_period == 1:
            result = update(*given, fast_gradient(state, config, communicator))
        else:
            result = update_periodically(*given, local_gradient(state, config, communicator), communicator)
        return result, state, getattr(communicator, "reduced", 0)

    return run_ranks(config, world_size, rank) if world_size > 1 else [rank(plan_of(config), alone(config))]


def prints_of(state):
    return fingerprints(state_arrays(state)).tolist()


@pytest.mark.parametrize("world_size", [2, 3, 4])
@NETS
def test_ranks_are_equal_after_each_synchronisation_and_only_then(monkeypatch, activation, world_size):
    before, after = [], []
    synchronize = periodic.synchronize

    def watched(state, period, communicator):
        before.append((state.optimizer_steps, prints_of(state)))
        together = synchronize(state, period, communicator)
        after.append((state.optimizer_steps, prints_of(state)))
        return together

    monkeypatch.setattr(periodic, "synchronize", watched)
    trained(config_of(3, network={"activation": activation}), world_size)
    assert sorted(steps for steps, _ in after) == sorted([3, 6, 8] * world_size)  # the last period is cut short
    for steps in (3, 6, 8):
        assert len({str(prints) for at, prints in after if at == steps}) == 1
        assert len({str(prints) for at, prints in before if at == steps}) == world_size


@pytest.mark.parametrize(("sync_period", "collectives"), [(1, 8), (2, 4), (4, 2), (8, 1), (100, 1), (5, 2)])
def test_a_period_of_four_takes_a_quarter_of_the_collectives(sync_period, collectives):
    for result, state, reduced in trained(config_of(sync_period), 2):
        assert reduced == collectives
        assert result.steps == result.evaluated == state.optimizer_steps == 8


def test_a_synchronisation_averages_parameters_and_both_moments(monkeypatch):
    held = {}
    synchronize = periodic.synchronize

    def watched(state, period, communicator):
        held.setdefault(communicator.topology.rank, state_arrays(state))
        return synchronize(state, period, communicator)

    monkeypatch.setattr(periodic, "synchronize", watched)
    (_, state, _), _ = trained(config_of(8), 2)
    for name, array in state_arrays(state).items():
        np.testing.assert_allclose(array, (held[0][name] + held[1][name]) / 2, rtol=1e-6, atol=1e-9, err_msg=name)
        if name != "optimizer/step":
            assert not np.array_equal(held[0][name], held[1][name]), name


@NETS
def test_a_single_rank_trains_as_without_periods(activation):
    network = {"activation": activation}
    (result, state, _), (plain, other, _) = (trained(config_of(k, network=network), 1)[0] for k in (3, 1))
    for name, array in state_arrays(state).items():
        np.testing.assert_allclose(array, state_arrays(other)[name], rtol=1e-5, atol=1e-7, err_msg=name)
    np.testing.assert_allclose(result.terms, plain.terms, rtol=1e-5)
    assert result.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)


def test_training_apart_is_close_to_training_together_and_not_the_same():
    (_, together, _), _ = trained(config_of(1), 2)
    (_, apart, _), _ = trained(config_of(4), 2)
    start = small_state(config_of(), described()).parameters.flat
    moved = (together.parameters.flat - start).norm()
    distance = (together.parameters.flat - apart.parameters.flat).norm()
    assert 0 < distance < 0.7 * moved


def test_the_mean_of_local_gradients_is_the_global_gradient():
    config = config_of(2)

    def rank(plan, communicator):
        state = small_state(config, described(), plan)
        columns = of_rank(random_batch(config, state.net), plan).columns()
        return joined(local_gradient(state, config, communicator)(columns, 64))

    halves, (whole,) = run_ranks(config, 2, rank), [rank(plan_of(config), alone(config))]
    size = whole.numel() - 5
    torch.testing.assert_close((halves[0] + halves[1])[:size] / 2, whole[:size])
    torch.testing.assert_close((halves[0] + halves[1])[size:], whole[size:])
    assert not torch.allclose(halves[0][:size], whole[:size], rtol=1e-2)


def test_the_kl_stop_waits_for_the_end_of_a_period():
    for target, steps in ((1e-9, 4), (1e9, 8)):
        for result, state, _ in trained(config_of(4, ppo={"target_kl": target}), 2):
            assert (result.stopped_by_kl, result.steps, state.optimizer_steps) == (steps == 4, steps, steps)


def test_the_learning_rate_adapts_once_a_period_and_alike_on_all_ranks():
    rates = [
        state.learning_rate
        for _, state, _ in trained(config_of(4, ppo={"schedule": "adaptive", "desired_kl": 1e-6}), 2)
    ]
    assert rates == [pytest.approx(3e-4 / 1.5**2)] * 2


def test_the_learning_rate_follows_the_period_that_stops_the_update_too():
    ppo = {"schedule": "adaptive", "desired_kl": 1e-6, "target_kl": 1e-6}
    for result, state, _ in trained(config_of(4, ppo=ppo), 2):
        assert (result.stopped_by_kl, result.steps) == (True, 4)
        assert state.learning_rate == pytest.approx(3e-4 / 1.5)


def test_a_loss_that_is_not_finite_on_one_rank_ends_both_at_the_synchronisation():
    def spoil(plan, batch):
        if plan.rank:
            batch.advantages[0, 0] = float("nan")

    with pytest.raises(NonFiniteError, match=r"iteration 1, epoch 1, the 4 minibatches up to 4 \(policy_loss nan"):
        trained(config_of(4, ppo={"advantage_normalization": "off"}), 2, spoil)
    trained(config_of(4, ppo={"advantage_normalization": "off"}), 2)


def test_a_gradient_whose_norm_is_too_large_ends_both_though_its_numbers_are_finite():
    def spoil(plan, batch):
        batch.advantages.mul_(1e22)

    with pytest.raises(NonFiniteError, match=r"iteration 1, epoch 1, the 4 minibatches up to 4"):
        trained(config_of(4, ppo={"advantage_normalization": "off"}), 2, spoil)


def test_scheduled_coefficients_are_those_of_the_iteration():
    """Half of the run is left; the record says so, and the update is that of the coefficients it says."""
    ppo, states = {"entropy_coef": 0.02, "clip_range": 0.1, "learning_rate": 0.01}, []
    falling = {"entropy_coef": 0.04, "clip_range": 0.2, "entropy_schedule": "linear", "clip_schedule": "linear"}
    for changes in (ppo, ppo | falling):
        config = config_of(sync_period=2, total_steps=1024, ppo=changes)
        state = small_state(config, described())
        state.global_step, whole = 512, random_batch(config, state.net)
        given = (state, whole, minibatch_indices(config, plan_of(config), 0), statistics_of(config, whole), config)
        communicator = alone(config)
        result = update_periodically(*given, plan_of(config), local_gradient(state, config, communicator), communicator)
        states.append(state.parameters.flat)
    assert result.coefficients == {"entropy_coef": 0.02, "clip_range": 0.1}
    torch.testing.assert_close(*states, rtol=1e-5, atol=1e-6)
