"""Environments that only JAX steps, on the host's loops: keyed episodes, limits, resets, states that come back."""

import jax
import numpy as np
import pytest
from refusals import error_of

from lockstep.config.run import EnvConfig
from lockstep.core.errors import EnvironmentFailureError
from lockstep.core.shards import keyed_seed
from lockstep.envs.describe import describe
from lockstep.envs.host_envs import WantedEnvs
from lockstep.envs.registry import make_envs
from lockstep.jax_engine.envs.for_host import JaxEnvs, make_jax_envs
from lockstep.runs.checkpoint import pack, unpack

LIMIT = 6
CONFIG = EnvConfig(id="corridors:Noisy", backend="jax", max_episode_steps=LIMIT)
RIGHT, LEFT = 1, 0


def environments(count=4, group=None, seed=0, purpose="reset", first=0):
    ids = range(first, first + count)
    return make_envs(CONFIG, describe(CONFIG), seed, ids, print, purpose, shard_size=group)


def played(envs, actions):
    """What ``actions`` (one a step, for all environments) lead to, as lists of buffers' copies."""
    out = []
    for action in actions:
        envs.buffers.actions[:] = action
        envs.step()
        b = envs.buffers
        out.append([x.copy() for x in (b.observations, b.rewards, b.terminated, b.truncated, b.episodes, b.successes)])
    return out


def same(a, b):
    return all(np.array_equal(x, y) for one, two in zip(a, b, strict=True) for x, y in zip(one, two, strict=True))


@pytest.fixture(scope="module")
def four():
    envs = environments()
    assert isinstance(envs, JaxEnvs)
    return envs


def restarted(envs):
    envs.buffers.episodes[:] = 0
    envs.reset()
    return envs


def test_an_episode_ends_at_its_end_or_at_the_limit_and_the_next_one_begins_in_the_same_step(four):
    b = restarted(four).buffers
    start = b.observations[:, 0].copy()
    for _ in range(LIMIT - 1):  # a corridor of 4: to the left there is no end
        b.actions[:] = LEFT
        four.step()
        assert not (b.terminated | b.truncated).any()
        assert (b.successes == -1).all()
    four.step()
    assert b.truncated.all()
    assert not b.terminated.any()
    assert (b.final_observations[:, 0] == 0).all()
    assert (b.episodes == 1).all()
    following = b.observations[:, 0].astype(int)
    assert (following != start).any()  # another episode, another start
    arrived = np.zeros(4, bool)
    for step in range(1, 5):
        b.actions[:] = RIGHT
        four.step()
        ends = 4 - following == step
        assert np.array_equal(b.terminated[~arrived], ends[~arrived])
        assert (b.final_observations[ends & ~arrived, 0] == 4).all()
        assert (b.successes[ends & ~arrived] == 1).all()
        arrived |= ends


def test_an_episode_is_a_function_of_its_key_alone(four):
    actions = [RIGHT, LEFT, RIGHT, RIGHT, RIGHT, RIGHT, LEFT, RIGHT]
    restarted(four)
    whole = played(four, actions)
    restarted(four)
    assert same(played(four, actions), whole)
    pairs = environments(group=2)  # in groups of two, as two shards are
    pairs.reset()
    assert same(played(pairs, actions), whole)
    last = environments(count=2, first=2, group=2)
    last.reset()
    assert same(played(last, actions), [[x[2:] for x in step] for step in whole])
    other = environments(seed=1)
    other.reset()
    assert not same(played(other, actions), whole)


def test_rewards_of_a_step_are_drawn_for_that_step(four):
    restarted(four)
    rewards = np.concatenate([step[1] for step in played(four, [LEFT] * 5)])
    assert len(np.unique(rewards)) == len(rewards)


def test_an_evaluation_repeats_its_episodes(four):
    envs = environments(purpose="eval")
    envs.reset()
    first = envs.buffers.observations.copy()
    played(envs, [LEFT] * LIMIT)
    assert (envs.buffers.episodes == 1).all()
    assert np.array_equal(envs.buffers.observations, first)
    restarted(four)
    assert not np.array_equal(four.buffers.observations, first)


def test_a_saved_state_goes_on_where_it_was(four):
    restarted(four)
    played(four, [LEFT, RIGHT, LEFT])
    saved, before = four.save_states(), four.buffers.observations.copy()
    episodes = four.buffers.episodes.copy()
    assert int(saved[0]["elapsed"]) == 3
    following = played(four, [LEFT] * 4)
    fresh = environments()
    for attempt in ("all", "all but one"):
        fresh.buffers.observations[:], fresh.buffers.episodes[:] = before, episodes
        for env, state in enumerate(saved):
            kept = state if attempt == "all" or env else {**state, "elapsed": np.asarray(0)}
            assert fresh.restore(env, np.zeros(0), np.zeros(0), kept)
        assert np.array_equal(fresh.buffers.observations, before)
        assert same(played(fresh, [LEFT] * 4), following) == (attempt == "all")


def test_states_of_any_dtypes_and_names_come_back():
    config = EnvConfig(id="corridors:Odd", backend="jax", max_episode_steps=LIMIT)
    one, other = (make_envs(config, describe(config), 0, range(2), print, "reset") for _ in range(2))
    one.reset()
    played(one, [LEFT, RIGHT])
    states = [unpack(pack(state or {})) for state in one.save_states()]
    other.buffers.observations[:], other.buffers.episodes[:] = one.buffers.observations, one.buffers.episodes
    for env, state in enumerate(states):
        assert other.restore(env, np.zeros(0), np.zeros(0), state)
    assert same(played(other, [LEFT] * 4), played(one, [LEFT] * 4))
    lost = {name: x for name, x in states[0].items() if name != "place"}
    assert "place is missing there and int32[] here" in error_of(other.restore, 0, np.zeros(0), np.zeros(0), lost)


def test_what_an_environment_raises_is_one_line(monkeypatch):
    import corridors

    def refuse(place):
        raise OSError("no such\nplace")

    def step(self, key, state, action, params):
        jax.debug.callback(refuse, state)
        return corridors.Corridor.step(self, key, state, action, params)

    monkeypatch.setattr(corridors.Noisy, "step", step)
    envs = make_jax_envs(WantedEnvs(CONFIG.model_copy(update={"timeout": 61.0}), describe(CONFIG), 0, [0], "eval"))
    envs.reset()
    with pytest.raises(EnvironmentFailureError, match=r"^environments \(corridors:Noisy\) raised in step: [^\n]*place"):
        envs.step()


def test_it_begins_as_the_environment_that_is_drawn():
    from lockstep.jax_engine.envs.picture import DrawnEnvironment

    config = EnvConfig(id="corridors:Painted", backend="jax", max_episode_steps=LIMIT, frame_stack=2)
    drawn, envs = DrawnEnvironment(config, "rgb_array"), make_envs(config, describe(config), 3, [0, 1], print, "eval")
    envs.reset()
    observation, _ = drawn.reset(seed=keyed_seed(3, "eval", 1))
    assert np.array_equal(observation, envs.buffers.observations[1])
    assert drawn.metadata["render_fps"] == 12
    brightness, ends = [int(drawn.render().max())], []
    for _ in range(4):
        observation, reward, terminated, truncated, info = drawn.step(1)
        envs.buffers.actions[:] = 1
        envs.step()
        assert reward == envs.buffers.rewards[1]
        brightness.append(int(drawn.render().max()))
        ends.append((terminated, truncated, info["is_success"]))
    assert brightness == [0, 10, 20, 30, 40]
    assert ends == [(False, False, False)] * 3 + [(True, False, True)]
    assert np.array_equal(observation, envs.buffers.final_observations[1])
    drawn.reset(seed=0)
    assert [drawn.step(0)[3] for _ in range(LIMIT)] == [False] * (LIMIT - 1) + [True]
