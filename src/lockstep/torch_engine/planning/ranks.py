"""Counts what one rank launches and holds in an iteration, by running its functions on tensors without memory."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config.checks import ungraphed
from lockstep.config.run import Config
from lockstep.core.normalizers import ObservationNormalizer, RunningMoments
from lockstep.core.shards import ShardPlan
from lockstep.envs.description import EnvDescription
from lockstep.envs.host_envs import WantedEnvs
from lockstep.torch_engine.accelerated.decisions import clip, decide
from lockstep.torch_engine.accelerated.report import Report
from lockstep.torch_engine.advantages import gae, group_advantages
from lockstep.torch_engine.distributed.ordered import tree_sum
from lockstep.torch_engine.envs.tensor_envs import TensorEnvs
from lockstep.torch_engine.envs.tensor_rollout import DeviceNormalizer, TensorRollout, take_step
from lockstep.torch_engine.gradients import norm_of
from lockstep.torch_engine.minibatches import normalize_advantages
from lockstep.torch_engine.nets import distributions, nets
from lockstep.torch_engine.nets.autograd import AutogradFunctions, dropout, minibatch_loss
from lockstep.torch_engine.nets.functions import DROPOUT_SEED
from lockstep.torch_engine.nets.nets import PolicyNet
from lockstep.torch_engine.nets.parameters import FlatParameters
from lockstep.torch_engine.nets.shards import Mode, parts_of, to_shards
from lockstep.torch_engine.planning.traced import StillActor, kernels_of, scaled, written
from lockstep.torch_engine.setup.accelerator import BRANCHES
from lockstep.torch_engine.setup.choose_mode import expected_modes, takes_few_operations
from lockstep.training.costs import FLOAT, Grows, Kernel, Part, merged
from lockstep.training.losses import loss_settings
from lockstep.training.schedules import scheduled_coefficients

META = torch.device("meta")
ADAM_BYTES = 7 * FLOAT
"""Bytes per parameter that fused Adam moves: it reads the gradient, reads and writes the parameter and two moments."""
ADAM_FLOPS = 12


class TracedRank:
    """Runs the functions of one rank's iteration on shapes, and counts what they launch and hold."""

    def __init__(self, config: Config, net: PolicyNet, plan: ShardPlan, platform: str) -> None:
        self.config, self.net, self.plan, self.on_cpu = config, net, plan, platform == "cpu"
        self.modes = expected_modes(config, net, platform)
        self.dtype = torch.from_numpy(np.zeros(0, net.observation.dtype)).dtype
        self.parameters = FlatParameters(net.shapes(), META)
        self.policy = AutogradFunctions(net, self.parameters, config)
        self.rows = plan.envs_per_shard
        if config.reduction == "fast":  # all samples of a rank are one shard of the update
            self.update_shards, self.update_rows = 1, plan.local_num_envs
        else:
            self.update_shards, self.update_rows = plan.local_num_shards, self.rows
        whole, modes = [(0, self.update_shards)], self.modes
        cut = whole if modes.mode == "batched" else parts_of(self.update_shards, modes.together)
        self.gradient_calls = Counter(last - first for first, last in cut)
        self.beside = BRANCHES if takes_few_operations(self.parameters.flat.numel(), config) else 1
        scheduled = dict.fromkeys(scheduled_coefficients(config, 0), torch.empty((), device=META))
        self.settings = loss_settings(config).scheduled(scheduled)
        self.report = Report(len(self.settings.terms), 4 * config.shards, META)
        outputs, noise = self._empty(1, 1, net.outputs), self._empty(1, 1, net.action.outputs)
        with torch.no_grad():
            self.action = distributions.sample(net, self.parameters.expanded(1), outputs, noise)

    def _calls(self, mode: Mode) -> tuple[int, int, Grows]:
        """Returns the number of calls for a device's shards, the shards of each call, and what further shards add."""
        shards = self.plan.local_num_shards
        return (shards, 1, "count") if mode == "loop" else (1, shards, "size")

    def parts(self) -> tuple[Part, ...]:
        """Counts what each part of an iteration launches."""
        config = self.config
        steps = config.ppo.num_epochs * config.ppo.num_minibatches
        evaluations, shards, grows = self._calls(self.modes.mode)
        with torch.no_grad():
            evaluate = kernels_of(lambda: self._evaluate(shards), evaluations)
        of_calls = (kernels_of(partial(self._gradient, n), steps * times) for n, times in self.gradient_calls.items())
        gradients = merged(kernel for kernels in of_calls for kernel in kernels)
        size = self.parameters.flat.numel()
        optimizer = (
            Kernel(ADAM_FLOPS * size, ADAM_BYTES * size, steps),
            Kernel(0.0, 2.0 * FLOAT * size, steps),  # the copy to where Adam reads it
        )
        with torch.no_grad():
            batch = kernels_of(self._batch)
            taken, decided = kernels_of(self._take, steps), kernels_of(self._decide, steps)
        return (
            *self._rollout(),
            Part("evaluate", evaluate, grows),
            Part("evaluate", batch, "size"),
            Part("gradients", gradients, grows, beside=self.beside),
            Part("gradients", taken, "size"),
            Part("optimizer", optimizer + decided, "not"),
            *self._sums(steps),
        )

    def _sums(self, steps: int) -> tuple[Part, ...]:
        """Counts the additions of all shards' gradients, as if one device owned all shards."""
        shards, size = self.config.shards, self.parameters.flat.numel() + len(self.settings.terms)
        if self.config.reduction != "exact" or shards == 1:
            return ()
        return (Part("optimizer", kernels_of(lambda: tree_sum(self._empty(shards, size)), steps), "additions", shards),)

    def _observations(self, shards: int, *shape: int) -> Tensor:
        return torch.empty((shards, *shape, self.net.observation.width), dtype=self.dtype, device=META)

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)  # launches no kernel

    def _actions(self, shards: int, *shape: int) -> Tensor:
        return torch.empty((shards, *shape, *self.action.shape[2:]), dtype=self.action.dtype, device=META)

    def environments(self, description: EnvDescription) -> tuple[Kernel, ...]:
        """Counts what a rollout of array environments launches: their steps, their resets, and storing each step."""
        config, net = self.config, self.net
        wanted = WantedEnvs(config.env, description, config.seed, self.plan.env_ids, group_size=config.group_size)
        envs, separate = TensorEnvs(wanted, META), config.normalize.observations
        rollout = TensorRollout.on_device(1, envs, net, separate, self.plan.local_num_shards)
        moments = ObservationNormalizer(RunningMoments.empty(net.observation.vector_size), 1.0) if separate else None
        normalize = DeviceNormalizer(net.observation, moments, META)
        squash = distributions.Squash(net, META) if net.squashed else None
        still = StillActor(self._actions(1, envs.num_envs)[0])
        with torch.no_grad():
            envs.begin()
            step = kernels_of(lambda: take_step(0, envs, still, self._empty(0), rollout, normalize, squash))
        return scaled(step, config.num_steps)

    def _rollout(self) -> tuple[Part, ...]:
        """Counts the sampling of all steps' actions; a lone image goes through the networks as one of two."""
        calls, shards, grows = self._calls(self.modes.rollout_mode)
        single = self.net.convolutional and self.net.custom is None and self.rows == 1
        least = 2 if single and grows == "size" else 1
        with torch.no_grad():
            kernels = scaled(self._act(max(shards, least)), self.config.num_steps * calls)
        sampled = Part("rollout", kernels, grows, max(self.plan.local_num_shards, least), least, beside=BRANCHES)
        return (sampled,) if self.net.core is None else (sampled, self._forgotten())

    def _act(self, shards: int) -> tuple[Kernel, ...]:
        """Counts the sampling of one step's actions for ``shards`` shards."""
        plan = ShardPlan(shards * self.rows, shards)
        actor, envs = self.policy.actor(plan, "batched"), plan.num_envs
        if self.net.core is not None:
            actor.begin(np.zeros((envs, self.net.state_size), np.float32))
        rows, noise = self._observations(1, envs)[0], self._empty(envs, self.net.action.outputs)
        return kernels_of(lambda: actor.tensors(rows, noise))

    def _forgotten(self) -> Part:
        """Counts the resets of all recurrent states: after each step, but not after the last if the host steps."""
        plan, steps = self.plan, self.config.num_steps - (self.config.env.backend != "tensor")
        actor, ended = self.policy.actor(plan, "batched"), self._empty(plan.local_num_envs, dtype=torch.bool)
        actor.begin(np.zeros((plan.local_num_envs, self.net.state_size), np.float32))
        with torch.no_grad():
            return Part("rollout", kernels_of(lambda: actor.forget(ended), steps), "size", sampling=False)

    def _evaluate(self, shards: int) -> None:
        """Computes log-probabilities and values of the rollout of ``shards`` shards."""
        steps, rows = self.config.num_steps, self.rows
        if self.net.core is None:
            seen, actions = self._observations(shards, (steps + 1) * rows), self._actions(shards, steps * rows)
            self.policy.evaluate(seen, actions)
            return
        seen, actions = self._observations(shards, steps + 1, rows), self._actions(shards, steps, rows)
        carried = self._empty(shards, rows, self.net.state_size)
        self.policy.unroll(seen, actions, carried, self._empty(shards, steps + 1, rows))

    def _batch(self) -> None:
        """Lays a rollout out by shards, copies it to where the steps read it, and computes advantages."""
        config, steps, envs = self.config, self.config.num_steps, self.plan.local_num_envs
        samples = to_shards(self._observations(steps + 1, envs), self.plan.local_num_shards)
        samples[:, : steps * self.rows].clone()
        if config.algorithm == "grpo":
            returns = self._empty(envs // config.group_size, config.group_size, dtype=torch.float64)
            group_advantages(returns, returns, config.grpo.normalize_std)
            return
        x = self._empty(steps, envs)
        gae(x, x, x, x, x, config.ppo.gamma, config.ppo.gae_lambda)

    @property
    def _minibatch(self) -> tuple[int, ...]:
        """The shape of a shard's part of a minibatch: its samples, or its sequences and their length."""
        length, ppo = self.config.sequence_length, self.config.ppo
        units = self.config.num_steps * self.update_rows // length
        count = units // ppo.num_minibatches // ppo.gradient_accumulation
        return (count, length) if self.net.core else (count,)

    def _take(self) -> None:
        """Takes one minibatch out of the rollout, and normalises its advantages."""
        shards, (count, *length) = self.update_shards, self._minibatch
        ppo = self.config.ppo
        total, count = ppo.num_epochs * ppo.num_minibatches, count * ppo.gradient_accumulation
        number = self._empty(1, dtype=torch.int64)
        index = self._empty(total, shards, count, dtype=torch.int64).index_select(0, number)[0]
        self._empty(total).index_select(0, number)
        held = self._columns(shards, (count, *length)) | {"observations": self._observations(shards, count, *length)}
        held.pop(DROPOUT_SEED, None)  # made by the host
        columns = {name: x.flatten(0, 1)[index] for name, x in held.items()}
        if self.net.critic and ppo.advantage_normalization != "off":
            mean, scale = (self._empty(total, 1, 1).index_select(0, number)[0] for _ in range(2))
            normalize_advantages(columns["advantages"], mean, scale)

    def _decide(self) -> None:
        """Computes a gradient's norm, takes a step's decisions, and clips the gradient."""
        names, ppo = self.settings.terms, self.config.ppo
        vector, number = self._empty(self.parameters.flat.numel()), self._empty(1, dtype=torch.int64)
        norm = torch.as_tensor(norm_of(vector))
        kl = names.index("approx_kl")
        applied = decide(self.report, self._empty(), self._empty(len(names)), norm, number[0], kl, ppo)
        clip(vector, norm, ppo.max_grad_norm)
        (~applied).float()
        number.add_(1)

    def _gradient(self, shards: int) -> None:
        """Computes the gradients of one minibatch of ``shards`` shards."""
        shape = self._minibatch
        columns = self._columns(shards, shape) | {"observations": self._observations(shards, *shape)}
        for _ in range(self.config.ppo.gradient_accumulation):
            self.policy.gradients(columns, self.settings)

    def _loss_bytes(self) -> float:
        """Returns the bytes of one minibatch, and of what its loss keeps until the gradient is taken."""
        shards, shape = max(self.gradient_calls), self._minibatch
        columns = self._columns(shards, shape) | {"observations": self._observations(shards, *shape)}
        weights = {name: x.requires_grad_() for name, x in nets.expand(self.parameters.views, shards).items()}
        with dropout(self.net, columns):
            kept = written(lambda: minibatch_loss(self.net, weights, columns, self.settings))
        return kept + sum(x.numel() * x.element_size() for x in columns.values())

    def memory(self, devices: int) -> dict[str, float]:
        """Returns the bytes that the rank's device holds, by kind.

        Gradients of every shard are counted twice: as autograd returns them, and side by side. With FSDP they are whole
        until they are scattered, as are the ``gathered`` parameters. Activations are the larger of two: what the loss
        of one minibatch (of each branch of a graph) keeps until its gradient is taken, and half of what the values of a
        whole rollout take.
        """
        config, size = self.config, self.parameters.flat.numel()
        cut = config.fsdp and devices > 1
        held = FLOAT * size / (devices if cut else 1)
        samples = self.plan.local_num_envs * config.num_steps
        width = self.net.observation.width * self.dtype.itemsize
        summed = self.update_shards if self.modes.mode == "loop" else 1
        graphed = devices == 1 and config.cuda_graphs is not False and ungraphed(config) is None
        beside = min(self.beside, self.gradient_calls.total()) if graphed else 1
        gradients = FLOAT * size * (max(self.gradient_calls) * 2 * beside + summed)
        with torch.no_grad():
            evaluated = written(lambda: self._evaluate(self._calls(self.modes.mode)[1])) / 2
        return {
            "parameters": held,
            "moments": 2 * held,
            "gathered": float(FLOAT * size) if cut else 0.0,
            "gradients": gradients,
            "rollout": samples * (float(self._copies()) * width + 10 * FLOAT),
            "activations": max(self._loss_bytes() * beside, evaluated),
        }

    def _copies(self) -> int:
        """Counts the copies of a rollout's observations: as collected, by shards, and where the steps read them.

        On an accelerator the third copy is always there. Where the host takes part in each step, it is there only for
        vectors of several shards; else the steps read the second. Environments on the device also keep what each
        episode saw last, and those in the networks' own memory the rows before they were normalised.
        """
        config, on_device = self.config, self.config.env.backend == "tensor"
        flattened = self.dtype != torch.uint8 and self.plan.local_num_shards > 1
        apart = flattened if self.on_cpu or config.fsdp or config.sync_period > 1 else True
        return 2 + apart + on_device + ((on_device or self.on_cpu) and config.normalize.observations)

    def _columns(self, shards: int, shape: tuple[int, ...]) -> dict[str, Tensor]:
        names = ["log_probs", "advantages", *(("values", "returns") if self.net.critic else ("valid",))]
        columns: dict[str, Any] = {name: self._empty(shards, *shape) for name in names}
        columns["actions"] = self._actions(shards, *shape)
        if self.config.algorithm == "grpo" and self.config.grpo.kl_coef:
            columns["reference_log_probs"] = self._empty(shards, *shape)
        if self.net.custom is not None:
            columns[DROPOUT_SEED] = torch.zeros((shards, 1), dtype=torch.int64)
        if self.net.core:
            columns["recurrent_state"] = self._empty(shards, shape[0], self.net.state_size)
            columns["resets"] = self._empty(shards, *shape)
        return columns
