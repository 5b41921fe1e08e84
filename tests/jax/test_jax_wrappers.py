"""Wrappers around functional environments: composed, batched, with statistics that all environments share."""

import doctest
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from lockstep.envs.arrays import CartPole
from lockstep.jax.wrappers import (
    AutoResetWrapper,
    ClipActionWrapper,
    EpisodeStatisticsWrapper,
    FrameStackWrapper,
    ObservationNormalizationWrapper,
    RescaleActionWrapper,
    RewardNormalizationWrapper,
    VmapWrapper,
    Wrapper,
)
from lockstep.jax.wrappers.batch import RunningMoments
from lockstep.jax_engine.envs.adapter import FunctionalAdapter
from lockstep.jax_engine.envs.registry import make

pytestmark = pytest.mark.quick
KEY = jax.random.key(0)


class Walk:
    """Adds actions up from where the key says; ends at 3. Rewards are the place times ``params``."""

    def reset(self, key, params):
        place = jnp.floor(jax.random.uniform(key) * 2)
        return place[None], place

    def step(self, key, state, action, params):
        place = state + action
        return place[None], place, place * params, place >= 3, {}

    def observation_space(self, params):
        return spaces.Box(0, 10, (1,), np.float32)

    def action_space(self, params):
        return spaces.Discrete(4)


class Push(Walk):
    """Its actions are continuous, between -2 and 4."""

    def step(self, key, state, action, params):
        return super().step(key, state, action[0], params)

    def action_space(self, params):
        return spaces.Box(-2, 4, (1,), np.float32)


def stepped(env, actions, params=1.0, key=KEY):
    """Observation of the reset, and each step's values, jitted."""
    obs, state = env.reset(key, params)
    out, step = [], jax.jit(env.step)
    for n, action in enumerate(actions):
        keys = jax.vmap(jax.random.fold_in, (0, None))(key, n) if key.ndim else jax.random.fold_in(key, n)
        values = step(keys, state, jnp.asarray(action), params)
        state = values[1]
        out.append(values)
    return obs, out


def test_make_gives_cartpole_in_the_known_form():
    env, params = make("CartPole-v1")
    params = params.replace(max_steps_in_episode=12)
    obs, state = env.reset(KEY, params)
    assert obs.shape == (4,)
    host, expected = CartPole(), {k: np.asarray(v)[None] for k, v in state["env"].items()}
    step = jax.jit(env.step)
    for n in range(12):
        obs, state, reward, done, info = step(KEY, state, n % 2, params)
        expected, seen, _, terminated = host.step(np, expected, np.array([n % 2]), None)
        np.testing.assert_allclose(obs, seen[0], rtol=1e-4, atol=1e-6)
        assert bool(info["terminated"]) == terminated[0]
        assert (float(reward), bool(done)) == (1.0, n == 11)
    assert (bool(info["truncated"]), bool(info["terminated"])) == (True, False)
    assert (env.action_space(params), env.observation_space(params)) == (host.action_space, host.observation_space)


def test_make_knows_ids_and_says_which_it_doesnt():
    assert make("lockstep/Pendulum-v1")[1].max_steps_in_episode == 200
    assert make("PushCube-v0", reward="sparse")[0].observation_space(None).shape == (18,)
    with pytest.raises(ValueError, match="there is no CartPol-v1; did you mean lockstep/CartPole-v1"):
        make("CartPol-v1")
    with pytest.raises(ValueError, match="'isaac/Ant' is none that JAX can step"):
        make("isaac/Ant")


def test_an_ended_episode_is_followed_by_the_next_and_keeps_its_last_observation():
    env = AutoResetWrapper(Walk())
    first, out = stepped(env, [1, 2, 1])
    obs, state, reward, done, info = out[1]
    assert float(first[0]) + 3 == float(info["final_obs"][0])
    assert (bool(done), bool(info["terminated"]), bool(info["truncated"])) == (True, True, False)
    assert float(reward) == float(first[0]) + 3
    assert float(obs[0]) in (0.0, 1.0)
    assert float(state) == float(obs[0])
    assert out[2][0][0] == obs[0] + 1
    assert not out[0][3]
    np.testing.assert_array_equal(out[0][4]["final_obs"], out[0][0])


def test_new_episodes_begin_by_their_own_keys():
    _, out = stepped(VmapWrapper(AutoResetWrapper(Walk())), [[3] * 20], key=jax.random.split(KEY, 20))
    assert out[0][3].all()
    assert set(out[0][0][:, 0].tolist()) == {0.0, 1.0}


def test_what_resets_by_itself_isnt_reset_twice():
    with pytest.raises(ValueError, match="AutoResetWrapper resets by itself already"):
        AutoResetWrapper(AutoResetWrapper(Walk()))


def test_the_engine_takes_a_wrapped_environment():
    adapter = FunctionalAdapter(EpisodeStatisticsWrapper(AutoResetWrapper(Walk())), 1.0)
    state, obs = adapter.reset(adapter.reset_random(KEY, (2,)))
    step = adapter.step(state, jnp.array([3, 1]), adapter.step_random(KEY, (2,)))
    np.testing.assert_array_equal(step.observation, obs + jnp.array([[3], [1]]))
    assert step.terminated[0]


def test_episode_statistics():
    env = EpisodeStatisticsWrapper(AutoResetWrapper(Walk()))
    first, out = stepped(env, [1, 2, 3, 0], params=2.0)
    begin, second = float(first[0]), float(out[1][0][0])
    infos = [values[4] for values in out]
    assert [bool(info["returned_episode"]) for info in infos] == [False, True, True, False]
    expected = [0.0, 2 * (begin + 1 + begin + 3), 2 * (second + 3), 2 * (second + 3)]
    assert [float(info["returned_episode_returns"]) for info in infos] == expected
    assert [int(info["returned_episode_lengths"]) for info in infos] == [0, 2, 1, 1]


def test_frames_are_stacked_and_begin_anew_with_an_episode():
    env = FrameStackWrapper(AutoResetWrapper(Walk()), 3)
    assert env.observation_space(None).shape == (3,)
    first, out = stepped(env, [1, 2, 1])
    b = float(first[0])
    np.testing.assert_array_equal(first, [b, b, b])
    np.testing.assert_array_equal(out[0][0], [b, b, b + 1])
    np.testing.assert_array_equal(out[1][4]["final_obs"], [b, b + 1, b + 3])
    n = float(out[1][0][0])
    np.testing.assert_array_equal(out[1][0], [n, n, n])
    np.testing.assert_array_equal(out[2][0], [n, n, n + 1])


def test_actions_are_clipped():
    env = ClipActionWrapper(Push())
    first, out = stepped(env, [[9.0], [-9.0]])
    assert [float(values[0][0]) - float(first[0]) for values in out] == [4.0, 2.0]
    assert env.action_space(None) == spaces.Box(-np.inf, np.inf, (1,), np.float32)


def test_actions_are_stretched_to_their_bounds():
    env = RescaleActionWrapper(Push())
    first, out = stepped(env, [[1.0], [0.0], [-1.0]])
    assert [float(values[0][0]) - float(first[0]) for values in out] == [4.0, 5.0, 3.0]
    assert env.action_space(None) == spaces.Box(-1, 1, (1,), np.float32)
    _, out = stepped(RescaleActionWrapper(Push(), 0.0, 2.0), [[2.0]])
    assert float(out[0][0][0]) - float(first[0]) == 4.0


@pytest.mark.parametrize("wrapper", [ClipActionWrapper, RescaleActionWrapper])
def test_discrete_actions_have_no_bounds(wrapper):
    with pytest.raises(ValueError, match=r"Wrapper: actions are Discrete\(4\), which have no bounds"):
        wrapper(Walk()).action_space(None)


def test_bounds_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match=r"low 1.0 must be below high 1.0"):
        RescaleActionWrapper(Push(), 1.0, 1.0)
    with pytest.raises(ValueError, match="no finite bounds"):
        RescaleActionWrapper(ClipActionWrapper(Push())).action_space(None)

    class Wide(Push):
        def action_space(self, params):
            return spaces.Box(-np.finfo(np.float32).max, np.finfo(np.float32).max, (1,), np.float32)

    with pytest.raises(ValueError, match="no finite bounds"):
        RescaleActionWrapper(Wide()).action_space(None)


@pytest.mark.parametrize("count", [0, -1, 1.5, "2"])
def test_frames_are_a_whole_number_of_at_least_one(count):
    line = f"FrameStackWrapper: count: {count!r} must be a whole number, at least 1"
    with pytest.raises(ValueError, match=re.escape(line)):
        FrameStackWrapper(Walk(), count)
    assert FrameStackWrapper(Walk(), 1).observation_space(None).shape == (1,)


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan")])
def test_a_clip_is_above_zero(clip):
    for kind in (ObservationNormalizationWrapper, RewardNormalizationWrapper):
        with pytest.raises(ValueError, match=f"{kind.__name__}: clip {clip} must be above 0"):
            kind(Walk(), clip=clip)


def test_a_batch_goes_into_no_wrapper_of_one_environment():
    with pytest.raises(ValueError, match="FrameStackWrapper: it works on one environment"):
        FrameStackWrapper(VmapWrapper(Walk()), 2)
    with pytest.raises(ValueError, match="is a batch of environments already"):
        VmapWrapper(VmapWrapper(Walk()))


ACTIONS = [[1, 0, 2, 3], [0, 3, 1, 1], [2, 2, 0, 0]]


def plain_and(wrapper):
    keys = jax.random.split(KEY, 4)
    inner = VmapWrapper(AutoResetWrapper(Walk()))
    return stepped(inner, ACTIONS, key=keys), stepped(wrapper(inner), ACTIONS, key=keys)


def test_observations_are_normalised_by_statistics_of_the_whole_batch():
    (first, plain), (normal_first, normal) = plain_and(ObservationNormalizationWrapper)
    seen = [np.asarray(first)] + [np.asarray(values[0]) for values in plain]
    for n, got in enumerate([normal_first] + [values[0] for values in normal]):
        samples = np.concatenate(seen[: n + 1])
        expected = (seen[n] - samples.mean()) / np.sqrt(samples.var() + 1e-8)
        np.testing.assert_allclose(got, np.clip(expected, -10, 10), rtol=1e-4, atol=1e-5)
    moments = normal[-1][1]["moments"][0]
    assert (moments.mean.shape, float(moments.count)) == ((1,), 16.0)
    samples = np.concatenate(seen[:3])
    final = (np.asarray(plain[1][4]["final_obs"]) - samples.mean()) / np.sqrt(samples.var() + 1e-8)
    np.testing.assert_allclose(normal[1][4]["final_obs"], final, rtol=1e-4)


def test_rewards_are_divided_by_the_spread_of_returns_of_the_whole_batch():
    (_, plain), (_, normal) = plain_and(lambda env: RewardNormalizationWrapper(env, gamma=0.5))
    running, returns = np.zeros(4), []
    for values, got in zip(plain, normal, strict=True):
        running = running * 0.5 + np.asarray(values[2])
        returns.append(running.copy())
        expected = np.asarray(values[2]) / np.sqrt(np.concatenate(returns).var() + 1e-8)
        np.testing.assert_allclose(got[2], np.clip(expected, -10, 10), rtol=1e-4)
        running = np.where(values[3], 0.0, running)
    assert any(values[3].any() for values in plain)


def test_rewards_in_float64_leave_the_state_as_it_was():
    """So that a loop in ``lax.scan`` takes them."""
    with jax.enable_x64(True):
        env = RewardNormalizationWrapper(VmapWrapper(Paid()))
        keys = jax.random.split(KEY, 2)
        _, state = env.reset(keys, None)
        _, following, *_ = env.step(keys, state, jnp.zeros(2), None)
    assert jax.tree.map(lambda x: x.dtype, following) == jax.tree.map(lambda x: x.dtype, state)


class Paid:
    """Pays in float64."""

    observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Discrete(2)

    def reset(self, key, params):
        return jnp.zeros(1, jnp.float32), jnp.zeros((), jnp.float32)

    def step(self, key, state, action, params):
        return jnp.zeros(1, jnp.float32), state, jnp.ones((), jnp.float64), jnp.zeros((), bool), {}


def test_a_batch_over_two_devices_is_normalised_as_one():
    keys, actions = jax.random.split(KEY, 4), jnp.asarray(ACTIONS[0])

    def run(env, keys, actions):
        obs, state = env.reset(keys, 1.0)
        after, state, reward, _, _ = env.step(keys, state, actions, 1.0)
        return obs, after, reward

    def both(axis_name):
        env = ObservationNormalizationWrapper(AutoResetWrapper(Walk()), axis_name)
        return RewardNormalizationWrapper(env, axis_name=axis_name)

    whole = jax.jit(lambda k, a: run(both(None), k, a))(keys, actions)
    halves = keys.reshape(2, 2), actions.reshape(2, 2)
    spread = jax.jit(jax.vmap(lambda k, a: run(both("batch"), k, a), axis_name="batch"))(*halves)
    for one, two in zip(whole, spread, strict=True):
        np.testing.assert_allclose(one, two.reshape(one.shape), rtol=1e-5)
    apart = jax.jit(jax.vmap(lambda k, a: run(both(None), k, a)))(*halves)
    assert np.abs(whole[1] - apart[1].reshape(whole[1].shape)).max() > 0.01


def test_bytes_and_indices_are_left_as_they_are():
    class Mixed(Walk):
        def reset(self, key, params):
            obs, state = super().reset(key, params)
            return {"place": obs, "pixel": obs.astype(jnp.uint8)}, state

        def observation_space(self, params):
            return spaces.Dict(place=super().observation_space(params), pixel=spaces.Box(0, 255, (1,), np.uint8))

    env = ObservationNormalizationWrapper(Mixed(), clip=5.0)
    obs, state = env.reset(jax.random.split(KEY, 3), 1.0)
    assert obs["pixel"].dtype == jnp.uint8
    assert len(state["moments"]) == 1
    space = env.observation_space(None)
    assert isinstance(space, spaces.Dict)
    assert space["place"] == spaces.Box(-5, 5, (1,), np.float32)
    assert space["pixel"].dtype == np.uint8


def test_moments_of_parts_are_those_of_the_whole():
    samples = np.random.default_rng(0).normal(3.0, 2.0, (50, 2)).astype(np.float32)
    moments = RunningMoments.empty((2,))
    np.testing.assert_array_equal(moments.variance, [1, 1])
    for part in np.split(samples, [7, 8, 30]):
        moments = moments.merged(jnp.asarray(part))
    np.testing.assert_allclose(moments.mean, samples.mean(0), rtol=1e-5)
    np.testing.assert_allclose(moments.variance, samples.var(0), rtol=1e-5)


def merged_often(moments, size, batches, spread):
    """Moments after batches of normal samples with mean 1."""

    def one(n, moments):
        return moments.merged(1.0 + spread * jax.random.normal(jax.random.fold_in(KEY, n), (size,)))

    return jax.jit(lambda moments: jax.lax.fori_loop(0, batches, one, moments))(moments)


@pytest.mark.parametrize(("size", "before"), [(1, 1 << 24), (3, (1 << 24) - 3), (16, 1 << 28), (2, 1 << 25)])
def test_moments_follow_what_comes_after_more_samples_than_float32_counts(size, before):
    old = RunningMoments(jnp.float32(before), jnp.float32(1.0), jnp.float32(4.0 * before))
    after = merged_often(old, size, 1 << 18, 3.0)
    kept = (1 - 1 / (1 << 20)) ** (1 << 18)  # of the old ones in a window of that many batches
    np.testing.assert_allclose(after.variance, 4.0 * kept + 9.0 * (1 - kept), rtol=0.01)
    np.testing.assert_allclose(after.mean, 1.0, atol=0.01)
    assert float(after.count) <= max(1 << 24, size << 20)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_moments_of_fewer_samples_have_the_bits_that_they_always_had(size):
    def always(moments, x):
        count, mean = jnp.float32(len(x)), x.mean(0)
        total, delta = moments.count + count, mean - moments.mean
        m2 = moments.m2 + jnp.square(x - mean).sum(0) + jnp.square(delta) * (moments.count * count / total)
        return RunningMoments(total, moments.mean + delta * (count / total), m2)

    one, other = RunningMoments.empty((2,)), RunningMoments.empty((2,))
    merge, as_always = jax.jit(lambda m, x: m.merged(x)), jax.jit(always)
    for n in range(200):
        x = jax.random.normal(jax.random.fold_in(KEY, n), (size, 2)) * 3 + 1
        one, other = merge(one, x), as_always(other, x)
        assert all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other)))
    full = RunningMoments(jnp.float32((1 << 24) - size), one.mean, one.m2)
    assert all(map(np.array_equal, jax.tree.leaves(merge(full, x)), jax.tree.leaves(as_always(full, x))))


def test_gymnax_environments_are_wrapped_without_their_own_reset():
    gymnax = pytest.importorskip("gymnax")
    env, params = gymnax.make("CartPole-v1")
    params = params.replace(max_steps_in_episode=2)
    _, out = stepped(AutoResetWrapper(env), [1, 1], params)
    obs, state, _, done, info = out[1]
    assert (bool(done), bool(info["truncated"])) == (True, True)
    assert int(state.time) == 0
    assert abs(float(obs[1])) <= 0.05 < 0.3 < float(info["final_obs"][1])
    assert Wrapper(env).num_actions == 2


def test_the_examples_of_the_documentation_hold():
    text = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    blocks = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if block.startswith(">>>")]
    example = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "environments.md", None, 0)
    said = []
    result = doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert result.attempted > 8
    assert not said
