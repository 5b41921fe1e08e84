"""Array environments on NumPy, PyTorch and JAX: those that Gymnasium has too are held to its own step by step."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec, namespace
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.envs.arrays import ARRAY_ENVIRONMENTS, ArrayEnvironment, CartPole, Pendulum, PushCube
from lockstep.envs.arrays.base import host_array
from lockstep.envs.arrays.gymnasium_env import ArrayGymnasiumEnv
from lockstep.envs.gymnasium_registration import register_array_environments

# One float32 step against the same step in float64: a few roundings (6e-8 each) of numbers up to 16.
RTOL, ATOL = 1e-6, 1e-6
STATES = {CartPole: ("x", "x_dot", "theta", "theta_dot"), Pendulum: ("theta", "theta_dot")}
BACKENDS = ("numpy", "torch", "jax")
TWINS = [env_id for env_id, kind in ARRAY_ENVIRONMENTS.items() if kind.gymnasium_id]

on_every_environment = pytest.mark.parametrize("kind", [*STATES, PushCube], ids=lambda kind: kind.__name__)
on_every_twin = pytest.mark.parametrize("kind", STATES, ids=lambda kind: kind.__name__)
on_every_backend = pytest.mark.parametrize("backend", BACKENDS)


def array_namespace(backend: str) -> Any:
    """The namespace to pass as ``xp``; skips where the framework isn't installed."""
    if backend == "numpy":
        return np
    if backend == "torch":
        pytest.importorskip("torch")
        return pytest.importorskip("array_api_compat.torch")
    return pytest.importorskip("jax.numpy")


def step_function(env: ArrayEnvironment, backend: str) -> Any:
    """``step(state, action)``, under ``jit`` where there is one."""
    step = functools.partial(env.step, array_namespace(backend), random=None)
    return pytest.importorskip("jax").jit(step) if backend == "jax" else step


def random_actions(env: ArrayEnvironment, n: int, rng: np.random.Generator) -> np.ndarray:
    """Actions of ``n`` environments; torques up to 1.5 times what is allowed."""
    if isinstance(env.action_space, gymnasium.spaces.Discrete):
        return rng.integers(0, int(env.action_space.n), n)
    return rng.uniform(-3, 3, (n, *env.action_space.shape)).astype(np.float32)


def random_states(env: ArrayEnvironment, n: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """States all over the space: beyond CartPole's limits, at Pendulum's greatest speed, PushCube's peg at the cube."""
    if isinstance(env, PushCube):
        return push_states(env, n, rng)
    bounds = (2.5, 3.0, 0.25, 4.0) if isinstance(env, CartPole) else (np.pi, 8.0)
    names = STATES[type(env)]
    return {name: rng.uniform(-b, b, n).astype(np.float32) for name, b in zip(names, bounds, strict=True)}


def push_states(env: PushCube, n: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Arms anywhere within the joints' limits, each with a cube at its peg: beside it, touched, around it."""
    angles = {"shoulder": rng.uniform(*env.shoulder_limits, n), "elbow": rng.uniform(*env.elbow_limits, n)}
    speeds = {f"{name}_speed": rng.uniform(-1, 1, n) for name in angles}
    peg_x, peg_y = env._peg(np, angles["shoulder"], angles["elbow"])
    yaw, near = rng.uniform(-np.pi, np.pi, n), rng.uniform(-0.08, 0.08, (2, n))
    cube = {"cube_x": peg_x + near[0], "cube_y": peg_y + near[1], "cube_cos": np.cos(yaw), "cube_sin": np.sin(yaw)}
    goal = {"goal_x": cube["cube_x"] + 2 * near[1], "goal_y": cube["cube_y"] - near[0]}
    return {name: x.astype(np.float32) for name, x in (angles | speeds | cube | goal).items()}


def gymnasium_step(env: ArrayEnvironment, reference: Any, state: dict[str, np.ndarray], action: Any) -> tuple:
    """One step of Gymnasium's environment from environment 0 of our ``state``: observation, reward, terminated."""
    reference.state = np.array([state[name][0] for name in STATES[type(env)]], np.float64)
    reference.steps_beyond_terminated = None
    return reference.step(action)[:3]


def assert_same_step(env: ArrayEnvironment, reference: Any, state: dict, action: np.ndarray, ours: tuple) -> None:
    """Compare environment 0 of our step with Gymnasium's from the same state."""
    observation, reward, terminated = gymnasium_step(env, reference, state, action[0])
    assert [array.dtype for array in ours] == [np.float32, np.float32, np.bool_]
    np.testing.assert_allclose(ours[0][0], observation, RTOL, ATOL)
    np.testing.assert_allclose(ours[1][0], reward, RTOL, ATOL)
    assert ours[2][0] == terminated


def follow_gymnasium(env: ArrayEnvironment, backend: str, steps: int = 600) -> int:
    """Run episodes, each step held to Gymnasium's from the same state; returns how many episodes ended."""
    xp, rng, step = array_namespace(backend), np.random.default_rng(3), step_function(env, backend)
    assert env.gymnasium_id is not None
    reference = gymnasium.make(env.gymnasium_id).unwrapped
    state, length, ended = None, 0, 0
    for _ in range(steps):
        if state is None:
            state, _ = env.reset(xp, xp.asarray(rng.random((1, env.reset_draws), np.float32)))
        before, action = {k: host_array(v) for k, v in state.items()}, random_actions(env, 1, rng)
        state, *ours = step(state, xp.asarray(action))
        assert_same_step(env, reference, before, action, tuple(host_array(array) for array in ours))
        length += 1
        if bool(ours[2][0]) or length == env.max_episode_steps:
            state, length, ended = None, 0, ended + 1
    return ended


@on_every_backend
@on_every_twin
def test_episodes_follow_gymnasium(kind: type[ArrayEnvironment], backend: str) -> None:
    array_namespace(backend)
    assert follow_gymnasium(kind(), backend) >= 3


@on_every_backend
@on_every_twin
def test_a_step_from_any_state_is_gymnasiums(kind: type[ArrayEnvironment], backend: str) -> None:
    env, xp, rng = kind(), array_namespace(backend), np.random.default_rng(4)
    assert env.gymnasium_id is not None
    reference = gymnasium.make(env.gymnasium_id).unwrapped
    state, action = random_states(env, 500, rng), random_actions(env, 500, rng)
    converted = {k: xp.asarray(v) for k, v in state.items()}
    _, *ours = step_function(env, backend)(converted, xp.asarray(action))
    ours = [host_array(array) for array in ours]
    for i in range(500):
        row = {k: v[i : i + 1] for k, v in state.items()}
        assert_same_step(env, reference, row, action[i : i + 1], tuple(array[i : i + 1] for array in ours))
    assert ours[2].any() == (kind is CartPole)


@pytest.mark.parametrize(("kind", "gravity"), [(CartPole, 9.81), (Pendulum, 9.999)], ids=["CartPole", "Pendulum"])
def test_a_wrong_gravity_does_not_follow_gymnasium(kind: type[ArrayEnvironment], gravity: float) -> None:
    env: Any = kind()
    env.gravity = gravity
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        follow_gymnasium(env, "numpy")


@pytest.mark.parametrize("backend", ["torch", "jax"])
@on_every_environment
def test_backends_agree_with_numpy(kind: type[ArrayEnvironment], backend: str) -> None:
    env, rng, xp = kind(), np.random.default_rng(5), array_namespace(backend)
    state, action = random_states(env, 1000, rng), random_actions(env, 1000, rng)
    on_numpy = env.step(np, state, action, None)
    converted = {k: xp.asarray(v) for k, v in state.items()}
    on_other = step_function(env, backend)(converted, xp.asarray(action))
    atol = 1e-4 if kind is PushCube else ATOL  # the last digit of a cosine, as depth of a contact, turns the cube
    for ours, theirs in zip(on_numpy[1:], on_other[1:], strict=True):
        np.testing.assert_allclose(ours, host_array(theirs), RTOL, atol)


@on_every_environment
def test_torch_tensors_may_be_on_any_device(kind: type[ArrayEnvironment]) -> None:
    env, xt, rng = kind(), array_namespace("torch"), np.random.default_rng(6)
    random = xt.asarray(rng.random((3, env.reset_draws), np.float32), device="meta")
    state, observation = env.reset(xt, random)
    state, *rest = env.step(xt, state, xt.asarray(random_actions(env, 3, rng), device="meta"), None)
    assert {array.device.type for array in (observation, *state.values(), *rest)} == {"meta"}


@on_every_backend
@on_every_environment
def test_inputs_are_left_as_they_are(kind: type[ArrayEnvironment], backend: str) -> None:
    env, xp, rng = kind(), array_namespace(backend), np.random.default_rng(7)
    random = xp.asarray(rng.random((5, env.reset_draws), np.float32))
    state, _ = env.reset(xp, random)
    action = xp.asarray(random_actions(env, 5, rng))
    inputs = [random, action, *state.values()]
    copies = [host_array(array).copy() for array in inputs]
    names = list(state)
    first, second = (env.step(xp, state, action, None) for _ in range(2))
    assert list(state) == names
    for array, copy in zip(inputs, copies, strict=True):
        np.testing.assert_array_equal(host_array(array), copy)
    for one, two in zip((*first[0].values(), *first[1:]), (*second[0].values(), *second[1:]), strict=True):
        np.testing.assert_array_equal(host_array(one), host_array(two))


@on_every_environment
def test_outputs_share_no_memory(kind: type[ArrayEnvironment]) -> None:
    env, rng = kind(), np.random.default_rng(8)
    random = rng.random((5, env.reset_draws), np.float32)
    state, observation = env.reset(np, random)
    action = random_actions(env, 5, rng)
    moved, *rest = env.step(np, state, action, None)
    arrays = [random, action, observation, *state.values(), *moved.values(), *rest]
    shared = [(i, j) for j, b in enumerate(arrays) for i, a in enumerate(arrays[:j]) if np.shares_memory(a, b)]
    assert shared == []


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@on_every_environment
@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 70), chunk=st.integers(1, 33), seed=st.integers(0, 2**32 - 1))
def test_bits_do_not_depend_on_the_batch(
    kind: type[ArrayEnvironment], backend: str, n: int, chunk: int, seed: int
) -> None:
    env, xp, rng = kind(), array_namespace(backend), np.random.default_rng(seed)
    state, action = random_states(env, n, rng), random_actions(env, n, rng)
    draws = rng.random((n, env.reset_draws), np.float32)

    def run(rows: slice) -> list[np.ndarray]:
        started, first = env.reset(xp, xp.asarray(draws[rows]))
        part = {k: xp.asarray(v[rows]) for k, v in state.items()}
        moved, *rest = env.step(xp, part, xp.asarray(action[rows]), None)
        return [host_array(array) for array in (*started.values(), first, *moved.values(), *rest)]

    parts = [run(slice(i, i + chunk)) for i in range(0, n, chunk)]
    for whole, *cut in zip(run(slice(n)), *parts, strict=True):
        np.testing.assert_array_equal(whole, np.concatenate(cut))


@on_every_backend
@on_every_twin
def test_a_reset_fills_its_range(kind: type[ArrayEnvironment], backend: str) -> None:
    env, xp = kind(), array_namespace(backend)
    random = np.random.default_rng(9).random((2000, env.reset_draws), np.float32)
    random[0], random[1] = 0.0, np.nextafter(np.float32(1), np.float32(0))
    state, observation = env.reset(xp, xp.asarray(random))
    bounds = (0.05,) * 4 if kind is CartPole else (np.pi, 1.0)
    for name, bound in zip(STATES[kind], bounds, strict=True):
        values = host_array(state[name])
        assert (values.dtype, values.shape) == (np.float32, (2000,))
        assert np.abs(values).max() <= np.float32(bound)
        np.testing.assert_allclose([values.min(), values.max()], [-bound, bound], 1e-6)
        assert abs(values.mean()) < bound / 20
    expected = [host_array(state[name]) for name in STATES[kind]]
    if kind is Pendulum:
        expected = [np.cos(expected[0]), np.sin(expected[0]), expected[1]]
    assert host_array(observation).dtype == np.float32
    np.testing.assert_allclose(host_array(observation), np.stack(expected, -1), RTOL, ATOL)


def test_an_angle_is_wrapped_and_one_in_range_keeps_its_bits() -> None:
    env = Pendulum()
    turns = np.float32(2 * np.pi) * np.arange(-3, 4, dtype=np.float32)
    still = {"theta": np.float32(1) + turns, "theta_dot": np.zeros(7, np.float32)}
    moved, _, reward, _ = env.step(np, still, np.zeros((7, 1), np.float32), None)
    np.testing.assert_allclose(moved["theta"], moved["theta"][3], atol=1e-5)
    np.testing.assert_allclose(reward, -1.0, atol=1e-5)
    assert reward[3] == -1.0
    over_the_bottom = {"theta": np.array([3.1, -3.1], np.float32), "theta_dot": np.array([8, -8], np.float32)}
    moved, *_ = env.step(np, over_the_bottom, np.zeros((2, 1), np.float32), None)
    np.testing.assert_allclose(moved["theta"], [3.5 - 2 * np.pi, 2 * np.pi - 3.5], atol=1e-6)


def test_a_gymnasium_keyword_reaches_the_physics() -> None:
    ours = gymnasium.make("lockstep/Pendulum-v1", g=5.0).unwrapped
    assert isinstance(ours, ArrayGymnasiumEnv)
    assert isinstance(ours.array_environment, Pendulum)
    assert ours.array_environment.gravity == 5.0


@pytest.mark.parametrize("env_id", TWINS)
def test_spaces_and_limits_are_gymnasiums(env_id: str) -> None:
    ours = gymnasium.make(env_id)
    reference = gymnasium.make(str(ARRAY_ENVIRONMENTS[env_id].gymnasium_id))
    assert ours.observation_space == reference.observation_space
    assert ours.action_space == reference.action_space
    assert ours.spec is not None
    assert reference.spec is not None
    assert ours.spec.max_episode_steps == reference.spec.max_episode_steps
    assert ours.metadata == {**reference.metadata, "render_modes": ["rgb_array"]}


@pytest.mark.parametrize("env_id", ARRAY_ENVIRONMENTS)
def test_gymnasiums_checker_passes(env_id: str) -> None:
    pytest.importorskip("pygame")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # What the checker says of the spaces, it says of Gymnasium's own CartPole and Pendulum too.
        warnings.filterwarnings("ignore", ".*(-infinity|is infinity|recommend using a symmetric)")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        check_env(gymnasium.make(env_id).unwrapped)


@pytest.mark.parametrize("env_id", ARRAY_ENVIRONMENTS)
def test_a_seed_repeats_an_episode_and_the_time_limit_ends_it(env_id: str) -> None:
    env = gymnasium.make(env_id, max_episode_steps=7)
    discrete = isinstance(env.action_space, gymnasium.spaces.Discrete)
    action = 0 if discrete else np.full(env.action_space.shape or (), 0.5, np.float32)

    def episode(seed: int | None) -> np.ndarray:
        rows = [env.reset(seed=seed)[0]]
        truncated = False
        while not truncated:
            observation, _, terminated, truncated, _ = env.step(action)
            assert not terminated
            rows.append(observation)
        return np.array(rows)

    first = episode(11)
    assert first.shape == (8, *(env.observation_space.shape or ()))
    np.testing.assert_array_equal(first, episode(11))
    assert not np.array_equal(first, episode(None))


@pytest.mark.parametrize("context", ["direct", "namespace"])
def test_registering_works_both_ways_and_twice_is_silent(context: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for env_id in ARRAY_ENVIRONMENTS:
        monkeypatch.delitem(gymnasium.registry, env_id)
    before = dict(gymnasium.registry)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            if context == "namespace":
                with namespace("lockstep"):
                    register_array_environments()
            else:
                register_array_environments()
    assert set(gymnasium.registry) - set(before) == set(ARRAY_ENVIRONMENTS)


@pytest.mark.parametrize("env_id", ARRAY_ENVIRONMENTS)
def test_make_imports_the_module_and_the_spec_is_json(env_id: str) -> None:
    env = gymnasium.make(f"lockstep.envs.gymnasium_registration:{env_id}")
    assert env.spec is not None
    again = EnvSpec.from_json(env.spec.to_json()).make()
    np.testing.assert_array_equal(env.reset(seed=1)[0], again.reset(seed=1)[0])


def test_vector_environments_can_be_made() -> None:
    envs = gymnasium.make_vec("lockstep/CartPole-v1", num_envs=3, vectorization_mode="sync")
    observations, _ = envs.reset(seed=1)
    assert len({row.tobytes() for row in observations}) == 3


@on_every_backend
@on_every_twin
def test_a_picture_shows_the_state(kind: type[ArrayEnvironment], backend: str) -> None:
    pytest.importorskip("pygame")
    env, xp = kind(), array_namespace(backend)
    rows = [[0.0, 0.0], [0.0, 0.0], [0.0, 0.2], [0.0, 0.0]] if kind is CartPole else [[0.1, 2.0], [0.0, 0.0]]
    state = {name: xp.asarray(np.array(row, np.float32)) for name, row in zip(STATES[kind], rows, strict=True)}
    first, second = env.render(state, 0), env.render(state, 1)
    assert first.dtype == np.uint8
    assert first.ndim == 3
    assert first.shape[2] == 3
    assert (first != second).any()
    env.close()
    np.testing.assert_array_equal(first, env.render(state))
    env.close()


def test_a_picture_without_pygame_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygame", None)
    env = CartPole()
    state, _ = env.reset(np, np.zeros((1, 4), np.float32))
    with pytest.raises(ValueError, match=r"^render: .*pygame.*pip install[^\n]*$"):
        env.render(state)


def test_wrong_use_is_named() -> None:
    env = ArrayGymnasiumEnv("lockstep/CartPole-v1")
    with pytest.raises(gymnasium.error.ResetNeeded, match="reset"):
        env.step(0)
    env.reset(seed=0)
    assert env.render() is None
    with pytest.raises(ValueError, match=r"action: 2 isn't one of the 2 actions"):
        env.step(2)
    with pytest.raises(ValueError, match=r"'lockstep/Carpole-v1' is none of ours; there are lockstep/CartPole-v1"):
        ArrayGymnasiumEnv("lockstep/Carpole-v1")
    with pytest.raises(ValueError, match=r"render_mode: 'human' isn't offered"):
        ArrayGymnasiumEnv("lockstep/CartPole-v1", render_mode="human")
