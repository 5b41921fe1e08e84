"""Array environments for the tests: the namespaces they run in, and states and actions all over their spaces."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np
import pytest

from lockstep.envs.arrays import (
    ARRAY_ENVIRONMENTS,
    Acrobot,
    ArrayEnvironment,
    CartPole,
    GridWorld,
    MountainCar,
    MountainCarContinuous,
    Pendulum,
    PushCube,
    Snake,
)

BACKENDS = ("numpy", "torch", "jax")
_CAR = {"position": (-1.2, 0.6), "velocity": (-0.07, 0.07)}
STATES: dict[type[ArrayEnvironment], dict[str, tuple[float, float]]] = {
    CartPole: {"x": (-2.5, 2.5), "x_dot": (-3, 3), "theta": (-0.25, 0.25), "theta_dot": (-4, 4)},
    Acrobot: {
        **{"theta1": (-np.pi, np.pi), "theta2": (-np.pi, np.pi)},
        **{"theta1_dot": (-4 * np.pi, 4 * np.pi), "theta2_dot": (-9 * np.pi, 9 * np.pi)},
    },
    MountainCar: _CAR,
    MountainCarContinuous: _CAR,
    Pendulum: {"theta": (-np.pi, np.pi), "theta_dot": (-8, 8)},
}
"""Of those that Gymnasium has too: their states, beyond CartPole's limits, up to the others' greatest speeds."""

on_every_environment = pytest.mark.parametrize("kind", ARRAY_ENVIRONMENTS.values(), ids=lambda kind: kind.__name__)
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


@functools.cache
def default(kind: type[ArrayEnvironment]) -> ArrayEnvironment:
    """The environment without arguments, one for all tests, so that what is compiled for it is compiled once."""
    return kind()


@functools.cache
def reset_function(env: ArrayEnvironment, backend: str) -> Any:
    """``reset(random)``, under ``jit`` where there is one."""
    reset = functools.partial(env.reset, array_namespace(backend))
    return pytest.importorskip("jax").jit(reset) if backend == "jax" else reset


@functools.cache
def step_function(env: ArrayEnvironment, backend: str) -> Any:
    """``step(state, action, random=None)``, under ``jit`` where there is one: no step branches on an array."""
    step = functools.partial(env.step, array_namespace(backend))
    compiled = pytest.importorskip("jax").jit(step) if backend == "jax" else step
    return lambda state, action, random=None: compiled(state, action, random)


def random_draws(env: ArrayEnvironment, n: int, rng: np.random.Generator) -> np.ndarray | None:
    """What a step of ``n`` environments draws, None if that is nothing."""
    return rng.random((n, env.step_draws), np.float32) if env.step_draws else None


def converted(xp: Any, array: np.ndarray | None) -> Any:
    """An array of the namespace, or None."""
    return None if array is None else xp.asarray(array)


def random_actions(env: ArrayEnvironment, n: int, rng: np.random.Generator) -> np.ndarray:
    """Actions of ``n`` environments; continuous ones up to three times what is allowed."""
    if isinstance(env.action_space, gymnasium.spaces.Discrete):
        return rng.integers(0, int(env.action_space.n), n)
    return rng.uniform(-3, 3, (n, *env.action_space.shape)).astype(np.float32)


def random_states(env: ArrayEnvironment, n: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """States all over the space: see :data:`STATES`, :func:`push_states` and so on."""
    if isinstance(env, PushCube):
        return push_states(env, n, rng)
    if isinstance(env, GridWorld):
        return grid_states(env, n, rng)
    if isinstance(env, Snake):
        return snake_states(env, n, rng)
    return {name: rng.uniform(*bounds, n).astype(np.float32) for name, bounds in STATES[type(env)].items()}


def grid_states(env: GridWorld, n: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Worlds of their own with agents next to the goal, or anywhere: in holes and walls too."""
    state, _ = env.reset(np, rng.random((n, env.reset_draws), np.float32))
    beside = state["goal"] + rng.choice(env._moves, n)
    anywhere = rng.integers(env.width + 1, env.width * (env.width - 1) - 1, n)
    return {**state, "agent": np.where(rng.random(n) < 0.3, beside, anywhere).astype(np.int32)}


def snake_states(env: Snake, n: int, rng: np.random.Generator, steps: int = 80) -> dict[str, np.ndarray]:
    """Snakes that chased their food as well as it goes without looking, those that died where they were before."""
    state, _ = env.reset(np, rng.random((n, env.reset_draws), np.float32))
    for _ in range(steps):
        rows, columns = (f(state["food"], env.size) - f(state["head"], env.size) for f in (np.floor_divide, np.mod))
        across = (columns != 0) & ((rows == 0) | (rng.random(n) < 0.5))
        chase = np.where(across, np.where(columns < 0, 0, 2), np.where(rows > 0, 1, 3))
        action = np.where(rng.random(n) < 0.2, rng.integers(0, 4, n), chase)
        moved, _, _, over = env.step(np, state, action, rng.random((n, 1), np.float32))
        state = {name: np.where(over.reshape(n, *[1] * (x.ndim - 1)), state[name], x) for name, x in moved.items()}
    return state


def push_states(env: PushCube, n: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Arms anywhere within the joints' limits, each with a cube at its peg: beside it, touched, around it."""
    angles = {"shoulder": rng.uniform(*env.shoulder_limits, n), "elbow": rng.uniform(*env.elbow_limits, n)}
    speeds = {f"{name}_speed": rng.uniform(-1, 1, n) for name in angles}
    peg_x, peg_y = env._peg(np, angles["shoulder"], angles["elbow"])
    yaw, near = rng.uniform(-np.pi, np.pi, n), rng.uniform(-0.08, 0.08, (2, n))
    cube = {"cube_x": peg_x + near[0], "cube_y": peg_y + near[1], "cube_cos": np.cos(yaw), "cube_sin": np.sin(yaw)}
    goal = {"goal_x": cube["cube_x"] + 2 * near[1], "goal_y": cube["cube_y"] - near[0]}
    return {name: x.astype(np.float32) for name, x in (angles | speeds | cube | goal).items()}
