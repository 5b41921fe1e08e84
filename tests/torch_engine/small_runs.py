"""Small runs for the tests of the engine: configs, states, batches, and environments that follow a script."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from gymnasium.spaces import Box, Dict
from torch import Tensor, nn

from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.core.shards import ShardPlan
from lockstep.core.spaces import ActionLayout, Leaf, ObservationLayout, observation_layout
from lockstep.core.topology import Topology
from lockstep.envs.description import EnvDescription
from lockstep.envs.host_envs import HostEnvs
from lockstep.torch_engine.batch import Batch
from lockstep.torch_engine.distributed.communicator import Communicator
from lockstep.torch_engine.gradients import Gradient, norm_of
from lockstep.torch_engine.minibatches import (
    MinibatchStatistics,
    advantage_moments,
    minibatch_indices,
    minibatch_statistics,
)
from lockstep.torch_engine.nets.encoders import float_columns
from lockstep.torch_engine.nets.functions import ShardGradients, shard_gradients
from lockstep.torch_engine.nets.nets import PolicyNet
from lockstep.torch_engine.rollout import Rollout
from lockstep.torch_engine.state import TrainState, init_state
from lockstep.training.losses import TERMS, LossSettings, loss_settings

T = TypeVar("T")
CPU = torch.device("cpu")
PICTURE = Dict({"eye": Box(0, 255, (6, 5, 3), np.uint8), "speed": Box(-1, 1, (2,), np.float32)})
IMAGE_NETS: dict[str, dict[str, Any]] = {
    "simple": {},
    "shared impala": {"shared": True, "image": {"kind": "impala", "width": 0.25, "depth": 1}},
    "residual, LSTM": {
        "image": {"kind": "residual", "width": 0.25},
        **{"recurrent": "lstm", "recurrent_size": 8, "sequence_length": 2},
    },
}
MODULES = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU, "gelu": nn.GELU}


def small_config(**changes: Any) -> Config:
    """Eight environments, four steps, two minibatches; groups given as dicts are laid over these."""
    values: dict[str, Any] = {
        "num_envs": 8,
        "num_steps": 4,
        "network": {"hidden_sizes": (8,)},
        "ppo": {"num_minibatches": 2, "num_epochs": 2, "schedule": "constant"},
    }
    for name, value in changes.items():
        values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value
    return resolve(Config.model_validate(values))


def vectors(size: int) -> ObservationLayout:
    """Observations that are vectors of numbers."""
    return ObservationLayout((Leaf("", "vector", (size,)),))


def actions_of(discrete: bool, actions: int) -> ActionLayout:
    """One index, or components within ±1."""
    if discrete:
        return ActionLayout("discrete", (actions,), (0,))
    bounds: dict[str, Any] = {"low": (-1.0,) * actions, "high": (1.0,) * actions}
    return ActionLayout("continuous", shape=(actions,), dtype="float32", **bounds)


def described(discrete: bool = True, size: int = 4, actions: int = 3) -> EnvDescription:
    """Spaces without an environment; continuous actions lie in ±1."""
    return EnvDescription("Scripted-v0", vectors(size), actions_of(discrete, actions))


def described_picture() -> EnvDescription:
    """Spaces without an environment: a small picture beside two numbers, and two actions."""
    return replace(described(actions=2), observation=observation_layout(PICTURE))


def policy_net(
    size: int, actions: int, discrete: bool, hidden_sizes: tuple[int, ...], activation: str = "tanh", **options: Any
) -> PolicyNet:
    """Networks on vectors."""
    return PolicyNet(vectors(size), actions_of(discrete, actions), hidden_sizes, activation, **options)


def plan_of(config: Config, world_size: int = 1, rank: int = 0) -> ShardPlan:
    return ShardPlan(config.envs, config.shards, world_size, rank)


def final_of(rollout: Rollout) -> dict[tuple[int, int], Any]:
    """The rows that truncated episodes by step and environment."""
    keys = np.argwhere(rollout.truncated).tolist()
    return {(t, env): row for (t, env), row in zip(keys, rollout.final, strict=True)}


def alone(config: Config) -> Communicator:
    """The collectives of a single rank."""
    return Communicator(Topology(), plan_of(config), CPU)


class _Meeting:
    """Where the ranks of :func:`run_ranks` exchange tensors."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size, timeout=600)
        self._slots: list[Tensor] = [torch.empty(0)] * world_size

    def gather(self, rank: int, x: Tensor) -> Tensor:
        self._slots[rank] = x.clone()
        self._barrier.wait()
        everyone = torch.stack(self._slots)
        self._barrier.wait()
        return everyone


def run_ranks(config: Config, world_size: int, function: Callable[[ShardPlan, Communicator], T]) -> list[T]:
    """Call a function as every rank of a run, in threads whose communicators meet; results in rank order."""
    meeting = _Meeting(world_size)

    def rank_of(rank: int) -> T:
        torch.set_num_threads(1)
        plan = plan_of(config, world_size, rank)
        communicator = Communicator(Topology(rank=rank, world_size=world_size), plan, CPU)
        communicator._all_gather = lambda x: meeting.gather(rank, x)
        return function(plan, communicator)

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(rank_of, range(world_size)))


def small_state(config: Config, description: EnvDescription, plan: ShardPlan | None = None) -> TrainState:
    """A state whose parameters are all random: no zero biases, no nearly uniform policy."""
    state = init_state(config, description, plan or plan_of(config), CPU)
    with torch.no_grad():
        state.parameters.flat.add_(torch.randn(state.parameters.flat.shape, generator=seeded(1)), alpha=0.3)
    return state


def shards_gradients(state: TrainState, config: Config) -> ShardGradients:
    """Each shard's gradient and loss terms, as the state's policy computes them."""
    return shard_gradients(state.policy, loss_settings(config), config.ppo.gradient_accumulation)


def joined(gradient: Gradient) -> Tensor:
    """A reduced gradient and its loss terms as one vector ``[P + T]``."""
    return torch.cat([gradient.vector, gradient.terms])


def reduced(vector: Tensor, terms: Tensor | None = None) -> Gradient:
    """A gradient that an update could be given."""
    return Gradient(vector, torch.zeros(len(TERMS)) if terms is None else terms, norm_of(vector))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_parameters(net: PolicyNet, seed: int = 0) -> dict[str, Tensor]:
    generator = seeded(seed)
    return {name: 0.5 * torch.randn(shape, generator=generator) for name, shape in net.shapes().items()}


def random_actions_of(net: PolicyNet, shape: Sequence[int], seed: int = 0) -> Tensor:
    generator = seeded(seed)
    if net.action.kind == "multi_discrete":
        parts = [torch.randint(0, count, tuple(shape), generator=generator) for count in net.action.choices]
        return torch.stack(parts, -1)
    if net.discrete:
        return torch.randint(0, net.action.outputs, tuple(shape), generator=generator)
    return torch.randn((*shape, net.action.outputs), generator=generator)


def random_rows(layout: ObservationLayout, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Observations `[*shape, width]`: normal numbers, and where there are images bytes of any kind."""
    floats = torch.randn((*shape, layout.float_size), generator=generator)
    if not layout.image_bytes:
        return floats
    rows = torch.randint(0, 256, (*shape, layout.width), dtype=torch.uint8, generator=generator)
    float_columns(layout, rows)[...] = floats
    return rows


def random_batch(config: Config, net: PolicyNet, seed: int = 0) -> Batch:
    """Samples of all shards, as if the policy had moved a little since they were drawn."""
    shape = (config.shards, config.num_steps * config.envs // config.shards)
    g = seeded(seed)
    columns = [torch.randn(shape, generator=g) for _ in range(4)]
    return Batch(
        observations=random_rows(net.observation, shape, g),
        actions=random_actions_of(net, shape, seed),
        log_probs=-1.0 + 0.3 * columns[0],
        values=columns[1],
        advantages=columns[2],
        returns=columns[3],
    )


def of_rank(batch: Batch, plan: ShardPlan) -> Batch:
    """The part of a batch of all shards that one rank holds, in memory of its own."""
    owned = slice(plan.shards.start, plan.shards.stop)
    return Batch(**{name: x[owned].clone() for name, x in batch.columns().items()})


def statistics_of(config: Config, batch: Batch, iteration: int = 0) -> MinibatchStatistics:
    """Statistics of the minibatches of a batch of all shards."""
    moments = advantage_moments(batch, minibatch_indices(config, plan_of(config), iteration))
    return minibatch_statistics(config, moments, moments)


def not_normalised(config: Config) -> MinibatchStatistics:
    """Statistics that leave advantages as they are."""
    shape = (config.ppo.num_epochs, config.ppo.num_minibatches)
    return MinibatchStatistics(np.full(shape, config.steps_per_iteration // config.ppo.num_minibatches))


def linear_stack(net: PolicyNet, parameters: dict[str, Tensor], name: str) -> nn.Sequential:
    """The actor or the critic as anybody would write it, in float64."""
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(itertools.pairwise(net.sizes(name))):
        layer = nn.Linear(inputs, outputs, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(parameters[f"{name}.{number}.weight"])
            layer.bias.copy_(parameters[f"{name}.{number}.bias"])
        layers += [layer, MODULES[net.activation]()]
    return nn.Sequential(*layers[:-1])


def naive_gradient(
    net: PolicyNet, parameters: dict[str, Tensor], settings: LossSettings, minibatch: Mapping[str, Tensor]
) -> Tensor:
    """What anybody would write: the mean over all samples of a minibatch, `nn.Linear` and autograd in float64."""
    flat = {name: x.flatten(0, 1) for name, x in minibatch.items()}
    columns = {name: x.double() if x.is_floating_point() else x for name, x in flat.items()}
    observations, actions, old_log_prob = columns["observations"], columns["actions"], columns["log_probs"]
    old_values, advantages, returns = columns["values"], columns["advantages"], columns["returns"]
    stacks = {name: linear_stack(net, parameters, name) for name in ("actor", "critic")}
    output, values = stacks["actor"](observations), stacks["critic"](observations)[:, 0]
    trained: list[Tensor] = [p for stack in stacks.values() for p in stack.parameters()]
    if net.discrete:
        distribution = torch.distributions.Categorical(logits=output)
        log_prob, entropy = distribution.log_prob(actions), distribution.entropy()
    else:
        log_std = parameters["log_std"].double().clone().requires_grad_()
        trained.append(log_std)
        distribution = torch.distributions.Normal(output, log_std.exp().expand_as(output))
        log_prob, entropy = distribution.log_prob(actions).sum(-1), distribution.entropy().sum(-1)
    ratio, change = (log_prob - old_log_prob).exp(), values - old_values
    surrogate = torch.min(
        ratio * advantages, ratio.clamp(1 - settings.clip_range, 1 + settings.clip_range) * advantages
    )
    error = (values - returns).square()
    if settings.value_clip_range is not None:
        limit = settings.value_clip_range
        clipped = (old_values + change.clamp(-limit, limit) - returns).square()
        error = torch.where(change.abs() <= limit, error, torch.maximum(error, clipped))
    loss = (-surrogate + 0.5 * settings.value_coef * error - settings.entropy_coef * entropy).sum() / settings.count
    gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(gradients, trained, strict=True)]
    )


class ScriptedEnvs(HostEnvs):
    """Environments whose every number is known: the observation of environment ``e`` in step ``t`` is ``[e, t]``.

    A step's reward is ``10·e + t``, its final observation ``[e, 1000 + t]``, the first one of the next episode
    ``[e, -t]``. All of it is written into the same buffers in every step, as environments do.

    Args:
        env_ids: global ids.
        ends: what ends in step ``t`` of environment ``e``: ``(t, e)`` to ``"terminated"``, ``"truncated"``, ``"both"``.
    """

    def __init__(self, env_ids: Sequence[int], ends: dict[tuple[int, int], str] | None = None) -> None:
        super().__init__(described(size=2), env_ids)
        self._ends, self._clock = ends or {}, 0
        self.taken: list[np.ndarray] = []

    def reset(self) -> None:
        self._clock = 0
        self.buffers.observations[:, 0], self.buffers.observations[:, 1] = self.env_ids, 0

    def step(self) -> None:
        b, t = self.buffers, self._clock
        self._clock += 1
        self.taken.append(b.actions.copy())
        b.observations[:, 1] = t + 1
        b.final_observations[:] = np.nan
        b.rewards[:] = 10.0 * np.array(self.env_ids) + t
        for row, env in enumerate(self.env_ids):
            end = self._ends.get((t, env), "")
            b.terminated[row], b.truncated[row] = end in ("terminated", "both"), end in ("truncated", "both")
            if end:
                b.episodes[row] += 1
                b.final_observations[row] = env, 1000 + t
                b.observations[row, 1] = -t

    def save_states(self) -> list[dict[str, np.ndarray] | None]:
        raise NotImplementedError

    def restore(self, env: int, actions: np.ndarray, hashes: np.ndarray, state: dict[str, np.ndarray]) -> bool:
        raise NotImplementedError
