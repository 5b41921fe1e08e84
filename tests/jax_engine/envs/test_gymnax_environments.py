"""gymnax's environments in the engine: their physics, their own time limits told apart from ends, no autoreset."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from refusals import error_of

from lockstep.config.run import EnvConfig
from lockstep.envs.describe import describe
from lockstep.jax_engine.envs.adapter import FunctionalAdapter
from lockstep.jax_engine.envs.environments import make_environment

gymnax = pytest.importorskip("gymnax")


@dataclasses.dataclass(frozen=True)
class OldParams:
    max_steps_in_episode: int = 3

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)


class OldStyle:
    """As gymnax 0.0.x: ``done`` of ``step_env`` is an end or the time limit, and nothing else tells them apart."""

    default_params = OldParams()

    def reset_env(self, key, params):
        return jnp.zeros(1), {"place": jnp.zeros((), jnp.int32), "time": 0}

    def step_env(self, key, state, action, params):
        state = {"place": state["place"] + action, "time": state["time"] + 1}
        done = self.is_terminal(state, params)
        return state["place"][None] * 1.0, state, 1, done, {"discount": 1.0 - done}

    def is_terminal(self, state, params):
        return (state["place"] >= 2) | (state["time"] >= params.max_steps_in_episode)

    def step(self, key, state, action, params):
        raise AssertionError("its own autoreset must not be used")

    reset = step

    def observation_space(self, params):
        return gymnax.environments.spaces.Box(-jnp.finfo(jnp.float32).max, 3.0, (1,))

    def action_space(self, params=None):
        return gymnax.environments.spaces.Discrete(2)


def ends(env, actions):
    """Whether each step of the first environment ended its episode, and how."""
    state, _ = env.reset(env.reset_random(jax.random.key(0), (1,)))
    out = []
    for action in actions:
        step = env.step(state, jnp.array([action]), env.step_random(jax.random.key(1), (1,)))
        state = step.state
        out.append((bool(step.terminated[0]), bool(step.truncated[0])))
    return out


def test_the_older_signature_tells_ends_from_limits():
    env = FunctionalAdapter(OldStyle())
    assert ends(env, [0, 1, 0]) == [(False, False), (False, False), (False, True)]
    assert ends(env, [0, 1, 1]) == [(False, False), (False, False), (True, False)]
    assert ends(env, [1, 1]) == [(False, False), (True, False)]
    assert env.max_episode_steps == 3
    assert ends(FunctionalAdapter(OldStyle(), None, 5), [0, 1, 0, 0, 0])[2:] == [(False, False)] * 2 + [(False, True)]


def test_its_spaces_become_gymnasiums():
    env = FunctionalAdapter(OldStyle())
    assert env.observation_space == spaces.Box(-np.inf, 3.0, (1,), np.float32)
    assert env.action_space == spaces.Discrete(2)


@pytest.fixture(scope="module")
def cartpole():
    return make_environment(EnvConfig(id="gymnax/CartPole-v1", max_episode_steps=40))


def test_cartpole_steps_as_gymnax_does(cartpole):
    env, params = gymnax.make("CartPole-v1")
    params = params.replace(max_steps_in_episode=40)
    keys = cartpole.reset_random(jax.random.key(0), (2,))
    state, observation = cartpole.reset(keys)
    expected, inner = jax.vmap(env.reset_env, (0, None))(keys, params)
    step, step_env = jax.jit(cartpole.step), jax.jit(jax.vmap(env.step_env, (0, 0, 0, None)))
    draws = cartpole.step_random(jax.random.key(1), (60, 2))
    over, reached = np.zeros(2, bool), []
    for n in range(45):
        np.testing.assert_allclose(observation, expected, rtol=1e-5, atol=1e-6)
        action = jnp.array([n % 2, 1])
        result = step(state, action, draws[n])
        expected, inner, reward, terminated, _ = step_env(draws[n], inner, action, params)
        np.testing.assert_array_equal(result.terminated, terminated)
        np.testing.assert_array_equal(result.truncated, [n + 1 >= 40] * 2)
        np.testing.assert_array_equal(result.reward, reward)
        state, observation = result.state, result.observation
        over |= np.asarray(terminated)
        reached.append(over.copy())
    assert not reached[38][0]  # alive at the limit, which the other one fell long before
    assert reached[20][1]
    assert np.abs(observation[1]).max() > 2  # and nothing has reset it


def test_the_config_sets_the_time_limit(cartpole):
    assert cartpole.max_episode_steps == 40
    assert make_environment(EnvConfig(id="gymnax/CartPole-v1")).max_episode_steps == 500


def test_a_gymnax_wrapper_keeps_its_own_step():
    from gymnax.wrappers.purerl import LogWrapper

    env, params = gymnax.make("CartPole-v1")
    adapter = FunctionalAdapter(LogWrapper(env), params.replace(max_steps_in_episode=2))
    state, _ = adapter.reset(adapter.reset_random(jax.random.key(0), (1,)))
    step = jax.jit(adapter.step)
    seen = []
    for n in range(2):
        result = step(state, jnp.array([1]), adapter.step_random(jax.random.key(n), (1,)))
        state = result.state
        seen.append(result.observation[0, 1])
    assert result.truncated[0]
    assert int(state.returned_episode_lengths[0]) == 2  # the wrapper's own step was taken
    assert 0.1 < seen[0] < seen[1]  # pushed to the right twice: no new episode's observation


def test_minatar_boards_are_images_of_bytes():
    config = EnvConfig(id="gymnax/Breakout-MinAtar")
    description = describe(config)
    image = description.observation.leaves[0]
    assert (image.kind, image.high, image.shape) == ("image", 1.0, (10, 10, 4))
    env = make_environment(config)
    keys = env.reset_random(jax.random.key(0), (3,))
    _, observation = env.reset(keys)
    inner, params = gymnax.make("Breakout-MinAtar")
    expected, _ = jax.vmap(inner.reset_env, (0, None))(keys, params)
    assert observation.dtype == jnp.uint8
    np.testing.assert_array_equal(observation, expected)
    assert set(np.unique(observation)) == {0, 1}


def test_an_observation_has_the_dtype_that_is_observed():
    env = make_environment(EnvConfig(id="gymnax/FourRooms-misc"))
    assert env.observation_space.dtype == np.int32
    assert env.reset(env.reset_random(jax.random.key(0), (1,)))[1].dtype == jnp.int32


@pytest.mark.parametrize(
    ("env_id", "line"),
    [
        ("gymnax/CartPole", "there is no gymnax/CartPole; did you mean gymnax/CartPole-v1?"),
        ("gymnax/Zzzzzz", r"there is no gymnax/Zzzzzz; there are CartPole-v1, Pendulum-v1"),
    ],
)
def test_an_unknown_id_gets_a_hint(env_id, line):
    with pytest.raises(ValueError, match=line):
        make_environment(EnvConfig(id=env_id))


class Shaped(type(gymnax.make("CartPole-v1")[0])):
    def step(self, key, state, action, params=None):
        obs, state, reward, *rest = super().step(key, state, action, params)
        return obs, state, reward * 100, *rest


class Moved(OldStyle):
    def reset(self, key, params):
        return self.reset_env(key, params)


class Doubled(OldStyle):
    def step_env(self, key, state, action, params):
        obs, state, reward, *rest = super().step_env(key, state, action, params)
        return obs, state, reward * 2, *rest


def test_a_step_or_reset_that_would_not_be_called_is_refused():
    for kind, name in ((Shaped, "step"), (Moved, "reset")):
        assert error_of(FunctionalAdapter, kind()) == (
            f"env: {kind.__name__} overrides {name}, and the engine, which resets by itself, calls {name}_env; "
            f"override {name}_env instead"
        )
    env = FunctionalAdapter(Doubled())
    state, _ = env.reset(env.reset_random(jax.random.key(0), (1,)))
    assert env.step(state, jnp.array([0]), env.step_random(jax.random.key(1), (1,))).reward.tolist() == [2]
