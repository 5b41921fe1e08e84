"""Combines means and decisions over ranks, and derives a seed for each.

All but :func:`shard_seed` are collectives: every rank must call them, equally often. With one rank they return what the
script would have computed without them.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from lockstep.core.shards import keyed_seed
from lockstep.integrations.attach.process_group import Same, communicator, join, meet, place

Value = TypeVar("Value", Tensor, np.ndarray, float)


def all_mean(x: Value) -> Value:
    """Returns the elementwise mean over ranks, summed in float64 and in rank order; the same bits on every rank.

    Args:
        x: floating-point tensor or array, of the same shape on every rank, or a number.

    Returns:
        The mean, of the type, dtype and shape of ``x``; a tensor is detached from the graph.

    Raises:
        ValueError: ``x`` is no tensor, array or number, or isn't floating-point.
        OutOfStepError: on every rank, if numbers of elements differ or ranks are at different calls.
    """
    tensor = _floating("all_mean", x)
    if join()[1] == 1:
        return _like(x, tensor.detach())
    meet("all_mean", [Same("brought {} elements", tensor.numel(), "shapes must be the same on every rank")])
    total = communicator().sum_ranks(tensor.detach().double())
    return _like(x, total / join()[1])


def _floating(name: str, x: Tensor | np.ndarray | float) -> Tensor:
    if isinstance(x, (int, np.integer)):
        x = float(x)
    if not isinstance(x, Tensor | np.ndarray | np.generic | float):
        raise ValueError(f"{name}: {type(x).__name__}; a tensor, an array or a number is wanted")
    tensor = x if isinstance(x, Tensor) else torch.from_numpy(np.ascontiguousarray(x).reshape(np.shape(x)))
    if not tensor.dtype.is_floating_point:
        raise ValueError(f"{name}: {tensor.dtype} values; make them floating-point first")
    return tensor


def _like(x: Value, result: Tensor) -> Value:
    """Converts a result to the type and dtype of ``x``; an integer gives a float."""
    if isinstance(x, Tensor):
        return result.to(x.dtype)
    if isinstance(x, np.ndarray):
        return result.numpy().astype(x.dtype)
    kind = float if isinstance(x, (int, np.integer)) else type(x)
    return kind(result.item())


def normalize(adv: Value, eps: float = 1e-8) -> Value:
    """Returns ``(adv - mean) / (std + eps)``, with mean and standard deviation over all ranks' elements.

    Each rank contributes count, mean and sum of squared differences. They are combined in rank order in float64 (Chan
    et al. 1983), so every rank uses the same two numbers. As in ``Tensor.std()``, the variance divides by count - 1.

    Args:
        adv: floating-point tensor or array ``[…]``; ranks may have different numbers of elements, or none.
        eps: added to the standard deviation.

    Returns:
        The result, of the type, dtype and shape of ``adv``; a tensor is detached from the graph.

    Raises:
        ValueError: ``adv`` isn't floating-point, or there are fewer than two elements over all ranks.
        OutOfStepError: on every rank, if ranks are at different calls.
    """
    tensor = _floating("normalize", adv).detach()
    if join()[1] == 1:
        _check_count(tensor.numel())
        return _like(adv, (tensor - tensor.mean()) / (tensor.std() + eps))
    meet("normalize")
    mean, std = _global_moments(tensor)
    return _like(adv, (tensor - mean) / (std + eps))


def _check_count(count: float) -> None:
    if count < 2:
        raise ValueError(f"normalize: a standard deviation needs at least 2 elements over all ranks, not {count:g}")


def _global_moments(x: Tensor) -> tuple[float, float]:
    """Returns mean and standard deviation over all ranks' elements, computed in float64; a collective."""
    values = x.double().flatten()
    own_mean = values.mean() if len(values) else values.new_zeros(())
    own = torch.stack([values.new_tensor(float(len(values))), own_mean, (values - own_mean).square().sum()])
    count = mean = m2 = 0.0
    for n, other_mean, other_m2 in communicator().gather_ranks(own.cpu()).tolist():
        if n:
            delta, both = other_mean - mean, count + n
            mean, m2, count = mean + delta * n / both, m2 + other_m2 + delta * delta * count * n / both, both
    _check_count(count)
    return mean, (m2 / (count - 1)) ** 0.5


def stop_if(flag: object) -> bool:
    """Returns whether ``flag`` is true on any rank: for decisions that ranks must share, such as an early stop.

    Args:
        flag: this rank's vote, converted by ``bool``.

    Raises:
        OutOfStepError: on every rank, if ranks are at different calls.
    """
    if join()[1] == 1:
        return bool(flag)
    return any(meet("stop_if", telling=int(bool(flag))))


def shard_seed(seed: int, rank: int | None = None) -> int:
    """Derives a rank's seed, for its environments and action noise; not a collective.

    Args:
        seed: the run's seed.
        rank: the rank to derive it for; None: this process's rank, or ``seed`` unchanged if there is only one.

    Returns:
        A 31-bit integer, unrelated to those of other ranks and seeds.
    """
    whose, (own, world_size) = rank, place()
    if whose is None and world_size == 1:
        return seed
    return keyed_seed(seed, "rank", own if whose is None else whose)
