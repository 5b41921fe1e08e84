"""Collects a rollout from environments on the device: observations, actions and rewards stay there until it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config.run import Config
from lockstep.core.errors import EnvironmentFailureError
from lockstep.core.life import life
from lockstep.core.normalizers import ObservationNormalizer
from lockstep.core.shards import ShardPlan, keyed_seed
from lockstep.core.spaces import ActionLayout, ObservationLayout
from lockstep.envs.gymnasium.random_policy import allowed_actions, random_actions, random_replacements
from lockstep.envs.numbers import check_acted, check_numbers, check_rows
from lockstep.torch_engine.envs.simulators import Step
from lockstep.torch_engine.envs.tensor_envs import TensorEnvs
from lockstep.torch_engine.nets import distributions
from lockstep.torch_engine.nets.encoders import action_mask, float_columns
from lockstep.torch_engine.nets.functions import Actor
from lockstep.torch_engine.nets.memory import on_host
from lockstep.torch_engine.nets.nets import PolicyNet
from lockstep.torch_engine.rollout import Rollout, action_noise
from lockstep.torch_engine.setup import accelerator
from lockstep.torch_engine.setup.accelerator import to_device
from lockstep.torch_engine.state import TrainState


@dataclass
class TensorRollout(Rollout):
    """Holds a rollout whose observations and actions are tensors on the device.

    Rewards and ends are collected there too, and are copied to the host at once when the rollout is complete.

    Attributes:
        last: last observations of each step's ended episodes, rows ``[T, E, width]`` as the environments gave them.
        device_scores: rewards as the environments gave them, float32 ``[T, E]``.
        device_ends: int8 ``[4, T, E]``: terminated, truncated, successes, where ``last`` is the observation before the
            step.
        shards: number of local shards; ``normalized``: whether ``raw`` has memory of its own.
        all_finite: whether the sums over all observations and rewards are finite, and observations are :func:`usable`.
        marked: whether a simulator ever gave no last observation; until then no step is marked.
    """

    last: Any = field(default=None)
    device_scores: Any = field(default=None)
    device_ends: Any = field(default=None)
    shards: int = field(default=1)
    normalized: bool = field(default=False)
    all_finite: bool = field(default=True)
    marked: bool = field(default=False)

    @classmethod
    def on_device(
        cls, num_steps: int, envs: TensorEnvs, net: PolicyNet, normalized: bool, shards: int
    ) -> TensorRollout:
        """Makes buffers for ``num_steps`` steps."""
        rows, action, device = envs.observations, envs.description.action, envs.device
        shape = (num_steps, envs.num_envs)
        observations: Any = torch.zeros((num_steps + 1, *rows.shape), dtype=rows.dtype, device=device)
        dtype = torch.int64 if action.discrete else torch.float32
        actions: Any = torch.zeros((*shape, *action.row_shape), dtype=dtype, device=device)
        return cls(
            observations=observations,
            raw=torch.zeros_like(observations[:-1]) if normalized else observations[:-1],  # pyright: ignore[reportArgumentType]
            actions=actions,
            native=torch.zeros_like(actions) if net.squashed else actions,  # pyright: ignore[reportArgumentType]
            rewards=np.zeros(shape),
            terminated=np.zeros(shape, np.bool_),
            truncated=np.zeros(shape, np.bool_),
            successes=np.zeros(shape, np.int8),
            final=rows.new_zeros((0, rows.shape[1])),  # pyright: ignore[reportArgumentType]
            scores=np.zeros(0) if envs.description.rewards.identity else np.zeros(shape),
            last=torch.zeros((*shape, rows.shape[1]), dtype=rows.dtype, device=device),
            device_scores=torch.zeros(shape, device=device),
            device_ends=torch.zeros((4, *shape), dtype=torch.int8, device=device),
            shards=shards,
            normalized=normalized,
        )

    def raw_rows(self) -> np.ndarray:
        """See :meth:`Rollout.raw_rows`."""
        rows: Any = self.raw
        return rows.cpu().numpy()

    def keep(self, t: int, step: Step) -> None:
        """Stores what a step gave, on the device."""
        self.device_scores[t] = step.reward
        self.device_ends[0, t] = step.terminated
        self.device_ends[1, t] = step.truncated
        successes = step.successes
        self.device_ends[2, t] = 0 if successes is None else successes
        if step.final_missing is not None or self.marked:
            self.marked, self.device_ends[3, t] = True, 0 if step.final_missing is None else step.final_missing
        self.last[t] = step.final

    def take(self, t: int, one: TensorRollout) -> None:
        """Copies the only step of another rollout to step ``t``, without the observation before it."""
        self.device_scores[t], self.device_ends[:, t] = one.device_scores[0], one.device_ends[:, 0]
        self.last[t], self.actions[t] = one.last[0], one.actions[0]
        self.observations[t + 1] = one.observations[1]
        if self.native is not self.actions:
            self.native[t] = one.native[0]
        if self.normalized:
            self.raw[t] = one.raw[0]

    def to_host(self, newest: Tensor, normalize: Any, layout: ObservationLayout, action: ActionLayout) -> None:
        """Copies rewards, ends, and the last rows of truncated episodes to the host.

        ``newest`` are the rows ``[E, width]`` after the last step, as the environments gave them.

        From an accelerator one copy brings all except the last rows, which stay there; it also brings the moments of
        observations that are normalised.
        """
        raw: Any = self.raw
        vectors = float_columns(layout, raw)[..., : layout.vector_size]
        total = vectors.sum() + self.device_scores.sum()
        for fit in usable(layout, action, raw) + self._unacted(layout, newest):
            total = torch.where(fit, total, torch.nan)
        if on_host(self.last.device):
            scores, ends, self.all_finite = (
                self.device_scores.numpy(),
                self.device_ends.numpy(),
                bool(torch.isfinite(total)),
            )
        else:
            sums = device_moments(vectors if self.normalized else vectors[..., :0], self.shards)
            scores, ends, total, sums = accelerator.read_at_once(self.device_scores, self.device_ends, total, sums)
            self.all_finite, self.moments = bool(np.isfinite(total)), sums if self.normalized else None
        self.scores[...] = scores
        self.terminated[...] = ends[0]
        np.greater(ends[1], ends[0], out=self.truncated)
        self.successes[...] = ends[2]
        final_missing = self.truncated & (ends[3] != 0)
        self.final_missing = final_missing if final_missing.any() else None
        rows = self.last[0, :0]
        if self.truncated.any():
            steps, envs = (to_device(index, self.last.device) for index in np.nonzero(self.truncated))
            rows = normalize(self.last[steps, envs])
        self.final = rows.numpy() if on_host(rows.device) else rows

    def _unacted(self, layout: ObservationLayout, newest: Tensor) -> list[Tensor]:
        """Returns whether numbers are finite and indices choices where no action followed, on the device.

        That is after the last step, and at truncated ends.
        """
        truncated, found = (self.device_ends[1] > self.device_ends[0]).unsqueeze(-1), []
        if size := layout.vector_size:
            ends = torch.where(truncated, float_columns(layout, self.last)[..., :size], 0.0)
            found.append(torch.isfinite(float_columns(layout, newest)[..., :size].sum() + ends.sum()))
        if layout.indices[1].size:
            found += [indices_fit(layout, newest).all(), (indices_fit(layout, self.last) | ~truncated[..., 0]).all()]
        return found

    def check_finals(self, envs: TensorEnvs, iteration: int) -> None:
        """Raises for the first truncated episode whose last observation no network can take, and names it."""
        for t in np.flatnonzero(self.truncated.any(1)):
            ends = np.flatnonzero(self.truncated[t])
            rows = self.last[int(t)].cpu().numpy()[ends]
            check_rows(envs.description, [envs.env_ids[end] for end in ends], rows, iteration, int(t) + 1)

    def final_rows(self, places: np.ndarray) -> np.ndarray | Tensor:
        """See :meth:`Rollout.final_rows`; an accelerator's stay there."""
        rows: Any = self.final
        return rows[places] if on_host(self.last.device) else rows[to_device(places, rows.device)]


def usable(layout: ObservationLayout, action: ActionLayout, rows: Tensor) -> list[Tensor]:
    """Returns on the device whether indices in rows ``[…, width]`` are choices, and whether masks allow an action.

    :func:`lockstep.envs.numbers.check_numbers` says where they don't.
    """
    found = [indices_fit(layout, rows).all()] if layout.indices[1].size else []
    if (mask := action_mask(layout, rows)) is not None:
        found += [part.any(-1).all() for part in mask.split(action.choices, -1)]
    return found


def indices_fit(layout: ObservationLayout, rows: Tensor) -> Tensor:
    """Returns on the device whether all indices in a row are choices, bool ``[…]``, for rows ``[…, width]``."""
    columns, counts = layout.indices
    indices = float_columns(layout, rows)[..., columns]
    return ((indices >= 0) & (indices < to_device(counts, rows.device)) & (indices == indices.floor())).all(-1)


def device_noise(config: Config, plan: ShardPlan, net: PolicyNet, iteration: int, device: torch.device) -> Tensor:
    """Draws :func:`~lockstep.torch_engine.rollout.action_noise` on the device, ``[T, E, action outputs]``.

    If the device has no generator, these are the host's numbers. A GPU draws its own from its counter-based generator
    (Philox), set to the same keys.
    """
    generator = accelerator.generator(device)
    if generator is None:
        return to_device(action_noise(config, plan, net, iteration), device)
    shape, parts = (config.num_steps, plan.envs_per_shard, net.action.outputs), []
    for shard in plan.shards:
        generator.manual_seed(keyed_seed(config.seed, "action", iteration, shard))
        noise = torch.empty(shape, device=device)
        parts.append(
            -noise.exponential_(generator=generator).log() if net.discrete else noise.normal_(generator=generator)
        )
    return torch.cat(parts, 1)


def device_moments(vectors: Tensor, shards: int) -> Tensor:
    """Computes mean and M2 of vectors ``[T, E, size]`` by shard, float64 ``[k, 2·size]``, on their device.

    It goes shard by shard, because the number of sums decides how many threads an accelerator gives each of them.
    """
    parts = []
    for part in vectors.unflatten(1, (shards, -1)).unbind(1):
        x = part.double().contiguous().flatten(0, 1)
        mean = x.mean(0)
        parts.append(torch.cat([mean, (x - mean).square().sum(0)]))
    return torch.stack(parts)


class DeviceNormalizer:
    """Normalises observation rows on the device, with the moments of the last :meth:`freeze`, at first those it got."""

    def __init__(
        self, layout: ObservationLayout, normalizer: ObservationNormalizer | None, device: torch.device
    ) -> None:
        self._layout, self._normalizer = layout, normalizer
        if normalizer is not None:
            mean, scale, self._clip = normalizer.frozen
            self._mean, self._scale = (torch.zeros(x.shape, dtype=torch.float32, device=device) for x in (mean, scale))
        self.freeze()

    def freeze(self) -> None:
        """Copies the current moments into the memory of the last ones."""
        if self._normalizer is not None:
            mean, scale, _ = self._normalizer.frozen
            for own, x in ((self._mean, mean), (self._scale, scale)):
                own.copy_(to_device(x, own.device))

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns rows ``[…, width]`` with their vectors normalised; the same memory if nothing is normalised."""
        if self._normalizer is None:
            return rows
        out = rows.clone()
        vectors = float_columns(self._layout, out)[..., : self._layout.vector_size]
        vectors.copy_(((vectors - self._mean) * self._scale).clamp(-self._clip, self._clip))
        return out


class TensorCollector:
    """Collects from environments on the device; see :class:`lockstep.torch_engine.rollout.Collector`."""

    def __init__(self, config: Config, plan: ShardPlan, state: TrainState, envs: TensorEnvs, actor: Actor) -> None:
        self._config, self._plan, self._state, self._envs, self._actor = config, plan, state, envs, actor
        normalizer, net = state.observation_normalizer, state.net
        self._normalize = DeviceNormalizer(net.observation, normalizer, envs.device)
        self._squash = distributions.Squash(net, envs.device) if net.squashed else None
        self._buffers = TensorRollout.on_device(
            config.num_steps, envs, net, normalizer is not None, plan.local_num_shards
        )
        self.rollout: Rollout = self._buffers

    def collect(self) -> None:
        """See :meth:`Collector.collect`."""
        noise = device_noise(self._config, self._plan, self._state.net, self._state.iteration, self._envs.device)
        self.collect_with(noise)
        self._check_numbers(self._state.iteration)

    @torch.no_grad()  # not inference mode, whose tensors simulators couldn't change outside of it
    def collect_with(self, noise: Tensor) -> None:
        """Steps every local environment once for each row of noise ``[T, E, action outputs]``."""
        out, envs = self._buffers, self._envs
        self._normalize.freeze()
        self._actor.begin(self._state.recurrent_state)
        out.observations[0] = self._normalize(envs.observations)
        self.take_steps(noise)
        out.to_host(envs.observations, self._normalize, self._state.net.observation, self._state.net.action)
        out.shape_rewards(envs.description.rewards)

    def take_steps(self, noise: Tensor) -> None:
        """Takes the steps of a rollout, from its first observations on."""
        envs = self._envs
        for t in range(len(noise)):
            try:
                take_step(t, envs, self._actor, noise[t], self._buffers, self._normalize, self._squash)
            except Exception:  # maybe because a network on the host got an index that is no choice
                if on_host(envs.device):
                    rows = envs.observations.numpy()[None]
                    check_acted(envs.description, envs.env_ids, rows, self._state.iteration, t)
                raise
            life.progressed()

    def _check_numbers(self, iteration: int) -> None:
        out, envs = self._buffers, self._envs
        if not out.all_finite:
            check_numbers(envs.description, envs.env_ids, out.raw_rows(), out.scores, iteration)
            out.check_finals(envs, iteration)
            check_rows(envs.description, envs.env_ids, envs.observations.cpu().numpy(), iteration, len(out.scores))

    def collect_random(self) -> None:
        """See :meth:`Collector.collect_random`."""
        collect_random(self._config, self._plan, self._envs, self._buffers)
        self._check_numbers(-1)


def take_step(
    t: int,
    envs: TensorEnvs,
    actor: Actor,
    noise: Tensor,
    out: TensorRollout,
    normalize: Callable[[Tensor], Tensor],
    squash: Callable[[Tensor], Tensor] | None,
) -> None:
    """Takes step ``t`` of a rollout with noise ``[E, action outputs]``; the host reads no value."""
    if out.normalized:
        out.raw[t] = envs.observations
    actions = actor.tensors(out.observations[t], noise)
    out.actions[t] = actions
    native = actions
    if squash is not None:
        out.native[t] = native = squash(actions)
    step = envs.advance(native)
    out.keep(t, step)
    actor.forget(step.terminated | step.truncated)
    out.observations[t + 1] = normalize(envs.observations)


@torch.no_grad()
def collect_random(config: Config, plan: ShardPlan, envs: TensorEnvs, out: TensorRollout) -> None:
    """Fills ``out`` with random actions, for the normalisers' first statistics; then starts new episodes."""
    observation, action = envs.description.observation, envs.description.action
    actions, replacements = random_actions(config, plan, action), random_replacements(config, plan, action)
    for t in range(config.num_steps):
        out.raw[t] = envs.observations
        rows = envs.observations.cpu().numpy()
        allowed = allowed_actions(observation, action, rows, actions[t], replacements[t])
        try:
            step = envs.advance(torch.from_numpy(allowed).to(envs.device))
        except EnvironmentFailureError:
            check_acted(envs.description, envs.env_ids, rows[None], -1, t)
            raise
        out.keep(t, step)
        life.progressed()
    out.to_host(envs.observations, lambda rows: rows, observation, action)
    out.shape_rewards(envs.description.rewards)
    envs.buffers.episodes += config.num_steps + 1  # more than any environment has begun
    envs.begin()
