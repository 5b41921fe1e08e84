"""Environments out of a checkpoint: back in the middle of an episode to the bit, or named as restarted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from lockstep.config.run import EnvConfig
from lockstep.core.episodes import EpisodeCounter
from lockstep.core.shards import ShardPlan
from lockstep.envs.describe import describe
from lockstep.envs.gymnasium.keyed import KeyedEnv
from lockstep.envs.host_envs import HostEnvs
from lockstep.envs.registry import make_envs
from lockstep.envs.restore.replay import ReplayLog, row_hashes
from lockstep.envs.restore.snapshot import load_shards, save_shards

ENVS, SHARDS, STEPS = 8, 4, 45
CARTPOLE = {"id": "CartPole-v1", "max_episode_steps": 30}
ARRAYS = {"id": "lockstep/CartPole-v1", "max_episode_steps": 30}
PENDULUM = {"id": "Pendulum-v1", "max_episode_steps": 30}
ARRAY_PENDULUM = {"id": "lockstep/Pendulum-v1", "max_episode_steps": 30}
FORGETFUL = {"id": "forgetful:ForgetfulCartPole-v0"}
ARRAY_IMAGES = {"id": "lockstep/GridWorldPixels-v0"}
HOOKED = {"id": "hooked:Hooked-v0"}
OWN_LIMIT = {"id": "odd_factories:repeated_pendulum"}
UNCOUNTED = {"id": "odd_factories:uncounted_pendulum"}

Shards = dict[int, dict[str, np.ndarray]]


@dataclass
class Rank:
    """One rank's environments and what it keeps about their live episodes."""

    envs: HostEnvs
    plan: ShardPlan
    limit: int = 10_000
    replay: ReplayLog = field(init=False)
    counter: EpisodeCounter = field(init=False)
    discounted: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """As in a new process."""
        n = self.plan.local_num_envs
        self.replay, self.counter, self.discounted = ReplayLog(n, self.limit), EpisodeCounter(n), np.zeros(n)
        for buffer in ("observations", "rewards", "actions"):
            getattr(self.envs.buffers, buffer)[:] = 77
        self.envs.buffers.episodes[:] = 0

    def advance(self, first: int, steps: int) -> list[bytes]:
        """Steps with actions that depend on environment and time only; everything that each of them left."""
        b, ids, left = self.envs.buffers, self.plan.env_ids, []
        columns: dict[str, list[np.ndarray]] = {name: [] for name in ("actions", "observations", "rewards", "done")}
        for t in range(first, first + steps):
            for row, env_id in enumerate(ids):
                b.actions[row] = actions_of(self.envs, env_id)[t]
            self.envs.step()
            done = b.terminated | b.truncated
            for name, value in zip(columns, (b.actions, b.observations, b.rewards, done), strict=True):
                columns[name].append(value.copy())
            parts = (b.observations, b.rewards, b.terminated, b.truncated, b.episodes, b.final_observations[done])
            left.append(b"".join(part.tobytes() for part in parts))
        actions, observations, rewards, done = (np.stack(column) for column in columns.values())
        self.replay.extend(actions, row_hashes(observations, rewards), done)
        self.counter.finished(rewards, done, ids, np.zeros(done.shape, np.int8))
        self.discounted = np.where(done[-1], 0.0, rewards.sum(0))
        return left

    def save(self) -> Shards:
        return save_shards(self.envs, self.replay, self.counter, {"discounted": self.discounted}, self.plan)

    def load(self, shards: Shards) -> list[int]:
        carried = {"discounted": self.discounted}
        return load_shards(self.envs, self.replay, self.counter, carried, self.plan, shards)


def actions_of(envs: HostEnvs, env_id: int) -> np.ndarray:
    rng = np.random.default_rng([4, env_id])
    action = envs.description.action
    if action.discrete:
        return rng.integers(0, action.outputs, 200)
    return rng.normal(size=(200, action.outputs)).astype(np.float32)


def make_rank(config: dict[str, Any], world_size: int = 1, rank: int = 0, limit: int = 10_000) -> Rank:
    plan = ShardPlan(ENVS, SHARDS, world_size, rank)
    env_config = EnvConfig.model_validate(config)
    return Rank(make_envs(env_config, describe(env_config), 0, plan.env_ids, pytest.fail), plan, limit)


def begun(rank: Rank, steps: int = STEPS) -> Rank:
    rank.forget()
    rank.envs.reset()
    rank.advance(0, steps)
    return rank


def saved_and_continued(rank: Rank) -> tuple[Shards, list[bytes], EpisodeCounter]:
    shards = rank.save()
    return shards, rank.advance(STEPS, 60), copy.deepcopy(rank.counter)


# --- Exactly back -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [CARTPOLE, ARRAYS, PENDULUM, ARRAY_PENDULUM, ARRAY_IMAGES, HOOKED, OWN_LIMIT, UNCOUNTED],
    ids=lambda c: c["id"],
)
def test_a_restored_episode_goes_on_to_the_bit(config):
    first, second = begun(make_rank(config)), make_rank(config)
    shards, expected, counted = saved_and_continued(first)
    assert any(arrays["lengths"].any() for arrays in shards.values())  # in the middle of episodes
    assert second.load(shards) == []
    assert second.advance(STEPS, 60) == expected
    np.testing.assert_array_equal(second.counter.returns, counted.returns)
    np.testing.assert_array_equal(second.counter.lengths, counted.lengths)


@pytest.mark.parametrize("config", [CARTPOLE, ARRAYS], ids=lambda c: c["id"])
def test_without_restoring_it_goes_on_otherwise(config):
    """The negative of the above, from the episodes' beginning and from a snapshot of another moment."""
    _, expected, _ = saved_and_continued(begun(make_rank(config)))
    fresh, early = make_rank(config), make_rank(config)
    fresh.envs.buffers.episodes[:] = 0
    fresh.envs.reset()
    assert fresh.advance(STEPS, 60) != expected
    assert early.load(begun(make_rank(config), STEPS - 1).save()) == []
    assert early.advance(STEPS, 60) != expected


def test_workers_restore_their_environments_too():
    rank = begun(make_rank(CARTPOLE | {"workers": 2}))
    try:
        shards, expected, _ = saved_and_continued(rank)
        assert saved_and_continued(begun(make_rank(CARTPOLE)))[1] == expected
        rank.forget()
        assert rank.load(shards) == []
        assert rank.advance(STEPS, 60) == expected
    finally:
        rank.envs.close()


@pytest.mark.parametrize("config", [CARTPOLE, ARRAYS, HOOKED], ids=lambda c: c["id"])
def test_a_snapshot_restores_whatever_the_number_of_ranks(config):
    whole = begun(make_rank(config))
    shards = whole.save()
    whole.advance(STEPS, 60)
    last = whole.envs.buffers.observations
    for world_size in (2, 4):
        for number in range(world_size):
            rank = make_rank(config, world_size, number)
            assert rank.load(shards) == []
            rank.advance(STEPS, 60)
            np.testing.assert_array_equal(rank.envs.buffers.observations, last[rank.plan.env_ids])


@pytest.mark.parametrize("config", [CARTPOLE, ARRAYS, HOOKED], ids=lambda c: c["id"])
def test_a_snapshot_stays_as_it_is_while_the_environments_go_on(config):
    rank = begun(make_rank(config))
    shards = rank.save()
    before = copy.deepcopy(shards)
    rank.advance(STEPS, 60)
    for shard, arrays in shards.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, before[shard][name], err_msg=name)


def test_each_kind_is_saved_by_what_restores_it():
    kinds = {"CartPole-v1": "replay.", "lockstep/CartPole-v1": "state.", "hooked:Hooked-v0": "state."}
    for config in (CARTPOLE, ARRAYS, HOOKED):
        for arrays in begun(make_rank(config)).save().values():
            named = {name for name in arrays if name.startswith(("replay.", "state."))}
            assert named
            assert all(name.startswith(kinds[config["id"]]) for name in named)


@pytest.mark.parametrize("name", ["Kept", "KeptAsNone"])
def test_hooks_that_hold_nothing_leave_the_replay(name):
    config = {"id": f"unfit_later:{name}", "max_episode_steps": 200}
    shards, expected, counter = saved_and_continued(begun(make_rank(config)))
    assert "replay.0.actions" in shards[0]
    again = make_rank(config)
    assert again.load(shards) == []
    assert again.advance(STEPS, 60) == expected
    np.testing.assert_array_equal(again.counter.lengths, counter.lengths)


# --- Restarted --------------------------------------------------------------------------------------------------------


def assert_restarted(rank: Rank, shards: Shards, env_ids: list[int]) -> None:
    """Exactly these environments began their next episode with nothing counted; the others are where they were."""
    assert rank.load(shards) == env_ids
    next_ones = make_rank(CARTPOLE)
    saved = {name: np.concatenate([shards[s][name] for s in range(SHARDS)]) for name in shards[0] if "." not in name}
    next_ones.envs.buffers.episodes[:] = saved["episodes"] + 1
    next_ones.envs.reset()
    for env in range(ENVS):
        b, restarted = rank.envs.buffers, env in env_ids
        assert b.episodes[env] == saved["episodes"][env] + restarted
        start = next_ones.envs.buffers.observations if restarted else saved["observations"]
        np.testing.assert_array_equal(b.observations[env], start[env])
        assert rank.counter.lengths[env] == rank.replay.length(env) == (0 if restarted else saved["lengths"][env])
        assert rank.counter.returns[env] == (0 if restarted else saved["returns"][env])
        assert rank.discounted[env] == (0 if restarted else saved["discounted"][env])


def test_environments_without_the_hooks_that_they_were_saved_by_are_named_and_restarted(monkeypatch):
    shards = begun(make_rank(HOOKED)).save()
    monkeypatch.setattr(KeyedEnv, "_hooks", None)
    rank = make_rank(HOOKED)
    assert rank.load(shards) == list(range(ENVS))
    assert not rank.counter.lengths.any()
    rank.advance(0, 5)


def test_an_environment_that_is_not_deterministic_is_named_and_restarted():
    first = begun(make_rank(FORGETFUL))
    shards = first.save()
    live = [env for env in range(ENVS) if first.counter.lengths[env]]
    assert len(live) >= 6
    assert_restarted(make_rank(FORGETFUL), shards, live)


def flip(array: np.ndarray) -> None:
    array.view(np.uint8).reshape(-1)[0] ^= 1


TAMPERED: dict[str, Callable[[dict[str, np.ndarray]], None]] = {
    "an action": lambda arrays: flip(arrays["replay.1.actions"]),
    "a hash": lambda arrays: flip(arrays["replay.1.hashes"]),
    "the observation": lambda arrays: flip(arrays["observations"][1]),
    "the episode": lambda arrays: arrays["episodes"].__setitem__(1, 50),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_one_wrong_bit_is_found_and_only_that_environment_restarted(what):
    shards = begun(make_rank(CARTPOLE)).save()
    assert shards[2]["lengths"][1] > 2
    assert_restarted(make_rank(CARTPOLE), copy.deepcopy(shards), [])
    TAMPERED[what](shards[2])
    assert_restarted(begun(make_rank(CARTPOLE), 7), shards, [5])


def test_an_episode_longer_than_the_limit_is_restarted_and_shorter_ones_are_not():
    first = begun(make_rank(CARTPOLE, limit=12))
    longer = [env for env in range(ENVS) if first.counter.lengths[env] > 12]
    assert 0 < len(longer) < ENVS
    assert_restarted(make_rank(CARTPOLE, limit=12), first.save(), longer)


def test_a_restarted_environment_can_be_saved_and_restored_again():
    first = begun(make_rank(CARTPOLE, limit=12))
    second, third = make_rank(CARTPOLE), make_rank(CARTPOLE)
    assert second.load(first.save())
    second.advance(STEPS, 10)
    assert third.load(second.save()) == []
    np.testing.assert_array_equal(third.envs.buffers.observations, second.envs.buffers.observations)
    assert third.advance(STEPS + 10, 40) == second.advance(STEPS + 10, 40)
