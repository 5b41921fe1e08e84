"""Rollouts of environments on the host in parts: the networks compute for one while the other steps; the same bytes."""

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from jax import Array
from jax import numpy as jnp

from lockstep.config.run import Config
from lockstep.envs.describe import describe
from lockstep.envs.gymnasium.in_process import InProcessEnvs
from lockstep.envs.host_envs import HostEnvs
from lockstep.envs.registry import make_envs
from lockstep.envs.restore.replay import row_hashes
from lockstep.jax_engine.host.rollout import HostRollout, collect

CONFIG = Config.model_validate(
    {"engine": "jax", "env": {"id": "CartPole-v1", "max_episode_steps": 10}, "num_envs": 8, "num_steps": 43}
)
HALVES = [slice(0, 4), slice(4, 8)]


def made(overlapped: bool, env_id: str = "CartPole-v1") -> HostEnvs:
    config = CONFIG.env.model_copy(update={"id": env_id})
    more = {"shard_size": 2, "in_parts": True, "overlapped": overlapped}
    envs = make_envs(config, describe(config), 5, range(8), pytest.fail, **more)
    envs.reset()
    return envs


@pytest.fixture
def envs(request) -> Iterator[HostEnvs]:
    with closing(made(request.param)) as found:
        yield found


def collected(envs: HostEnvs, said: list[str] | None = None) -> HostRollout:
    """A rollout of a policy of the observation alone; ``said`` gets what happened in which order."""
    out, said = HostRollout.empty(CONFIG, envs), [] if said is None else said

    def infer(part: int, t: int, rows: np.ndarray) -> Array:
        said.append(f"infer {part} at {t}")
        return jnp.asarray(rows[:, 0] > 0.01 * t, jnp.int32)

    def noted(name: str, original):
        def call(part: int = 0) -> None:
            said.append(f"{name} {part}")
            original(part)

        return call

    envs.begin_step, envs.end_step = noted("begin", envs.begin_step), noted("end", envs.end_step)
    collect(envs, infer, lambda actions: actions, out, 0)
    return out


@pytest.mark.parametrize(("envs", "parts"), [(False, [slice(0, 8)]), (True, HALVES)], indirect=["envs"])
def test_one_process_steps_in_parts_only_for_those_who_compute_meanwhile(envs, parts):
    assert isinstance(envs, InProcessEnvs)
    assert envs.parts == parts


@pytest.mark.parametrize("envs", [True], indirect=True)
def test_a_part_is_stepped_while_the_other_is_inferred_for(envs):
    said: list[str] = []
    collected(envs, said)
    assert said[:2] == ["infer 0 at 0", "infer 1 at 0"]
    assert said[2:8] == ["begin 0", "end 0", "infer 0 at 1", "begin 1", "end 1", "infer 1 at 1"]


@pytest.mark.parametrize("envs", [True], indirect=True)
def test_where_others_step_both_parts_are_begun_first(envs, monkeypatch):
    monkeypatch.setattr(InProcessEnvs, "in_workers", True)
    said: list[str] = []
    collected(envs, said)
    assert said[2:8] == ["begin 0", "begin 1", "end 0", "infer 0 at 1", "end 1", "infer 1 at 1"]


FIELDS = ("raw", "actions", "scores", "rewards", "terminated", "truncated", "final", "over")


def test_the_order_is_not_seen_in_a_rollout():
    with closing(made(False)) as whole, closing(made(True)) as halves:
        one, two = collected(whole), collected(halves)
        for name in FIELDS:
            assert getattr(one, name).tobytes() == getattr(two, name).tobytes(), name
        assert one.truncated.any()
        assert one.terminated.any()


def test_a_step_of_all_parts_says_what_one_of_them_says():
    name = "stating:Stating-v0"
    with closing(made(False, name)) as whole, closing(made(True, name)) as halves:
        said: set[int] = set()
        for _ in range(12):
            for envs in (whole, halves):
                envs.buffers.actions[:] = envs.description.action.first
                envs.step()
            np.testing.assert_array_equal(whole.buffers.observations, halves.buffers.observations)
            assert whole.env_metrics == halves.env_metrics
            said |= whole.env_metrics.keys()
        assert {row < 4 for row in said} == {True, False}


@pytest.mark.parametrize("envs", [True], indirect=True)
def test_an_environment_of_the_second_part_is_restored_by_its_actions(envs):
    row, taken = 6, np.arange(7) % 2
    rows, scores = [], []
    for action in taken:
        envs.buffers.actions[:] = action
        envs.step()
        rows.append(envs.buffers.observations[None].copy())
        scores.append(envs.buffers.rewards[None].copy())
    hashes = row_hashes(np.concatenate(rows), np.concatenate(scores))[:, row]
    episode = int(envs.buffers.episodes[row])
    with pytest.MonkeyPatch.context() as patch:  # of the first part none is asked
        patch.setattr(envs._sweeps[0], "restore", pytest.fail)
        assert envs.restore(row, taken.astype(np.int64), hashes, {}) is True
    assert envs.buffers.episodes[row] == episode
    wrong = hashes ^ np.uint64(1)
    assert envs.restore(row, taken.astype(np.int64), wrong, {}) is False
    assert envs.buffers.episodes[row] == episode + 1
