"""Collecting a rollout: only the actor runs at each step; values and log-probabilities come from one pass after it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lockstep.config import Config
from lockstep.envs.description import EnvDescription
from lockstep.envs.replay import ReplayLog, row_hashes
from lockstep.envs.vector import HostEnvs
from lockstep.normalizers import ObservationNormalizer
from lockstep.shards import ShardPlan, keyed_generator
from lockstep.torch_engine import nets
from lockstep.torch_engine.nets import PolicyNet
from lockstep.torch_engine.self_check import Mode, by_shard
from lockstep.torch_engine.state import TrainState


@dataclass
class Rollout:
    """One rank's rollout, host arrays ``[T, E, …]`` over its local environments.

    Attributes:
        raw: observations as the environments gave them, float32 ``[T, E, size]``.
        observations: the same, normalised, with the one that follows the last step: ``[T+1, E, size]``.
        actions: int64 ``[T, E]`` or float32 ``[T, E, A]``.
        rewards: float64 ``[T, E]``, as the environments gave them.
        terminated: bool ``[T, E]``; ``truncated`` likewise.
        successes: int8 ``[T, E]``, as :class:`lockstep.envs.vector.Buffers` has them.
        final: observations that truncated an episode: ``(step, environment) -> float32 [size]``, normalised.
    """

    raw: np.ndarray
    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    successes: np.ndarray
    final: dict[tuple[int, int], np.ndarray]

    @property
    def done(self) -> np.ndarray:
        """Where an episode ended, bool ``[T, E]``."""
        return self.terminated | self.truncated

    @classmethod
    def empty(cls, num_steps: int, envs: HostEnvs) -> Rollout:
        """Buffers for ``num_steps`` steps."""
        b, shape = envs.buffers, (num_steps, envs.num_envs)
        size = b.observations.shape[1]
        return cls(
            raw=np.zeros((*shape, size), np.float32),
            observations=np.zeros((num_steps + 1, envs.num_envs, size), np.float32),
            actions=np.zeros((num_steps, *b.actions.shape), b.actions.dtype),
            rewards=np.zeros(shape),
            terminated=np.zeros(shape, np.bool_),
            truncated=np.zeros(shape, np.bool_),
            successes=np.zeros(shape, np.int8),
            final={},
        )


def action_noise(config: Config, plan: ShardPlan, net: PolicyNet, iteration: int) -> np.ndarray:
    """Noise of a whole rollout keyed by ``(seed, "action", iteration, shard)``: float32 ``[T, E, num_actions]``.

    Gumbel for discrete actions (adding it to the logits and taking the largest samples the categorical), standard
    normal for continuous ones.
    """
    shape = (config.num_steps, plan.envs_per_shard, net.num_actions)
    parts = []
    for shard in plan.shards:
        generator = keyed_generator(config.seed, "action", iteration, shard)
        noise = generator.gumbel(size=shape) if net.discrete else generator.standard_normal(shape)
        parts.append(noise.astype(np.float32))
    return np.concatenate(parts, 1)


def random_actions(config: Config, plan: ShardPlan, description: EnvDescription) -> np.ndarray:
    """Actions of a random policy keyed by ``(seed, "random", shard)``, ``[T, E]`` or ``[T, E, A]``.

    Uniform over the actions or within the bounds; standard normal in a component without bounds.
    """
    parts = []
    low, high = (np.asarray(bound) for bound in (description.action_low, description.action_high))
    for shard in plan.shards:
        generator = keyed_generator(config.seed, "random", shard)
        shape = (config.num_steps, plan.envs_per_shard)
        if description.discrete:
            parts.append(generator.integers(0, description.num_actions, shape))
            continue
        uniform, normal = generator.random((*shape, low.size)), generator.standard_normal((*shape, low.size))
        bounded = np.isfinite(low) & np.isfinite(high)
        span = np.where(bounded, high, 1.0) - np.where(bounded, low, 0.0)
        parts.append(np.where(bounded, np.where(bounded, low, 0.0) + span * uniform, normal).astype(np.float32))
    return np.concatenate(parts, 1)


def aligned(array: np.ndarray, device: torch.device) -> Tensor:
    """A host array as a tensor of its own: a product's last bits may depend on how its input lies in memory."""
    tensor = torch.from_numpy(array)
    return tensor.clone() if device.type == "cpu" else tensor.to(device)


class Actor:
    """The policy during a rollout: normalised observations ``[E, size]`` to actions, shard by shard or batched."""

    def __init__(self, state: TrainState, plan: ShardPlan, mode: Mode, device: torch.device) -> None:
        self._net, self._device = state.net, device
        self._mode: Mode = mode
        self._shards, self._rows = plan.local_num_shards, plan.envs_per_shard
        self._parameters = state.parameters

    def __call__(self, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Sample actions ``[E]`` or ``[E, A]``; noise float32 ``[E, num_actions]``."""
        x = aligned(observations, self._device).view(self._shards, self._rows, -1)
        drawn = torch.from_numpy(noise).to(self._device).view(self._shards, self._rows, -1)
        return by_shard(self._mode, self.output, x, drawn).flatten(0, 1).cpu().numpy()

    def output(self, observations: Tensor, noise: Tensor) -> Tensor:
        """Actions ``[k, rows, …]`` of observations and noise ``[k, rows, …]``."""
        weights = self._parameters.expanded(len(observations))
        return nets.sample(self._net, weights, nets.actor(self._net, weights, observations), noise)


def normalized(observations: np.ndarray, normalizer: ObservationNormalizer | None) -> np.ndarray:
    """Observations as the networks see them."""
    return observations if normalizer is None else normalizer(observations)


@torch.inference_mode()
def collect(state: TrainState, envs: HostEnvs, actor: Actor, noise: np.ndarray, out: Rollout) -> None:
    """Step every local environment ``T`` times, filling ``out``."""
    buffers = envs.buffers
    out.final.clear()
    current = normalized(buffers.observations, state.observations)
    for t in range(len(noise)):
        out.raw[t] = buffers.observations
        out.observations[t] = current
        out.actions[t] = actor(out.observations[t], noise[t])
        buffers.actions[:] = out.actions[t]
        envs.step()
        out.rewards[t] = buffers.rewards
        out.terminated[t] = buffers.terminated
        out.truncated[t] = buffers.truncated & ~buffers.terminated
        out.successes[t] = buffers.successes
        for env in np.flatnonzero(out.truncated[t]):
            out.final[t, int(env)] = normalized(buffers.final_observations[env], state.observations).copy()
        current = normalized(buffers.observations, state.observations)
    out.observations[len(noise)] = current


def collect_random(config: Config, plan: ShardPlan, envs: HostEnvs, out: Rollout) -> None:
    """A rollout of random actions, for the normalisers' first statistics; afterwards every episode starts anew."""
    buffers = envs.buffers
    actions = random_actions(config, plan, envs.description)
    for t in range(config.num_steps):
        out.raw[t] = buffers.observations
        buffers.actions[:] = actions[t]
        envs.step()
        out.rewards[t] = buffers.rewards
        out.terminated[t] = buffers.terminated
        out.truncated[t] = buffers.truncated & ~buffers.terminated
    buffers.episodes += 1
    envs.reset()


def record_replay(replay: ReplayLog, envs: HostEnvs, out: Rollout) -> None:
    """Keep the actions of live episodes, with a hash of what each step returned."""
    b = envs.buffers
    followed = np.concatenate([out.raw[1:], b.observations[None]])
    replay.extend(out.actions, row_hashes(followed, out.rewards), out.done)
