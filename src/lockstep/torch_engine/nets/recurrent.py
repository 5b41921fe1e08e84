"""Recurrent cores with a leading shard axis: LSTM (Hochreiter & Schmidhuber 1997) and GRU (Cho et al. 2014).

Gates are in PyTorch's order. The logistic function is computed as ``(1 + tanh(x/2)) / 2``: on a CPU PyTorch's sigmoid
rounds by an element's position in memory, which would make a shard's bits depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.torch_engine.nets.row_sums import over_rows


def _logistic(x: Tensor) -> Tensor:
    return 0.5 * torch.tanh(0.5 * x) + 0.5


def _lstm(projected: Tensor, state: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    hidden, cell = state.chunk(2, -1)
    gates = projected + torch.bmm(hidden, weight)
    i, f, g, o = gates.chunk(4, -1)
    cell = _logistic(f) * cell + _logistic(i) * torch.tanh(g)
    hidden = _logistic(o) * torch.tanh(cell)
    return hidden, torch.cat([hidden, cell], -1)


def _gru(projected: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    r, z, n = projected.chunk(3, -1)
    hr, hz, hn = torch.baddbmm(over_rows(bias, state.shape[1]), state, weight).chunk(3, -1)
    reset, update = _logistic(r + hr), _logistic(z + hz)
    new = torch.tanh(n + reset * hn)
    hidden = new + update * (state - new)
    return hidden, hidden


def unroll(
    core: str | None, parameters: Mapping[str, Tensor], name: str, x: Tensor, recurrent_state: Tensor, resets: Tensor
) -> tuple[Tensor, Tensor]:
    """Runs a core (``lstm`` or ``gru``) of the network ``name`` over sequences ``[k, steps, n, inputs]``.

    ``recurrent_state`` ``[k, n, size]`` is that before the first step; ``resets`` ``[k, steps, n]`` are 1.0 where
    nothing is carried into a step. Returns hidden states and recurrent states after each step, ``[k, steps, n, size]``.
    """
    k, steps, n, _ = x.shape
    weight, bias = parameters[f"{name}.core.input.weight"], parameters[f"{name}.core.input.bias"]
    rows = x.flatten(1, 2)
    projected = torch.baddbmm(over_rows(bias, steps * n), rows, weight.transpose(1, 2)).view(k, steps, n, -1)
    hidden_weight = parameters[f"{name}.core.hidden.weight"].transpose(1, 2)
    keep = (1.0 - resets).unsqueeze(-1)
    outputs, states, state = [], [], recurrent_state
    for t in range(steps):
        kept = state * keep[:, t]
        if core == "lstm":
            hidden, state = _lstm(projected[:, t], kept, hidden_weight)
        else:
            hidden, state = _gru(projected[:, t], kept, hidden_weight, parameters[f"{name}.core.hidden.bias"])
        outputs.append(hidden)
        states.append(state)
    return torch.stack(outputs, 1), torch.stack(states, 1)
