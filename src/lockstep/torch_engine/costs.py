"""What an iteration costs a device of the PyTorch engine: its own functions, run on shapes alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config.run import Config
from lockstep.core.shards import ShardPlan
from lockstep.envs.describe import describe
from lockstep.torch_engine.nets import distributions, nets
from lockstep.torch_engine.nets.autograd import AutogradFunctions, minibatch_loss, set_dropout
from lockstep.torch_engine.nets.functions import DROPOUT_SEED
from lockstep.torch_engine.nets.nets import PolicyNet
from lockstep.torch_engine.nets.parameters import FlatParameters
from lockstep.torch_engine.setup.traced import counted, scaled, written
from lockstep.torch_engine.state import make_net
from lockstep.training.costs import FLOAT, Costs, Grows, Kernel, Part
from lockstep.training.losses import loss_settings

META = torch.device("meta")
ADAM_BYTES = 7 * FLOAT
"""Of a parameter that fused Adam reads and writes: the gradient, the parameter and two moments."""
ADAM_FLOPS = 12


def can_compile(platform: str) -> bool:
    """Whether programs can be compiled for a platform that isn't here: never, in this engine."""
    return False


def start_compiler(platform: str) -> None:
    """Starts what compiles: nothing, in this engine."""


def costs(config: Config, platform: str, shape: str | None, devices: int) -> Costs:
    """Runs an iteration's functions on tensors without memory, and counts what a device would launch.

    Args:
        config: resolved for that many devices.
        platform: ``cpu`` or ``cuda``.
        shape: is for the other engine.
        devices: ranks of the run; the costs are the first one's.

    Raises:
        ValueError: the networks don't fit the environment, or can't be counted; one line.
    """
    description = describe(config.env)
    net = replace(make_net(config, description.observation, description.action), bf16=False)  # shapes are the same
    plan = ShardPlan(config.envs, config.shards, devices)
    loops = config.reduction == "exact" and (net.convolutional or net.custom is not None or config.compile)
    traced = _Traced(config, net, plan, loops)
    try:
        parts, held = traced.parts(), traced.memory(devices)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"network.custom: {config.network.custom} can't be counted on shapes alone ({reason})"
        ) from None
    return Costs(
        plan.local_num_shards,
        parts,
        held,
        host_steps=config.env.backend != "tensor",
        source="shapes of PyTorch's operations",
    )


class _Traced:
    """The functions of an iteration of one rank, on shapes."""

    def __init__(self, config: Config, net: PolicyNet, plan: ShardPlan, loops: bool) -> None:
        self.config, self.net, self.plan = config, net, plan
        self.dtype = torch.from_numpy(np.zeros(0, net.observation.dtype)).dtype
        self.parameters = FlatParameters(net.shapes(), META)
        self.policy = AutogradFunctions(net, self.parameters, config)
        self.shards = 1 if loops else plan.local_num_shards
        self.rows = plan.envs_per_shard
        if config.reduction == "fast":  # all samples of a rank are one shard of the update
            self.update_shards, self.update_rows = 1, plan.local_num_envs
        else:
            self.update_shards, self.update_rows = self.shards, self.rows
        self.calls = plan.local_num_shards if loops else 1
        self.grows: Grows = "count" if loops else "size"

    def parts(self) -> tuple[Part, ...]:
        """Counts all parts."""
        config = self.config
        steps = config.ppo.num_epochs * config.ppo.num_minibatches
        with torch.no_grad():
            rollout = scaled(counted(self._act), config.num_steps * self.calls)
            evaluate = scaled(counted(self._evaluate), self.calls)
        gradients = scaled(counted(self._gradient), steps * (1 if config.reduction == "fast" else self.calls))
        size = self.parameters.flat.numel()
        optimizer = (
            Kernel(ADAM_FLOPS * size, ADAM_BYTES * size, steps),
            Kernel(2.0 * size, 2.0 * FLOAT * size, 3.0 * steps),  # the norm, clipping, the copy to where Adam reads it
        )
        return (
            Part("rollout", rollout, self.grows),
            Part("evaluate", evaluate, self.grows),
            Part("gradients", gradients, self.grows),
            Part("optimizer", optimizer, "not"),
        )

    def _observations(self, shards: int, *shape: int) -> Tensor:
        return torch.zeros((shards, *shape, self.net.observation.width), dtype=self.dtype, device=META)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=META)

    def _actions(self, shards: int, *shape: int) -> Tensor:
        weights = self.parameters.expanded(1)
        outputs, noise = self._zeros(1, 1, self.net.outputs), self._zeros(1, 1, self.net.action.outputs)
        one = distributions.sample(self.net, weights, outputs, noise)
        return torch.zeros((shards, *shape, *one.shape[2:]), dtype=one.dtype, device=META)

    def _act(self) -> None:
        """Samples the actions of one step."""
        plan = ShardPlan(self.shards * self.rows, self.shards)
        actor = self.policy.actor(plan, "batched")
        envs = plan.num_envs
        if self.net.core is not None:
            actor.begin(np.zeros((envs, self.net.carry_size), np.float32))
        actor.tensors(self._observations(1, envs)[0], self._zeros(envs, self.net.action.outputs))

    def _evaluate(self) -> None:
        """Computes log-probabilities and values of a rollout."""
        steps, rows, shards = self.config.num_steps, self.rows, self.shards
        if self.net.core is None:
            seen, actions = self._observations(shards, (steps + 1) * rows), self._actions(shards, steps * rows)
            self.policy.evaluate(seen, actions)
            return
        seen, actions = self._observations(shards, steps + 1, rows), self._actions(shards, steps, rows)
        carried = self._zeros(shards, rows, self.net.carry_size)
        self.policy.unroll(seen, actions, carried, self._zeros(shards, steps + 1, rows))

    @property
    def _minibatch(self) -> tuple[int, ...]:
        """Samples of a shard's part of a minibatch, or sequences and their length."""
        length, ppo = self.config.sequence_length, self.config.ppo
        units = self.config.num_steps * self.update_rows // length
        count = units // ppo.num_minibatches // ppo.gradient_accumulation
        return (count, length) if self.net.core else (count,)

    def _gradient(self) -> None:
        """Computes the gradient of one minibatch, its samples taken out of the rollout first."""
        shards, shape, pieces = self.update_shards, self._minibatch, self.config.ppo.gradient_accumulation
        columns = self._columns(shards, shape)
        index = torch.zeros((shards * shape[0],), dtype=torch.int64, device=META)
        rollout = self._observations(1, shards * shape[0] * self.config.ppo.num_minibatches * pieces, *shape[1:])[0]
        for _ in range(pieces):
            columns["observations"] = rollout[index].view(shards, *shape, -1)
            self.policy.gradients(columns, loss_settings(self.config))

    def _loss(self) -> None:
        """Computes the loss of one minibatch, and keeps what its gradient would need."""
        shards, shape = self.update_shards, self._minibatch
        columns = self._columns(shards, shape) | {"observations": self._observations(shards, *shape)}
        weights = {name: x.requires_grad_() for name, x in nets.expand(self.parameters.views, shards).items()}
        set_dropout(self.net, columns)
        minibatch_loss(self.net, weights, columns, loss_settings(self.config))
        set_dropout(self.net, None)

    def memory(self, devices: int) -> dict[str, float]:
        """Bytes that the rank's device holds, by kind.

        Gradients are of every shard, once as autograd gives them and once side by side. Activations are what the loss
        of one minibatch keeps until its gradient is taken, or, if that is more, half of what the values of a whole
        rollout take.
        """
        config, size = self.config, self.parameters.flat.numel()
        held = FLOAT * size / (devices if config.fsdp else 1)
        samples = self.plan.local_num_envs * config.num_steps
        width = self.net.observation.width * self.dtype.itemsize
        gradients = FLOAT * size * (self.update_shards * 2 + self.calls)
        with torch.no_grad():
            evaluated = written(self._evaluate) / 2
        return {
            "parameters": held,
            "moments": 2 * held,
            "gradients": gradients,
            "rollout": samples * (2.0 * width + 10 * FLOAT),
            "activations": max(written(self._loss), evaluated),
        }

    def _columns(self, shards: int, shape: tuple[int, ...]) -> dict[str, Tensor]:
        names = ["log_probs", "advantages", *(("values", "returns") if self.net.critic else ("valid",))]
        columns: dict[str, Any] = {name: self._zeros(shards, *shape) for name in names}
        columns["actions"] = self._actions(shards, *shape)
        if self.config.algorithm == "grpo" and self.config.grpo.kl_coef:
            columns["reference_log_probs"] = self._zeros(shards, *shape)
        if self.net.custom is not None:
            columns[DROPOUT_SEED] = torch.zeros((shards, 1), dtype=torch.int64)
        if self.net.core:
            columns["recurrent_state"] = self._zeros(shards, shape[0], self.net.carry_size)
            columns["resets"] = self._zeros(shards, *shape)
        return columns
