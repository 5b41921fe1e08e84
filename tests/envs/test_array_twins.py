"""Array environments that Gymnasium has too, held to its own step by step."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from array_cases import (
    STATES,
    array_namespace,
    on_every_backend,
    on_every_twin,
    random_actions,
    random_states,
    step_function,
)

from lockstep.envs.arrays import (
    ARRAY_ENVIRONMENTS,
    Acrobot,
    ArrayEnvironment,
    CartPole,
    MountainCar,
    MountainCarContinuous,
    Pendulum,
)
from lockstep.envs.arrays.base import host_array
from lockstep.envs.arrays.gymnasium_env import ArrayGymnasiumEnv

RTOL, ATOL = 1e-6, 1e-6
"""One float32 step against the same step in float64: a few roundings (6e-8 each) of numbers up to 16."""
SLOW = 2e-7
"""The same of the cars, whose numbers are at most 1.2."""
FAST = 2e-3
"""The same at Acrobot's greatest speeds, where two steps from almost the same state part quickly: the method of Runge
and Kutta squares speeds of 28 rad/s and takes the sine of where they lead, four times over. 1.6e-3 is the most that
20,000 random states showed; that nothing but rounding is in it, the same step in float64 says."""
_CAR = {"position": (-0.6, -0.4), "velocity": (0.0, 0.0)}
RESETS: dict[type[ArrayEnvironment], dict[str, tuple[float, float]]] = {
    CartPole: dict.fromkeys(STATES[CartPole], (-0.05, 0.05)),
    Acrobot: dict.fromkeys(STATES[Acrobot], (-0.1, 0.1)),
    MountainCar: _CAR,
    MountainCarContinuous: _CAR,
    Pendulum: {"theta": (-np.pi, np.pi), "theta_dot": (-1.0, 1.0)},
}
SEEN: dict[type[ArrayEnvironment], list[list[float]]] = {
    CartPole: [[0.0, 0.0], [0.0, 0.0], [0.0, 0.2], [0.0, 0.0]],
    Acrobot: [[0.1, 0.1], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]],
    MountainCar: [[-0.5, 0.2], [0.0, 0.0]],
    MountainCarContinuous: [[-0.5, 0.2], [0.0, 0.0]],
    Pendulum: [[0.1, 2.0], [0.0, 0.0]],
}
"""Two states by component that look different."""
TWINS = [env_id for env_id, kind in ARRAY_ENVIRONMENTS.items() if kind.gymnasium_id]


def gymnasium_step(env: ArrayEnvironment, reference: Any, state: dict[str, np.ndarray], action: Any) -> tuple:
    """One step of Gymnasium's environment from environment 0 of our ``state``: observation, reward, terminated."""
    reference.state = np.array([state[name][0] for name in STATES[type(env)]], np.float64)
    reference.steps_beyond_terminated = None
    return reference.step(action)[:3]


def assert_same_step(
    env: ArrayEnvironment, reference: Any, state: dict, action: np.ndarray, ours: tuple, atol: float
) -> None:
    """Compare environment 0 of our step with Gymnasium's from the same state."""
    observation, reward, terminated = gymnasium_step(env, reference, state, action[0])
    assert [array.dtype for array in ours] == [np.float32, np.float32, np.bool_]
    np.testing.assert_allclose(ours[0][0], observation, RTOL, atol)
    np.testing.assert_allclose(ours[1][0], reward, RTOL, ATOL)
    assert ours[2][0] == terminated


def follow_gymnasium(env: ArrayEnvironment, backend: str, steps: int = 600) -> int:
    """Run episodes, each step held to Gymnasium's from the same state; returns how many episodes ended."""
    xp, rng, step = array_namespace(backend), np.random.default_rng(3), step_function(env, backend)
    assert env.gymnasium_id is not None
    reference = gymnasium.make(env.gymnasium_id).unwrapped
    state, length, ended, atol = None, 0, 0, SLOW if "position" in STATES[type(env)] else ATOL
    for _ in range(steps):
        if state is None:
            state, _ = env.reset(xp, xp.asarray(rng.random((1, env.reset_draws), np.float32)))
        before, action = {k: host_array(v) for k, v in state.items()}, random_actions(env, 1, rng)
        state, *ours = step(state, xp.asarray(action))
        assert_same_step(env, reference, before, action, tuple(host_array(array) for array in ours), atol)
        length += 1
        if bool(ours[2][0]) or length == min(env.max_episode_steps, steps // 3):
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
    atol = FAST if kind is Acrobot else SLOW if "position" in state else ATOL
    for i in range(500):
        row = {k: v[i : i + 1] for k, v in state.items()}
        part = tuple(array[i : i + 1] for array in ours)
        assert_same_step(env, reference, row, action[i : i + 1], part, atol)
    assert ours[2].any() == (kind is not Pendulum)
    assert not ours[2].all()


@on_every_twin
def test_a_step_in_float64_is_gymnasiums_to_the_last_digit_it_shows(kind: type[ArrayEnvironment]) -> None:
    env, rng = kind(), np.random.default_rng(10)
    assert env.gymnasium_id is not None
    reference = gymnasium.make(env.gymnasium_id).unwrapped
    state = {name: values.astype(np.float64) for name, values in random_states(env, 300, rng).items()}
    action = random_actions(env, 300, rng)
    _, observation, reward, terminated = env.step(np, state, action, None)
    for i in range(300):
        expected = gymnasium_step(env, reference, {k: v[i : i + 1] for k, v in state.items()}, action[i])
        np.testing.assert_allclose(observation[i], expected[0], 2e-7, 1e-9)  # a float32
        np.testing.assert_allclose(reward[i], expected[1], 1e-7)  # torques are float32 in it
        assert terminated[i] == expected[2]


@on_every_twin
def test_a_wrong_gravity_does_not_follow_gymnasium(kind: type[ArrayEnvironment]) -> None:
    env: Any = kind()
    env.gravity *= 1.01
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        follow_gymnasium(env, "numpy")


@on_every_backend
@on_every_twin
def test_a_reset_fills_its_range(kind: type[ArrayEnvironment], backend: str) -> None:
    env, xp = kind(), array_namespace(backend)
    random = np.random.default_rng(9).random((2000, env.reset_draws), np.float32)
    random[0], random[1] = 0.0, np.nextafter(np.float32(1), np.float32(0))
    state, observation = env.reset(xp, xp.asarray(random))
    for name, (low, high) in RESETS[kind].items():
        values = host_array(state[name])
        assert (values.dtype, values.shape) == (np.float32, (2000,))
        assert values.min() >= np.float32(low)
        assert values.max() <= np.float32(high)
        np.testing.assert_allclose([values.min(), values.max()], [low, high], 1e-6)
        assert abs(values.mean() - (low + high) / 2) <= (high - low) / 40
    expected = [host_array(state[name]) for name in RESETS[kind]]
    angles = {Pendulum: 1, Acrobot: 2}.get(kind, 0)  # seen as cosine and sine
    expected = [part(x) for x in expected[:angles] for part in (np.cos, np.sin)] + expected[angles:]
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


@pytest.mark.parametrize(
    ("env_id", "keyword", "value", "name"),
    [
        ("lockstep/Pendulum-v1", "g", 5.0, "gravity"),
        ("lockstep/MountainCar-v0", "goal_velocity", 0.03, "goal_velocity"),
        ("lockstep/MountainCarContinuous-v0", "goal_velocity", 0.03, "goal_velocity"),
    ],
)
def test_a_gymnasium_keyword_reaches_the_physics(env_id: str, keyword: str, value: float, name: str) -> None:
    keywords: dict[str, Any] = {keyword: value}
    ours: Any = gymnasium.make(env_id, **keywords).unwrapped
    assert isinstance(ours, ArrayGymnasiumEnv)
    assert type(ours.array_environment) is ARRAY_ENVIRONMENTS[env_id]
    assert getattr(ours.array_environment, name) == value


@pytest.mark.parametrize("kind", [MountainCar, MountainCarContinuous])
def test_a_slow_car_has_not_arrived_where_a_speed_is_asked_for(kind: Any) -> None:
    state = {"position": np.array([0.49, 0.49], np.float32), "velocity": np.array([0.02, 0.04], np.float32)}
    action = np.ones((2, 1), np.float32) if kind is MountainCarContinuous else np.full(2, 2)
    for goal_velocity, arrived in ((0.0, [True, True]), (0.03, [False, True]), (0.05, [False, False])):
        *_, reward, terminated = kind(goal_velocity).step(np, state, action, None)
        assert terminated.tolist() == arrived
        expected = np.where(arrived, 99.9, -0.1) if kind is MountainCarContinuous else [-1, -1]
        np.testing.assert_allclose(reward, expected, RTOL)


@pytest.mark.parametrize("env_id", TWINS)
def test_spaces_and_limits_are_gymnasiums(env_id: str) -> None:
    ours = gymnasium.make(env_id)
    reference = gymnasium.make(str(ARRAY_ENVIRONMENTS[env_id].gymnasium_id))
    assert ours.observation_space == reference.observation_space
    assert ours.action_space == reference.action_space
    assert ours.spec is not None
    assert reference.spec is not None
    assert ours.spec.max_episode_steps == reference.spec.max_episode_steps
    assert ours.metadata == {**reference.metadata, "render_modes": ["rgb_array", "human"]}


@on_every_backend
@on_every_twin
def test_a_picture_shows_the_state(kind: type[ArrayEnvironment], backend: str) -> None:
    pytest.importorskip("pygame")
    env, xp = kind(), array_namespace(backend)
    state = {name: xp.asarray(np.array(row, np.float32)) for name, row in zip(STATES[kind], SEEN[kind], strict=True)}
    first, second = env.render(state, 0), env.render(state, 1)
    assert first.dtype == np.uint8
    assert first.ndim == 3
    assert first.shape[2] == 3
    assert (first != second).any()
    env.close()
    np.testing.assert_array_equal(first, env.render(state))
    env.close()
