"""Frame skip, sticky actions and frame stack in the compiled program do what the host's wrappers do."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from lockstep.config.run import EnvConfig
from lockstep.envs.gymnasium.wrappers import wrap as wrap_on_the_host
from lockstep.jax_engine.envs.adapter import FunctionalAdapter
from lockstep.jax_engine.envs.wrappers import FrameSkip, StickyActions, wrap

END = 7
SPACES = spaces.Dict({
    "picture": spaces.Box(0, 255, (2, 3, 1), np.uint8),
    "vector": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "mask": spaces.MultiBinary(3),
    "count": spaces.Discrete(100),
})  # fmt: skip


class Counter:
    """Adds its actions up and ends at ``END``; all that it shows follows from the sum."""

    def reset(self, key, params):
        return self.shown(0), jnp.zeros((), jnp.int32)

    def step(self, key, state, action, params):
        state = state + action
        return self.shown(state), state, state * 1.0, state >= END, {"success": state == END}

    @staticmethod
    def shown(total, xp=jnp):
        total = xp.asarray(total)
        return {
            "picture": xp.full((2, 3, 1), total).astype(xp.uint8),
            "vector": xp.stack([total, -total]).astype(xp.float32),
            "mask": (xp.arange(3) == total % 3).astype(xp.int8),
            "count": total.astype(xp.int32),
        }

    def observation_space(self, params):
        return SPACES

    def action_space(self, params):
        return spaces.Discrete(3)


class HostCounter(gymnasium.Env):
    observation_space, action_space = SPACES, spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        self.total = 0
        return Counter.shown(0, np), {}

    def step(self, action):
        self.total += int(action)
        return Counter.shown(self.total, np), float(self.total), self.total >= END, False, {}


def compared(settings, actions, limit=None):
    """Both step the same actions until the host's episode ends."""
    config = EnvConfig(id="x", backend="jax", **settings)
    env = wrap(config, FunctionalAdapter(Counter(), None, limit))
    inner = HostCounter() if limit is None else gymnasium.wrappers.TimeLimit(HostCounter(), limit)
    host = wrap_on_the_host(config, inner)
    assert env.observation_space == host.observation_space
    state, observation = env.reset(env.reset_random(jax.random.key(0), (2,)))
    expected, _ = host.reset()
    step = jax.jit(env.step)
    for action in actions:
        for name, value in expected.items():
            np.testing.assert_array_equal(observation[name][0], value, err_msg=name)
            assert observation[name].dtype == (jnp.int32 if name == "count" else value.dtype)
        expected, reward, terminated, truncated, _ = host.step(action)
        result = step(state, jnp.array([action, 0], jnp.int32), env.step_random(jax.random.key(1), (2,)))
        state, observation = result.state, result.observation
        got = (float(result.reward[0]), bool(result.terminated[0]), bool(result.truncated[0]))
        assert got == (reward, terminated, truncated)
        assert (float(result.reward[1]), bool(result.terminated[1])) == (0.0, False)
        if terminated or truncated:
            break
    return result, env


def test_frames_are_stacked_as_on_the_host():
    result, _ = compared({"frame_stack": 3, "action_mask": "mask"}, [1, 2, 0, 1, 2, 2])
    assert result.terminated[0]
    assert result.observation["picture"].shape == (2, 2, 3, 3)
    np.testing.assert_array_equal(result.observation["vector"][0], [4, -4, 6, -6, 8, -8])
    assert result.observation["mask"].shape == (2, 3)


def test_actions_are_repeated_until_the_episode_ends():
    result, env = compared({"frame_skip": 4}, [1, 0, 1])
    assert result.terminated[0]
    assert result.success[0]
    np.testing.assert_array_equal(result.observation["vector"][0], [END, -END])
    assert env.max_episode_steps is None


def test_a_time_limit_counts_the_steps_that_are_skipped():
    result, env = compared({"frame_skip": 3}, [0, 0, 0, 0], limit=8)
    assert result.truncated.all()
    assert env.max_episode_steps == 3
    assert result.state["elapsed"].tolist() == [8, 8]


def test_skipped_steps_draw_apart():
    class Drawn(Counter):
        def step(self, key, state, action, params):
            obs, state, _, done, info = super().step(key, state, action, params)
            return obs, state, jax.random.uniform(key), done, info

    env = FrameSkip(FunctionalAdapter(Drawn()), 2)
    draws = env.step_random(jax.random.key(0), (3,))
    assert draws.shape == (3, 2, 2)
    state, _ = env.reset(env.reset_random(jax.random.key(0), (3,)))
    result = env.step(state, jnp.zeros(3, jnp.int32), draws)
    expected = jax.vmap(jax.vmap(jax.random.uniform))(draws).sum(1)
    np.testing.assert_allclose(result.reward, expected, rtol=1e-6)


@pytest.fixture(scope="module")
def sticky():
    return StickyActions(FunctionalAdapter(Counter()), 0.25)


def test_an_action_sticks_where_the_draw_says_so_but_never_the_first(sticky):
    state, _ = sticky.reset(sticky.reset_random(jax.random.key(0), (2,)))
    inner = jnp.zeros((2, 2), jnp.uint32)
    totals = []
    for action, draw in ((1, 0.0), (2, 0.3), (0, 0.2), (0, 0.3)):
        result = sticky.step(state, jnp.full(2, action), {"env": inner, "sticks": jnp.array([draw, 0.9])})
        state = result.state
        totals.append(result.observation["count"].tolist())
    assert totals == [[1, 1], [3, 3], [5, 3], [5, 3]]


def test_actions_stick_as_often_as_asked(sticky):
    draws = sticky.step_random(jax.random.key(0), (100, 40))
    assert abs(float((draws["sticks"] < 0.25).mean()) - 0.25) < 0.03
    assert draws["env"].shape == (100, 40, 2)


def test_continuous_actions_stick_too():
    class Adding(Counter):
        def step(self, key, state, action, params):
            return super().step(key, state, jnp.round(action[0]).astype(jnp.int32), params)

        def action_space(self, params):
            return spaces.Box(0, 2, (1,), np.float32)

    env = StickyActions(FunctionalAdapter(Adding()), 0.5)
    state, _ = env.reset(env.reset_random(jax.random.key(0), (1,)))
    random = {"env": jnp.zeros((1, 2), jnp.uint32), "sticks": jnp.zeros(1)}
    state = env.step(state, jnp.array([[2.0]]), random).state
    assert env.step(state, jnp.array([[0.0]]), random).observation["count"].tolist() == [4]
