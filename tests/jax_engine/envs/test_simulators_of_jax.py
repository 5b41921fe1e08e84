"""Brax's and Playground's environments: their own steps, without their wrappers; compiled once each, in small."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from lockstep.config.run import EnvConfig
from lockstep.jax_engine.envs.adapter import FunctionalAdapter
from lockstep.jax_engine.envs.environments import make_environment
from lockstep.jax_engine.envs.functional import strong
from lockstep.jax_engine.envs.simulators import SimulatedEnvironment, reward_terms

brax = pytest.importorskip("brax.envs")

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""A simulator's step is compiled to be run a few times."""


class Pushed(brax.Env):
    """A number that is pushed; ends at 3, and says at 2 that this is a limit's doing."""

    observation_size, action_size, backend = {"state": 1}, 1, "none"

    def reset(self, rng):
        zero = jnp.zeros(())
        seen = {"state": jax.random.uniform(rng, (1,))}
        metrics = {"reward_push": zero, "reward/pull": zero, "height": zero, "success": zero}
        return brax.State(jnp.zeros(()), seen, zero, zero, metrics, {"truncation": zero, "rng": rng})

    def step(self, state, action):
        place = state.pipeline_state + action[0]
        state.metrics.update({"reward_push": place, "reward/pull": -place, "success": (place >= 3) * 1.0})
        state.info["truncation"] = (place == 2) * 1.0
        seen = {"state": place[None]}
        return state.replace(pipeline_state=place, obs=seen, reward=2.0, done=(place >= 2) * 1)


@pytest.fixture(scope="module")
def pushed():
    return FunctionalAdapter(SimulatedEnvironment(Pushed(), 5))


def test_a_state_goes_in_and_comes_out(pushed):
    assert pushed.observation_space == spaces.Dict({"state": spaces.Box(-np.inf, np.inf, (1,), np.float32)})
    assert pushed.action_space == spaces.Box(-1, 1, (1,), np.float32)
    assert pushed.max_episode_steps == 5
    assert pushed.step_random(jax.random.key(0), (3,)) is None
    keys = pushed.reset_random(jax.random.key(0), (2,))
    state, observation = pushed.reset(keys)
    assert observation["state"][0] != observation["state"][1]
    kinds = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    result = pushed.step(state, jnp.array([[3.0], [2.0]]), None)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), result.state) == kinds
    assert result.terminated.tolist() == [True, False]
    assert result.truncated.tolist() == [False, True]
    assert result.success.tolist() == [True, False]
    assert result.reward.tolist() == [2.0, 2.0]
    assert {name: value.tolist() for name, value in result.terms.items()} == {"push": [3, 2], "pull": [-3, -2]}
    assert state["env"].metrics["reward_push"].tolist() == [0, 0]


def test_its_episodes_have_a_limit(pushed):
    state, _ = pushed.reset(pushed.reset_random(jax.random.key(0), (1,)))
    for _ in range(5):
        result = pushed.step(state, jnp.zeros((1, 1)), None)
        state = result.state
    assert result.truncated[0]
    assert not result.terminated[0]


def test_only_rewards_are_reward_terms():
    assert reward_terms({"reward_alive": jnp.ones(()), "x_position": jnp.ones(())}) == {"alive": 1}


def test_brax_steps_as_brax_does():
    settings = {"backend": "spring"}
    env = make_environment(EnvConfig(id="brax/inverted_pendulum", kwargs=settings, max_episode_steps=9))
    assert (env.observation_space.shape, env.action_space.shape, env.max_episode_steps) == ((4,), (1,), 9)
    actions = jnp.array([[[0.5], [-0.5]], [[1.0], [0.0]]])
    inner = brax.get_environment("inverted_pendulum", **settings)

    @partial(jax.jit, compiler_options=QUICK)
    def both(keys):
        state, first = env.reset(keys)
        _, steps = jax.lax.scan(
            lambda s, a: ((r := env.step(s, a, None)).state, r._replace(state=None)), state, actions
        )
        theirs = strong(jax.vmap(inner.reset)(keys))
        _, seen = jax.lax.scan(lambda s, a: ((t := jax.vmap(inner.step)(s, a)), t.obs), theirs, actions)
        return first, steps, theirs.obs, seen

    first, steps, their_first, seen = both(env.reset_random(jax.random.key(0), (2,)))
    np.testing.assert_allclose(first, their_first, rtol=1e-5)
    np.testing.assert_allclose(steps.observation, seen, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(steps.reward, np.ones((2, 2)))
    assert not steps.terminated.any()
    assert np.abs(seen[1, 0] - seen[1, 1]).max() > 1e-3  # the two really differ


def test_brax_names_what_it_lacks():
    with pytest.raises(ValueError, match="there is no brax/ants; did you mean brax/ant"):
        make_environment(EnvConfig(id="brax/ants"))
    with pytest.raises(ValueError, match="brax/reacher can't be made: ValueError: backend should be in"):
        make_environment(EnvConfig(id="brax/reacher", kwargs={"backend": "warp"}))


def test_playground_needs_a_known_task_and_its_models(monkeypatch):
    pytest.importorskip("mujoco_playground")
    with pytest.raises(ValueError, match="did you mean playground/HumanoidWalk"):
        make_environment(EnvConfig(id="playground/Humanoidwalk"))
    from mujoco_playground._src import mjx_env

    monkeypatch.setattr(mjx_env, "MENAGERIE_PATH", mjx_env.ROOT_PATH / "nowhere")
    with pytest.raises(ValueError, match="Go1JoystickFlatTerrain needs the robots of mujoco_menagerie"):
        make_environment(EnvConfig(id="playground/Go1JoystickFlatTerrain"))


def test_playground_takes_changes_of_its_configuration():
    pytest.importorskip("mujoco_playground")
    env = make_environment(EnvConfig(id="playground/CartpoleBalance", kwargs={"episode_length": 77}))
    assert (env.observation_space.shape, env.action_space.shape, env.max_episode_steps) == ((5,), (1,), 77)
    with pytest.raises(ValueError, match="CartpoleBalance can't be made: KeyError"):
        make_environment(EnvConfig(id="playground/CartpoleBalance", kwargs={"gravity": 1.0}))


@pytest.mark.long  # MJX's humanoid compiles for half a minute
def test_the_humanoid_walks_offline():
    pytest.importorskip("mujoco_playground")
    env = make_environment(EnvConfig(id="playground/HumanoidWalk"))
    assert (env.observation_space.shape, env.action_space.shape, env.max_episode_steps) == ((67,), (21,), 1000)

    @partial(jax.jit, compiler_options=QUICK)
    def few(keys, actions):
        state, first = env.reset(keys)
        last, steps = jax.lax.scan(
            lambda s, a: ((r := env.step(s, a, None)).state, r._replace(state=None)), state, actions
        )
        return first, steps, jax.tree.map(lambda x, y: (x.dtype == y.dtype) & (x.shape == y.shape), state, last)

    actions = jnp.stack([jnp.zeros((3, 21)), jnp.ones((3, 21))], 1)
    first, steps, same = few(env.reset_random(jax.random.key(0), (2,)), actions)
    assert all(jax.tree.leaves(same))
    assert (steps.observation.shape, steps.reward.shape) == ((3, 2, 67), (3, 2))
    assert set(steps.terms) == {"standing", "upright", "stand", "small_control", "move"}
    np.testing.assert_allclose(
        steps.reward, steps.terms["stand"] * steps.terms["move"] * steps.terms["small_control"], rtol=1e-5
    )
    np.testing.assert_array_equal(first[0], first[1])
    assert np.abs(steps.observation[2, 0] - steps.observation[2, 1]).max() > 0.1  # they were driven apart
    assert not (steps.terminated | steps.truncated).any()
