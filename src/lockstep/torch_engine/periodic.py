"""Local optimiser steps with periodic averaging over ranks (local SGD; Stich 2019): fewer collectives, no promise.

Each rank takes ``sync_period`` optimiser steps on gradients of its own samples. Then parameters and both of Adam's
moments are averaged over ranks, in one collective together with the loss terms. A period ends with the iteration at the
latest: the last one of an update may be shorter, so that rollouts, fingerprints and checkpoints find equal ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lockstep.config.run import Config
from lockstep.core.life import life
from lockstep.core.shards import ShardPlan
from lockstep.torch_engine.batch import Batch
from lockstep.torch_engine.distributed.communicator import Communicator
from lockstep.torch_engine.gradients import GradientSource
from lockstep.torch_engine.minibatches import MinibatchStatistics, epoch_minibatches
from lockstep.torch_engine.nets.parameters import MOMENTS
from lockstep.torch_engine.state import TrainState
from lockstep.torch_engine.update import UpdateResult, begin_update, clip_and_step, decide
from lockstep.training.limits import minibatch_name, non_finite
from lockstep.training.losses import loss_settings


@dataclass
class _Period:
    """Sums what this rank has seen in ``steps`` optimiser steps since the last synchronisation.

    ``terms`` are its parts of the loss terms ``[T]``, ``norm`` the norms of its gradients. ``broken`` counts the
    minibatches whose loss or gradient was not finite.
    """

    terms: Tensor
    norm: float = 0.0
    broken: int = 0
    steps: int = 0


def synchronize(state: TrainState, period: _Period, communicator: Communicator) -> _Period:
    """Averages parameters and moments over ranks and sums their periods, in one collective; ranks are equal then."""
    adam, flat = state.optimizer.moments(), state.parameters.flat
    vectors = [flat, *(adam[name] for name in MOMENTS)]
    seen = torch.tensor([period.norm, float(period.broken)], device=flat.device)
    total = communicator.all_reduce(torch.cat([*vectors, period.terms.to(flat.device), seen]))
    ranks = communicator.topology.world_size
    views, frozen = state.parameters.views, () if state.net.custom is None else state.net.custom.frozen
    # equal on all ranks already, and a mean of three would round
    equal = {name: views[name].clone() for name in frozen}
    for number, vector in enumerate(vectors):
        vector.copy_(total[number * flat.numel() : (number + 1) * flat.numel()] / ranks)
    for name, value in equal.items():
        views[name].copy_(value)
    terms, (norm, broken) = total[3 * flat.numel() : -2], total[-2:].cpu().tolist()
    return _Period(terms, norm / ranks, int(broken), period.steps)


def update_periodically(
    state: TrainState,
    batch: Batch,
    indices: np.ndarray,
    statistics: MinibatchStatistics,
    config: Config,
    plan: ShardPlan,
    source: GradientSource,
    communicator: Communicator,
) -> UpdateResult:
    """Trains on one rollout as :func:`lockstep.torch_engine.update.update` does, but apart for ``sync_period`` steps.

    The KL stop and the adaptive learning rate look at the mean KL of a whole period once it is over, so a stop comes
    after the period's steps were taken.

    Raises:
        NonFiniteError: on every rank at the same synchronisation, if a loss or gradient was not finite.
    """
    ppo, names = config.ppo, loss_settings(config).terms
    result = UpdateResult(terms=np.zeros(len(names)), coefficients=begin_update(state, config))
    total = ppo.num_epochs * ppo.num_minibatches
    fresh = torch.zeros(len(names))
    period, done = _Period(fresh), 0
    for epoch in range(ppo.num_epochs):
        for number, columns in enumerate(epoch_minibatches(state, batch, indices, statistics, epoch, config, plan)):
            local = source(columns, int(statistics.counts[epoch, number]))
            period.terms = period.terms + local.terms.cpu()
            period.broken += not (math.isfinite(float(local.norm)) and bool(torch.isfinite(local.terms).all()))
            period.norm += float(local.norm)
            clip_and_step(state, local, ppo.max_grad_norm, state.learning_rate)
            period.steps += 1
            life.progressed()
            done += 1
            if done % config.sync_period and done < total:
                continue
            together = synchronize(state, period, communicator)
            add_period(state, together, result, config, names, minibatch_name(config, done - 1))
            if result.stopped_by_kl:
                return result
            period = _Period(fresh)
    return result


def add_period(
    state: TrainState, together: _Period, result: UpdateResult, config: Config, names: tuple[str, ...], where: str
) -> None:
    """Adds a period of all ranks to the result, and decides on KL stop and learning rate, the same on every rank.

    Raises:
        NonFiniteError: if a loss or gradient of the period was not finite.
    """
    terms = together.terms.double().cpu().numpy()
    if together.broken or not np.isfinite(terms).all():
        raise non_finite(state.iteration + 1, where, names, terms, custom=config.network.custom)
    result.terms += terms
    result.evaluated += together.steps
    result.steps += together.steps
    result.grad_norm += together.norm
    decide(state, result, config, float(terms[names.index("approx_kl")]) / together.steps)
