"""Back ends that reset one step late: the step in between counts in no loss, statistic or episode."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config.checks import resolve
from lockstep.config.run import Config, EnvConfig
from lockstep.core.normalizers import shard_moments
from lockstep.core.topology import Topology
from lockstep.envs.batched import envpool as envpool_vector
from lockstep.envs.batched.envpool import EnvPoolEnvs, check_envpool_options
from lockstep.envs.describe import describe
from lockstep.envs.registry import make_envs
from lockstep.policies.evaluation import run_episodes
from lockstep.torch_engine.batch import make_batch
from lockstep.torch_engine.groups import finished_episodes
from lockstep.torch_engine.minibatches import advantage_moments, minibatch_indices
from lockstep.torch_engine.nets.autograd import AutogradFunctions
from lockstep.torch_engine.plain.functions import PlainFunctions
from lockstep.torch_engine.session import Session, open_session
from lockstep.torch_engine.statistics import explained_variance, moments_of_values, normalizer_moments, sample_counts
from lockstep.training.losses import loss_settings

LATE: dict[str, Any] = {"id": "Late-v0", "backend": "envpool"}


@pytest.fixture
def fake(monkeypatch) -> Any:
    late = importlib.import_module("late")
    monkeypatch.setattr(envpool_vector, "envpool_module", lambda: late)
    return late


def made(env_ids=range(8), shard_size=2, purpose="reset", seed=0) -> EnvPoolEnvs:
    config = EnvConfig.model_validate(LATE)
    envs = make_envs(config, describe(config), seed, env_ids, pytest.fail, purpose, shard_size=shard_size)
    assert isinstance(envs, EnvPoolEnvs)
    envs.reset()
    return envs


def played(envs: EnvPoolEnvs, steps: int = 20) -> dict[str, np.ndarray]:
    names = ("observations", "rewards", "terminated", "truncated", "dead", "episodes")
    rows: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for _ in range(steps):
        envs.step()
        for name in names:
            rows[name].append(getattr(envs.buffers, name).copy())
    return {name: np.stack(values) for name, values in rows.items()}


def opened(**settings: Any) -> Session:
    values: dict[str, Any] = {"env": LATE, "num_envs": 4, "num_shards": 2, "num_steps": 16}
    session = open_session(resolve(Config.model_validate({**values, **settings})), Topology(), None)
    session.collect()
    return session


@pytest.mark.usefixtures("fake")
def test_the_step_after_an_end_is_dead_and_no_other():
    steps = played(made())
    done = steps["terminated"] | steps["truncated"]
    assert done.any(0).all()
    np.testing.assert_array_equal(steps["dead"][1:], done[:-1])
    assert not steps["dead"][0].any()
    assert (steps["observations"][..., 1][steps["dead"]] == 0).all()
    assert (steps["rewards"][steps["dead"]] == 0).all()
    np.testing.assert_array_equal(steps["episodes"], np.cumsum(steps["dead"], 0))


@pytest.mark.usefixtures("fake")
def test_each_shards_pool_is_seeded_by_its_key():
    everyone, some = played(made()), played(made(range(4, 6)))
    for name, values in some.items():
        np.testing.assert_array_equal(values, everyone[name][:, 4:6])
    assert not np.array_equal(played(made(seed=1))["observations"], everyone["observations"])
    again = made()
    again.buffers.episodes[:] = 1
    again.reset()
    assert not np.array_equal(played(again)["observations"], everyone["observations"])


@pytest.mark.usefixtures("fake")
def test_evaluations_are_the_same_episodes_every_time():
    envs = made(purpose="eval")
    first = run_episodes(envs, lambda rows: np.zeros(len(rows), np.int64), 10)
    np.testing.assert_array_equal(run_episodes(envs, lambda rows: np.zeros(len(rows), np.int64), 10), first)
    assert set(first[:, 1]) <= {3.0, 4.0}
    np.testing.assert_array_equal(first[:, 0], first[:, 1] * (first[:, 1] + 1) / 2)


@pytest.mark.usefixtures("fake")
def test_episodes_are_counted_without_dead_steps():
    session = opened()
    rows = finished_episodes(session.state, session.rollout, session.config, session.plan)
    assert len(rows) >= 8
    assert set(rows[:, 3]) <= {3.0, 4.0}
    np.testing.assert_array_equal(rows[:, 2], rows[:, 3] * (rows[:, 3] + 1) / 2)
    session.close()


@pytest.mark.usefixtures("fake")
def test_advantages_end_at_the_dead_step_and_a_truncated_episode_bootstraps_from_its_final_observation():
    session = opened(ppo={"gamma": 0.9, "gae_lambda": 1.0, "num_minibatches": 2})
    rollout = session.rollout
    batch = make_batch(session.state, rollout, session.plan, session.config, session.mode)
    assert batch.values is not None
    assert batch.returns is not None
    assert batch.valid is not None

    def table(x: torch.Tensor) -> np.ndarray:
        return x.view(2, 16, 2).transpose(0, 1).reshape(16, 4).numpy()

    values, returns = table(batch.values), table(batch.returns)
    assert rollout.dead is not None
    np.testing.assert_array_equal(table(batch.valid) > 0, ~rollout.dead)
    assert len(rollout.final) == 0
    for t, env in np.argwhere(rollout.truncated[:15]):
        bootstrapped = rollout.rewards[t, env] + 0.9 * values[t + 1, env]
        np.testing.assert_allclose(returns[t, env], bootstrapped, rtol=1e-5)
        assert rollout.observations[t + 1, env, 1] == 4.0
    for t, env in np.argwhere(rollout.terminated):
        np.testing.assert_allclose(returns[t, env], rollout.rewards[t, env], rtol=1e-5)
        if t:
            np.testing.assert_allclose(
                returns[t - 1, env], rollout.rewards[t - 1, env] + 0.9 * returns[t, env], rtol=1e-5
            )
    assert rollout.truncated.any()
    assert rollout.terminated.any()
    session.close()


@pytest.mark.usefixtures("fake")
def test_statistics_are_of_the_steps_that_count():
    session = opened(normalize={"observations": True, "returns": True})
    rollout, plan, state = session.rollout, session.plan, session.state
    assert rollout.dead is not None
    alive = ~rollout.dead
    assert sample_counts(rollout, plan).tolist() == [alive[:, :2].sum(), alive[:, 2:].sum()]
    moments = normalizer_moments(state, rollout, plan)
    expected = shard_moments(rollout.raw[:, 2:].reshape(-1, 2)[alive[:, 2:].reshape(-1)])
    np.testing.assert_array_equal(moments[1, :4].reshape(2, 2), expected)
    assert not np.allclose(shard_moments(rollout.raw[:, 2:].reshape(-1, 2)), expected)
    batch = make_batch(state, rollout, plan, session.config, session.mode)
    assert batch.returns is not None
    assert batch.values is not None
    assert batch.valid is not None
    counted = advantage_moments(batch, minibatch_indices(session.config, plan, 0))
    np.testing.assert_array_equal(counted[:, :, :, 0].sum(2), np.tile(sample_counts(rollout, plan), (4, 1)).T)
    ours = explained_variance(moments_of_values(batch), sample_counts(rollout, plan))
    keep = batch.valid.flatten() > 0
    returns, values = batch.returns.flatten()[keep].double(), batch.values.flatten()[keep].double()
    assert ours == pytest.approx(float(1 - (returns - values).var() / returns.var()), abs=1e-6)
    session.close()


@pytest.mark.parametrize("continuous", [False, True])
def test_the_gradient_by_hand_leaves_out_what_does_not_count(continuous):
    env = {"id": "Pendulum-v1" if continuous else "CartPole-v1"}
    ppo = {"num_minibatches": 1, "entropy_coef": 0.1}
    config = resolve(Config.model_validate({"env": env, "num_envs": 2, "num_shards": 2, "num_steps": 8, "ppo": ppo}))
    session = open_session(config, Topology(), None)
    session.collect()
    batch = make_batch(session.state, session.rollout, session.plan, config, session.mode)
    valid = torch.ones(2, 8)
    valid[0, 2] = valid[1, 5:] = 0.0
    columns = {**batch.columns(), "valid": valid}
    settings, state = loss_settings(config).counting(12), session.state
    assert isinstance(state.policy, PlainFunctions)
    by_hand = state.policy.gradients(columns, settings).clone()  # its memory is used again
    expected = AutogradFunctions(state.net, state.parameters, config).gradients(columns, settings)
    torch.testing.assert_close(by_hand, expected, atol=1e-6, rtol=1e-4)
    spoiled = {**columns, "advantages": torch.where(valid > 0, columns["advantages"], 1e3)}
    torch.testing.assert_close(state.policy.gradients(spoiled, settings), by_hand, atol=0, rtol=0)
    assert not torch.allclose(state.policy.gradients({**spoiled, "valid": torch.ones(2, 8)}, settings), by_hand)
    session.close()


@pytest.mark.usefixtures("fake")
def test_no_live_episode_comes_back():
    envs = made()
    played(envs, 5)
    before = envs.buffers.episodes.copy()
    assert envs.save_states() == [None] * 8
    assert not any(envs.restore(env, np.zeros(0), np.zeros(0), {}) for env in range(8))
    np.testing.assert_array_equal(envs.buffers.episodes, before + 1)
    assert (envs.buffers.observations[:, 1] == 0).all()


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"algorithm": "grpo", "num_envs": 16, "grpo": {"group_size": 2}}, "algorithm: grpo"),
        ({"env": {**LATE, "frame_stack": 4}}, "env.frame_stack: EnvPool takes no wrappers"),
        ({"env": {**LATE, "atari": True}}, "env.atari"),
        ({"env": {**LATE, "action_mask": "info"}}, "env.action_mask"),
    ],
)
def test_what_it_cannot_do_is_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        check_envpool_options(resolve(Config.model_validate({"env": LATE, **settings})))
    check_envpool_options(resolve(Config.model_validate({"env": LATE})))


@pytest.mark.usefixtures("fake")
def test_an_unknown_id_is_refused():
    with pytest.raises(ValueError, match="EnvPool has no 'Nope-v0'"):
        describe(EnvConfig.model_validate({**LATE, "id": "Nope-v0"}))


def test_without_envpool_one_line_says_so(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'lockstep-rl\[envpool\]'"):
        describe(EnvConfig.model_validate(LATE))


def test_the_real_one_behaves_like_the_fake():
    pytest.importorskip("envpool", reason="EnvPool isn't installed")
    config = EnvConfig.model_validate({"id": "CartPole-v1", "backend": "envpool", "max_episode_steps": 12})
    envs = make_envs(config, describe(config), 0, range(4), pytest.fail, shard_size=2)
    assert isinstance(envs, EnvPoolEnvs)
    envs.reset()
    envs.buffers.actions[::2] = 1
    steps = played(envs, 40)
    done = steps["terminated"] | steps["truncated"]
    np.testing.assert_array_equal(steps["dead"][1:], done[:-1])
    assert (steps["rewards"] == np.where(steps["dead"], 0.0, 1.0)).all()
    assert (np.abs(steps["observations"][steps["dead"]]) <= 0.05).all()
    assert (np.abs(steps["observations"][done]) > 0.05).any(1).all()
    envs.close()


@pytest.mark.filterwarnings("error::UserWarning")
def test_the_real_ones_bounds_are_not_warned_of():
    pytest.importorskip("envpool", reason="EnvPool isn't installed")
    config = EnvConfig.model_validate({"id": "CartPole-v1", "backend": "envpool"})
    envs = make_envs(config, describe(config), 0, range(2), pytest.fail)
    envs.reset()
    envs.step()
    envs.close()
