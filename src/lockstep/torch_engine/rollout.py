"""Collects a rollout: only the actor runs at each step; one pass after it computes values and log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.config.run import Config
from lockstep.core.errors import EnvironmentFailureError
from lockstep.core.life import life
from lockstep.core.normalizers import ObservationNormalizer
from lockstep.core.shards import ShardPlan, keyed_generator
from lockstep.core.spaces import ObservationLayout
from lockstep.envs.host_envs import Buffers, HostEnvs
from lockstep.envs.numbers import check_acted, check_numbers, check_rows
from lockstep.envs.restore.replay import ReplayLog, row_hashes
from lockstep.envs.rewards import RewardShaping
from lockstep.torch_engine.nets.functions import Actor
from lockstep.torch_engine.nets.nets import PolicyNet
from lockstep.torch_engine.state import TrainState
from lockstep.training.host_rollout import first_episodes, random_steps


@dataclass
class Rollout:
    """Holds one rank's rollout, host arrays ``[T, E, …]`` over its local environments.

    Attributes:
        observations: rows as the networks see them, ``[T+1, E, width]``; the last one follows the last step.
        raw: rows as the environments gave them, ``[T, E, width]``; the same memory if nothing is normalised.
        actions: as the policy took them: int64 ``[T, E]`` or ``[T, E, indices]``, or float32 ``[T, E, A]``.
        native: actions as the environments took them; the same memory unless actions are squashed.
        rewards: float64 ``[T, E]``, as the learner gets them.
        terminated: bool ``[T, E]``, where an episode terminated for the learner, by a lost life too; ``truncated``:
            where one was truncated and did not terminate.
        successes: int8 ``[T, E]``, as in :class:`lockstep.envs.host_envs.Buffers`.
        final: final observations of truncated episodes, as the networks see them, ``[n, width]``: one for each
            ``truncated`` in order of step and environment; empty for back ends that reset late.
        scores: float64 ``[T, E]``, rewards as the environments gave them; the same memory if nothing is shaped.
        over: bool ``[T, E]``, where an episode of the environment ended; None: wherever one ends for the learner.
        dead: bool ``[T, E]``, steps that only began an episode, in back ends that reset late; None: there are none.
        moments: mean and M2 of the raw vectors by shard, float64 ``[k, 2·size]``, if an accelerator computed them; else
            None.
        final_missing: bool ``[T, E]``, truncations whose row in ``final`` is the observation before the step, because
            the simulator gave no other; None: there are none.
        env_metrics: the environments' own metrics of episodes that ended, by step and environment.
    """

    observations: np.ndarray
    raw: np.ndarray
    actions: np.ndarray
    native: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    successes: np.ndarray
    final: np.ndarray
    scores: np.ndarray = field(default_factory=lambda: np.zeros(0))
    over: np.ndarray | None = None
    dead: np.ndarray | None = None
    moments: np.ndarray | None = None
    final_missing: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.env_metrics: dict[tuple[int, int], dict[str, float]] = {}
        if not self.scores.size:
            self.scores = self.rewards

    @property
    def done(self) -> np.ndarray:
        """Where an episode ended for the learner, bool ``[T, E]``."""
        return self.terminated | self.truncated

    @property
    def resets(self) -> np.ndarray:
        """After which steps the next observation begins an episode for the learner, bool ``[T, E]``."""
        return self.done if self.dead is None else self.dead

    @property
    def ended(self) -> np.ndarray:
        """Where an episode of the environment ended, bool ``[T, E]``."""
        return self.done if self.over is None else self.over

    @property
    def first_episodes(self) -> np.ndarray:
        """Where no episode of the environment had ended before in this rollout, bool ``[T, E]``."""
        return first_episodes(self.ended)

    def raw_rows(self) -> np.ndarray:
        """Returns ``raw`` on the host."""
        return self.raw

    def final_rows(self, places: np.ndarray) -> np.ndarray | Tensor:
        """Returns the rows ``[m, width]`` of ``final`` at places ``[m]``, where the policy computes."""
        return self.final[places]

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns ``observations`` and ``actions`` as tensors on a device, in the same memory if they lie there."""
        return torch.as_tensor(self.observations).to(device), torch.as_tensor(self.actions).to(device)

    @classmethod
    def empty(cls, num_steps: int, envs: HostEnvs, net: PolicyNet, normalized: bool) -> Rollout:
        """Makes buffers for ``num_steps`` steps."""
        b, shape = envs.buffers, (num_steps, envs.num_envs)
        observations = np.zeros((num_steps + 1, *b.observations.shape), b.observations.dtype)
        actions = np.zeros((num_steps, *b.actions.shape), b.actions.dtype)
        return cls(
            observations=observations,
            raw=np.zeros_like(observations[:-1]) if normalized else observations[:-1],
            actions=actions,
            native=np.zeros_like(actions) if net.squashed else actions,
            rewards=np.zeros(shape),
            terminated=np.zeros(shape, np.bool_),
            truncated=np.zeros(shape, np.bool_),
            successes=np.zeros(shape, np.int8),
            final=observations[0, :0],
            scores=np.zeros(0) if envs.description.rewards.identity else np.zeros(shape),
            over=np.zeros(shape, np.bool_) if envs.description.lives else None,
            dead=np.zeros(shape, np.bool_) if envs.late_reset else None,
        )

    def of(self, part: slice) -> Rollout:
        """Returns views of some environments' columns; ``final``, still empty, and ``env_metrics`` are its own."""
        views: dict[str, Any] = {"final": self.final[:0]}
        for name in (each.name for each in fields(Rollout) if each.name != "final"):
            whole = getattr(self, name)
            views[name] = None if whole is None else whole[:, part]
        return Rollout(**views)

    def take(self, t: int, buffers: Buffers) -> None:
        """Stores what step ``t`` gave: rewards, ends and successes."""
        self.scores[t] = buffers.rewards
        self.successes[t] = buffers.successes
        if self.over is None:
            self.terminated[t] = buffers.terminated
        else:
            np.logical_or(buffers.terminated, buffers.lost, out=self.terminated[t])
            np.logical_or(buffers.terminated, buffers.truncated, out=self.over[t])
        np.greater(buffers.truncated, self.terminated[t], out=self.truncated[t])
        if self.dead is not None:
            self.dead[t] = buffers.dead

    def shape_rewards(self, shaping: RewardShaping) -> None:
        """Computes the learner's rewards from the scores."""
        if self.scores is not self.rewards:
            self.rewards[...] = shaping(self.scores)


def action_noise(config: Config, plan: ShardPlan, net: PolicyNet, iteration: int) -> np.ndarray:
    """Draws a rollout's noise, keyed by ``(seed, "action", iteration, shard)``: float32 ``[T, E, action outputs]``.

    It is Gumbel noise for discrete actions (the largest of logits plus noise samples the categorical), standard normal
    for continuous ones.
    """
    shape = (config.num_steps, plan.envs_per_shard, net.action.outputs)
    parts = []
    for shard in plan.shards:
        generator = keyed_generator(config.seed, "action", iteration, shard)
        noise = generator.gumbel(size=shape) if net.discrete else generator.standard_normal(shape)
        parts.append(noise.astype(np.float32))
    return np.concatenate(parts, 1)


def normalized(layout: ObservationLayout, rows: np.ndarray, normalizer: ObservationNormalizer | None) -> np.ndarray:
    """Normalises the vectors of observation rows; None leaves the rows as they are."""
    if normalizer is None:
        return rows
    if layout.plain:
        return normalizer(rows)
    out = rows.copy()
    vectors = layout.floats(out)[..., : layout.vector_size]
    vectors[...] = normalizer(vectors)
    return out


class Collector(Protocol):
    """Steps a rank's environments and stores what they give; chosen once, by where the environments live.

    Attributes:
        rollout: the buffers, which each call fills anew.
    """

    rollout: Rollout

    def collect(self) -> None:
        """Fills the rollout with this iteration's steps of the policy.

        Raises:
            EnvironmentFailureError: if an environment gave a number that isn't finite, an index that is none of its
                choices, or a mask that allows nothing; the message is one line that names it.
        """

    def collect_random(self) -> None:
        """Fills the rollout with random actions, for the normalisers' first statistics; then starts new episodes."""


class HostCollector:
    """Collects from the local shards' environments on the host; see :class:`Collector`."""

    def __init__(self, config: Config, plan: ShardPlan, state: TrainState, envs: HostEnvs, actor: Actor) -> None:
        self._config, self._plan, self._state, self._envs, self._actor = config, plan, state, envs, actor
        normalized = state.observation_normalizer is not None
        self.rollout = Rollout.empty(config.num_steps, envs, state.net, normalized)

    def collect(self) -> None:
        """See :meth:`Collector.collect`."""
        noise = action_noise(self._config, self._plan, self._state.net, self._state.iteration)
        collect(self._state, self._envs, self._actor, noise, self.rollout)
        check_rollout(self.rollout, self._envs, self._state.iteration)

    def collect_random(self) -> None:
        """See :meth:`Collector.collect_random`."""
        collect_random(self._config, self._plan, self._envs, self.rollout)
        out, envs = self.rollout, self._envs
        check_numbers(envs.description, envs.env_ids, out.raw, out.scores, -1, dead=out.dead)


class _Part:
    """Steps some of a rollout's environments together, on views of their columns; all else is shared."""

    def __init__(
        self,
        state: TrainState,
        envs: HostEnvs,
        actor: Actor,
        noise: np.ndarray,
        out: Rollout,
        part: slice,
        final: list[np.ndarray],
    ) -> None:
        self._net, self._normalizer, self._actor = state.net, state.observation_normalizer, actor
        self._envs, self._iteration = envs, state.iteration
        self._final, self._env_ids = final, np.asarray(envs.env_ids)[part]
        everyone = part.stop - part.start == envs.num_envs
        self._rows = None if everyone else part
        self._buffers = envs.buffers if everyone else envs.buffers.of(part)
        self._noise, self._out = noise[:, part], out if everyone else out.of(part)

    def _seen(self, rows: np.ndarray) -> np.ndarray:
        return normalized(self._net.observation, rows, self._normalizer)

    def observe(self, t: int) -> None:
        """Stores the observations before step ``t``."""
        self._out.observations[t] = self._seen(self._buffers.observations)

    @torch.inference_mode()
    def act(self, t: int) -> None:
        """Samples the actions of step ``t``."""
        out, buffers = self._out, self._buffers
        if self._normalizer is not None:
            out.raw[t] = buffers.observations
        try:
            out.actions[t] = self._actor(out.observations[t], self._noise[t], self._rows)
        except Exception:  # maybe because the network got an index that is no choice
            check_acted(self._envs.description, self._env_ids.tolist(), buffers.observations[None], self._iteration, t)
            raise
        if self._net.squashed:
            out.native[t] = self._net.squash(out.actions[t])
        buffers.actions[...] = out.native[t]

    def take(self, t: int) -> None:
        """Stores what step ``t`` gave, and the observations after it."""
        out, buffers = self._out, self._buffers
        out.take(t, buffers)
        if out.dead is None and buffers.truncated.any():
            ends = np.flatnonzero(out.truncated[t])
            rows = buffers.final_observations[ends]
            check_rows(self._envs.description, self._env_ids[ends].tolist(), rows, self._iteration, t + 1)
            self._final.append(self._seen(rows))
        if self._net.core is not None:
            resets = out.terminated[t] | out.truncated[t] if out.dead is None else out.dead[t]
            with torch.inference_mode():
                self._actor.forget(torch.from_numpy(resets), self._rows)
        self.observe(t + 1)


def collect(state: TrainState, envs: HostEnvs, actor: Actor, noise: np.ndarray, out: Rollout) -> None:
    """Steps every local environment ``T`` times and fills ``out``; infers for one part of them while others step.

    Environments are stepped outside inference mode, because their own code may take gradients.
    """
    out.env_metrics.clear()
    final = [out.observations[0, :0]]
    with torch.inference_mode():
        actor.begin(state.recurrent_state)
    parts = [_Part(state, envs, actor, noise, out, part, final) for part in envs.parts]
    for number, part in enumerate(parts):
        part.observe(0)
        part.act(0)
        envs.begin_step(number)
    steps, t = len(noise), 0
    try:
        for t in range(steps):
            for number, part in enumerate(parts):
                envs.end_step(number)
                life.progressed()
                part.take(t)
                out.env_metrics |= envs.env_metrics_at(t)
                if t + 1 < steps:
                    part.act(t + 1)
                    envs.begin_step(number)
    except EnvironmentFailureError:
        check_acted(envs.description, envs.env_ids, out.raw[: t + 1], state.iteration, dead=out.dead)
        raise
    out.final = np.concatenate(final)
    out.shape_rewards(envs.description.rewards)


def check_rollout(rollout: Rollout, envs: HostEnvs, iteration: int) -> None:
    """Checks the numbers that environments gave in a rollout and after its last step; see :func:`check_numbers`."""
    check_numbers(envs.description, envs.env_ids, rollout.raw, rollout.scores, iteration, dead=rollout.dead)
    check_rows(envs.description, envs.env_ids, envs.buffers.observations, iteration, len(rollout.raw))


def collect_random(config: Config, plan: ShardPlan, envs: HostEnvs, out: Rollout) -> None:
    """Fills ``out`` with random actions, for the normalisers' first statistics; then starts new episodes."""
    for t in random_steps(config, plan, envs, out.raw, out.dead):
        out.take(t, envs.buffers)
    out.shape_rewards(envs.description.rewards)


def record_replay(replay: ReplayLog, envs: HostEnvs, out: Rollout) -> None:
    """Keeps the actions of live episodes, with a hash of what each step returned."""
    followed = row_hashes(out.raw[1:], out.scores[:-1]), row_hashes(envs.buffers.observations[None], out.scores[-1:])
    replay.extend(out.native, np.concatenate(followed), out.ended)
