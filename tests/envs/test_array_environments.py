"""What every array environment owes: the same on NumPy, PyTorch and JAX, whatever the batch, and through Gymnasium."""

from __future__ import annotations

import functools
import inspect
import re
import subprocess
import sys
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from array_cases import (
    array_namespace,
    converted,
    default,
    on_every_backend,
    on_every_environment,
    random_actions,
    random_draws,
    random_states,
    reset_function,
    step_function,
)
from gymnasium.envs.registration import EnvSpec, namespace
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.run import EnvConfig
from lockstep.envs import register_array_environments
from lockstep.envs.arrays import (
    ARRAY_ENVIRONMENTS,
    Acrobot,
    ArrayEnvironment,
    CartPole,
    GridWorld,
    GridWorldPixels,
    Pendulum,
    PushCube,
    Snake,
)
from lockstep.envs.arrays.base import host_array, numbers, side_by_side
from lockstep.envs.arrays.gymnasium_env import ArrayGymnasiumEnv
from lockstep.envs.describe import describe

RTOL, ATOL = 1e-6, 1e-6
ATOLS: dict[type[ArrayEnvironment], float] = {
    PushCube: 1e-4,  # the last digit of a cosine, as depth of a contact, turns the cube
    Acrobot: 2e-3,  # at its greatest speeds, see test_array_twins.FAST
}


def arrays_of(env: ArrayEnvironment, backend: str) -> dict[str, np.ndarray]:
    """What a reset and a step of 1,000 environments give, under ``jit`` where there is one, by name."""
    xp, rng, rows = array_namespace(backend), np.random.default_rng(5), 1000
    random, state = rng.random((rows, env.reset_draws), np.float32), random_states(env, rows, rng)
    action = xp.asarray(random_actions(env, rows, rng))
    started, first = reset_function(env, backend)(xp.asarray(random))
    draws = converted(xp, random_draws(env, rows, rng))
    moved, *rest = step_function(env, backend)({k: xp.asarray(v) for k, v in state.items()}, action, draws)
    named = {f"reset {k}": v for k, v in started.items()} | {f"step {k}": v for k, v in moved.items()}
    outputs = dict(zip(("reset", "observation", "reward", "terminated"), (first, *rest), strict=True))
    return {name: host_array(array) for name, array in (named | outputs).items()}


@functools.cache
def arrays_of_kind(kind: type[ArrayEnvironment], backend: str) -> dict[str, np.ndarray]:
    return arrays_of(default(kind), backend)


def assert_agree(kind: type[ArrayEnvironment], expected: dict[str, np.ndarray], ours: dict[str, np.ndarray]) -> None:
    assert ours.keys() == expected.keys()
    for name, array in expected.items():
        assert ours[name].dtype == array.dtype, name
        if array.dtype == np.float32:
            np.testing.assert_allclose(ours[name], array, RTOL, ATOLS.get(kind, ATOL), err_msg=name)
        else:
            np.testing.assert_array_equal(ours[name], array, name)


@pytest.mark.parametrize("backend", ["torch", "jax"])
@on_every_environment
def test_backends_agree_with_numpy(kind: type[ArrayEnvironment], backend: str) -> None:
    assert_agree(kind, arrays_of_kind(kind, "numpy"), arrays_of_kind(kind, backend))


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_constant_of_its_own_dtype_would_be_found(backend: str) -> None:
    env: Any = Pendulum()
    env.gravity = np.float64(10.0)  # which NumPy promotes to, the others don't
    with pytest.raises(AssertionError, match=r"observation|step"):
        assert_agree(Pendulum, arrays_of(env, "numpy"), arrays_of_kind(Pendulum, backend))


@on_every_backend
@on_every_environment
def test_dtypes_are_those_promised(kind: type[ArrayEnvironment], backend: str) -> None:
    arrays, space = arrays_of_kind(kind, backend), kind().observation_space
    assert arrays["reward"].dtype == np.float32
    assert arrays["terminated"].dtype == np.bool_
    for name in ("reset", "observation"):
        assert (arrays[name].dtype, arrays[name].shape) == (space.dtype, (1000, *space.shape))
    for name in (key for key in arrays if key.startswith("reset ")):
        assert arrays[name].dtype in (np.float32, np.int32, np.bool_)
        assert arrays[name].dtype == arrays[name.replace("reset", "step")].dtype


@on_every_environment
def test_torch_tensors_may_be_on_any_device(kind: type[ArrayEnvironment]) -> None:
    env, xt, rng = kind(), array_namespace("torch"), np.random.default_rng(6)
    random = xt.asarray(rng.random((3, env.reset_draws), np.float32), device="meta")
    state, observation = env.reset(xt, random)
    action, draws = random_actions(env, 3, rng), random_draws(env, 3, rng)
    draws = None if draws is None else xt.asarray(draws, device="meta")
    state, *rest = env.step(xt, state, xt.asarray(action, device="meta"), draws)
    assert {array.device.type for array in (observation, *state.values(), *rest)} == {"meta"}


@on_every_backend
@on_every_environment
def test_inputs_are_left_as_they_are(kind: type[ArrayEnvironment], backend: str) -> None:
    env, xp, rng = default(kind), array_namespace(backend), np.random.default_rng(7)
    random = xp.asarray(rng.random((1000, env.reset_draws), np.float32))
    state, _ = reset_function(env, backend)(random)
    action, step = xp.asarray(random_actions(env, 1000, rng)), step_function(env, backend)
    draws = converted(xp, random_draws(env, 1000, rng))
    inputs = [random, action, *([] if draws is None else [draws]), *state.values()]
    copies = [host_array(array).copy() for array in inputs]
    names = list(state)
    first, second = (step(state, action, draws) for _ in range(2))
    assert list(state) == names
    assert set(first[0]) == set(names)
    for array, copy in zip(inputs, copies, strict=True):
        np.testing.assert_array_equal(host_array(array), copy)
    for one, two in zip((*first[0].values(), *first[1:]), (*second[0].values(), *second[1:]), strict=True):
        np.testing.assert_array_equal(host_array(one), host_array(two))


@on_every_environment
def test_outputs_share_no_memory(kind: type[ArrayEnvironment]) -> None:
    env, rng = kind(), np.random.default_rng(8)
    random = rng.random((5, env.reset_draws), np.float32)
    state, observation = env.reset(np, random)
    action, draws = random_actions(env, 5, rng), rng.random((5, env.step_draws), np.float32)
    moved, *rest = env.step(np, state, action, draws)
    arrays = [random, action, draws, observation, *state.values(), *moved.values(), *rest]
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
    draws, later = rng.random((n, env.reset_draws), np.float32), rng.random((n, env.step_draws), np.float32)

    def run(rows: slice) -> list[np.ndarray]:
        started, first = env.reset(xp, xp.asarray(draws[rows]))
        part = {k: xp.asarray(v[rows]) for k, v in state.items()}
        moved, *rest = env.step(xp, part, xp.asarray(action[rows]), xp.asarray(later[rows]))
        return [host_array(array) for array in (*started.values(), first, *moved.values(), *rest)]

    parts = [run(slice(i, i + chunk)) for i in range(0, n, chunk)]
    for whole, *cut in zip(run(slice(n)), *parts, strict=True):
        np.testing.assert_array_equal(whole, np.concatenate(cut))


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
    env = gymnasium.make(env_id, max_episode_steps=4)
    discrete = isinstance(env.action_space, gymnasium.spaces.Discrete)
    action = (
        {"lockstep/Snake-v0": 2}.get(env_id, 0) if discrete else np.full(env.action_space.shape or (), 0.5, np.float32)
    )

    def episode(seed: int) -> np.ndarray:
        rows = [env.reset(seed=seed)[0]]
        truncated = False
        while not truncated:
            observation, _, terminated, truncated, _ = env.step(action)
            assert not terminated
            rows.append(observation)
        return np.array(rows)

    first = episode(11)  # in which the agent of a grid world meets neither goal nor hole
    assert first.shape == (5, *(env.observation_space.shape or ()))
    np.testing.assert_array_equal(first, episode(11))
    assert not np.array_equal(first[0], env.reset()[0])


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
def test_the_spec_is_json(env_id: str) -> None:
    env = gymnasium.make(f"lockstep.envs:{env_id}")
    assert env.spec is not None
    again = EnvSpec.from_json(env.spec.to_json()).make()
    np.testing.assert_array_equal(env.reset(seed=1)[0], again.reset(seed=1)[0])


def test_importing_lockstep_envs_registers_them_and_loads_no_framework() -> None:
    code = """import sys, gymnasium
assert not any(name.startswith("lockstep/") for name in gymnasium.registry)
gymnasium.make("lockstep.envs:lockstep/CartPole-v1")
print(*(name for name in gymnasium.registry if name.startswith("lockstep/")))
assert not {"torch", "jax", "pydantic", "lockstep.config.run"} & set(sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == list(ARRAY_ENVIRONMENTS)


def test_vector_environments_can_be_made() -> None:
    envs = gymnasium.make_vec("lockstep/CartPole-v1", num_envs=3, vectorization_mode="sync")
    observations, _ = envs.reset(seed=1)
    assert len({row.tobytes() for row in observations}) == 3


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
    with pytest.raises(ValueError, match=r"render_mode: 'ansi' isn't offered; use 'rgb_array', 'human' or None"):
        ArrayGymnasiumEnv("lockstep/CartPole-v1", render_mode="ansi")


def arguments() -> list[tuple[str, str, Any]]:
    """Every argument of every array environment that isn't a text: the id, the name, the default."""
    found = ((key, inspect.signature(kind).parameters.values()) for key, kind in ARRAY_ENVIRONMENTS.items())
    return [(key, p.name, p.default) for key, taken in found for p in taken if not isinstance(p.default, str)]


@pytest.mark.parametrize(("env_id", "name", "default_value"), arguments(), ids=str)
def test_an_argument_of_another_type_is_refused_by_name(env_id: str, name: str, default_value: Any) -> None:
    kind: Any = ARRAY_ENVIRONMENTS[env_id]
    others = {bool: [1, 0.0], int: [True, 8.5, float("nan"), float("inf")], float: [True, float("nan"), 10**400]}
    for wrong in (str(default_value), None, [default_value], *others[type(default_value)]):
        with pytest.raises(ValueError, match=f"^{name}: {re.escape(repr(wrong))} is n[^\n]*; use [^\n]*$"):
            kind(**{name: wrong})


@pytest.mark.parametrize(
    ("env_id", "kwargs", "says"),
    [
        ("lockstep/GridWorld-v0", {"size": 8.5}, "size: 8.5 is no whole number; use 4 to 32"),
        ("lockstep/GridWorldPixels-v0", {"pixels": "2"}, "pixels: '2' is no whole number; use 1 or more"),
        ("lockstep/Pendulum-v1", {"g": "9.8"}, "g: '9.8' is no finite number; use one, such as 1.5"),
        ("lockstep/MountainCar-v0", {"goal_velocity": None}, "goal_velocity: None is no finite number; use one"),
        ("lockstep/Snake-v0", {"ages": "false"}, "ages: 'false' is neither true nor false; use one of them"),
    ],
)
def test_a_config_with_such_an_argument_is_refused_before_the_run(env_id: str, kwargs: dict, says: str) -> None:
    with pytest.raises(ValueError, match=f"^env.id: {env_id} can't be made: ValueError: {re.escape(says)}"):
        describe(EnvConfig(id=env_id, kwargs=kwargs))


@pytest.mark.parametrize("size", [8.0, np.int64(8), np.float64(8)])
@pytest.mark.parametrize("kind", [GridWorld, GridWorldPixels, Snake])
def test_a_size_without_a_fraction_is_a_whole_number(kind: Any, size: Any) -> None:
    ours, theirs = kind(size=size), kind(size=8)
    assert type(ours.size) is int
    assert ours.reset_draws == theirs.reset_draws
    assert ours.observation_space == theirs.observation_space


def test_hunger_may_be_without_an_end() -> None:
    patience: Any = Snake(starvation=1e308).patience
    assert patience == np.iinfo(np.int32).max


@on_every_backend
def test_columns_side_by_side_are_stacked(backend: str) -> None:
    xp = array_namespace(backend)
    columns = [xp.asarray(np.array([1.0, 2.0, 3.0], np.float32) * k) for k in (1, 10)]
    stacked = host_array(side_by_side(xp, columns))
    assert stacked.dtype == np.float32
    np.testing.assert_array_equal(stacked, [[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])


def test_numbers_are_arrays_of_the_same_dtype_for_numpy_alone() -> None:
    for dtype in (np.float32, np.float64):
        (half,) = numbers(np.zeros(2, dtype), 0.5)
        assert (half.dtype, half.shape, half.flags.writeable) == (dtype, (), False)
        assert half == 0.5
    for backend in ("torch", "jax"):
        assert numbers(array_namespace(backend).zeros(2), 0.5) == (0.5,)
