"""The three back ends of environments: keyed episodes, same-step autoreset, and the same bytes in worker processes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.heap import Arena
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from gated import STOPS_AT

from lockstep.config.run import EnvConfig
from lockstep.core.errors import EnvironmentFailureError
from lockstep.envs.arrays import GridWorldPixels, Pendulum
from lockstep.envs.batched.array_envs import ArrayEnvs
from lockstep.envs.describe import describe
from lockstep.envs.gymnasium.in_process import InProcessEnvs, Watchdog
from lockstep.envs.gymnasium.workers import WorkerEnvs
from lockstep.envs.host_envs import Buffers, HostEnvs
from lockstep.envs.registry import make_envs

SEED, LIMIT, EVERYONE = 3, 25, range(8)
CONFIGS = {
    "arrays": {"id": "lockstep/CartPole-v1"},
    "in process": {"id": "CartPole-v1"},
    "workers": {"id": "CartPole-v1", "workers": 2},
}
BACKENDS = {"arrays": ArrayEnvs, "in process": InProcessEnvs, "workers": WorkerEnvs}
HERE = pytest.mark.parametrize("kind", ["arrays", "in process"])


def make(
    config: dict[str, Any], env_ids: Sequence[int] = EVERYONE, seed: int = SEED, purpose: str = "reset"
) -> HostEnvs:
    """Environments of a config, whose episodes of CartPole end by falling as often as by the limit of 25 steps."""
    limit = {"max_episode_steps": LIMIT} if "CartPole" in config["id"] else {}
    env_config = EnvConfig.model_validate(limit | config)
    return make_envs(env_config, describe(env_config), seed, env_ids, pytest.fail, purpose)


def begin(envs: HostEnvs, episode: int = 0) -> HostEnvs:
    envs.buffers.episodes[:] = episode
    envs.reset()
    return envs


@pytest.fixture(scope="module", params=CONFIGS)
def backend(request: pytest.FixtureRequest) -> Iterator[HostEnvs]:
    """Each back end once, eight environments; worker processes are started once for all tests."""
    envs = make(CONFIGS[request.param])
    assert isinstance(envs, BACKENDS[request.param])
    yield envs
    envs.close()


@pytest.fixture(scope="module")
def in_process() -> Iterator[HostEnvs]:
    envs = make(CONFIGS["in process"])
    yield envs
    envs.close()


def fixed_actions(steps: int, env_ids: Sequence[int] = EVERYONE) -> np.ndarray:
    """The same actions for the same environments however they are grouped, `[T, E]`."""
    columns = [np.random.default_rng([9, env_id]).integers(0, 2, steps) for env_id in env_ids]
    return np.stack(columns, 1)


def played(envs: HostEnvs, actions: np.ndarray) -> Buffers:
    """What each step left, stacked over time, the first observations before it; without garbage in `final`."""
    names = [f.name for f in dataclasses.fields(Buffers)]
    rows: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for row in actions:
        envs.buffers.actions[:] = row
        envs.step()
        ended = envs.buffers.terminated | envs.buffers.truncated
        for name in names:
            value = getattr(envs.buffers, name).copy()
            if name == "final_observations":
                value[~ended] = 0
            rows[name].append(value)
    return Buffers(**{name: np.stack(values) for name, values in rows.items()})


def assert_same(ours: Buffers, theirs: Buffers, columns: slice = slice(None)) -> None:
    for field in dataclasses.fields(Buffers):
        if field.name not in ("stepping", "heartbeats"):
            expected = getattr(theirs, field.name)[:, columns]
            assert getattr(ours, field.name).tobytes() == expected.tobytes(), field.name


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has only multiprocessing's files")
def test_workers_need_no_file_system_for_what_they_share(in_process, monkeypatch):
    monkeypatch.setattr(Arena, "_dir_candidates", ["/no/such/place"])  # a container without /dev/shm
    actions = fixed_actions(3)
    with contextlib.closing(make(CONFIGS["workers"])) as envs:
        assert_same(played(begin(envs), actions), played(begin(in_process), actions))


def test_without_memory_of_its_own_there_are_multiprocessings_files(in_process, monkeypatch):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    actions = fixed_actions(3)
    with contextlib.closing(make(CONFIGS["workers"])) as envs:
        assert_same(played(begin(envs), actions), played(begin(in_process), actions))


# --- Keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["workers"], indirect=True)
def test_workers_and_this_process_give_the_same_bytes(backend, in_process):
    actions = fixed_actions(300)
    first = begin(backend).buffers.observations.copy()
    np.testing.assert_array_equal(first, begin(in_process).buffers.observations)
    ours, theirs = played(backend, actions), played(in_process, actions)
    assert ours.terminated.any()
    assert ours.truncated.any()
    assert_same(ours, theirs)


def test_workers_step_the_shards_of_a_part_while_the_others_wait(in_process):
    config = EnvConfig.model_validate(CONFIGS["workers"] | {"max_episode_steps": LIMIT})
    envs = make_envs(config, describe(config), SEED, EVERYONE, pytest.fail, shard_size=2, in_parts=True)
    try:
        first, second = envs.parts
        assert (first, second) == (slice(0, 4), slice(4, 8))
        begin(envs)
        begin(in_process)
        for row in fixed_actions(60):
            before = envs.buffers.observations[second].copy()
            envs.buffers.actions[:] = row
            envs.begin_step(0)
            envs.end_step(0)
            np.testing.assert_array_equal(envs.buffers.observations[second], before)
            envs.begin_step(1)
            envs.end_step(1)
            in_process.buffers.actions[:] = row
            in_process.step()
            for name in ("observations", "rewards", "terminated", "truncated", "episodes"):
                assert getattr(envs.buffers, name).tobytes() == getattr(in_process.buffers, name).tobytes(), name
    finally:
        envs.close()


@HERE
def test_an_environment_does_not_know_with_which_others_it_is_grouped(kind):
    together = played(begin(make(CONFIGS[kind])), fixed_actions(60))
    for env_ids in (range(4), range(4, 8), [6]):
        group = played(begin(make(CONFIGS[kind], env_ids)), fixed_actions(60, env_ids))
        assert_same(group, together, slice(env_ids[0], env_ids[0] + len(env_ids)))
    assert together.episodes[-1].min() >= 2  # several episodes each, not only the first reset


@HERE
def test_every_environment_episode_seed_and_purpose_starts_elsewhere(kind):
    def starts(seed: int = SEED, episode: int = 0, purpose: str = "reset") -> np.ndarray:
        return begin(make(CONFIGS[kind], seed=seed, purpose=purpose), episode).buffers.observations.copy()

    drawn = np.concatenate([starts(), starts(seed=4), starts(episode=1), starts(purpose="eval")])
    assert len(np.unique(drawn, axis=0)) == 32
    np.testing.assert_array_equal(starts(), starts())


@HERE
def test_an_evaluation_starts_the_same_episodes_every_time(kind):
    envs = begin(make(CONFIGS[kind], purpose="eval"))
    first = envs.buffers.observations.copy()
    envs.reset()
    np.testing.assert_array_equal(envs.buffers.observations, first)
    played(envs, fixed_actions(40))
    envs.reset()
    np.testing.assert_array_equal(envs.buffers.observations, first)


# --- Autoreset --------------------------------------------------------------------------------------------------------


def test_an_ended_episode_keeps_its_final_observation_and_the_next_one_has_begun(backend):
    before = begin(backend).buffers.observations.copy()
    steps = played(backend, fixed_actions(80))
    ended = steps.terminated | steps.truncated
    assert ended.any(0).all()
    arrived = np.where(ended[..., None], steps.final_observations, steps.observations)
    previous = np.concatenate([before[None], steps.observations[:-1]])
    # Both worlds move by Euler's rule: x and theta by 0.02 of their speeds. A row that had been reset would not.
    np.testing.assert_allclose(arrived[..., [0, 2]], previous[..., [0, 2]] + 0.02 * previous[..., [1, 3]], atol=1e-6)
    fallen = (np.abs(arrived[..., 0]) > 2.4) | (np.abs(arrived[..., 2]) > np.radians(12))
    np.testing.assert_array_equal(steps.terminated, fallen)
    assert (np.abs(steps.observations[ended]) <= 0.05).all()
    assert (np.abs(steps.final_observations[ended]) > 0.05).any(1).all()
    assert (steps.rewards == 1.0).all()


def test_the_next_episode_is_the_one_of_its_key(backend):
    begin(backend)
    steps = played(backend, fixed_actions(80))
    ended = steps.terminated | steps.truncated
    np.testing.assert_array_equal(steps.episodes, np.cumsum(ended, 0))
    for episode in (1, 2):
        expected = begin(backend, episode).buffers.observations
        for env in EVERYONE:
            (t,) = np.flatnonzero(ended[:, env] & (steps.episodes[:, env] == episode))
            np.testing.assert_array_equal(steps.observations[t, env], expected[env])


def test_the_time_limit_truncates_an_episode_at_its_step_and_no_other(backend):
    begin(backend)
    steps = played(backend, fixed_actions(120))
    ended = steps.terminated | steps.truncated
    for env in EVERYONE:
        last = -1
        for t in np.flatnonzero(ended[:, env]):
            assert steps.truncated[t, env] == (t - last == LIMIT)
            assert t - last <= LIMIT
            last = t
    assert (steps.terminated & ~steps.truncated).any()
    assert (steps.truncated & ~steps.terminated).any()


# --- Actions ----------------------------------------------------------------------------------------------------------


def echoed(env_id: str, actions: Any) -> HostEnvs:
    envs = begin(make({"id": env_id}, range(2)))
    envs.buffers.actions[:] = actions
    envs.step()
    return envs


def test_box_actions_are_clipped_to_their_bounds_and_arrive_in_the_spaces_shape_and_dtype():
    given = [[5.0, -9.0], [0.25, 0.4]]
    envs = echoed("echoing:EchoBox-v0", given)
    np.testing.assert_allclose(envs.buffers.observations, [[1.0, -2.0], [0.25, 0.4]])
    np.testing.assert_allclose(envs.buffers.rewards, [-1.0, 0.65])
    np.testing.assert_allclose(envs.buffers.actions, given)  # what the policy drew is what it is trained on


def test_actions_of_array_environments_are_clipped_and_shaped_alike(monkeypatch):
    taken, step = [], Pendulum.step

    def recorded(self, xp, state, action, random):
        taken.append(action.copy())
        return step(self, xp, state, action, random)

    monkeypatch.setattr(Pendulum, "step", recorded)
    envs = echoed("lockstep/Pendulum-v1", [[-50.0], [1.5]])
    assert [action.tolist() for action in taken] == [[[-2.0], [1.5]]]
    assert envs.buffers.actions.tolist() == [[-50.0], [1.5]]


def test_discrete_actions_begin_where_their_space_does():
    assert echoed("echoing:EchoDiscrete-v0", [0, 2]).buffers.observations.ravel().tolist() == [5.0, 7.0]
    with pytest.raises(EnvironmentFailureError, match="8"):
        echoed("echoing:EchoDiscrete-v0", [0, 3])


# --- Failures ---------------------------------------------------------------------------------------------------------


def run_faulty(fault: str, env_ids: Sequence[int], workers: int) -> None:
    """Environment 5 fails some time after 36 steps."""
    config = {"id": "faulty:FaultyCartPole-v0", "kwargs": {"fault": fault}, "workers": workers}
    envs = make(config, env_ids, seed=0)
    try:
        played(begin(envs), fixed_actions(36, env_ids))
        played(envs, fixed_actions(36, env_ids))
    finally:
        envs.close()


@pytest.mark.parametrize(
    ("fault", "workers", "says"),
    [
        ("step", 0, r"raised in step: RuntimeError: the motor is gone for good \(faulty.py:\d+\)"),
        ("reset", 0, r"raised in reset: RuntimeError: the cart left the track \(faulty.py:\d+\)"),
        ("step", 2, r"raised in step: RuntimeError: the motor is gone for good \(faulty.py:\d+\)"),
    ],
)
def test_an_environment_that_raises_is_named_by_its_global_id(fault, workers, says):
    with pytest.raises(EnvironmentFailureError, match=rf"^environment 5 \(faulty:FaultyCartPole-v0\) {says}$"):
        run_faulty(fault, range(2, 8), workers)


def test_without_that_environment_or_without_the_fault_nothing_fails():
    run_faulty("step", range(5), 0)
    run_faulty("none", range(4, 6), 0)


def test_a_watchdog_says_who_hangs_and_only_while_somebody_is_being_waited_for():
    said, barked = [], threading.Event()

    def fail(message: str) -> None:
        said.append(message)
        barked.set()

    watchdog = Watchdog(0.05, lambda: 0, lambda: "environment 4 hangs", fail)
    with watchdog:
        assert barked.wait(600)
    watchdog.close()
    assert said == ["environment 4 hangs"]
    calm = Watchdog(1e-3, lambda: 0, lambda: "nobody", fail)
    assert not threading.Event().wait(0.05)
    calm.close()
    assert said == ["environment 4 hangs"]


def leaping(patch, at_the_third=lambda: None):
    """Lets a thousand seconds pass between any two looks at the clock, as in a process that is stopped."""
    looks = itertools.count()

    def leap():
        look = next(looks)
        if look == 2:
            at_the_third()
        return 1000.0 * look

    patch.setattr(time, "monotonic", leap)


def test_time_in_which_a_process_is_stopped_is_none_that_its_environments_take(monkeypatch):
    said, looked, signs = [], threading.Event(), iter([0] * 12)
    leaping(monkeypatch)

    def sign():
        found = next(signs, None)
        if found is None:
            looked.set()
        return found

    def fail(message: str) -> None:
        said.append(message)
        looked.set()

    watchdog = Watchdog(0.1, sign, lambda: "environment 4 hangs", fail)
    watchdog._limit = 2.0  # of which twelve looks, 0.05 s at most each, are not a third
    with watchdog:
        looked.wait()
    watchdog.close()
    assert said == []


def test_time_in_which_workers_are_stopped_is_none_that_their_environments_take(tmp_path, monkeypatch):
    gate = tmp_path / "gate"
    monkeypatch.setenv("GATE", str(gate))
    config = EnvConfig(id="gated:GatedCartPole-v0", workers=1)
    with contextlib.closing(make_envs(config, describe(config), SEED, range(1), pytest.fail)) as envs:
        envs.reset()
        assert isinstance(envs, WorkerEnvs)
        for _ in range(STOPS_AT - 1):
            envs.step()
        gate.touch()
        envs._timeout = 40.0  # of which two looks, 2 s at most each, are little
        with monkeypatch.context() as patch:
            leaping(patch, gate.unlink)
            envs.step()
        assert not gate.exists()
        gate.touch()
        envs._timeout = 0.4
        with pytest.raises(EnvironmentFailureError, match=r"didn't answer within 0.4 s \(env.timeout\)"):
            envs.step()


def test_a_worker_may_take_longer_to_make_an_environment_than_a_step_may(monkeypatch):
    config = EnvConfig(id="slow:SlowlyMade-v0", workers=1, timeout=0.2)
    described = describe(config)
    monkeypatch.setenv("MAKING", "1.0")
    with contextlib.closing(make_envs(config, described, SEED, range(1), pytest.fail)) as envs:
        assert isinstance(envs, WorkerEnvs)


def test_what_a_worker_takes_to_start_is_none_of_its_environments_time():
    config = EnvConfig(id="slow:SlowPendulum-v0", workers=1)
    with contextlib.closing(make_envs(config, describe(config), SEED, range(1), pytest.fail)) as envs:
        assert isinstance(envs, WorkerEnvs)
        workers = envs
        assert workers.buffers.heartbeats.tolist() == [1]  # by which a worker says that it is there
        workers._timeout = 2.0

        def still_for(seconds: float) -> None:
            workers._check_heartbeats({0: cast("Any", SimpleNamespace(look=lambda _: seconds))}, [0])

        workers.buffers.heartbeats[0] = 0
        still_for(59.0)
        line = "worker process 0 of slow:SlowPendulum-v0 didn't start within 60 s; a longer env.timeout gives it more"
        with pytest.raises(EnvironmentFailureError, match=f"^{line}$"):
            still_for(61.0)
        workers.buffers.heartbeats[0] = 1
        workers._made = False
        still_for(59.0)
        line = (
            r"environment 0 \(slow:SlowPendulum-v0\), worker process 0, wasn't made within 60 s; a longer env.timeout"
        )
        with pytest.raises(EnvironmentFailureError, match=f"^{line} gives it more$"):
            still_for(61.0)
        workers._made = True
        with pytest.raises(EnvironmentFailureError, match=r"didn't answer within 2 s \(env.timeout\)"):
            still_for(2.5)


# --- Successes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_what_an_environment_says_of_its_task_arrives(workers):
    envs = begin(make({"id": "telling:Telling-v0", "workers": workers}))
    try:
        ones = np.arange(8) % 5  # of the six steps of an episode
        left = played(envs, np.arange(6)[:, None] < ones)
        np.testing.assert_array_equal(left.successes, np.where(np.cumsum(left.actions, 0) >= 3, 1, -1))
        assert left.successes.dtype == np.int8
        np.testing.assert_array_equal(left.successes[-1], np.where(ones >= 3, 1, -1))
        assert left.terminated[-1].all()
    finally:
        envs.close()


@pytest.mark.parametrize("name", ["is_success", "success", "solved"])
@pytest.mark.parametrize("form", ["bool", "numpy", "float", "array", "text", None])
def test_a_success_has_two_names_and_is_a_number(name, form):
    envs = begin(make({"id": "telling:Telling-v0", "kwargs": {"name": name, "form": form}}, range(2)))
    left = played(envs, np.array([[1, 0]] * 6))
    said = name != "solved" and form not in ("text", None)
    assert left.successes[-1].tolist() == ([1, -1] if said else [0, 0])


def test_array_environments_say_it_where_they_know():
    push = begin(make({"id": "lockstep/PushCube-v0"}, range(4)))
    state: dict[str, np.ndarray] = push._state  # pyright: ignore[reportAttributeAccessIssue]
    state["goal_x"][1], state["goal_y"][1] = state["cube_x"][1] + 0.01, state["cube_y"][1]
    push.step()
    assert push.buffers.successes.tolist() == [-1, 1, -1, -1]
    assert push.buffers.terminated.tolist() == [False, True, False, False]
    assert push.buffers.episodes.tolist() == [0, 1, 0, 0]
    push.step()
    assert push.buffers.successes.tolist() == [-1] * 4  # of the next episode
    cartpole = begin(make(CONFIGS["arrays"]))
    cartpole.step()
    assert not cartpole.buffers.successes.any()


@pytest.mark.parametrize("size", [4, 5])  # of 48 and of 75 bytes, which are filled up to 76
def test_images_of_array_environments_are_rows_as_any_others(size):
    envs = begin(make({"id": "lockstep/GridWorldPixels-v0", "kwargs": {"size": size}, "max_episode_steps": 4}))
    layout, world = envs.description.observation, GridWorldPixels(size)
    assert (layout.dtype, layout.width) == (np.uint8, {4: 48, 5: 76}[size])
    for action in range(4):
        state: dict[str, np.ndarray] = envs._state  # pyright: ignore[reportAttributeAccessIssue]
        _, images, _, terminated = world.step(np, state, np.full(8, action), None)
        envs.buffers.actions[:] = action
        envs.step()
        ended = terminated | (envs.buffers.truncated)
        rows = np.where(ended[:, None], envs.buffers.final_observations, envs.buffers.observations)
        np.testing.assert_array_equal(rows, [layout.encode(image) for image in images])
        np.testing.assert_array_equal(layout.decode(rows[3]), images[3])
        assert ((rows != envs.buffers.observations).any(1) == ended).all()
    assert ended.any()


# --- Masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_masks_by_info_and_by_method_reach_the_rows(workers):
    rows = {}
    for source in ("info", "method"):
        envs = begin(make({"id": "small_worlds:Doors-v0", "action_mask": source, "workers": workers}))
        layout, given = envs.description.observation, [envs.buffers.observations.copy()]
        for _ in range(20):  # more than an episode
            masks = layout.floats(envs.buffers.observations)[:, 3:]
            envs.buffers.actions[:] = np.stack([masks[:, :3].argmax(1), masks[:, 3:].argmax(1)], 1)
            envs.step()
            given.append(envs.buffers.observations.copy())
        rows[source] = np.stack(given)
        envs.close()
    closed = rows["info"][..., :3]
    np.testing.assert_array_equal(rows["info"][..., 3:6], 1.0 - closed)
    assert (rows["info"][..., 6] == 1.0).all()
    assert 0.2 < rows["info"][..., 7].mean() < 0.8
    np.testing.assert_array_equal(rows["method"], rows["info"])


def test_a_mask_that_an_environment_does_not_give_is_an_error_that_says_so():
    envs = make({"id": "CartPole-v1", "action_mask": "info"})
    with pytest.raises(EnvironmentFailureError, match=r"env\.action_mask is 'info', but info has no 'action_mask'"):
        envs.reset()
    with pytest.raises(EnvironmentFailureError, match=r"raised in reset: AttributeError: .*action_masks"):
        make({"id": "CartPole-v1", "action_mask": "method"}).reset()


def test_a_forbidden_action_would_have_raised():
    """The negative: in the run above every action was allowed."""
    envs = begin(make({"id": "small_worlds:Doors-v0", "action_mask": "info"}))
    masks = envs.description.observation.floats(envs.buffers.observations)[:, 3:]
    envs.buffers.actions[:, 0] = masks[:, :3].argmin(1)
    with pytest.raises(EnvironmentFailureError, match="is forbidden"):
        envs.step()


def test_workers_close_their_environments(tmp_path, monkeypatch):
    config = {"id": "odd_factories:Closing", "workers": 2}
    described = describe(EnvConfig.model_validate(config))
    monkeypatch.setenv("CLOSED_IN", str(tmp_path))
    envs = make_envs(EnvConfig.model_validate(config), described, SEED, range(3), pytest.fail, "reset")
    begin(envs)
    envs.close()
    closed = [name.name.split("-")[0] for name in tmp_path.iterdir()]
    assert len(closed) == 3
    assert len(set(closed)) == 2  # processes
