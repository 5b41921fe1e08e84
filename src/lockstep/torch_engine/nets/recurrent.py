"""Recurrent cores with a leading shard axis: LSTM (Hochreiter & Schmidhuber 1997) and GRU (Cho et al. 2014).

Gates in PyTorch's order. The logistic function is taken as ``(1 + tanh(x/2)) / 2``: PyTorch's own sigmoid rounds by an
element's position in memory on a CPU, which would make a shard's bits depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def _logistic(x: Tensor) -> Tensor:
    return 0.5 * torch.tanh(0.5 * x) + 0.5


def _lstm(projected: Tensor, carry: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    hidden, cell = carry.chunk(2, -1)
    gates = projected + torch.bmm(hidden, weight)
    i, f, g, o = gates.chunk(4, -1)
    cell = _logistic(f) * cell + _logistic(i) * torch.tanh(g)
    hidden = _logistic(o) * torch.tanh(cell)
    return hidden, torch.cat([hidden, cell], -1)


def _gru(projected: Tensor, carry: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    r, z, n = projected.chunk(3, -1)
    hr, hz, hn = torch.baddbmm(bias.unsqueeze(1), carry, weight).chunk(3, -1)
    reset, update = _logistic(r + hr), _logistic(z + hz)
    new = torch.tanh(n + reset * hn)
    hidden = new + update * (carry - new)
    return hidden, hidden


def unroll(
    core: str | None, parameters: Mapping[str, Tensor], name: str, x: Tensor, carry: Tensor, resets: Tensor
) -> tuple[Tensor, Tensor]:
    """Run a core over sequences.

    Args:
        core: ``lstm`` or ``gru``.
        parameters: expanded, ``[k, …]``.
        name: of the network that the core belongs to.
        x: inputs ``[k, steps, n, inputs]``.
        carry: ``[k, n, carry_size]`` before the first step.
        resets: 1.0 where nothing is carried into a step, ``[k, steps, n]``.

    Returns:
        Hidden states ``[k, steps, n, size]`` and what is carried after each step ``[k, steps, n, carry_size]``.
    """
    k, steps, n, _ = x.shape
    weight, bias = parameters[f"{name}.core.input.weight"], parameters[f"{name}.core.input.bias"]
    projected = torch.baddbmm(bias.unsqueeze(1), x.flatten(1, 2), weight.transpose(1, 2)).view(k, steps, n, -1)
    hidden_weight = parameters[f"{name}.core.hidden.weight"].transpose(1, 2)
    keep = (1.0 - resets).unsqueeze(-1)
    outputs, carries = [], []
    for t in range(steps):
        kept = carry * keep[:, t]
        if core == "lstm":
            hidden, carry = _lstm(projected[:, t], kept, hidden_weight)
        else:
            hidden, carry = _gru(projected[:, t], kept, hidden_weight, parameters[f"{name}.core.hidden.bias"])
        outputs.append(hidden)
        carries.append(carry)
    return torch.stack(outputs, 1), torch.stack(carries, 1)
