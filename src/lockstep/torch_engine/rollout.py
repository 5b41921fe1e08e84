"""Collecting a rollout: only the actor runs at each step; values and log-probabilities come from one pass after it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lockstep.config.run import Config
from lockstep.core.normalizers import ObservationNormalizer
from lockstep.core.shards import ShardPlan, keyed_generator
from lockstep.core.spaces import ObservationLayout
from lockstep.envs.gymnasium.random_policy import allowed_actions, random_actions
from lockstep.envs.host_envs import Buffers, HostEnvs
from lockstep.envs.restore.replay import ReplayLog, row_hashes
from lockstep.envs.rewards import RewardShaping
from lockstep.torch_engine.nets import distributions, nets
from lockstep.torch_engine.nets.nets import PolicyNet
from lockstep.torch_engine.setup.self_check import Mode, by_shard
from lockstep.torch_engine.state import TrainState


@dataclass
class Rollout:
    """One rank's rollout, host arrays ``[T, E, …]`` over its local environments.

    Attributes:
        observations: rows as the networks see them, with the one that follows the last step: ``[T+1, E, width]``.
        raw: rows as the environments gave them, ``[T, E, width]``; the same memory where nothing is normalised.
        actions: as the policy took them: int64 ``[T, E]`` or ``[T, E, indices]``, or float32 ``[T, E, A]``.
        native: rows of actions as the environments took them; the same memory but for squashed ones.
        rewards: float64 ``[T, E]``, as the learner gets them.
        terminated: bool ``[T, E]``, for the learner: lost lives too; ``truncated`` likewise.
        successes: int8 ``[T, E]``, as :class:`lockstep.envs.host_envs.Buffers` has them.
        final: rows that truncated an episode: ``(step, environment) -> [width]``, as the networks see them.
        scores: float64 ``[T, E]``, rewards as the environments gave them; the same memory where nothing is shaped.
        over: bool ``[T, E]``, where an episode of the environment ended; None: wherever one ends for the learner.
        dead: bool ``[T, E]``, steps of back ends that reset late which only began an episode; None: there are none.
    """

    observations: np.ndarray
    raw: np.ndarray
    actions: np.ndarray
    native: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    successes: np.ndarray
    final: dict[tuple[int, int], np.ndarray]
    scores: np.ndarray = field(default_factory=lambda: np.zeros(0))
    over: np.ndarray | None = None
    dead: np.ndarray | None = None

    def __post_init__(self) -> None:
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
        done = self.ended
        return np.cumsum(done, 0) - done == 0

    @classmethod
    def empty(cls, num_steps: int, envs: HostEnvs, net: PolicyNet, normalized: bool) -> Rollout:
        """Buffers for ``num_steps`` steps."""
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
            final={},
            scores=np.zeros(0) if envs.description.rewards.identity else np.zeros(shape),
            over=np.zeros(shape, np.bool_) if envs.description.lives else None,
            dead=np.zeros(shape, np.bool_) if envs.late_reset else None,
        )

    def take(self, t: int, buffers: Buffers) -> None:
        """Keep what a step gave: rewards, ends and successes."""
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
        """Make the learner's rewards of the scores."""
        if self.scores is not self.rewards:
            self.rewards[...] = shaping(self.scores)


def action_noise(config: Config, plan: ShardPlan, net: PolicyNet, iteration: int) -> np.ndarray:
    """Noise of a whole rollout keyed by ``(seed, "action", iteration, shard)``: float32 ``[T, E, action outputs]``.

    Gumbel for discrete actions (adding it to the logits and taking the largest samples the categorical), standard
    normal for continuous ones.
    """
    shape = (config.num_steps, plan.envs_per_shard, net.action.outputs)
    parts = []
    for shard in plan.shards:
        generator = keyed_generator(config.seed, "action", iteration, shard)
        noise = generator.gumbel(size=shape) if net.discrete else generator.standard_normal(shape)
        parts.append(noise.astype(np.float32))
    return np.concatenate(parts, 1)


def aligned(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """A host array as a tensor of its own: a product's last bits may depend on how its input lies in memory."""
    tensor = torch.as_tensor(array)
    return tensor.clone() if device.type == "cpu" else tensor.to(device)


class Actor:
    """The policy during a rollout: rows ``[E, width]`` to actions, shard by shard or batched."""

    def __init__(self, state: TrainState, plan: ShardPlan, mode: Mode, device: torch.device) -> None:
        self._net, self._device = state.net, device
        self._mode: Mode = mode
        self._shards, self._rows = plan.local_num_shards, plan.envs_per_shard
        self._parameters, self._plain = state.parameters, state.plain
        self._carry = torch.zeros(0)
        self._none = torch.zeros((self._shards, 1, self._rows), device=device)

    def begin(self, carry: np.ndarray | None) -> None:
        """Begin a rollout with what a recurrent policy carries into it, float32 ``[E, carry_size]``."""
        if carry is not None:
            self._carry = torch.from_numpy(carry).to(self._device).view(self._shards, self._rows, -1).clone()

    def __call__(self, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Sample actions ``[E, …]``; noise float32 ``[E, action outputs]``."""
        if self._plain is not None:
            split = (self._shards, self._rows, -1)
            actions = by_shard(self._mode, self._plain.act, observations.reshape(split).copy(), noise.reshape(split))
            return actions.reshape(self._shards * self._rows, *actions.shape[2:])
        drawn = torch.from_numpy(noise).to(self._device)
        return self.tensors(torch.from_numpy(observations).to(self._device), drawn).cpu().numpy()

    def tensors(self, observations: Tensor, noise: Tensor) -> Tensor:
        """The same with tensors on the device."""
        if self._plain is not None:
            return torch.from_numpy(self(observations.numpy(), noise.numpy()))
        x = aligned(observations, self._device).view(self._shards, self._rows, -1)
        drawn = noise.view(self._shards, self._rows, -1)
        if self._net.core is None:
            return by_shard(self._mode, self.output, x, drawn).flatten(0, 1)
        actions, self._carry = by_shard(self._mode, self.recurrent_output, x, drawn, self._carry)
        return actions.flatten(0, 1)

    def forget(self, done: np.ndarray) -> None:
        """Carry nothing over the end of an episode; bool ``[E]``."""
        if self._net.core is not None and done.any():
            self._carry[torch.from_numpy(done).to(self._device).view(self._shards, self._rows)] = 0.0

    def forget_where(self, done: Tensor) -> None:
        """The same with a tensor, without a look at it."""
        if self._net.core is not None:
            self._carry = torch.where(done.view(self._shards, self._rows, 1), 0.0, self._carry)

    def output(self, observations: Tensor, noise: Tensor) -> Tensor:
        """Actions ``[k, rows, …]`` of observations and noise ``[k, rows, …]``."""
        weights = self._parameters.expanded(len(observations))
        return distributions.sample(self._net, weights, nets.actor(self._net, weights, observations), noise)

    def recurrent_output(self, observations: Tensor, noise: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        """Actions and what is carried on ``[k, rows, carry_size]``."""
        weights, none = self._parameters.expanded(len(observations)), self._none[: len(observations)]
        output, _, carries = nets.unroll(self._net, weights, observations.unsqueeze(1), carry, none, actor_only=True)
        return distributions.sample(self._net, weights, output[:, 0], noise), carries[:, 0]


def normalized(layout: ObservationLayout, rows: np.ndarray, normalizer: ObservationNormalizer | None) -> np.ndarray:
    """Observation rows as the networks see them: their vectors normalised."""
    if normalizer is None:
        return rows
    if layout.plain:
        return normalizer(rows)
    out = rows.copy()
    vectors = layout.floats(out)[..., : layout.vector_size]
    vectors[...] = normalizer(vectors)
    return out


@torch.inference_mode()
def collect(state: TrainState, envs: HostEnvs, actor: Actor, noise: np.ndarray, out: Rollout) -> None:
    """Step every local environment ``T`` times, filling ``out``."""
    buffers, layout, normalizer = envs.buffers, state.net.observation, state.observations
    squashed, recurrent = state.net.squashed, state.net.core is not None
    out.final.clear()
    actor.begin(state.carry)
    out.observations[0] = normalized(layout, buffers.observations, normalizer)
    for t in range(len(noise)):
        if normalizer is not None:
            out.raw[t] = buffers.observations
        out.actions[t] = actor(out.observations[t], noise[t])
        if squashed:
            out.native[t] = distributions.squash(state.net, out.actions[t])
        buffers.actions[...] = out.native[t]
        envs.step()
        out.take(t, buffers)
        if out.dead is None and buffers.truncated.any():
            for env in np.flatnonzero(out.truncated[t]):
                final = buffers.final_observations[env : env + 1]
                out.final[t, int(env)] = normalized(layout, final, normalizer)[0].copy()
        if recurrent:
            actor.forget(out.terminated[t] | out.truncated[t] if out.dead is None else out.dead[t])
        out.observations[t + 1] = normalized(layout, buffers.observations, normalizer)
    out.shape_rewards(envs.description.rewards)


def collect_random(config: Config, plan: ShardPlan, envs: HostEnvs, out: Rollout) -> None:
    """A rollout of random actions, for the normalisers' first statistics; afterwards every episode starts anew."""
    buffers = envs.buffers
    observation, action = envs.description.observation, envs.description.action
    actions = random_actions(config, plan, action)
    for t in range(config.num_steps):
        out.raw[t] = buffers.observations
        buffers.actions[...] = allowed_actions(observation, action, buffers.observations, actions[t])
        envs.step()
        out.take(t, buffers)
    out.shape_rewards(envs.description.rewards)
    buffers.episodes += 1
    envs.reset()


def record_replay(replay: ReplayLog, envs: HostEnvs, out: Rollout) -> None:
    """Keep the actions of live episodes, with a hash of what each step returned."""
    b = envs.buffers
    followed = np.concatenate([out.raw[1:], b.observations[None]])
    replay.extend(out.native, row_hashes(followed, out.scores), out.ended)
