"""Minibatches of sequences and of samples that don't all count; statistics of what counts."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_runs import (
    actions_of,
    alone,
    described,
    not_normalised,
    of_rank,
    plan_of,
    random_actions_of,
    random_batch,
    run_ranks,
    seeded,
    small_config,
    small_state,
    statistics_of,
)

from lockstep import reference
from lockstep.config.run import Config
from lockstep.core.shards import ShardPlan
from lockstep.torch_engine.advantages import counted_moments, merge_counts
from lockstep.torch_engine.batch import Batch, make_batch
from lockstep.torch_engine.distributed.communicator import Communicator
from lockstep.torch_engine.gradients import exact_gradient, fast_gradient
from lockstep.torch_engine.minibatches import (
    advantage_moments,
    epoch_minibatches,
    minibatch_indices,
    minibatch_statistics,
    observations_taker,
)
from lockstep.torch_engine.nets import nets
from lockstep.torch_engine.nets.autograd import minibatch_loss
from lockstep.torch_engine.nets.shards import to_sequences, to_shards
from lockstep.torch_engine.rollout import Rollout
from lockstep.torch_engine.state import TrainState
from lockstep.training.losses import TERMS, loss_settings

RECURRENT = {"recurrent": "lstm", "recurrent_size": 6, "sequence_length": 4}

# --- What counts ------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 8]), st.sampled_from([0.0, 0.3, 1.0]))
def test_moments_of_what_counts_are_the_references(seed, shards, share):
    rng = np.random.default_rng(seed)
    x, valid = rng.normal(2, 3, (shards, 10)).astype(np.float32), rng.random((shards, 10)) < share
    parts = counted_moments(torch.from_numpy(x), torch.from_numpy(valid).float())
    assert parts[:, 0].tolist() == valid.sum(1).tolist()
    count, mean, std = (float(part) for part in merge_counts(parts))
    chosen = x[valid].astype(np.float64)
    assert count == len(chosen)
    assert mean == pytest.approx(chosen.mean() if len(chosen) else 0.0, rel=1e-9, abs=1e-12)
    assert std == pytest.approx(chosen.std() if len(chosen) else 0.0, rel=1e-9, abs=1e-9)
    if share == 1.0:
        everything = counted_moments(torch.from_numpy(x), None)
        torch.testing.assert_close(everything, parts)
    elif 0 < len(chosen) < x.size:
        assert mean != pytest.approx(float(x.mean()), rel=1e-9)


def with_valid(config: Config, share: float) -> Batch:
    batch = random_batch(config, small_state(config, described()).net)
    batch.valid = (torch.rand(batch.actions.shape, generator=seeded(9)) < share).float()
    batch.valid[0] = 0.0  # nothing of the first shard counts
    return batch


def test_a_minibatch_counts_what_is_valid_in_all_shards_whichever_rank_asks():
    config = small_config(num_shards=4)
    whole = with_valid(config, 0.6)
    assert whole.valid is not None

    def rank(plan: ShardPlan, communicator: Communicator) -> list[list[int]]:
        mine, indices = of_rank(whole, plan), minibatch_indices(config, plan, 0)
        local = advantage_moments(mine, indices)
        return minibatch_statistics(config, local, communicator.gather_shards(local)).counts.tolist()

    indices = minibatch_indices(config, plan_of(config), 0)
    expected = [
        [int(sum(whole.valid[s][indices[epoch, number, s]].sum() for s in range(4))) for number in range(2)]
        for epoch in range(2)
    ]
    assert len({count for row in expected for count in row} - {16}) > 1
    for world_size in (1, 2, 3, 4):
        assert run_ranks(config, world_size, rank) == [expected] * world_size


def test_where_nothing_counts_the_loss_is_divided_by_one():
    config = small_config()
    batch = with_valid(config, 0.0)
    assert (statistics_of(config, batch).counts == 1).all()
    assert (statistics_of(config, random_batch(config, small_state(config, described()).net)).counts == 16).all()


def test_what_does_not_count_has_no_part_in_loss_and_terms():
    config = small_config(num_shards=4, ppo={"entropy_coef": 0.1})
    state, settings = small_state(config, described()), loss_settings(config)
    columns = random_batch(config, state.net).columns()
    valid = torch.ones_like(columns["advantages"])
    valid[:, 3:] = 0.0
    spoiled = {n: x.index_fill(1, torch.tensor([5]), torch.nan) if n == "advantages" else x for n, x in columns.items()}
    weights = nets.expand(state.parameters.views, 4)
    masked = minibatch_loss(state.net, weights, spoiled | {"valid": valid}, settings)
    cut = minibatch_loss(state.net, weights, {n: x[:, :3].contiguous() for n, x in columns.items()}, settings)
    for ours, expected in zip(masked, cut, strict=True):
        torch.testing.assert_close(ours, expected)
    assert torch.isnan(minibatch_loss(state.net, weights, spoiled, settings)[0]).all()


# --- Sequences --------------------------------------------------------------------------------------------------------


def test_sequences_by_hand():
    # One shard of two environments, four steps: 10·step + environment; sequences of two steps of one environment each.
    x = torch.tensor([[0, 1, 10, 11, 20, 21, 30, 31]])
    assert to_sequences(x, 4, 2).tolist() == [[[0, 10], [1, 11], [20, 30], [21, 31]]]
    assert to_sequences(x, 4, 4).tolist() == [[[0, 10, 20, 30], [1, 11, 21, 31]]]
    assert to_sequences(x.unsqueeze(-1), 4, 2).shape == (1, 4, 2, 1)


def test_minibatches_are_of_whole_sequences():
    config = small_config(num_steps=8, num_shards=4, network=RECURRENT)
    indices = minibatch_indices(config, plan_of(config), 0)
    assert indices.shape == (2, 2, 4, 2)  # 2 environments x 8 steps / 4 = 4 sequences a shard, in two minibatches
    for epoch, shard in np.ndindex(2, 4):
        assert sorted(indices[epoch, :, shard].ravel().tolist()) == [0, 1, 2, 3]
    flat = minibatch_indices(small_config(num_steps=8, num_shards=4), plan_of(config), 0)
    assert flat.shape == (2, 2, 4, 8)


ENDS = {(1, 0): "terminated", (3, 1): "truncated", (4, 2): "terminated", (7, 5): "terminated"}


def recurrent_batch(
    core: str = "lstm", shared: bool = False, activation: str = "tanh"
) -> tuple[Config, TrainState, Rollout, Batch]:
    """A batch of eight steps in which episodes end within sequences, at their borders, and at the last step."""
    network = {**RECURRENT, "recurrent": core, "shared": shared, "activation": activation}
    config = small_config(num_steps=8, num_shards=4, network=network)
    state, rng = small_state(config, described()), np.random.default_rng(0)
    assert isinstance(state.recurrent_state, np.ndarray)
    state.recurrent_state[:] = rng.normal(size=state.recurrent_state.shape)
    kinds = np.full((8, 8), "", object)
    for where, kind in ENDS.items():
        kinds[where] = kind
    observations = rng.normal(size=(9, 8, 4)).astype(np.float32)
    actions = random_actions_of(state.net, (8, 8)).numpy()
    rollout = Rollout(
        observations=observations,
        raw=observations[:-1],
        actions=actions,
        native=actions,
        rewards=rng.normal(size=(8, 8)),
        terminated=kinds == "terminated",
        truncated=kinds == "truncated",
        successes=np.zeros((8, 8), np.int8),
        final=rng.normal(size=(1, 4)).astype(np.float32),
    )
    return config, state, rollout, make_batch(state, rollout, plan_of(config), config, "batched")


def approx_kl(config: Config, state: TrainState, columns: dict[str, torch.Tensor]) -> float:
    """The mean divergence by PyTorch's networks, whoever computed the rollout."""
    weights = nets.expand(state.parameters.views, 4)
    terms = minibatch_loss(state.net, weights, columns, loss_settings(config))[1]
    return float(terms[:, TERMS.index("approx_kl")].sum())


@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
def test_sequences_with_their_carries_reproduce_the_rollout(core, shared):
    """Before the first step the policy is the one that acted: every log-probability and value comes out again."""
    config, state, _, batch = recurrent_batch(core, shared)
    assert batch.recurrent_state is not None
    assert batch.resets is not None
    assert batch.log_probs.shape == batch.resets.shape == (4, 4, 4)
    columns = batch.columns()
    assert approx_kl(config, state, columns) < 1e-10
    plan, indices = plan_of(config), minibatch_indices(config, plan_of(config), 0)
    for minibatch in epoch_minibatches(state, batch, indices, not_normalised(config), 0, config, plan):
        assert minibatch["observations"].shape == (4, 2, 4, 4)
        assert approx_kl(config, state, minibatch) < 1e-10
    assert approx_kl(config, state, columns | {"recurrent_state": torch.zeros_like(batch.recurrent_state)}) > 1e-5
    assert approx_kl(config, state, columns | {"recurrent_state": batch.recurrent_state.flip(1)}) > 1e-5
    assert approx_kl(config, state, columns | {"resets": torch.zeros_like(batch.resets)}) > 1e-5


def test_an_episode_that_ends_hands_nothing_on_and_the_others_do():
    _, state, rollout, _ = recurrent_batch()
    assert state.recurrent_state is not None
    ended = rollout.done[-1]
    assert ended.tolist() == [False] * 5 + [True] + [False] * 2
    assert not state.recurrent_state[ended].any()
    assert np.abs(state.recurrent_state[~ended]).max(1).min() > 1e-3


def test_a_truncated_episode_bootstraps_from_what_was_carried_to_its_end():
    config, state, rollout, batch = recurrent_batch()
    assert batch.values is not None
    assert batch.returns is not None
    # Environment 1 is the second of shard 0; step 3 is the last of its first sequence, the shard's second one.
    carried = batch.recurrent_state
    assert carried is not None
    sequence = batch.observations[0, 1]
    weights = nets.expand(state.parameters.views, 1)
    final = torch.from_numpy(rollout.final[0])
    steps = torch.cat([sequence, final[None]])[None, :, None]
    resets = torch.zeros(1, 5, 1)
    _, values, _ = nets.unroll(state.net, weights, steps, carried[0, 1][None, None], resets)
    assert values is not None
    expected = float(rollout.rewards[3, 1]) + config.ppo.gamma * float(values[0, -1, 0])
    assert float(batch.returns[0, 1, 3]) == pytest.approx(expected, abs=1e-5)
    _, fresh, _ = nets.unroll(
        state.net, weights, final.view(1, 1, 1, -1), torch.zeros(1, 1, state.net.state_size), resets[:, :1]
    )
    assert fresh is not None
    assert float(values[0, -1, 0]) != pytest.approx(float(fresh[0, 0, 0]), abs=1e-4)


def test_sequences_advantages_are_normalised_over_the_whole_minibatch():
    config, state, _, batch = recurrent_batch()
    plan, indices = plan_of(config), minibatch_indices(config, plan_of(config), 0)
    statistics = statistics_of(config, batch)
    assert (statistics.counts == 32).all()
    for number, minibatch in enumerate(epoch_minibatches(state, batch, indices, statistics, 1, config, plan)):
        raw = np.stack([batch.advantages[s][indices[1, number, s]].numpy() for s in range(4)])
        count, mean, m2 = reference.moments(raw.ravel())
        expected = reference.normalize_advantages(raw, mean.item(), m2.item(), count)
        np.testing.assert_allclose(minibatch["advantages"].numpy(), expected, rtol=1e-4, atol=1e-5)
    local = small_config(
        **{
            **config.model_dump(include={"num_steps", "num_shards"}),
            "network": RECURRENT,
            "ppo": {"advantage_normalization": "local"},
        }
    )
    first = next(epoch_minibatches(state, batch, indices, statistics_of(local, batch), 0, local, plan))
    flat = first["advantages"].flatten(1)
    torch.testing.assert_close(flat.mean(1), torch.zeros(4), rtol=0, atol=1e-5)
    torch.testing.assert_close(flat.std(1, correction=0), torch.ones(4), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_a_ranks_part_of_a_recurrent_batch_is_its_slice_of_the_worlds(core):
    config, state, rollout, whole = recurrent_batch(core)
    for world_size in (2, 3, 4):
        parts = []
        for rank in range(world_size):
            plan = plan_of(config, world_size, rank)
            ids = slice(plan.env_ids.start, plan.env_ids.stop)
            given = ("observations", "raw", "actions", "native", "rewards", "terminated", "truncated", "successes")
            mine = Rollout(
                **{name: np.ascontiguousarray(getattr(rollout, name)[:, ids]) for name in given},
                final=rollout.final if 1 in plan.env_ids else rollout.final[:0],
            )
            own = small_state(config, described(), plan)
            carry = np.random.default_rng(0).normal(size=(8, state.net.state_size))
            own.recurrent_state = carry[ids].astype(np.float32)
            parts.append(make_batch(own, mine, plan, config, "batched").columns())
        for name, column in whole.columns().items():
            assert torch.equal(torch.cat([part[name] for part in parts]), column), (world_size, name)


def test_layouts_of_sequences_and_samples_agree():
    x = torch.arange(8 * 8).view(8, 8)
    blocks = to_shards(x, 4)
    sequences = to_sequences(blocks, 8, 4)
    assert sequences.shape == (4, 4, 4)
    for shard in range(4):
        for number, sequence in enumerate(sequences[shard]):
            start, env = 4 * (number // 2), 2 * shard + number % 2
            assert sequence.tolist() == x[start : start + 4, env].tolist()
    assert actions_of(True, 3).row_shape == ()


@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("activation", ["tanh", "silu"], ids=["by hand", "by autograd"])
def test_the_fast_gradient_of_sequences_is_the_exact_one_up_to_summation_order(core, activation):
    config, state, _, batch = recurrent_batch(core, activation=activation)
    columns = batch.columns()
    exact = exact_gradient(state, config, alone(config), "batched")(columns, 64)
    fast = fast_gradient(state, config, alone(config))(columns, 64)
    assert float(exact.vector.abs().max()) > 1e-3
    torch.testing.assert_close(fast.vector, exact.vector, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(fast.terms, exact.terms, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_a_gradient_of_sequences_in_parts_is_that_of_the_whole(core):
    config, state, _, batch = recurrent_batch(core)
    parts = config.model_copy(update={"ppo": config.ppo.model_copy(update={"gradient_accumulation": 2})})
    whole, halves = (exact_gradient(state, c, alone(c), "batched")(batch.columns(), 64) for c in (config, parts))
    torch.testing.assert_close(halves.vector, whole.vector, rtol=1e-4, atol=1e-6)
    assert not torch.equal(halves.vector, whole.vector)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_observations_are_taken_from_their_shard(dtype):
    rollout = torch.arange(3 * 5 * 4).view(3, 5, 4).to(dtype)
    samples = rollout[:, :4]  # as a batch has them: without those that follow the last step
    of_shard = torch.tensor([[[3, 0], [1, 2], [0, 3]], [[1, 2], [0, 3], [2, 1]]])
    take = observations_taker(samples, of_shard, of_shard + 4 * torch.arange(3)[:, None])
    for number, indices in enumerate(of_shard):
        taken = take(number)
        assert torch.equal(taken, torch.stack([samples[s][indices[s]] for s in range(3)]))
        taken.zero_()
    assert int(rollout[0, 0, 1]) == 1
