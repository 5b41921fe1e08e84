"""The update: its gradients, and that it has the same bits for every number of ranks."""

import numpy as np
import pytest
import torch
from small_runs import (
    alone,
    described,
    joined,
    naive_gradient,
    not_normalised,
    of_rank,
    plan_of,
    random_batch,
    run_ranks,
    small_config,
    small_state,
    statistics_of,
)
from torch import Tensor

from lockstep.config.run import Config
from lockstep.core.shards import ShardPlan
from lockstep.torch_engine.batch import Batch
from lockstep.torch_engine.distributed.communicator import Communicator
from lockstep.torch_engine.gradients import exact_gradient, fast_gradient
from lockstep.torch_engine.minibatches import (
    advantage_moments,
    epoch_minibatches,
    minibatch_indices,
    minibatch_statistics,
)
from lockstep.torch_engine.nets.shards import Mode
from lockstep.torch_engine.state import TrainState
from lockstep.torch_engine.update import UpdateResult, update
from lockstep.training.losses import TERMS, loss_settings

HEADS = pytest.mark.parametrize("discrete", [True, False], ids=["discrete", "continuous"])


# --- Which samples ----------------------------------------------------------------------------------------------------


def test_an_epoch_visits_every_sample_of_a_shard_once():
    config = small_config(num_steps=8, num_shards=4, ppo={"num_epochs": 3, "num_minibatches": 4})
    indices = minibatch_indices(config, plan_of(config), iteration=0)
    assert indices.shape == (3, 4, 4, 4)  # epochs, minibatches, shards, rows
    for epoch, shard in np.ndindex(3, 4):
        assert sorted(indices[epoch, :, shard].ravel().tolist()) == list(range(16))


def test_permutations_differ_between_epochs_shards_iterations_and_seeds():
    config = small_config(num_steps=8, num_shards=2, ppo={"num_epochs": 2, "num_minibatches": 1})
    drawn = [minibatch_indices(config, plan_of(config), iteration).reshape(4, -1) for iteration in (0, 1)]
    drawn.append(minibatch_indices(config.model_copy(update={"seed": 1}), plan_of(config), 0).reshape(4, -1))
    permutations = {tuple(row) for table in drawn for row in table.tolist()}
    assert len(permutations) == 12


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_a_shard_is_permuted_alike_whichever_rank_owns_it(world_size):
    config = small_config(num_shards=8)
    whole = minibatch_indices(config, plan_of(config), iteration=5)
    ranks = [minibatch_indices(config, plan_of(config, world_size, rank), 5) for rank in range(world_size)]
    np.testing.assert_array_equal(np.concatenate(ranks, 2), whole)
    assert not np.array_equal(ranks[0], ranks[1])


def test_a_global_minibatch_is_the_union_of_the_shards_slices():
    config, description = small_config(num_shards=4), described()
    state, plan = small_state(config, description), plan_of(config)
    batch = random_batch(config, state.net)
    batch.returns = torch.arange(batch.actions.numel()).view_as(batch.actions).float()  # names every sample
    indices = minibatch_indices(config, plan, 0)
    minibatches = list(epoch_minibatches(state, batch, indices, not_normalised(config), 1, config, plan))
    seen = torch.cat([minibatch["returns"].flatten() for minibatch in minibatches])
    assert sorted(seen.tolist()) == batch.returns.flatten().tolist()
    for number, minibatch in enumerate(minibatches):
        assert minibatch.keys() == batch.columns().keys()
        for shard in range(4):
            for name, column in batch.columns().items():
                assert torch.equal(minibatch[name][shard], column[shard][indices[1, number, shard]])


# --- Gradients --------------------------------------------------------------------------------------------------------


def minibatch_of(config: Config, state: TrainState, seed: int = 0) -> tuple[dict[str, Tensor], int]:
    """The second minibatch of the first epoch, and its count."""
    batch, plan, statistics = random_batch(config, state.net, seed), plan_of(config), not_normalised(config)
    indices = minibatch_indices(config, plan, 0)
    _, columns = epoch_minibatches(state, batch, indices, statistics, 0, config, plan)
    return columns, int(statistics.counts[0, 1])


@HEADS
@pytest.mark.parametrize("activation", ["tanh", "silu"], ids=["by hand", "by autograd"])
@pytest.mark.parametrize("mode", ["batched", "loop"])
def test_the_sum_over_shards_is_the_gradient_of_the_whole_minibatch(mode, activation, discrete):
    config = small_config(ppo={"entropy_coef": 0.05}, network={"activation": activation})
    state = small_state(config, described(discrete))
    minibatch = minibatch_of(config, state)
    size = state.parameters.flat.numel()
    ours = joined(exact_gradient(state, config, alone(config), mode)(*minibatch))
    expected = naive_gradient(state.net, state.parameters.views, loss_settings(config), minibatch[0])
    assert ours.shape == (size + len(TERMS),)
    torch.testing.assert_close(ours[:size].double(), expected, rtol=1e-4, atol=1e-5)
    other = naive_gradient(state.net, state.parameters.views, loss_settings(config), minibatch_of(config, state, 1)[0])
    assert (ours[:size] - other).abs().max() > 1e-2


@HEADS
def test_the_fast_gradient_is_the_exact_one_up_to_summation_order(discrete):
    config = small_config(ppo={"entropy_coef": 0.05, "value_clip_range": 0.3})
    state = small_state(config, described(discrete))
    fast, exact = fast_gradient(state, config, alone(config)), exact_gradient(state, config, alone(config), "batched")
    for seed in (0, 1):  # twice: nothing of the first pass is left in the second
        minibatch = minibatch_of(config, state, seed)
        torch.testing.assert_close(joined(fast(*minibatch)), joined(exact(*minibatch)), rtol=1e-5, atol=1e-5)


def test_the_fast_gradient_follows_the_parameters_that_the_optimiser_moves():
    config = small_config()
    state = small_state(config, described())
    fast, exact = fast_gradient(state, config, alone(config)), exact_gradient(state, config, alone(config), "batched")
    minibatch = minibatch_of(config, state)
    before = joined(fast(*minibatch))
    state.parameters.flat.add_(0.1)
    torch.testing.assert_close(joined(fast(*minibatch)), joined(exact(*minibatch)), rtol=1e-5, atol=1e-5)
    assert (joined(fast(*minibatch)) - before).abs().max() > 1e-2


@HEADS
@pytest.mark.parametrize("activation", ["tanh", "silu"], ids=["by hand", "by autograd"])
@pytest.mark.parametrize("mode", ["batched", "loop"])
def test_a_minibatch_in_parts_has_the_gradient_of_the_whole(mode, activation, discrete):
    config = small_config(num_shards=4, network={"activation": activation})
    parts = small_config(num_shards=4, network={"activation": activation}, ppo={"gradient_accumulation": 2})
    state = small_state(config, described(discrete))
    minibatch = minibatch_of(config, state)
    whole = joined(exact_gradient(state, config, alone(config), mode)(*minibatch))
    torch.testing.assert_close(
        joined(exact_gradient(state, parts, alone(parts), mode)(*minibatch)), whole, rtol=1e-5, atol=1e-5
    )
    half = {name: x[:, : x.shape[1] // 2].contiguous() for name, x in minibatch[0].items()}
    assert (joined(exact_gradient(state, config, alone(config), mode)(half, minibatch[1])) - whole).abs().max() > 1e-2


def test_the_loss_is_divided_by_the_global_count():
    config = small_config(num_envs=8, num_shards=4, num_steps=6, ppo={"num_minibatches": 3})
    assert loss_settings(config).count == 16
    for world_size in (2, 3, 4):
        counts = run_ranks(config, world_size, lambda plan, communicator: loss_settings(config).count)
        assert counts == [16] * world_size


# --- The same bits for every number of ranks --------------------------------------------------------------------------


def trained(config: Config, discrete: bool, batch: Batch, mode: Mode, world_size: int) -> list[tuple[Tensor, float]]:
    """Parameters after an update, and the summed gradient norm, of every rank."""

    def rank(plan: ShardPlan, communicator: Communicator) -> tuple[Tensor, float]:
        state = small_state(config, described(discrete, batch.observations.shape[-1]), plan)
        mine, indices = of_rank(batch, plan), minibatch_indices(config, plan, 0)
        local = advantage_moments(mine, indices)
        statistics = minibatch_statistics(config, local, communicator.gather_shards(local))
        source = exact_gradient(state, config, communicator, mode)
        result = update(state, mine, indices, statistics, config, plan, source)
        return state.parameters.flat, result.grad_norm

    return run_ranks(config, world_size, rank)


@HEADS
@pytest.mark.parametrize(("mode", "size"), [("batched", 4), ("loop", 4), ("loop", 11)])
def test_an_update_has_the_same_bits_for_every_number_of_ranks(mode, size, discrete):
    """Two rows of 11 numbers don't fill whole cache lines: the minibatches of a rank lie anywhere in memory."""
    config = small_config(num_shards=4, network={"hidden_sizes": (64, 64)}, ppo={"num_minibatches": 4})
    batch = random_batch(config, small_state(config, described(discrete, size)).net)
    ((expected, norm),) = trained(config, discrete, batch, mode, 1)
    assert not torch.equal(expected, small_state(config, described(discrete, size)).parameters.flat)
    for world_size in (2, 3, 4):
        for parameters, its_norm in trained(config, discrete, batch, mode, world_size):
            assert its_norm == norm, f"{world_size} ranks"
            assert torch.equal(parameters, expected), f"{world_size} ranks"


def test_one_sample_more_or_less_has_other_bits():
    """The negative of the above."""
    config = small_config(num_shards=4)
    batch = random_batch(config, small_state(config, described()).net)
    ((before, _),) = trained(config, True, batch, "loop", 1)
    batch.advantages[3, 7] += 1e-3
    ((after, _),) = trained(config, True, batch, "loop", 1)
    assert not torch.equal(before, after)


# --- Metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_are_means_over_minibatches_and_optimiser_steps():
    config = small_config(ppo={"value_coef": 2.0, "entropy_coef": 0.5})
    result = UpdateResult(np.array([4.0, 2.0, 6.0, 0.2, 1.0]), evaluated=2, grad_norm=3.0, steps=2, stopped_by_kl=True)
    metrics = result.metrics(config, 0.25)
    assert metrics["train/policy_loss"] == 2.0
    assert metrics["train/loss"] == 2.0 + 2.0 * 1.0 - 0.5 * 3.0
    assert metrics["train/grad_norm"] == 1.5
    assert metrics["train/learning_rate"] == 0.25
    assert (metrics["train/optimizer_steps"], metrics["train/stopped_by_kl"]) == (2, 1)


@pytest.mark.parametrize("normalization", ["global", "local"])
def test_the_reported_terms_are_those_of_the_minibatches(normalization):
    config = small_config(ppo={"advantage_normalization": normalization, "num_epochs": 1, "learning_rate": 1e-9})
    state = small_state(config, described())
    plan, batch = plan_of(config), random_batch(config, state.net)
    indices, statistics = minibatch_indices(config, plan, 0), statistics_of(config, batch)
    source = exact_gradient(state, config, alone(config), "batched")
    minibatches = epoch_minibatches(state, batch, indices, statistics, 0, config, plan)
    expected = sum(source(minibatch, 16).terms.double().numpy() for minibatch in minibatches)
    result = update(state, batch, indices, statistics, config, plan, source)
    assert result.steps == 2
    np.testing.assert_allclose(result.terms, expected, rtol=1e-4, atol=1e-6)
