"""Distributions of actions, given by an actor's output: categorical, several categoricals, or a diagonal Gaussian.

Noise is drawn beforehand, so that sampling is a pure function. The largest of logits plus Gumbel noise is a sample of a
categorical; mean plus standard deviation times normal noise is one of a Gaussian. A squashed Gaussian keeps the number
before the tanh as its action; :meth:`.PolicyNet.squash` and :class:`Squash` convert it to the environment's action.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.networks.spec import LOG_STD_LIMITS
from lockstep.torch_engine.nets.encoders import marked
from lockstep.torch_engine.nets.memory import on_host
from lockstep.torch_engine.nets.nets import PolicyNet
from lockstep.torch_engine.nets.row_sums import over_rows

LOG_TWO_PI = math.log(2.0 * math.pi)


def mean_and_log_std(net: PolicyNet, parameters: Mapping[str, Tensor], output: Tensor) -> tuple[Tensor, Tensor]:
    """Splits a Gaussian's output into mean ``[k, …, A]`` and log standard deviation, which broadcasts with it."""
    if net.state_dependent_std:
        mean, log_std = output.chunk(2, -1)
        return mean, log_std.clamp(*LOG_STD_LIMITS)
    log_std, dims = parameters["log_std"], output.dim() - 2
    if on_host(output.device):
        return output, log_std.view(len(log_std), *(1,) * dims, -1)
    within = output.shape[1:-1]  # rows, or sequences of them
    spread = over_rows(log_std, within.numel())
    return output, spread.unflatten(1, within if spread.shape[1] == within.numel() else (1,) * dims)


def sample(net: PolicyNet, parameters: Mapping[str, Tensor], output: Tensor, noise: Tensor) -> Tensor:
    """Samples actions from the actor's output ``[k, rows, outputs]`` and noise drawn beforehand.

    The noise ``[k, rows, action outputs]`` is Gumbel (discrete) or standard normal (continuous).

    Returns:
        int64 ``[k, rows]`` or ``[k, rows, indices]``, or float32 ``[k, rows, A]``.
    """
    if net.discrete:
        return mode(net, output + noise)
    mean, log_std = mean_and_log_std(net, parameters, output)
    return mean + log_std.exp() * noise


def mode(net: PolicyNet, output: Tensor) -> Tensor:
    """Returns the most likely actions, shaped as :func:`sample`'s."""
    if net.action.kind == "discrete":
        return output.argmax(-1)
    if net.action.kind == "multi_discrete":
        return torch.stack([part.argmax(-1) for part in output.split(net.action.choices, -1)], -1)
    return output[..., : net.action.outputs]


def log_prob_and_entropy(
    net: PolicyNet, parameters: Mapping[str, Tensor], output: Tensor, actions: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes log-probability and entropy, each ``[k, …]``, of actions shaped as :func:`sample`'s.

    A squashed Gaussian has no entropy in closed form. It is computed as the Gaussian's plus the mean log slope of the
    tanh, estimated at these actions as a function of mean and standard deviation. (Minus the log-probability would have
    the same mean, but a gradient that is 0 on average.)
    """
    if net.action.kind == "discrete":
        return _categorical(output, actions)
    if net.action.kind == "multi_discrete":
        parts = output.split(net.action.choices, -1)
        both = [_categorical(part, actions[..., n]) for n, part in enumerate(parts)]
        return sum_in_order([x for x, _ in both]), sum_in_order([x for _, x in both])
    mean, log_std = mean_and_log_std(net, parameters, output)
    z = (actions - mean) * torch.exp(-log_std)
    log_prob = (-0.5 * z * z - log_std - 0.5 * LOG_TWO_PI).sum(-1)
    entropy = (log_std + 0.5 * (1.0 + LOG_TWO_PI)).sum(-1)
    if net.squashed:
        moved = mean + log_std.exp() * z.detach()
        return log_prob - _log_slope(actions).sum(-1), entropy + _log_slope(moved).sum(-1)
    return log_prob, entropy.expand_as(log_prob)


def _categorical(logits: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    log_probs = torch.log_softmax(logits, -1)
    return _chosen(log_probs, actions), -(log_probs.exp() * log_probs).sum(-1)


def _chosen(log_probs: Tensor, actions: Tensor) -> Tensor:
    """Selects the log-probabilities ``[…]`` of actions from those of all choices ``[…, choices]``.

    On an accelerator it compares instead of gathering; the values are the same. The gradient of a gather is a scatter:
    with deterministic kernels the host waits for some devices, and others need many kernels.
    """
    if on_host(log_probs.device):
        return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    return torch.where(marked(actions, log_probs.shape[-1]), log_probs, 0.0).sum(-1)


def sum_in_order(parts: list[Tensor]) -> Tensor:
    """Adds tensors, first to last."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _log_slope(x: Tensor) -> Tensor:
    """Computes log tanh'(x), ``2 (log 2 - |x| - log(1 + exp(-2|x|)))`` (Haarnoja et al. 2018, appendix C)."""
    size = x.abs()
    return 2.0 * (math.log(2.0) - size - torch.log(1.0 + torch.exp(-2.0 * size)))


def into_bounds(actions: Tensor, low: Tensor, half: Tensor) -> Tensor:
    """Squashes actions ``[…, A]`` into bounds that begin at ``low`` and are twice ``half`` apart, each ``[A]``."""
    return low + half * (torch.tanh(actions) + 1.0)


class Squash:
    """Squashes as :meth:`.PolicyNet.squash` does, on tensors of a device."""

    def __init__(self, net: PolicyNet, device: torch.device) -> None:
        self._low, high = (
            torch.tensor(x, dtype=torch.float32, device=device) for x in (net.action.low, net.action.high)
        )
        self._half = (high - self._low) * 0.5

    def __call__(self, actions: Tensor) -> Tensor:
        """Maps actions to what the environment takes ``[…, A]``."""
        return into_bounds(actions, self._low, self._half)
