"""Runs iterations whose environments are stepped on the host; inference and the update are compiled programs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp

from lockstep.config.run import EnvConfig
from lockstep.core.episodes import WINDOW, EpisodeCounter
from lockstep.core.life import Part, life
from lockstep.core.machine import one_torch_thread
from lockstep.core.process import fail_now
from lockstep.core.shards import ShardPlan
from lockstep.envs.numbers import check_numbers, check_rows
from lockstep.envs.registry import make_envs
from lockstep.envs.restore.replay import ReplayLog
from lockstep.envs.restore.snapshot import load_shards, load_states, save_shards
from lockstep.jax_engine.distributed.mesh import SHARDED, named_sharding, replicate_sharding
from lockstep.jax_engine.distributed.placement import fetch, fetch_rows, place, shard_rows, waited
from lockstep.jax_engine.distributed.processes import gather_bytes, gather_json, wait_for_all
from lockstep.jax_engine.host.clock import Clock, Laps
from lockstep.jax_engine.host.compiled import compile_first, compile_learn
from lockstep.jax_engine.host.rollout import HostRollout, collect, collect_random, record_replay
from lockstep.jax_engine.program.calls import no_matter
from lockstep.jax_engine.program.inference import Inference
from lockstep.jax_engine.program.iterations import Finished, Inputs, Iteration, coefficients_of, learning_rates
from lockstep.jax_engine.program.program import Carried, Program
from lockstep.jax_engine.rollout import Rollout
from lockstep.jax_engine.state import TrainState, place_state, state_specs
from lockstep.training.host_rollout import begin_groups, finished_episodes
from lockstep.training.session import gather_shards


@dataclass(frozen=True)
class HostPending:
    """An iteration whose update is under way, with the episodes that ended in it and its times.

    ``env_metrics`` are the environments' own metrics of each of those episodes, empty if they give none.
    """

    first: int
    metrics: dict[str, Array]
    episodes: np.ndarray
    env_metrics: list[dict[str, float]]
    laps: Laps


class HostRunner:
    """Holds the state on the mesh, environments on the host, and the programs between them; see :class:`.Runner`.

    The environments are those of ``env_config`` if it is given, else of the program's config.
    """

    capacity = 1

    def __init__(
        self,
        program: Program,
        state: TrainState,
        plan: ShardPlan,
        local_devices: int,
        env_config: EnvConfig | None = None,
    ) -> None:
        self.program, self.config, self.plan = program, program.config, plan
        self._local_devices = local_devices
        self.specs = state_specs(state, program.layout.specs)
        self.state = place_state(state, self.specs, program.mesh)
        self.owned = place(program.rows.owned, named_sharding(program.mesh, SHARDED))
        self._devices = range(plan.rank, plan.rank + plan.ranks)
        self._learn, self._first = waited(compile_learn(program, self.specs)), compile_first(program, self.specs)
        self._policy = Inference(program)
        self.envs = make_envs(
            env_config or self.config.env,
            program.description,
            self.config.seed,
            plan.env_ids,
            fail_now,
            group_size=self.config.group_size,
            shard_size=plan.envs_per_shard,
            in_parts=self.config.reduction == "exact",
            overlapped=program.net.convolutional,  # for smaller networks a second call costs more than it hides
        )
        one_torch_thread()
        rows = plan.envs_per_shard
        self._shards = [plan.shards[part.start // rows : part.stop // rows] for part in self.envs.parts]
        self._replay = ReplayLog(self.envs.num_envs, self.config.checkpoint.replay_limit)
        self._counter = EpisodeCounter(self.envs.num_envs)
        self.rollout = HostRollout.empty(self.config, self.envs)
        self.discounted = np.zeros((plan.local_num_shards, plan.envs_per_shard), np.float32)
        self.recurrent_state = np.zeros((*self.discounted.shape, program.net.state_size), np.float32)
        self._carried: Carried | None = None
        self._clock = Clock()

    def begin(self) -> None:
        """See :meth:`.Runner.begin`."""
        self.envs.reset()
        one_torch_thread()  # a reset may have loaded PyTorch
        if self.config.normalize.observations or self.config.normalize.returns:
            collect_random(self.config, self.plan, self.envs, self.rollout)
            check_numbers(self.envs.description, self.plan.env_ids, self.rollout.raw, self.rollout.scores, -1)
            self.state = self._first(self.state, *self._placed(), self.owned)
        self._clock.begin()

    def dispatch(self, first: int, count: int, stop: int, before: Callable[[], None] = no_matter) -> HostPending:
        """Collects a rollout and starts the update; see :meth:`.Runner.dispatch`."""
        assert count == 1, count
        life.begin(Part.ROLLOUT)
        config, mesh = self.config, self.program.mesh
        self._take_carried()  # waits for the previous update
        self._clock.update_ends()
        self._clock.rollout_begins()
        if config.algorithm == "grpo":
            begin_groups(self.envs, first)
            self.recurrent_state[:] = 0.0
        self._collect(first)
        check_numbers(self.envs.description, self.plan.env_ids, self.rollout.raw, self.rollout.scores, first)
        for t in np.flatnonzero(self.rollout.truncated.any(1)).tolist():
            ends = self.rollout.truncated[t]
            ids = [self.plan.env_ids[env] for env in np.flatnonzero(ends)]
            check_rows(self.envs.description, ids, self.rollout.final[t, ends], first, t + 1)
        if self.envs.replayed and config.algorithm == "ppo":
            record_replay(self._replay, self.envs, self.rollout)
        out = self.rollout
        episodes = finished_episodes(config, self._counter, out.scores, out.over, out.successes, self.plan.env_ids)
        env_metrics = [self.rollout.env_metrics.get((int(step), int(env)), {}) for step, env, *_ in episodes]
        laps = self._clock.rollout_ends()
        coefficients = jax.tree.map(lambda x: jnp.asarray(x[0]), coefficients_of(config, first, 1))
        inputs = Inputs(jnp.int32(first), jnp.float32(learning_rates(config, first, 1)[0]), coefficients)
        inputs = jax.tree.map(lambda x: place(x, replicate_sharding(mesh)), inputs)
        stops = shard_rows(np.full(self._local_devices, stop, np.int32), mesh)
        rollout, discounted = self._placed()
        before()
        self.state, metrics, self._carried = self._learn(self.state, rollout, discounted, inputs, stops, self.owned)
        return HostPending(first, metrics, episodes, env_metrics, laps)

    def fetch(self, pending: HostPending) -> list[Iteration]:
        """See :meth:`.Runner.fetch`."""
        life.begin(Part.PROGRAM)
        metrics = {name: fetch(x).tolist() for name, x in pending.metrics.items()}
        self._clock.update_ends(pending.laps)
        laps, told = pending.laps, finished(pending.episodes, pending.env_metrics)
        return [Iteration(pending.first, metrics, told, laps.total, time.monotonic(), laps.parts)]

    # --- the rollout ----------------------------------------------------------------------------------------------

    def _collect(self, iteration: int) -> None:
        plan = self.plan
        parameters = self._policy.local_parameters(self.state)
        scale = self._policy.local_scale(self.state)
        noises = [
            self._policy.noise(jnp.int32(iteration), jnp.asarray(shards, jnp.int32), jnp.int32(len(shards)))
            for shards in self._shards
        ]
        ends = [shards.stop - plan.shards.start for shards in self._shards]
        states = [jnp.asarray(x) for x in np.split(self.recurrent_state, ends[:-1])]
        parts = self.envs.parts

        def infer(p: int, t: int, rows: np.ndarray) -> Array:
            count = len(self._shards[p])
            shaped = rows.reshape(count, plan.envs_per_shard, -1)
            ended = self._ended(parts[p], t).reshape(shaped.shape[:2])
            numbers = jnp.int32(t), jnp.int32(count)
            actions, states[p] = self._policy.act(parameters, scale, shaped, states[p], ended, noises[p], *numbers)
            return actions

        collect(self.envs, infer, self.program.net.squash, self.rollout, iteration)

    def _ended(self, part: slice, t: int) -> np.ndarray:
        """Returns whether the step before ended an episode for the learner, bool ``[n]``."""
        if t == 0:
            return np.zeros(part.stop - part.start, np.bool_)
        return self.rollout.terminated[t - 1, part] | self.rollout.truncated[t - 1, part]

    def _placed(self) -> tuple[Rollout, Array]:
        """Places on the mesh, by shard, the rollout and the discounted returns before it."""
        out, plan, mesh = self.rollout, self.plan, self.program.mesh

        def by_shard(x: np.ndarray) -> Array:
            return shard_rows(self.program.rows.laid_out(x, self._devices), mesh)

        def placed(x: np.ndarray) -> Array:
            shaped = x.reshape(len(x), plan.local_num_shards, plan.envs_per_shard, *x.shape[2:])
            return by_shard(np.ascontiguousarray(np.moveaxis(shaped, 1, 0)))

        zeros = np.zeros(out.scores.shape, np.float32)
        with np.errstate(over="ignore"):  # the loss made of them is looked at
            rewards = out.rewards.astype(np.float32)
        rollout = Rollout(
            observations=placed(out.raw),
            raw=placed(out.raw[:-1]) if self.config.normalize.observations else None,
            actions=placed(out.actions),
            outputs=None,
            rewards=placed(rewards),
            terminated=placed(out.terminated),
            truncated=placed(out.truncated),
            final=placed(out.final),
            recurrent_state=by_shard(self.recurrent_state),
            over=placed(out.over),
            returns=placed(zeros),
            lengths=placed(zeros.astype(np.int32)),
            successes=placed(out.successes),
            terms={},
        )
        return rollout, by_shard(self.discounted)

    def _take_carried(self) -> None:
        """Reads the recurrent states and discounted returns that the previous update computed."""
        if self._carried is not None:
            rows = self.program.rows
            recurrent_state, discounted = (rows.shards_alone(fetch_rows(x), self._devices) for x in self._carried)
            self.recurrent_state, self.discounted, self._carried = recurrent_state.copy(), discounted.copy(), None

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def _carries(self) -> dict[str, np.ndarray]:
        carry = self.recurrent_state.reshape(self.discounted.size, -1)
        return {"discounted": self.discounted.reshape(-1), "carry": carry}

    def env_arrays(self) -> dict[int, dict[str, np.ndarray]]:
        """See :meth:`.Runner.env_arrays`."""
        self._take_carried()
        local = save_shards(self.envs, self._replay, self._counter, self._carries(), self.plan)
        return gather_shards(local, gather_bytes)

    def restore(self, state: TrainState, shards: Mapping[int, dict[str, np.ndarray]]) -> list[int]:
        """See :meth:`.Runner.restore`."""
        self.state = place_state(state, self.specs, self.program.mesh)
        restarted: list[int] = []
        if self.config.algorithm == "grpo":
            load_states(self.envs, self.plan, shards)
        else:
            carries = self._carries()
            restarted = load_shards(self.envs, self._replay, self._counter, carries, self.plan, shards)
        one_torch_thread()
        wait_for_all("restored")  # a replay may take long
        self._clock.begin()
        return sorted(env for ids in gather_json(restarted) for env in ids)

    def close(self) -> None:
        """See :meth:`.Runner.close`."""
        with contextlib.suppress(Exception):  # the error has been raised already
            jax.block_until_ready(self.state)
        self.envs.close()


def finished(episodes: np.ndarray, env_metrics: Sequence[Mapping[str, float]]) -> Finished:
    """Gathers the episodes ``[n, 5]`` of all processes, and the environments' own metrics of them; a collective."""
    own = [*zip(episodes.tolist(), env_metrics, strict=True)]
    everyone = gather_json(own) if jax.process_count() > 1 else [own]
    both = sorted((pair for pairs in everyone for pair in pairs), key=lambda pair: pair[0][:2])
    newest = both[-WINDOW:]
    said = [dict(metrics) for _, metrics in newest] if any(metrics for _, metrics in newest) else None
    return Finished([(float(r), int(n), int(s)) for (_, _, r, n, s), _ in newest], len(both), said)
