"""Rollouts in two parts, one inferred for while the other steps: the bytes of a rollout in one, on any rank."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from small_runs import final_of, plan_of, small_config, small_state

from lockstep.config.run import Config
from lockstep.core.normalizers import RunningMoments
from lockstep.core.shards import ShardPlan
from lockstep.envs.describe import describe
from lockstep.envs.gymnasium.sweep import Sweep
from lockstep.envs.host_envs import HostEnvs, WantedEnvs, cut
from lockstep.envs.registry import make_envs
from lockstep.torch_engine.rollout import Rollout, action_noise, collect
from lockstep.torch_engine.setup.self_check import group_sizes

When = Literal["at once", "at the end"]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"env": {"id": "CartPole-v1", "max_episode_steps": 12}},
    "recurrent": {
        "env": {"id": "CartPole-v1", "max_episode_steps": 12},
        "network": {"recurrent": "gru", "recurrent_size": 5},
        "normalize": {"observations": True},
    },
    "squashed": {"env": {"id": "Pendulum-v1", "max_episode_steps": 9}, "network": {"squash": True}},
}


class InParts(HostEnvs):
    """What worker processes do, in this one: a part's step is taken as soon, or as late, as a process might take it."""

    def __init__(self, wanted: WantedEnvs, when: When) -> None:
        super().__init__(wanted.description, wanted.env_ids)
        self._parts, self._when, self.under_way = cut(self.num_envs, wanted.shard_size, 2), when, [0, 0]
        self.most_under_way = 0
        self._sweeps = [Sweep(wanted, self.buffers, range(p.start, p.stop), 0) for p in self._parts]

    @property
    def parts(self) -> list[slice]:
        return self._parts

    def reset(self) -> None:
        for sweep in self._sweeps:
            sweep.reset()

    def step(self) -> None:
        raise NotImplementedError

    def begin_step(self, part: int = 0) -> None:
        self.under_way[part] += 1
        self.most_under_way = max(self.most_under_way, sum(self.under_way))
        if self._when == "at once":
            self.env_metrics = self._sweeps[part].step()

    def end_step(self, part: int = 0) -> None:
        self.under_way[part] -= 1
        if self._when == "at the end":
            self.env_metrics = self._sweeps[part].step()

    def save_states(self) -> list[dict[str, np.ndarray] | None]:
        raise NotImplementedError

    def restore(self, env: int, actions: np.ndarray, hashes: np.ndarray, state: dict[str, np.ndarray]) -> bool:
        raise NotImplementedError


def config_of(kind: str) -> Config:
    return small_config(num_envs=12, num_shards=6, num_steps=30, **KINDS[kind])


def collected(config: Config, plan: ShardPlan, when: When | None) -> Rollout:
    """Two rollouts of a rank, the second of which is returned; ``when`` is None for one part."""
    description = describe(config.env)
    wanted = WantedEnvs(config.env, description, config.seed, plan.env_ids, shard_size=plan.envs_per_shard)
    if when is None:
        envs = make_envs(config.env, description, config.seed, plan.env_ids, pytest.fail)
    else:
        envs = InParts(wanted, when)
    state = small_state(config, description, plan)
    if state.observation_normalizer is not None:
        state.observation_normalizer.moments = RunningMoments(9.0, np.full(4, 0.1), np.full(4, 0.3))
        state.observation_normalizer.freeze()
    rollout = Rollout.empty(config.num_steps, envs, state.net, state.observation_normalizer is not None)
    envs.reset()
    for iteration in range(2):
        collect(
            state, envs, state.policy.actor(plan, "batched"), action_noise(config, plan, state.net, iteration), rollout
        )
    if isinstance(envs, InParts):
        assert envs.under_way == [0, 0]
        assert envs.most_under_way == len(envs.parts)
    envs.close()
    return rollout


@pytest.mark.parametrize("kind", KINDS)
def test_parts_give_the_bytes_of_one_on_every_number_of_ranks(kind):
    config = config_of(kind)
    whole = collected(config, plan_of(config), None)
    assert len(whole.final)
    worlds: list[tuple[int, When]] = [(1, "at once"), (1, "at the end"), (2, "at the end"), (3, "at once")]
    for world_size, when in worlds:
        for rank in {0, world_size - 1}:
            plan = plan_of(config, world_size, rank)
            ids = slice(plan.env_ids.start, plan.env_ids.stop)
            rollout = collected(config, plan, when)
            for name in ("observations", "raw", "actions", "native", "rewards", "terminated", "truncated", "successes"):
                assert getattr(rollout, name).tobytes() == getattr(whole, name)[:, ids].tobytes(), name
            own = {(t, env - ids.start): row for (t, env), row in final_of(whole).items() if env in plan.env_ids}
            assert {key: row.tobytes() for key, row in final_of(rollout).items()} == {
                k: x.tobytes() for k, x in own.items()
            }


def test_a_part_of_a_rollout_is_memory_of_the_whole():
    config = config_of("plain")
    whole = collected(config, plan_of(config), None)
    part = whole.of(slice(2, 6))
    part.rewards[3, 1] = 7.5
    assert whole.rewards[3, 3] == 7.5
    assert part.scores is not part.rewards
    assert part.dead is None
    assert len(part.final) == 0


@pytest.mark.parametrize(
    ("num_envs", "shard_size", "workers", "expected"),
    [
        (8, 2, 2, [(0, 4), (4, 8)]),
        (8, 2, 4, [(0, 4), (4, 8)]),
        (8, 2, 3, [(0, 8)]),  # three workers would be one for half of the environments, and two for the others
        (6, 2, 2, [(0, 6)]),  # three shards have no halves
        (6, 2, 3, [(0, 2), (2, 6)]),
        (8, 8, 4, [(0, 8)]),
        (8, None, 4, [(0, 8)]),
        (8, 1, 1, [(0, 8)]),
    ],
)
def test_environments_are_cut_where_shards_and_workers_come_out_even(num_envs, shard_size, workers, expected):
    assert [(part.start, part.stop) for part in cut(num_envs, shard_size, workers)] == expected


def test_the_self_check_has_compared_shards_in_halves():
    for shards in range(1, 65):
        checked = {1, *group_sizes(shards)}
        for owned in checked:
            assert {owned // 2, owned - owned // 2} - {0} <= checked
