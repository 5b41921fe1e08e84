"""Generalised advantage estimation and the moments of advantages; references in :mod:`lockstep.reference`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.torch_engine.nets.memory import on_host
from lockstep.training.limits import GROUP_EPSILON, GROUP_ROUNDING


def gae(
    rewards: Tensor,
    values: Tensor,
    bootstrap_values: Tensor,
    terminated: Tensor,
    done: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Computes advantages and returns (Schulman et al. 2016, eq. 16), all ``[num_steps, num_envs]`` float32.

    ``values`` are V of the observations acted on. ``bootstrap_values`` are V of the observations that followed; where
    an episode was truncated, V of its final observation. Nothing is bootstrapped where ``terminated`` is 1.0. No
    advantage flows back across a step where ``done`` (terminated or truncated) is 1.0.
    """
    deltas = rewards + gamma * torch.where(terminated > 0, 0.0, bootstrap_values) - values
    advantages = torch.zeros_like(deltas)
    carried = torch.where(done > 0, torch.zeros_like(deltas), gamma * gae_lambda)
    if on_host(deltas.device):
        _accumulate(deltas.numpy(), carried.numpy(), advantages.numpy())
    else:
        running = torch.zeros_like(deltas[0])
        for t in range(len(deltas) - 1, -1, -1):
            running = deltas[t] + torch.where(carried[t] > 0, carried[t] * running, 0.0)
            advantages[t] = running
    return advantages, advantages + values


@np.errstate(over="ignore", invalid="ignore")  # of numbers too large for any; the update reports what isn't finite
def _accumulate(deltas: np.ndarray, carried: np.ndarray, out: np.ndarray) -> None:
    """Computes ``out[t] = deltas[t] + carried[t] * out[t + 1]`` in NumPy, whose calls cost little."""
    if not len(deltas):
        return
    out[-1] = deltas[-1]
    flows = carried > 0.0
    for t in range(len(deltas) - 2, -1, -1):
        np.multiply(carried[t], out[t + 1], out=out[t], where=flows[t])
        out[t] += deltas[t]


def group_advantages(returns: Tensor, magnitudes: Tensor, normalize_std: bool) -> Tensor:
    """Computes group-relative advantages (Shao et al. 2024, section 4.1.2).

    They are 0 in a group whose returns differ only as equal returns of float32 rewards may: the division would make
    advantages of about 1 of the rounding.

    Args:
        returns: float64 ``[groups, group_size]``.
        magnitudes: the sums of absolute rewards, of the same shape.
        normalize_std: whether to divide by the group's population standard deviation; Liu et al. 2025, section 3.2,
            don't.
    """
    centred = returns - returns.mean(1, keepdim=True)
    if not normalize_std:
        return centred
    std = centred.square().mean(1, keepdim=True).sqrt()
    alike = std <= GROUP_ROUNDING * magnitudes.amax(1, keepdim=True)  # NaN isn't
    return torch.where(alike, 0.0, centred / (std + GROUP_EPSILON))


def summed_alone(device: torch.device) -> bool:
    """Returns whether a sum over a contiguous last axis adds each row by itself, whatever the number of rows.

    Only then do a row's bits not depend on how many rows there are. It is so on a CPU with one thread. Several threads
    may share one row's sum, and accelerators always may.
    """
    return on_host(device) and torch.get_num_threads() == 1


def moments(x: Tensor) -> Tensor:
    """Computes the mean and the sum of squared deviations over the last axis in float64: ``[…, n]`` to ``[…, 2]``."""
    x = x.double().contiguous()  # rows of other layouts may be added side by side, in another order
    mean = x.mean(-1, keepdim=True)
    return torch.cat([mean, (x - mean).square().sum(-1, keepdim=True)], -1)


def counted_moments(x: Tensor, valid: Tensor | None) -> Tensor:
    """Computes count, mean and M2 over the last axis in float64: ``[…, n]`` to ``[…, 3]``.

    ``valid`` is 1.0 where an entry counts and 0.0 elsewhere; None: all count.
    """
    if valid is None:
        both = moments(x)
        return torch.cat([torch.full_like(both[..., :1], x.shape[-1]), both], -1)
    x, weight = x.double().contiguous(), valid.double().contiguous()
    count = weight.sum(-1, keepdim=True)
    mean = (x * weight).sum(-1, keepdim=True) / count.clamp(min=1.0)
    return torch.cat([count, mean, ((x - mean).square() * weight).sum(-1, keepdim=True)], -1)


def merge_counts(parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merges the moments of shards into those of their union, in shard order (Chan et al. 1983).

    Args:
        parts: float64 ``[num_shards, …, 3]``: count, mean and M2 of each shard.

    Returns:
        Count, mean and population standard deviation, float64 ``[…]``; 0 where nothing counts.
    """
    if not on_host(parts.device):
        count, mean, variance = _merge(parts, torch.clamp)
        return count, mean, variance.sqrt()
    with np.errstate(all="ignore"):  # as PyTorch; the update reports what isn't finite
        merged = _merge(parts.numpy(), np.maximum)
    count, mean, variance = (torch.from_numpy(np.asarray(x)) for x in merged)
    return count, mean, variance.sqrt()  # PyTorch's and NumPy's roots differ in the last bit


def _merge(parts: Any, at_least: Callable[..., Any]) -> tuple[Any, Any, Any]:
    """Returns count, mean and population variance of :func:`merge_counts`, as tensors or as arrays.

    Calls on arrays cost less.
    """
    count, mean, m2 = (parts[0, ..., column] for column in range(3))
    for part in parts[1:]:
        n, its_mean, its_m2 = (part[..., column] for column in range(3))
        total = at_least(count + n, 1.0)
        delta = its_mean - mean
        mean = mean + delta * (n / total)
        m2 = m2 + its_m2 + delta * delta * (count * n / total)
        count = count + n
    return count, mean, m2 / at_least(count, 1.0)
