"""GRPO's groups: the same start for all members, one episode each, advantages relative to the group."""

import dataclasses

import numpy as np
import pytest
import torch
from small_runs import described, plan_of, small_config, small_state

from lockstep import reference
from lockstep.config.run import Config
from lockstep.core.shards import ShardPlan
from lockstep.envs.describe import describe
from lockstep.envs.host_envs import HostEnvs
from lockstep.envs.registry import make_envs
from lockstep.torch_engine.batch import Batch, make_batch
from lockstep.torch_engine.groups import begin_groups, finished_episodes
from lockstep.torch_engine.nets import distributions, nets
from lockstep.torch_engine.nets.autograd import minibatch_loss
from lockstep.torch_engine.nets.shards import from_shards
from lockstep.torch_engine.rollout import Rollout
from lockstep.torch_engine.session import set_reference
from lockstep.torch_engine.state import TrainState
from lockstep.training.losses import loss_settings

GROUP, ENVS, STEPS = 4, 16, 6


def grpo_config(**changes) -> Config:
    values = {"algorithm": "grpo", "num_envs": ENVS, "num_steps": STEPS, "grpo": {"group_size": GROUP}}
    return small_config(**{**values, **changes})


# --- Starts -----------------------------------------------------------------------------------------------------------


def envs_of(config: Config, plan: ShardPlan) -> HostEnvs:
    description = describe(config.env)
    return make_envs(config.env, description, config.seed, plan.env_ids, pytest.fail, group_size=config.group_size)


BACK_ENDS = pytest.mark.parametrize(
    "env", [{"id": "CartPole-v1"}, {"id": "lockstep/CartPole-v1"}, {"id": "CartPole-v1", "workers": 2}], ids=str
)


@BACK_ENDS
def test_members_of_a_group_start_alike_and_groups_and_iterations_do_not(env):
    config = grpo_config(env=env)
    plan, state = plan_of(config), small_state(config, describe(config.env))
    envs, starts = envs_of(config, plan), []
    try:
        for state.iteration in (0, 1, 0):
            begin_groups(state, envs)
            starts.append(envs.buffers.observations.reshape(ENVS // GROUP, GROUP, -1).copy())
            envs.buffers.actions[:] = np.arange(ENVS) % 2
            for _ in range(40):
                envs.step()
            assert not np.array_equal(envs.buffers.observations[0], envs.buffers.observations[1])
    finally:
        envs.close()
    assert all((start == start[:, :1]).all() for start in starts)
    assert len({row.tobytes() for start in starts[:2] for row in start[:, 0]}) == 2 * ENVS // GROUP
    np.testing.assert_array_equal(starts[2], starts[0])


@BACK_ENDS
def test_without_groups_every_environment_has_a_start_of_its_own(env):
    config = grpo_config(env=env).model_copy(update={"algorithm": "ppo"})
    envs = envs_of(config, plan_of(config))
    try:
        envs.reset()
        assert len({row.tobytes() for row in envs.buffers.observations}) == ENVS
    finally:
        envs.close()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_rank_starts_its_groups_as_one_rank_does(world_size):
    config = grpo_config(env="lockstep/CartPole-v1")
    assert config.shards == ENVS // GROUP  # a group stays within its shard
    whole, parts = [], []
    for ranks, into in ((1, whole), (world_size, parts)):
        for rank in range(ranks):
            plan = plan_of(config, ranks, rank)
            state, envs = small_state(config, describe(config.env), plan), envs_of(config, plan)
            state.iteration = 3
            begin_groups(state, envs)
            into.append(envs.buffers.observations)
    np.testing.assert_array_equal(np.concatenate(parts), whole[0])


def test_a_recurrent_policy_forgets_between_iterations():
    config = grpo_config(env="lockstep/CartPole-v1", network={"recurrent": "gru", "recurrent_size": 4})
    state = small_state(config, describe(config.env))
    assert state.recurrent_state is not None
    state.recurrent_state[:] = 1.0
    begin_groups(state, envs_of(config, plan_of(config)))
    assert not state.recurrent_state.any()


# --- Episodes ---------------------------------------------------------------------------------------------------------

ENDS = {(0, 1): "terminated", (2, 1): "terminated", (3, 2): "truncated", (5, 4): "terminated", (4, 9): "terminated"}


def made_rollout() -> Rollout:
    """Random numbers; the given steps `(t, env)` end an episode."""
    rng, kinds = np.random.default_rng(0), np.full((STEPS, ENVS), "", object)
    for where, kind in ENDS.items():
        kinds[where] = kind
    observations, actions = rng.normal(size=(STEPS + 1, ENVS, 4)).astype(np.float32), rng.integers(0, 3, (STEPS, ENVS))
    return Rollout(
        observations=observations,
        raw=observations[:-1],
        actions=actions,
        native=actions,
        rewards=rng.normal(size=(STEPS, ENVS)),
        terminated=kinds == "terminated",
        truncated=kinds == "truncated",
        successes=np.zeros((STEPS, ENVS), np.int8),
        final=rng.normal(size=(1, 4)).astype(np.float32),
    )


FIRST_LENGTHS = {1: 1, 2: 4, 9: 5}  # that of environment 4 ends with the rollout


def expected_valid() -> np.ndarray:
    lengths = np.array([FIRST_LENGTHS.get(env, STEPS) for env in range(ENVS)])
    return np.arange(STEPS)[:, None] < lengths


def test_the_first_episode_counts_to_its_end_and_nothing_after():
    rollout = made_rollout()
    np.testing.assert_array_equal(rollout.first_episodes, expected_valid())
    assert not np.array_equal(expected_valid(), ~rollout.done)


def test_finished_episodes_are_the_first_ones_whole_or_cut():
    config, rollout = grpo_config(), made_rollout()
    state = small_state(config, described())
    table = finished_episodes(state, rollout, config, plan_of(config))
    assert table.shape[0] == ENVS
    assert sorted(table[:, 1].tolist()) == list(range(ENVS))
    assert np.lexsort((table[:, 1], table[:, 0])).tolist() == list(range(ENVS))
    for step, env, total, length in table[:, :4]:
        assert length == FIRST_LENGTHS.get(int(env), STEPS) == step + 1
        assert total == pytest.approx(rollout.rewards[: int(length), int(env)].sum())
    ppo = grpo_config(algorithm="ppo")
    ended = finished_episodes(state, rollout, ppo, plan_of(ppo))
    assert {(int(t), int(e)) for t, e in ended[:, :2]} == set(ENDS)


# --- Advantages -------------------------------------------------------------------------------------------------------


def batch_of(config: Config, state: TrainState) -> Batch:
    return make_batch(state, made_rollout(), plan_of(config), config, "batched")


@pytest.mark.parametrize("normalize_std", [True, False])
def test_advantages_are_the_references_for_the_steps_that_count_and_zero_elsewhere(normalize_std):
    config = grpo_config(grpo={"group_size": GROUP, "normalize_std": normalize_std})
    state = small_state(config, described())
    assert not state.net.critic
    assert not any(name.startswith("critic") for name in state.net.shapes())
    batch, valid = batch_of(config, state), expected_valid()
    assert batch.valid is not None
    returns = np.where(valid, made_rollout().rewards, 0.0).sum(0)
    relative = reference.group_advantages(returns, GROUP, 1e-8)
    if not normalize_std:
        groups = returns.reshape(-1, GROUP)
        relative = (groups - groups.mean(1, keepdims=True)).ravel()
    ours = from_shards(batch.advantages, STEPS).numpy()
    np.testing.assert_array_equal(from_shards(batch.valid, STEPS).numpy(), valid)
    np.testing.assert_allclose(ours, np.where(valid, relative, 0.0), rtol=1e-5, atol=1e-6)
    assert set(batch.columns()) == {"observations", "actions", "log_probs", "advantages", "valid"}
    over_all = reference.group_advantages(returns, ENVS, 1e-8)
    assert not np.allclose(ours, np.where(valid, over_all, 0.0), atol=1e-2)


def test_what_follows_the_first_episode_changes_nothing():
    config = grpo_config()
    state, plan, other = small_state(config, described()), plan_of(config), made_rollout()
    other.rewards[1:, 1] = 100.0  # after the end in step 0
    a, b = batch_of(config, state), make_batch(state, other, plan, config, "batched")
    assert torch.equal(a.advantages, b.advantages)
    other.rewards[0, 1] = 100.0
    assert not torch.equal(a.advantages, make_batch(state, other, plan, config, "batched").advantages)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_rank_makes_its_part_of_the_batch_bit_for_bit(world_size):
    config = grpo_config(grpo={"group_size": GROUP, "kl_coef": 0.1})
    whole_state = small_state(config, described())
    set_reference(whole_state, config)
    whole, rollout, parts = batch_of(config, whole_state), made_rollout(), []
    for rank in range(world_size):
        plan = plan_of(config, world_size, rank)
        ids = slice(plan.env_ids.start, plan.env_ids.stop)
        given = [f.name for f in dataclasses.fields(Rollout) if getattr(rollout, f.name) is not None]
        columns = [name for name in given if name != "final"]
        mine = Rollout(
            **{n: np.ascontiguousarray(getattr(rollout, n)[:, ids]) for n in columns}, final=rollout.final[:0]
        )
        state = small_state(config, described(), plan)
        set_reference(state, config)
        parts.append(make_batch(state, mine, plan, config, "batched").columns())
    for name, column in whole.columns().items():
        assert torch.equal(torch.cat([part[name] for part in parts]), column), name


# --- The reference policy ---------------------------------------------------------------------------------------------


def test_the_kl_is_to_the_first_parameters():
    config = grpo_config(grpo={"group_size": GROUP, "kl_coef": 0.25})
    state = small_state(config, described())  # moved away from its first parameters
    set_reference(state, config)
    assert state.reference is not None
    flat = state.parameters
    batch = batch_of(config, state)
    assert state.parameters is flat
    assert batch.reference_log_probs is not None
    weights = state.reference.weights.expanded(config.shards)
    output = nets.actor(state.net, weights, batch.observations)
    expected, _ = distributions.log_prob_and_entropy(state.net, weights, output, batch.actions)
    torch.testing.assert_close(batch.reference_log_probs, expected)
    assert not torch.allclose(batch.reference_log_probs, batch.log_probs, atol=1e-2)
    state.parameters.flat.copy_(state.reference.weights.flat)
    again = batch_of(config, state)
    assert again.reference_log_probs is not None
    assert torch.equal(again.reference_log_probs, again.log_probs)


def test_the_loss_is_the_surrogate_and_the_kl_over_the_steps_that_count():
    config = grpo_config(grpo={"group_size": GROUP, "kl_coef": 0.25}, ppo={"entropy_coef": 0.1})
    state = small_state(config, described())
    set_reference(state, config)
    batch = batch_of(config, state)
    columns = batch.columns()
    columns["log_probs"] = columns["log_probs"] + 0.3 * torch.randn(columns["log_probs"].shape)
    count = int(expected_valid().sum())
    settings = dataclasses.replace(loss_settings(config), count=count)
    weights = state.parameters.expanded(config.shards)
    loss, terms = minibatch_loss(state.net, weights, columns, settings)
    counted = columns["valid"].numpy() > 0
    output = nets.actor(state.net, weights, columns["observations"])
    both = distributions.log_prob_and_entropy(state.net, weights, output, columns["actions"])
    new, entropy = (x.double().numpy()[counted] for x in both)
    names = ("log_probs", "advantages", "reference_log_probs")
    old, advantages, target = (columns[name].double().numpy()[counted] for name in names)
    zeros = np.zeros(count)
    expected = reference.ppo_loss(
        new, old, advantages, zeros, zeros, zeros, entropy, clip_range=0.2, value_clip_range=None, entropy_coef=0.1,
        value_coef=0.5, count=count,
    )  # fmt: skip
    kl = np.mean(np.exp(target - new) - 1 - (target - new))
    assert float(terms[:, 5].sum()) == pytest.approx(kl, rel=1e-4)
    assert float(loss.sum()) == pytest.approx(expected["loss"] + 0.25 * kl, rel=1e-4, abs=1e-6)
    assert float(loss.sum()) != pytest.approx(expected["loss"], rel=1e-2)
