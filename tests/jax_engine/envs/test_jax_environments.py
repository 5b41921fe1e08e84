"""The engine's environments: array environments against their own NumPy physics, ids, options and their errors."""

import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.config.checks import resolve
from lockstep.config.run import Config, EnvConfig
from lockstep.envs.arrays import ARRAY_ENVIRONMENTS
from lockstep.envs.describe import describe
from lockstep.envs.gymnasium.make import make_environment as make_on_the_host
from lockstep.jax_engine.envs.environments import environment_spaces, is_jax_environment, make_environment

COUNT = 5


def actions_of(env, steps):
    rng = np.random.default_rng(0)
    if env.action_space.dtype == np.float32:
        return rng.uniform(-1, 1, (steps, COUNT, *env.action_space.shape)).astype(np.float32)
    return rng.integers(env.action_space.n, size=(steps, COUNT)).astype(np.int32)


@pytest.mark.parametrize("env_id", ["lockstep/CartPole-v1", "lockstep/Pendulum-v1", "lockstep/PushCube-v0"])
def test_array_environments_step_as_on_the_host(env_id):
    env, host = make_environment(EnvConfig(id=env_id)), ARRAY_ENVIRONMENTS[env_id]()
    random = env.reset_random(jax.random.key(0), (COUNT,))
    draws = env.step_random(jax.random.key(1), (3, COUNT))
    state, observation = jax.jit(env.reset)(random)
    expected_state, expected = host.reset(np, np.asarray(random))
    np.testing.assert_allclose(observation, expected, rtol=1e-5, atol=1e-6)
    step = jax.jit(env.step)
    for n, action in enumerate(actions_of(env, 3)):
        draw = None if draws is None else draws[n]
        result = step(state, action, draw)
        expected_state, expected, reward, terminated = host.step(np, expected_state, action, draw)
        np.testing.assert_allclose(result.observation, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(result.reward, reward, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(result.terminated, terminated)
        assert jax.tree.structure(result.state) == jax.tree.structure(state)
        success = host.success(np, expected_state)
        assert (result.success is None) == (success is None)
        state = result.state
    assert (result.reward.dtype, result.terminated.dtype, result.truncated.dtype) == (jnp.float32, bool, bool)
    assert not result.truncated.any()


def test_draws_of_resets_are_uniform_and_all_different():
    env = make_environment(EnvConfig(id="lockstep/CartPole-v1"))
    draws = np.asarray(env.reset_random(jax.random.key(0), (100, COUNT)))
    assert (draws.shape, draws.dtype) == ((100, COUNT, 4), np.float32)
    assert len(np.unique(draws)) > 1900
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.05
    again = env.reset_random(jax.random.key(1), (100, COUNT))
    assert not np.array_equal(draws, again)


def test_time_limits():
    assert make_environment(EnvConfig(id="lockstep/CartPole-v1")).max_episode_steps == 500
    assert make_environment(EnvConfig(id="lockstep/CartPole-v1", max_episode_steps=30)).max_episode_steps == 30
    observation, action, limit = environment_spaces(EnvConfig(id="lockstep/Pendulum-v1"))
    assert (observation.shape, action.shape, limit) == ((3,), (1,), 200)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"id": "lockstep/CartPole-v1"}, True),
        ({"id": "lockstep/CartPole-v1", "backend": "jax"}, True),
        ({"id": "lockstep/CartPole-v1", "backend": "gymnasium"}, False),
        ({"id": "CartPole-v1"}, False),
        ({"id": "gymnax/CartPole-v1"}, True),
        ({"id": "brax/ant"}, True),
        ({"id": "playground/HumanoidWalk"}, True),
        ({"id": "module:Class", "backend": "jax"}, True),
        ({"id": "module:Id-v0"}, False),
    ],
)
def test_what_the_compiled_program_steps(settings, expected):
    assert is_jax_environment(EnvConfig(**settings)) is expected


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"id": "CartPole-v1", "backend": "jax"}, "CartPole-v1 with env.backend jax: give lockstep/"),
        ({"id": "CartPole-v1"}, "CartPole-v1 is stepped on the host"),
        ({"id": "elsewhere/Thing", "backend": "jax"}, "'elsewhere/Thing' is none that JAX can step"),
        ({"id": "lockstep/CartPole-v1", "kwargs": {"size": 3}}, "can't be made: TypeError"),
    ],
)
def test_what_cant_be_made_is_said(settings, line):
    with pytest.raises(ValueError, match=line):
        make_environment(EnvConfig(**settings))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"workers": 2}, "env.workers: 2"),
        ({"atari": True}, "no ALE game"),
        ({"action_mask": "info"}, "must be an entry of its Dict observation"),
        ({"action_mask": "method"}, "must be an entry of its Dict observation"),
    ],
)
def test_options_that_the_host_alone_has(options, line):
    config = EnvConfig(id="lockstep/CartPole-v1", backend="jax", **options)
    with pytest.raises(ValueError, match=line):
        describe(config)
    defaults = {name: getattr(EnvConfig(), name) for name in options}
    assert describe(config.model_copy(update=defaults)).id == config.id


def test_a_description_knows_frames_and_the_time_limit():
    config = EnvConfig(id="lockstep/CartPole-v1", backend="jax", frame_stack=3, frame_skip=3, sticky_actions=0.1)
    description = describe(config)
    assert description.observation.width == 12
    assert description.max_episode_steps == 167
    with pytest.raises(ValueError, match=r"takes no wrappers; use --env.backend gymnasium \(or jax"):
        describe(config.model_copy(update={"backend": "auto"}))


@pytest.mark.parametrize("settings", [{"id": "gymnax/CartPole-v1"}, {"id": "lockstep/CartPole-v1", "backend": "jax"}])
def test_the_torch_engine_refuses_them(settings):
    with pytest.raises(ValueError, match="is stepped by JAX, which engine torch can't do; use --engine jax"):
        resolve(Config(env=EnvConfig(**settings)))
    resolve(Config(env=EnvConfig(id="lockstep/CartPole-v1")))


def test_another_back_end_is_refused_at_once():
    with pytest.raises(ValueError, match=r"env.backend: tensor, but gymnax/CartPole-v1 is an environment of JAX's"):
        EnvConfig(id="gymnax/CartPole-v1", backend="tensor")


def test_they_are_no_gymnasium_environments():
    with pytest.raises(ValueError, match="it can't be drawn here"):
        make_on_the_host(EnvConfig(id="gymnax/CartPole-v1"))


@pytest.mark.parametrize(
    ("env_id", "package"),
    [("gymnax/CartPole-v1", "gymnax"), ("brax/ant", "brax"), ("playground/X", "mujoco_playground")],
)
def test_a_package_that_isnt_installed_is_named(env_id, package, monkeypatch):
    real = importlib.import_module

    def absent(name, *arguments):
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return real(name, *arguments)

    monkeypatch.setattr(importlib, "import_module", absent)
    extra = env_id.partition("/")[0]
    with pytest.raises(
        ValueError, match=rf"needs {package}, which isn't installed; pip install 'lockstep-rl\[{extra}\]'"
    ):
        make_environment(EnvConfig(id=env_id, max_episode_steps=3))


def test_without_jax_a_description_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(ValueError, match=r"jax isn't installed; pip install 'lockstep-rl\[jax\]'"):
        describe(EnvConfig(id="gymnax/CartPole-v1"))


def test_rewards_are_shaped_alike_on_both_sides():
    rewards = np.array([-30.0, 0.0, 0.25, 4.0], np.float32)
    plain = EnvConfig(id="lockstep/CartPole-v1", backend="jax")
    for options in ({"reward_sign": True}, {"reward_scale": 0.5, "reward_clip": (-1.0, 1.5)}):
        shaping = describe(plain.model_copy(update=options)).rewards
        shaped = jax.jit(lambda x, shaping=shaping: shaping(x, jnp))(rewards)
        np.testing.assert_allclose(shaped, shaping(rewards), rtol=1e-6)
        assert np.abs(shaped - rewards).max() > 1
