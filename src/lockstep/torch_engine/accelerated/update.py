"""Takes the update on an accelerator: shapes are static, decisions stay there, the host reads them an iteration later.

One optimiser step is a function of tensors that stay where they are; a counter on the device says which minibatch it
takes. So it can be captured once as a graph and replayed for every step of every update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.config.run import Config
from lockstep.core.life import life
from lockstep.core.shards import ShardPlan
from lockstep.torch_engine.accelerated.decisions import clip, decide
from lockstep.torch_engine.accelerated.graphs import captured
from lockstep.torch_engine.accelerated.report import Report, Sent
from lockstep.torch_engine.batch import Batch
from lockstep.torch_engine.gradients import GradientSource
from lockstep.torch_engine.minibatches import MinibatchStatistics, dropout_seeds, normalize_advantages
from lockstep.torch_engine.nets.functions import DROPOUT_SEED
from lockstep.torch_engine.state import TrainState
from lockstep.torch_engine.update import UpdateResult, begin_update
from lockstep.training.limits import minibatch_name, non_finite
from lockstep.training.losses import loss_settings

if TYPE_CHECKING:
    from lockstep.torch_engine.statistics import SharedStatistics


class AwaitedUpdate:
    """Holds an update that was launched; :meth:`result` waits for it."""

    def __init__(self, update: AcceleratedUpdate, shared: SharedStatistics, coefficients: Mapping[str, float]) -> None:
        self._update, self._shared, self._iteration = update, shared, update.state.iteration + 1
        self._coefficients = coefficients
        self._copy = update.report.send()

    def result(self) -> UpdateResult:
        """Waits for the update, and stores what it did in the state and in the iteration's statistics.

        Raises:
            NonFiniteError: on every rank, if a minibatch was not finite; nothing was applied from that one on.
        """
        config, state, report = self._update.config, self._update.state, self._update.report
        sent = Sent(self._copy.wait(), report.size)
        numbers = sent.numbers
        self._shared.value_moments = sent.more.view(self._shared.value_moments.shape)
        if numbers["failed"] >= 0:
            where = minibatch_name(config, int(numbers["failed"]))
            names, custom = loss_settings(config).terms, config.network.custom
            raise non_finite(self._iteration, where, names, sent.failed_terms, custom=custom)
        steps = int(numbers["steps"])
        state.optimizer_steps += steps
        if config.ppo.schedule == "adaptive":
            state.learning_rate = numbers["learning_rate"]
        return UpdateResult(
            sent.terms,
            int(numbers["evaluated"]),
            numbers["grad_norm"],
            steps,
            numbers["stopped"] > 0.0,
            self._coefficients,
        )


class AcceleratedUpdate:
    """Takes the optimiser steps of an iteration on an accelerator.

    If ``graphed``, the steps are captured as one graph at the first update and replayed from then on. They then read
    memory of their own, into which each rollout is copied, and do the same operations in the same order. Steps that
    can't be captured are launched, with a warning; if ``cuda_graphs`` is true, it is an error.
    """

    def __init__(
        self, state: TrainState, config: Config, plan: ShardPlan, source: GradientSource, graphed: bool = False
    ) -> None:
        self.state, self.config, self.graphed = state, config, graphed
        self._plan, self._source, self._device = plan, source, state.parameters.flat.device
        names = loss_settings(config).terms
        self.report = Report(len(names), 4 * config.shards, self._device)
        self._kl = names.index("approx_kl")
        self._rate = torch.zeros((), device=self._device)
        self._number = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._held: dict[str, Tensor] = {}
        self._replay: Callable[[], None] | None = None

    def __call__(
        self, batch: Batch, indices: Tensor, statistics: MinibatchStatistics, shared: SharedStatistics
    ) -> AwaitedUpdate:
        """Launches the optimiser steps on one rollout, and waits for nothing.

        The indices are those of :func:`.minibatches.minibatch_indices`, on the device.

        Raises:
            ValueError: at the first call, if a step can't be captured and ``cuda_graphs`` is true; the message is one
                line.
        """
        config, state = self.config, self.state
        coefficients = begin_update(state, config)
        self._rate.fill_(state.learning_rate)  # as the last update left it, which has been read by now
        self.report.clear()
        self._number.zero_()
        self._hold(batch, indices, statistics)
        total = config.ppo.num_epochs * config.ppo.num_minibatches
        with torch.no_grad():
            if self.graphed and self._replay is None:
                self._replay = self._captured()
            for number in range(total):
                self._step(number) if self._replay is None else self._replay()
                life.progressed()
            self.report.more.copy_(shared.value_moments.flatten())
        return AwaitedUpdate(self, shared, coefficients)

    def _hold(self, batch: Batch, indices: Tensor, statistics: MinibatchStatistics) -> None:
        """Lays out what the steps read: samples ``[k · n, …]``, and each minibatch's indices and statistics."""
        shards, samples = batch.advantages.shape[:2]
        first = torch.arange(shards, device=self._device).mul_(samples).unsqueeze(1)
        held = {name: x.reshape(shards * samples, *x.shape[2:]) for name, x in batch.columns().items()}
        held["index"] = indices.flatten(0, 1) + first
        held["count"] = torch.as_tensor(statistics.counts, device=self._device).float().flatten()
        if statistics.mean is not None and statistics.scale is not None:
            held |= {"mean": statistics.mean.flatten(0, 1), "scale": statistics.scale.flatten(0, 1)}
        if not self.graphed:
            self._held = held
        elif not self._held:
            self._held = {name: x.clone() for name, x in held.items()}
        else:
            for name, x in held.items():
                self._held[name].copy_(x)

    def _minibatch(self, number: int) -> tuple[dict[str, Tensor], Tensor]:
        """Returns the minibatch that the counter points to, and its count; the host's ``number`` only keys dropout."""
        now = {name: self._held[name].index_select(0, self._number)[0] for name in self._per_minibatch()}
        index, count = now.pop("index"), now.pop("count")
        columns = {name: x[index] for name, x in self._held.items() if name not in self._per_minibatch()}
        if now:
            columns["advantages"] = normalize_advantages(columns["advantages"], now["mean"], now["scale"])
        if self.state.net.custom is not None:
            epoch, minibatch = divmod(number, self.config.ppo.num_minibatches)
            columns[DROPOUT_SEED] = dropout_seeds(self.config, self._plan, self.state.iteration, epoch, minibatch)
        return columns, count

    def _per_minibatch(self) -> list[str]:
        return [name for name in ("index", "count", "mean", "scale") if name in self._held]

    def _step(self, number: int) -> None:
        """Takes one optimiser step, or none if the update is over."""
        columns, count = self._minibatch(number)
        gradient = self._source(columns, count)
        norm = torch.as_tensor(gradient.norm)
        applied = decide(self.report, self._rate, gradient.terms, norm, self._number[0], self._kl, self.config.ppo)
        vector = clip(gradient.vector, norm, self.config.ppo.max_grad_norm)
        self.state.optimizer.step(vector, self._rate, (~applied).float())
        self._number.add_(1).remainder_(len(self._held["index"]))  # warm-up may take more steps than there are

    def _captured(self) -> Callable[[], None] | None:
        """Captures a step, None if it can't be captured; warm-up and capture leave no trace in the state."""
        optimizer = self.state.optimizer
        kept = [optimizer.parameters(), *optimizer.moments().values(), self._rate]
        asked = self.config.cuda_graphs is True
        replay = captured(self._device, lambda: self._step(0), kept, "an optimiser step", asked)
        self.graphed = replay is not None
        self.report.clear()
        self._number.zero_()
        return replay
