"""Iterations whose environments are stepped on the host; inference and the whole update stay compiled programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from lockstep.config.run import Config
from lockstep.core.episodes import EPISODES_PER_ITERATION, WINDOW, EpisodeCounter, first_episodes
from lockstep.core.process import fail_now
from lockstep.core.shards import ShardPlan
from lockstep.envs.host_envs import HostEnvs
from lockstep.envs.registry import make_envs
from lockstep.envs.restore.replay import ReplayLog
from lockstep.envs.restore.snapshot import load_shards, save_shards
from lockstep.jax_engine.distributed.mesh import replicate_sharding
from lockstep.jax_engine.distributed.placement import fetch, fetch_rows, place, shard_rows
from lockstep.jax_engine.distributed.processes import gather_bytes, gather_json
from lockstep.jax_engine.host.program import HostProgram
from lockstep.jax_engine.host.rollout import HostRollout, collect, collect_random, parts_of, record_replay
from lockstep.jax_engine.program.calls import no_matter
from lockstep.jax_engine.program.inference import Inference
from lockstep.jax_engine.program.iterations import Finished, Inputs, Iteration, learning_rates
from lockstep.jax_engine.program.program import Program
from lockstep.jax_engine.program.run import parameter_specs
from lockstep.jax_engine.rollout import Rollout
from lockstep.jax_engine.state import TrainState, place_state, state_specs
from lockstep.training.session import gather_shards


class HostPending:
    """An iteration whose update is under way."""

    def __init__(self, number: int, metrics: Any, episodes: np.ndarray, seconds: dict[str, float]) -> None:
        self.first, self.count, self.metrics, self.episodes, self.seconds = number, 1, metrics, episodes, seconds


class HostRun:
    """The training state on the mesh, environments on the host, and the programs between them.

    Args:
        program: what is compiled.
        state: of host arrays.
        plan: the shards of this process.
        local_devices: of this process.
    """

    capacity = 1

    def __init__(self, program: Program, state: TrainState, plan: ShardPlan, local_devices: int) -> None:
        self.program, self.config, self.plan = program, program.config, plan
        self._local_devices = local_devices
        self.specs = state_specs(state, parameter_specs(program))
        self.state = place_state(state, self.specs, program.mesh)
        self.owned = place(np.int32(program.blocks.shards), replicate_sharding(program.mesh))
        update = HostProgram(program)
        self._learn, self._first = update.compile_learn(self.specs), update.compile_first(self.specs)
        self._policy = Inference(program)
        config, description = self.config, program.description
        self.groups = self._groups()
        self.envs: list[HostEnvs] = [
            make_envs(
                self._share(config),
                description,
                config.seed,
                [e for shard in group for e in plan.shard_env_ids(shard)],
                fail_now,
                group_size=config.group_size,
                shard_size=plan.envs_per_shard,
            )
            for group in self.groups
        ]
        limit = config.checkpoint.replay_limit
        self.replays = [ReplayLog(group.num_envs, limit) for group in self.envs]
        self.counters = [EpisodeCounter(group.num_envs) for group in self.envs]
        self.rollout = HostRollout.empty(config, self.envs)
        rows, size = plan.envs_per_shard, program.net.carry_size
        self.memory = np.zeros((plan.local_num_shards, rows, size), np.float32)
        self.discounted = np.zeros((plan.local_num_shards, rows), np.float32)
        self._carried: Any = None
        self._mark = time.perf_counter()

    def _groups(self) -> list[list[int]]:
        """Shards of each group: two where worker processes can step one while the device infers for the other."""
        shards = list(self.plan.shards)
        half = len(shards) // 2
        return [shards[:half], shards[half:]] if half and self.config.env.workers > 1 else [shards]

    def _share(self, config: Config) -> Any:
        workers = config.env.workers // len(self.groups) if config.env.workers > 1 else config.env.workers
        return config.env.model_copy(update={"workers": workers})

    def begin(self) -> None:
        """First episodes, and first statistics where something is normalised."""
        for group in self.envs:
            group.reset()
        if self.config.normalize.observations or self.config.normalize.returns:
            collect_random(self.config, self.plan, self.envs, self.rollout)
            self.state = self._first(self.state, *self._placed(), self.owned)

    def dispatch(self, first: int, count: int, stop: int, before: Callable[[], None] = no_matter) -> HostPending:
        """Collect a rollout and start the update; ``first`` iterations have been done before.

        ``before`` is called before the update takes the state over.
        """
        assert count == 1, count
        started = time.perf_counter()
        config, mesh = self.config, self.program.mesh
        self._take_carried()
        if config.algorithm == "grpo":
            self._begin_groups(first)
        self._collect(first)
        if self.envs[0].replayed and config.algorithm == "ppo":
            record_replay(self.replays, self.envs, self.rollout)
        episodes = self._finished()
        collected = time.perf_counter()
        inputs = Inputs(jnp.int32(first), jnp.float32(learning_rates(config, first, 1)[0]))
        inputs = jax.tree.map(lambda x: place(x, replicate_sharding(mesh)), inputs)
        stops = shard_rows(np.full(self._local_devices, stop, np.int32), mesh)
        rollout, discounted = self._placed()
        before()
        self.state, metrics, self._carried = self._learn(self.state, rollout, discounted, inputs, stops, self.owned)
        return HostPending(first, metrics, episodes, {"rollout": collected - started})

    def fetch(self, pending: HostPending) -> list[Iteration]:
        """Wait for an iteration's update and read what it tells."""
        metrics = {name: fetch(x).tolist() for name, x in pending.metrics.items()}
        everyone = gather_json(pending.episodes.tolist()) if jax.process_count() > 1 else [pending.episodes.tolist()]
        table = np.array([row for rows in everyone for row in rows], np.float64).reshape(-1, 5)
        order = np.lexsort((table[:, 1], table[:, 0]))[-WINDOW:]
        newest = [(float(r), int(n), int(s)) for _, _, r, n, s in table[order]]
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        return [Iteration(pending.first, metrics, Finished(newest, len(table)), seconds, pending.seconds)]

    # --- the rollout ----------------------------------------------------------------------------------------------

    def _collect(self, iteration: int) -> None:
        plan = self.plan
        parameters = self._policy.local_parameters(self.state)
        scale = self._policy.local_scale(self.state)
        noises = [
            self._policy.noise(jnp.int32(iteration), jnp.asarray(group, jnp.int32), jnp.int32(len(group)))
            for group in self.groups
        ]
        start = plan.shards.start
        memories = [jnp.asarray(self.memory[group[0] - start : group[-1] + 1 - start]) for group in self.groups]

        def infer(g: int, t: int, rows: np.ndarray) -> Any:
            shaped = rows.reshape(len(self.groups[g]), plan.envs_per_shard, -1)
            ended = self._ended(g, t).reshape(shaped.shape[:2])
            count = jnp.int32(len(self.groups[g]))
            actions, memories[g] = self._policy.act(
                parameters, scale, shaped, memories[g], ended, noises[g], jnp.int32(t), count
            )
            return actions

        collect(self.envs, infer, self._squash, self.rollout)

    def _ended(self, g: int, t: int) -> np.ndarray:
        """Where the step before ended an episode for the learner, bool ``[n]``."""
        part = parts_of(self.envs)[g]
        if t == 0:
            return np.zeros(part.stop - part.start, np.bool_)
        return self.rollout.terminated[t - 1, part] | self.rollout.truncated[t - 1, part]

    def _squash(self, actions: np.ndarray) -> np.ndarray:
        net = self.program.net
        if not net.squashed:
            return actions
        low, high = (np.asarray(bound, np.float32) for bound in (net.action.low, net.action.high))
        return (low + (high - low) * np.float32(0.5) * (np.tanh(actions) + np.float32(1.0))).astype(np.float32)

    def _begin_groups(self, iteration: int) -> None:
        for group in self.envs:
            group.buffers.episodes[:] = iteration * EPISODES_PER_ITERATION
            group.reset()
        self.memory[:] = 0.0

    def _finished(self) -> np.ndarray:
        """Episodes that ended here, float64 ``[n, 5]``: step, global env id, return, length, success."""
        out, rollout = [], self.rollout
        if self.config.algorithm == "grpo":
            return first_episodes(rollout.first_episodes, rollout.scores, rollout.successes, self.plan.env_ids)
        for counter, group, part in zip(self.counters, self.envs, parts_of(self.envs), strict=True):
            ids = range(group.env_ids[0], group.env_ids[0] + group.num_envs)
            over, successes = rollout.over[:, part], rollout.successes[:, part]
            out.append(counter.finished(rollout.scores[:, part], over, ids, successes))
        return np.concatenate(out)

    def _placed(self) -> tuple[Rollout, Any]:
        """The rollout as global arrays by shard, and discounted returns before it."""
        out, plan, mesh = self.rollout, self.plan, self.program.mesh

        def placed(x: np.ndarray) -> Any:
            shaped = x.reshape(len(x), plan.local_num_shards, plan.envs_per_shard, *x.shape[2:])
            return shard_rows(np.ascontiguousarray(np.moveaxis(shaped, 1, 0)), mesh)

        normalized = self.config.normalize.observations
        zeros = np.zeros(out.scores.shape, np.float32)
        rollout = Rollout(
            observations=placed(out.raw),
            raw=placed(out.raw[:-1]) if normalized else None,
            actions=placed(out.actions),
            outputs=None,
            rewards=placed(out.rewards.astype(np.float32)),
            terminated=placed(out.terminated),
            truncated=placed(out.truncated),
            final=placed(out.final),
            memory=shard_rows(self.memory, mesh),
            over=placed(out.over),
            returns=placed(zeros),
            lengths=placed(zeros.astype(np.int32)),
            successes=placed(out.successes),
            terms={},
        )
        return rollout, shard_rows(self.discounted, mesh)

    def _take_carried(self) -> None:
        """What the update before said that environments carry on."""
        if self._carried is not None:
            memory, discounted = (fetch_rows(x) for x in self._carried)
            self.memory, self.discounted, self._carried = memory.copy(), discounted.copy(), None

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def _per_group(self) -> list[tuple[Any, ...]]:
        return list(zip(self.envs, self.replays, self.counters, self.groups, parts_of(self.envs), strict=True))

    def _carries(self, part: slice) -> dict[str, np.ndarray]:
        flat = {"discounted": self.discounted.reshape(-1), "carry": self.memory.reshape(self.discounted.size, -1)}
        return {name: x[part] for name, x in flat.items()}

    def env_arrays(self) -> dict[int, dict[str, np.ndarray]]:
        """What a checkpoint holds of environments, by shard; with several processes a collective."""
        self._take_carried()
        local: dict[int, dict[str, np.ndarray]] = {}
        for envs, replay, counter, group, part in self._per_group():
            local |= save_shards(envs, replay, counter, self._carries(part), _GroupPlan(group, self.plan))  # type: ignore
        return gather_shards(local, gather_bytes)

    def restore(self, state: TrainState, shards: Mapping[int, Mapping[str, np.ndarray]], iteration: int) -> list[int]:
        """Go on from a checkpoint; returns environments (of all processes) that couldn't be restored exactly."""
        self.state = place_state(state, self.specs, self.program.mesh)
        restarted: list[int] = []
        for envs, replay, counter, group, part in self._per_group():
            if self.config.algorithm == "grpo":
                envs.reset()
                continue
            carries = self._carries(part)
            plan: Any = _GroupPlan(group, self.plan)
            restarted += load_shards(envs, replay, counter, carries, plan, shards)  # type: ignore[arg-type]
        return sorted(env for ids in gather_json(restarted) for env in ids)

    def wait(self) -> None:
        """Wait until nothing is under way."""
        jax.block_until_ready(self.state)

    def close(self) -> None:
        """Let the environments go."""
        for group in self.envs:
            group.close()


class _GroupPlan:
    """The shards of one group, as far as :mod:`lockstep.envs.restore.snapshot` asks."""

    def __init__(self, group: list[int], plan: ShardPlan) -> None:
        self.shards, self.envs_per_shard = range(group[0], group[-1] + 1), plan.envs_per_shard
