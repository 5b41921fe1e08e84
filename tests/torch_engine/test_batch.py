"""From a rollout to a batch: layout by shard, bootstrapping at the ends of episodes, blocks of fixed shape."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_runs import described, final_of, linear_stack, plan_of, small_config, small_state

from lockstep import reference
from lockstep.config.run import Config
from lockstep.core.normalizers import RunningMoments
from lockstep.core.shards import ShardPlan
from lockstep.torch_engine.batch import bootstrap_values, make_batch
from lockstep.torch_engine.nets import nets
from lockstep.torch_engine.nets.functions import PolicyOutputs
from lockstep.torch_engine.nets.shards import from_shards, to_shards
from lockstep.torch_engine.plain.functions import PlainFunctions
from lockstep.torch_engine.planning.traced import CountingMode
from lockstep.torch_engine.rollout import Rollout
from lockstep.torch_engine.state import TrainState


def test_a_shard_is_one_block_in_time_order_by_hand():
    # Two steps of four environments; environments 0, 1 are shard 0 and 2, 3 shard 1.
    x = torch.tensor([[0, 1, 2, 3], [10, 11, 12, 13]])
    assert to_shards(x, 2).tolist() == [[0, 1, 10, 11], [2, 3, 12, 13]]
    assert to_shards(x, 1).tolist() == [[0, 1, 2, 3, 10, 11, 12, 13]]
    assert from_shards(to_shards(x, 2), 2).tolist() == x.tolist()
    assert from_shards(to_shards(x, 2), 4).tolist() != x.tolist()


@given(st.integers(1, 5), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.sampled_from([(), (3,)]))
def test_from_shards_undoes_to_shards(steps, shards, rows, rest):
    x = torch.arange(steps * shards * rows * int(np.prod(rest, dtype=int))).view(steps, shards * rows, *rest)
    blocks = to_shards(x, shards)
    assert blocks.shape == (shards, steps * rows, *rest)
    for shard in range(shards):
        owned = x[:, shard * rows : (shard + 1) * rows].reshape(steps * rows, *rest)
        assert torch.equal(blocks[shard], owned)
    if not rest:
        assert torch.equal(from_shards(blocks, steps), x)


# --- make_batch -------------------------------------------------------------------------------------------------------


def made_rollout(config: Config, plan: ShardPlan, ends: dict[tuple[int, int], str], size: int = 4) -> Rollout:
    """A rollout of random numbers in which the given steps `(t, env)` end an episode."""
    rng, shape = np.random.default_rng(0), (config.num_steps, config.envs)
    kinds = np.full(shape, "", object)
    for where, kind in ends.items():
        kinds[where] = kind
    observations = rng.normal(size=(config.num_steps + 1, config.envs, size)).astype(np.float32)
    actions = rng.integers(0, 3, shape)
    whole = Rollout(
        raw=observations[:-1].copy(),
        observations=observations,
        actions=actions,
        native=actions,
        rewards=rng.normal(size=shape),
        terminated=kinds == "terminated",
        truncated=kinds == "truncated",
        successes=np.zeros(shape, np.int8),
        final=rng.normal(size=(list(ends.values()).count("truncated"), size)).astype(np.float32),
    )
    return part_of(whole, plan)


def part_of(whole: Rollout, plan: ShardPlan) -> Rollout:
    """What one rank has of a rollout."""
    ids = plan.env_ids
    columns = {
        f.name: np.ascontiguousarray(getattr(whole, f.name)[:, ids.start : ids.stop])
        for f in dataclasses.fields(whole)
        if f.name != "final" and getattr(whole, f.name) is not None
    }
    final = whole.final[[env in ids for _, env in final_of(whole)]]
    return Rollout(**columns, final=final)


def displaced(array: np.ndarray) -> np.ndarray:
    """The same numbers one float beyond where an array would begin."""
    room = np.empty(array.size + 1, array.dtype)
    room[1:] = array.ravel()
    return room[1:].reshape(array.shape)


def value(state: TrainState, observations: np.ndarray) -> np.ndarray:
    """V in float64 by a stack of `nn.Linear`."""
    stack = linear_stack(state.net, state.parameters.views, "critic")
    with torch.no_grad():
        return stack(torch.from_numpy(observations).double())[..., 0].numpy()


def expected_advantages(state: TrainState, rollout: Rollout, config: Config, rewards=None):
    bootstrapped = value(state, rollout.observations[1:])
    for where, observation in final_of(rollout).items():
        bootstrapped[where] = value(state, observation)
    rewards = rollout.rewards if rewards is None else rewards
    values = value(state, rollout.observations[:-1])
    flags = rollout.terminated, rollout.truncated
    return reference.gae(rewards, values, bootstrapped, *flags, config.ppo.gamma, config.ppo.gae_lambda)


COLUMNS = ("observations", "actions", "log_probs", "advantages", "values", "returns")
ENDS = {(0, 0): "truncated", (1, 0): "terminated", (3, 1): "truncated", (3, 2): "terminated", (2, 5): "truncated"}


@pytest.fixture
def config() -> Config:
    return small_config(num_shards=4, ppo={"gamma": 0.9, "gae_lambda": 0.8})


@pytest.mark.parametrize("mode", ["batched", "loop"])
def test_advantages_bootstrap_from_the_final_observation_of_a_truncated_episode_only(config, mode):
    plan, state = plan_of(config), small_state(config, described())
    rollout = made_rollout(config, plan, ENDS)
    batch = make_batch(state, rollout, plan, config, mode)
    assert batch.returns is not None
    for ours, expected in zip(
        (batch.advantages, batch.returns), expected_advantages(state, rollout, config), strict=True
    ):
        np.testing.assert_allclose(from_shards(ours, config.num_steps).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("shards", [1, 4, 8])
def test_observations_are_copied_once_into_memory_of_their_own(shards):
    config = small_config(num_shards=shards)
    plan, state = plan_of(config), small_state(config, described())
    rollout = made_rollout(config, plan, ENDS)
    seen, size = rollout.observations.copy(), 2 * rollout.observations.nbytes  # read and written
    with CountingMode() as mode:
        batch = make_batch(state, rollout, plan, config, "batched")
    assert sum(kernel.calls for kernel in mode.kernels if kernel.bytes == size) == 1
    rollout.observations[...] = np.nan
    expected = to_shards(torch.from_numpy(seen[:-1]), shards)
    assert torch.equal(batch.observations, expected)
    assert batch.observations[0].is_contiguous()


def test_an_end_of_another_kind_gives_other_advantages(config):
    """The negative of the above, end by end: each one matters where it stands, and nothing after it does."""
    plan, state = plan_of(config), small_state(config, described())
    right = make_batch(state, made_rollout(config, plan, ENDS), plan, config, "batched")
    for (step, env), kind in ENDS.items():
        for other in {"", "terminated", "truncated"} - {kind}:
            wrong = make_batch(state, made_rollout(config, plan, ENDS | {(step, env): other}), plan, config, "batched")
            pairs = [from_shards(b.advantages, config.num_steps) for b in (right, wrong)]
            differs = (pairs[0] - pairs[1]).abs() > 1e-3
            assert differs[step, env]
            assert not differs[step + 1 :, env].any()


def test_the_columns_of_a_batch_belong_together(config):
    plan, state = plan_of(config), small_state(config, described())
    rollout = made_rollout(config, plan, {})
    batch = make_batch(state, rollout, plan, config, "batched")
    logits = linear_stack(state.net, state.parameters.views, "actor")(batch.observations.double()).detach()
    expected = reference.categorical_log_prob(logits.numpy(), batch.actions.numpy())
    np.testing.assert_allclose(batch.log_probs.numpy(), expected, atol=1e-5)
    assert batch.values is not None
    assert batch.returns is not None
    np.testing.assert_allclose(batch.values.numpy(), value(state, batch.observations.numpy()), atol=1e-5)
    torch.testing.assert_close(batch.returns, batch.advantages + batch.values)
    assert torch.equal(batch.observations, to_shards(torch.from_numpy(rollout.observations[:-1]), 4))
    assert torch.equal(batch.actions, to_shards(torch.from_numpy(rollout.actions), 4))
    assert {name: len(x) for name, x in batch.columns().items()} == dict.fromkeys(COLUMNS, 4)
    exchanged = reference.categorical_log_prob(logits.numpy(), (batch.actions.numpy() + 1) % 3)
    assert not np.allclose(batch.log_probs.numpy(), exchanged, atol=1e-2)


def test_normalised_rewards_go_into_the_advantages(config):
    config = config.model_copy(update={"normalize": config.normalize.model_copy(update={"returns": True})})
    plan, state = plan_of(config), small_state(config, described())
    assert state.return_normalizer is not None
    state.return_normalizer.moments = RunningMoments(4.0, np.array([0.0]), np.array([36.0]))  # deviates by 3
    rollout = made_rollout(config, plan, ENDS)
    ours = from_shards(make_batch(state, rollout, plan, config, "batched").advantages, config.num_steps).numpy()
    np.testing.assert_allclose(ours, expected_advantages(state, rollout, config, rollout.rewards / 3)[0], atol=1e-5)
    assert not np.allclose(ours, expected_advantages(state, rollout, config)[0], atol=1e-2)


@pytest.mark.parametrize(("mode", "size"), [("batched", 4), ("loop", 4), ("loop", 11)])
def test_a_rank_makes_its_part_of_the_batch_bit_for_bit(mode, size):
    """Observations of 11 numbers don't fill whole cache lines: how they lie in memory must not show."""
    config = small_config(num_shards=4, network={"hidden_sizes": (64, 64)})
    state, whole_plan = small_state(config, described(size=size)), plan_of(config)
    whole = make_batch(state, made_rollout(config, whole_plan, ENDS, size), whole_plan, config, mode)
    for world_size in (2, 3, 4):
        plans = [plan_of(config, world_size, rank) for rank in range(world_size)]
        rollouts = [made_rollout(config, p, ENDS, size) for p in plans]
        for rollout in rollouts:
            rollout.observations = displaced(rollout.observations)
        parts = [make_batch(state, r, p, config, mode) for r, p in zip(rollouts, plans, strict=True)]
        assert set(whole.columns()) == set(COLUMNS)
        for name, column in whole.columns().items():
            joined = torch.cat([part.columns()[name] for part in parts])
            assert torch.equal(joined, column), (world_size, name)


# --- bootstrap_values -------------------------------------------------------------------------------------------------


def seen_values(config: Config) -> PolicyOutputs:
    """What the policy would say of a rollout: a value of its own for every observation, all of them above 100."""
    shape = (config.shards, config.num_steps + 1, config.envs // config.shards)
    return PolicyOutputs(torch.empty(0), 100.0 + torch.arange(int(np.prod(shape)), dtype=torch.float32).view(shape))


def of_next_observations(config: Config) -> np.ndarray:
    values = seen_values(config).values
    assert values is not None
    return from_shards(values.flatten(1), config.num_steps + 1)[1:].numpy()


@pytest.mark.parametrize(("activation", "plain"), [("tanh", True), ("silu", False)])
def test_more_truncations_than_rows_are_valued_in_blocks_of_one_shape(monkeypatch, activation, plain):
    """Two environments a shard, and shard 0 truncates five episodes, shard 2 one: three blocks and one."""
    ends = {(t, e): "truncated" for t, e in [(0, 0), (0, 1), (1, 0), (2, 1), (3, 0), (1, 5)]}
    config = small_config(num_shards=4, network={"activation": activation})
    plan, state = plan_of(config), small_state(config, described())
    rollout = made_rollout(config, plan, ends)
    by_hand = state.policy.plain if isinstance(state.policy, PlainFunctions) else None
    place, name = (by_hand, "values") if plain else (nets, "critic")
    assert (by_hand is not None) == plain
    shapes, values = [], getattr(place, name)

    def recorded(*arguments):
        shapes.append(tuple(arguments[-1].shape))
        return values(*arguments)

    monkeypatch.setattr(place, name, recorded)
    with torch.no_grad():
        ours = bootstrap_values(state, rollout, seen_values(config), plan).numpy()
    assert shapes == [(1, 2, 4)] * 4
    following = of_next_observations(config)
    assert {tuple(where) for where in np.argwhere(ours != following).tolist()} == set(ends)
    for where, observation in final_of(rollout).items():
        assert ours[where] == pytest.approx(float(value(state, observation)), abs=1e-5)
    assert len({round(float(ours[where]), 4) for where in ends}) == len(ends)


def test_nothing_truncated_is_nothing_valued(config):
    plan = plan_of(config)
    rollout = made_rollout(config, plan, {(0, 0): "terminated"})
    ours = bootstrap_values(small_state(config, described()), rollout, seen_values(config), plan)
    np.testing.assert_array_equal(ours.numpy(), of_next_observations(config))
