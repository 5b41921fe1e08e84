"""Adam for plain policies, in NumPy on the memory of tensors."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor


class HostAdam:
    """Adam (Kingma & Ba 2015, algorithm 1) in NumPy: at few parameters most of PyTorch's step goes into calling it.

    Parameters ``[P]`` on the CPU and ``step``, ``exp_avg`` and ``exp_avg_sq`` by name are changed in place.
    """

    def __init__(self, flat: Tensor, moments: dict[str, Tensor], betas: tuple[float, float], epsilon: float) -> None:
        self._parameters = flat.detach().numpy()
        self._mean, self._square = moments["exp_avg"].numpy(), moments["exp_avg_sq"].numpy()
        self._count = moments["step"]
        self._betas, self._epsilon = betas, epsilon
        self._scratch = np.empty_like(self._parameters)

    def __call__(self, gradient: Tensor, learning_rate: float) -> None:
        """Applies a gradient ``[P]``, whose memory is used up."""
        self.step(gradient.numpy(), learning_rate)

    def step(self, gradient: np.ndarray, learning_rate: float) -> None:
        """Applies a gradient ``[P]``, whose memory is used up."""
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
