"""Environments of a user's own: stepped as written, checked before anything is compiled."""

import dataclasses
import types
from typing import NamedTuple

import corridors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import error_of

from lockstep.config.run import EnvConfig
from lockstep.envs.describe import describe
from lockstep.jax.reward_terms import RewardTermsWrapper
from lockstep.jax.wrappers import EpisodeStatisticsWrapper, VmapWrapper, Wrapper
from lockstep.jax_engine.envs.adapter import FunctionalAdapter
from lockstep.jax_engine.envs.environments import make_environment
from lockstep.jax_engine.envs.functional import Environment
from lockstep.jax_engine.envs.registry import make

RIGHT = jnp.ones(3, jnp.int32)
NO_KEYS = jnp.zeros((3, 2), jnp.uint32)


def keys(env, count=3):
    return env.reset_random(jax.random.key(0), (count,))


def walked(env, steps, actions=RIGHT):
    state, observation = env.reset(keys(env))
    out = []
    for _ in range(steps):
        step = env.step(state, actions, NO_KEYS)
        state = step.state
        out.append(step)
    return observation, out


def test_an_environment_of_ones_own_is_stepped_as_written():
    env = FunctionalAdapter(corridors.Corridor())
    first, steps = walked(env, 4, jnp.array([1, 1, 0]))
    np.testing.assert_array_equal(first, np.zeros((3, 2)))
    np.testing.assert_array_equal(steps[3].observation, [[4, 5], [4, 5], [0, 1]])
    np.testing.assert_array_equal([s.terminated[0] for s in steps], [False, False, False, True])
    assert not any(s.terminated[2] or s.truncated.any() for s in steps)
    np.testing.assert_allclose(steps[3].reward, [0.9, 0.9, -0.1], rtol=1e-6)
    np.testing.assert_array_equal(steps[3].success, [True, True, False])
    np.testing.assert_allclose(steps[3].terms["arrival"], [1, 1, 0])
    assert (steps[0].reward.dtype, steps[0].terminated.dtype) == (jnp.float32, bool)
    assert env.max_episode_steps is None


def test_a_success_that_is_a_number_is_one_above_a_half():
    class Graded(corridors.Corridor):
        def step(self, key, state, action, params):
            *rest, info = super().step(key, state, action, params)
            return *rest, info | {"success": 0.3 + 0.4 * (state > 0)}

    _, steps = walked(FunctionalAdapter(Graded()), 2, jnp.array([1, 1, 0]))
    assert [np.asarray(step.success).tolist() for step in steps] == [[False] * 3, [True, True, False]]


def test_six_values_tell_how_an_episode_ended():
    _, steps = walked(FunctionalAdapter(corridors.SixValues()), 4)
    assert [bool(s.truncated[0]) for s in steps] == [False, False, True, False]
    assert [bool(s.terminated[0]) for s in steps] == [False, False, False, True]


def test_a_time_limit_among_the_parameters_is_the_environments():
    env, params = corridors.with_params(7)
    assert FunctionalAdapter(env, params).max_episode_steps == 7
    assert FunctionalAdapter(env, params, max_episode_steps=9).max_episode_steps == 9


def test_parameters_of_a_whole_batch_are_refused():
    env, params = make("CartPole-v1")
    batched = jax.vmap(lambda key: params.replace(max_steps_in_episode=500))(jax.random.split(jax.random.key(0), 16))
    with pytest.raises(ValueError, match=r"^env_params: ") as caught:
        FunctionalAdapter(env, batched)
    assert str(caught.value) == (
        "env_params: max_steps_in_episode is of shape (16,); one set of parameters is for all environments; draw what "
        "differs between episodes in reset, from its key"
    )


@pytest.mark.parametrize("limit", [0, -5, float("inf"), "20", 20.7])
def test_a_time_limit_is_a_whole_number(limit):
    class Limited(corridors.Corridor):
        max_episode_steps = limit

    must = f"{limit!r} must be a whole number, at least 1, or None for no limit"
    assert error_of(FunctionalAdapter, Limited()) == f"env: Limited: max_episode_steps: {must}"
    env, params = corridors.with_params(limit)
    assert error_of(FunctionalAdapter, env, params) == f"env_params: max_steps_in_episode: {must}"


@pytest.mark.parametrize("limit", [20, 20.0, np.int64(20), jnp.int32(20)])
def test_a_whole_time_limit_may_be_written_in_any_way(limit):
    env, params = corridors.with_params(limit)
    assert FunctionalAdapter(env, params).max_episode_steps == 20


@pytest.mark.parametrize(("own", "params", "limit"), [(9, 20, 9), (20, 9, 9), (None, 9, 9)])
def test_of_two_time_limits_the_lower_one_ends_an_episode(own, params, limit):
    class Limited(corridors.Corridor):
        max_episode_steps = own

    env, (_, params) = Limited(), corridors.with_params(params)
    assert FunctionalAdapter(env, params).max_episode_steps == limit
    assert FunctionalAdapter(env, params, max_episode_steps=30).max_episode_steps == 30


class Params(NamedTuple):
    max_steps_in_episode: int = 7


@dataclasses.dataclass(frozen=True)
class PlainParams:
    max_steps_in_episode: int = 7


def test_any_plain_parameters_take_another_limit():
    for params in (Params(), PlainParams()):
        adapter = FunctionalAdapter(corridors.SixValues(), params, max_episode_steps=9)
        assert adapter._params == type(params)(9)
    odd = types.SimpleNamespace(max_steps_in_episode=7)
    with pytest.raises(ValueError, match=r"^env.max_episode_steps: 9, but SixValues's parameters \(SimpleNamespace\)"):
        FunctionalAdapter(corridors.SixValues(), odd, max_episode_steps=9)


def test_an_environment_whose_limit_looks_like_an_end_is_pointed_out():
    note = FunctionalAdapter(corridors.Corridor(), Params()).limit_note
    assert note is not None
    assert "Corridor: its step doesn't tell max_steps_in_episode (7) from a real end" in note
    assert FunctionalAdapter(corridors.SixValues(), Params()).limit_note is None
    assert FunctionalAdapter(corridors.Corridor()).limit_note is None  # nobody knows of a limit
    env, params = make("gymnax/CartPole-v1")
    assert FunctionalAdapter(env, params).limit_note is None


@pytest.mark.parametrize("final", ["final_obs", "final_observation"])
def test_an_environment_that_resets_itself_shows_what_its_episode_saw_last(final):
    _, steps = walked(FunctionalAdapter(corridors.SelfResetting(final)), 4)
    np.testing.assert_array_equal(steps[3].observation[0], [4, 5])
    assert steps[3].terminated.all()
    np.testing.assert_array_equal(steps[2].observation[0], [3, 4])


def test_an_environment_that_resets_itself_without_a_final_observation_is_refused():
    with pytest.raises(ValueError, match=r"Resetting: its step resets by itself .* info\['final_obs'\]"):
        FunctionalAdapter(corridors.SelfResetting(None))


class Forwarding:
    """A wrapper of another library around gymnax: what it doesn't have is the inner one's."""

    def __init__(self, env):
        self._env = env

    def __getattr__(self, name):
        return getattr(self._env, name)


class Gymnaxlike(corridors.SelfResetting):
    autoreset = None

    def step_env(self, *arguments):
        raise AssertionError("a wrapper's own step must not be passed by")


def test_a_wrapper_that_hides_a_gymnax_step_resets_by_itself():
    class Doubling(Forwarding):
        def step(self, key, state, action, params):
            obs, state, reward, done, info = self._env.step(key, state, action, params)
            return obs, state, 2 * reward, done, info

    _, steps = walked(FunctionalAdapter(Doubling(Gymnaxlike())), 4)
    np.testing.assert_allclose(steps[3].reward, 1.8, rtol=1e-6)
    np.testing.assert_array_equal(steps[3].observation[0], [4, 5])
    with pytest.raises(ValueError, match="final_obs"):
        FunctionalAdapter(Doubling(Gymnaxlike(None)))


def test_keys_in_a_state_are_kept_as_plain_arrays():
    env = FunctionalAdapter(corridors.Keyed())
    state, _ = env.reset(keys(env))
    assert {str(x.dtype) for x in jax.tree.leaves(state)} == {"int32", "uint32"}
    assert not any(x.weak_type for x in jax.tree.leaves(state))
    step = jax.jit(env.step)(state, RIGHT, NO_KEYS)
    assert jax.tree.structure(step.state) == jax.tree.structure(state)
    assert not any(x.weak_type for x in jax.tree.leaves(step.state))
    drawn = [jax.random.uniform(jax.random.split(jax.random.wrap_key_data(k))[1]) for k in keys(env)]
    np.testing.assert_array_equal(step.reward, drawn)


def test_environments_differ_by_their_keys():
    env = FunctionalAdapter(corridors.Keyed())
    a, b = (env.reset_random(jax.random.key(seed), (5, 3)) for seed in (0, 0))
    np.testing.assert_array_equal(a, b)
    assert a.shape == (5, 3, 2)
    assert len(np.unique(a.reshape(-1, 2), axis=0)) == 15
    assert env.step_random(jax.random.key(0), (5, 3)).shape == (5, 3, 2)


def test_a_step_that_draws_nothing_gets_no_keys():
    class Quiet(corridors.Corridor):
        step_draws = False

        def step(self, key, state, action, params):
            assert key is None
            return super().step(key, state, action, params)

    env = FunctionalAdapter(Quiet())
    assert env.step_random(jax.random.key(0), (5, 3)) is None
    state, _ = env.reset(keys(env))
    np.testing.assert_array_equal(env.step(state, RIGHT, None).state, [1, 1, 1])


class Noisy(Forwarding):
    """A wrapper of a user's own, whose step draws where the one inside doesn't."""

    def step(self, key, state, action, params):
        key, own = jax.random.split(key)
        obs, state, reward, done, info = self._env.step(key, state, action, params)
        return obs, state, reward + jax.random.uniform(own), done, info


class Told(Noisy):
    """Says itself what it needs."""

    step_draws = False

    def step(self, key, state, action, params):
        assert key is None
        return self._env.step(key, state, action, params)


class Derived(Wrapper):
    """Derived from ours, with a step of its own."""

    def step(self, key, state, action, params=None):
        return Noisy.step(self, key, state, action, params)  # pyright: ignore[reportArgumentType]


def test_a_wrapper_of_ones_own_gets_keys_unless_it_says_itself_that_it_draws_nothing():
    inner, params = make("CartPole-v1")
    assert FunctionalAdapter(inner, params).step_random(jax.random.key(0), (3,)) is None
    for env in (Noisy(inner), Derived(inner), EpisodeStatisticsWrapper(Derived(inner))):
        adapter = FunctionalAdapter(env, params)
        random = adapter.step_random(jax.random.key(0), (3,))
        assert (random.shape, len(np.unique(random, axis=0))) == ((3, 2), 3)
        state, _ = adapter.reset(keys(adapter))
        rewards = adapter.step(state, jnp.ones(3, jnp.int32), random).reward
        drawn = [1 + jax.random.uniform(jax.random.split(key)[1]) for key in random]
        np.testing.assert_allclose(rewards, drawn, rtol=1e-6)
    for env in (Told(inner), EpisodeStatisticsWrapper(inner), RewardTermsWrapper(inner, {"a": (1.0, lambda t: 1.0)})):
        assert FunctionalAdapter(env, params).step_random(jax.random.key(0), (3,)) is None


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("reset", r"reset\(key, params\) must return \(obs, state\), not ShapeDtypeStruct"),
        ("values", r"step\(key, state, action, params\) must return .* not 4 values"),
        ("shape", r"reset's observation is float32\[1\], and its space says float32\[2\]"),
        ("dtype", r"step's observation is int32\[2\], and its space says float32\[2\]"),
        ("state", r"state is int32\[\] after a reset and float32\[\] after a step"),
        ("structure", "another structure than the reset's"),
        ("done", r"step's done is float32\[\]; it must be one bool"),
        ("reward", r"step's reward is float32\[1\]; it must be one real number"),
        ("no reward", r"step's reward is NoneType; it must be one real number"),
        ("complex", r"step's reward is complex64\[\]; it must be one real number"),
        ("no done", r"step's done is NoneType; it must be one bool"),
        ("info", r"step's info is of type NoneType; it must be a dict"),
        ({"success": [True]}, r"info\['success'\] is list; it must be one bool, or a number that is above 0.5"),
        ({"success": np.ones(1, bool)}, r"info\['success'\] is bool\[1\]; it must be one bool"),
        ({"truncated": np.ones(3, bool)}, r"info\['truncated'\] is bool\[3\]; it must be one bool"),
        ({"reward_terms": 1.0}, r"info\['reward_terms'\] is float32\[\]; it must be a dict of numbers by name"),
        ({"reward_terms": {"a": None}}, r"info\['reward_terms'\]\['a'\] is NoneType; it must be one real number"),
        ("branch", "step can't be traced by JAX: TracerBoolConversionError"),
        ("space", "observation_space: 'two numbers' is neither a Gymnasium nor a gymnax space"),
        ("actions", r"action space Text\(.* isn't supported"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(what, line):
    def make():
        if isinstance(what, dict):
            return FunctionalAdapter(corridors.Wrong(what), name="corridors:Wrong")
        return describe(EnvConfig(id="corridors:Wrong", backend="jax", kwargs={"what": what}))

    with pytest.raises(ValueError, match=line) as caught:
        make()
    assert str(caught.value).startswith("env.id: corridors:Wrong")
    assert "\n" not in str(caught.value)


def test_nothing_is_wrong_with_the_same_class_without_its_fault():
    description = describe(EnvConfig(id="corridors:Wrong", backend="jax", kwargs={"what": "nothing"}))
    assert (description.observation.width, description.action.choices) == (2, (2,))


def test_a_class_is_found_by_its_name():
    env = make_environment(EnvConfig(id="corridors:Corridor", backend="jax", kwargs={"length": 2}, max_episode_steps=5))
    _, steps = walked(env, 2)
    assert steps[1].terminated.all()
    assert not steps[0].terminated.any()
    assert env.max_episode_steps == 5
    pair = EnvConfig(id="corridors:with_params", backend="jax", kwargs={"limit": 6})
    assert make_environment(pair).max_episode_steps == 6


def test_what_makes_one_may_change_its_arguments():
    config = EnvConfig(id="corridors:taking", backend="jax", kwargs={"options": {"length": 2}})
    for _ in range(2):
        make_environment(config)
    assert config.kwargs == {"options": {"length": 2}}


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("corridors:Nothing", "module corridors has no Nothing"),
        ("nowhere:Corridor", "No module named 'nowhere'"),
        ("corridors:LENGTH", "neither a function nor a class"),
        ("corridors:Wrong", "can't be made: TypeError"),
        ("corridors:Incomplete", "has no step and no observation_space and no action_space"),
    ],
)
def test_a_class_that_cant_be_had_is_named(name, line):
    with pytest.raises(ValueError, match=line):
        make_environment(EnvConfig(id=name, backend="jax"))


def test_the_base_class_says_what_it_lacks():
    with pytest.raises(ValueError, match=r"observation_space: .*Environment has no observation_space"):
        FunctionalAdapter(Environment())


def test_a_batch_is_no_environment():
    with pytest.raises(ValueError, match="is a whole batch of environments"):
        FunctionalAdapter(VmapWrapper(corridors.Corridor()))


class Weak(corridors.Corridor):
    """A Python number in the reset's state, which JAX would let follow the dtype of what it meets."""

    def __init__(self, number, dtype):
        super().__init__()
        self.number, self.dtype = number, dtype

    def reset(self, key, params):
        return jnp.zeros(2), {"x": jnp.zeros((), self.dtype), "by": self.number}

    def step(self, key, state, action, params):
        obs, _, reward, done, info = super().step(key, jnp.zeros((), jnp.int32), action, params)
        return obs, state | {"x": state["x"] * state["by"]}, reward, done, info


@pytest.mark.parametrize(
    ("number", "dtype", "after"), [(0.9, "bfloat16", "float32"), (1, "int8", "int32"), (0.9, "float32", None)]
)
def test_a_number_in_a_resets_state_is_as_wide_as_in_the_program(number, dtype, after):
    if after is None:
        walked(FunctionalAdapter(Weak(number, dtype)), 2)
        return
    assert error_of(FunctionalAdapter, Weak(number, dtype)) == (
        f"env: Weak: state['x'] is {dtype}[] after a reset and {after}[] after a step; it must stay the same"
    )
