"""Makes Stable-Baselines3's own update global: it normalises advantages and compares the KL over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lockstep.core.errors import UnsynchronizedUpdateError
from lockstep.core.normalizers import RunningMoments, merge_shards, shard_moments
from lockstep.integrations.attach.companions import all_mean, normalize
from lockstep.torch_engine.distributed.communicator import Communicator


class GloballyNormalized:
    """Wraps a rollout buffer and normalises each minibatch's advantages over all ranks' parts of it."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def get(self, batch_size: int | None = None) -> Iterator[Any]:
        """Yields the buffer's minibatches; one collective for each."""
        for samples in self._buffer.get(batch_size):
            yield samples._replace(advantages=normalize(samples.advantages))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)


class AgreedLimit:
    """A ``target_kl`` that compares with the mean KL over ranks: ``kl > 1.5 * limit`` is the same on every rank."""

    __array_ufunc__ = None  # so that NumPy defers to __lt__ and __rmul__

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def __rmul__(self, factor: float) -> AgreedLimit:
        return AgreedLimit(factor * self.limit)

    def __lt__(self, kl: Any) -> bool:
        return all_mean(float(kl)) > self.limit


class UpdateGuard:
    """Raises if a subclass's ``train`` takes an optimiser step before it has called ours.

    It watches every optimiser that holds one of the policy's parameters. A rollout closes the guard, our ``train``
    opens it: later steps of the subclass are safe, because their gradients are reduced.
    """

    def __init__(self, policy: nn.Module, owner: str) -> None:
        self._guarded = {id(parameter) for parameter in policy.parameters()}
        self._owner, self._is_open = owner, False
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def open(self) -> None:
        """Allows optimiser steps until the next rollout."""
        self._is_open = True

    def close(self) -> None:
        """Refuses optimiser steps until our ``train`` is called."""
        self._is_open = False

    def remove(self) -> None:
        """Removes the hook."""
        self._handle.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if self._is_open or not stepped & self._guarded:
            return
        raise UnsynchronizedUpdateError(
            f"{self._owner}.train steps the policy without super().train(), so each rank would normalise advantages "
            "and stop by target_kl for itself: call super().train(), before any step of your own"
        )


@contextmanager
def of_all_ranks(model: Any) -> Iterator[None]:
    """Makes the model's ``train``, within this context, normalise advantages and compare the KL over all ranks."""
    buffer, normalized, limit = model.rollout_buffer, model.normalize_advantage, getattr(model, "target_kl", None)
    try:
        if normalized and not model.normalize_advantage_locally:
            model.rollout_buffer, model.normalize_advantage = GloballyNormalized(buffer), False
        if limit is not None:
            model.target_kl = AgreedLimit(limit)
        yield
    finally:
        model.rollout_buffer, model.normalize_advantage = buffer, normalized
        if limit is not None:
            model.target_kl = limit


def merge_metrics(model: OnPolicyAlgorithm, communicator: Communicator) -> None:
    """Replaces the numbers that this rank has logged under ``train/`` by means over ranks; a collective.

    Words, figures and pictures, which the logger takes too, stay each rank's own.
    """
    values = model.logger.name_to_value
    numbers = {name: value for name, value in values.items() if isinstance(value, (int, float, np.number))}
    mine = {name: float(value) for name, value in numbers.items() if name.startswith("train/")}
    everyone = communicator.gather_json(mine)
    for name, value in mine.items():
        theirs = [one[name] for one in everyone if name in one]
        if any(other != value for other in theirs):
            values[name] = math.fsum(theirs) / len(theirs)
    if "train/explained_variance" in mine:
        values["train/explained_variance"] = explained_variance(model, communicator.gather_ranks)


def explained_variance(model: OnPolicyAlgorithm, gather: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Returns ``1 - Var[returns - values] / Var[returns]`` over all ranks' samples; NaN if returns don't vary."""
    returns, values = model.rollout_buffer.returns.ravel(), model.rollout_buffer.values.ravel()
    moments = RunningMoments.empty(2)
    mine = shard_moments(np.stack([returns, returns.astype(np.float64) - values], 1))
    merge_shards(moments, gather(torch.from_numpy(mine)).numpy(), len(returns))
    of_returns, of_errors = moments.variance
    return float("nan") if of_returns == 0 else float(1 - of_errors / of_returns)
