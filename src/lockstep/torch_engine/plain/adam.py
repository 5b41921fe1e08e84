"""Adam for plain policies, in NumPy on the memory of PyTorch's."""

from __future__ import annotations

import math

import numpy as np
import torch

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What Adam remembers of every parameter, by PyTorch's names."""


class HostAdam:
    """Adam (Kingma & Ba 2015, algorithm 1) in NumPy, on the parameters and moments of PyTorch's.

    At some ten thousand parameters most of an optimiser step in PyTorch goes into calling it.

    Args:
        optimizer: holds one flat parameter ``[P]`` on the CPU, its moments in place already.
    """

    def __init__(self, optimizer: torch.optim.Adam) -> None:
        group = optimizer.param_groups[0]
        flat = group["params"][0]
        moments = optimizer.state[flat]
        self._parameters = flat.detach().numpy()
        self._mean, self._square = moments["exp_avg"].numpy(), moments["exp_avg_sq"].numpy()
        self._count = moments["step"]
        self._betas, self._epsilon = group["betas"], group["eps"]
        self._scratch = np.empty_like(self._parameters)

    def step(self, gradient: np.ndarray, learning_rate: float) -> None:
        """Apply a gradient ``[P]``, whose memory is used up."""
        first, second = self._betas
        self._count += 1
        count = int(self._count)
        scratch = self._scratch
        np.subtract(gradient, self._mean, out=scratch)
        scratch *= 1.0 - first
        self._mean += scratch
        gradient *= gradient
        gradient -= self._square
        gradient *= 1.0 - second
        self._square += gradient
        np.sqrt(self._square, out=scratch)
        scratch *= 1.0 / math.sqrt(1.0 - second**count)
        scratch += self._epsilon
        np.divide(self._mean, scratch, out=scratch)
        scratch *= learning_rate / (1.0 - first**count)
        self._parameters -= scratch
