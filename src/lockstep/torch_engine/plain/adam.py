"""Adam for plain policies, in NumPy on the memory of tensors."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from lockstep.torch_engine.nets.parameters import Rule


def host_adam(flat: Tensor, moments: dict[str, Tensor], betas: tuple[float, float], epsilon: float) -> Rule:
    """Returns a rule that applies Adam in NumPy (Kingma & Ba 2015, algorithm 1), to parameters ``[P]`` on the CPU.

    The moments are on the CPU too. With few parameters, calling it takes most of PyTorch's step.
    """
    parameters, mean, square = flat.detach().numpy(), moments["exp_avg"].numpy(), moments["exp_avg_sq"].numpy()
    scratch, steps = np.empty_like(parameters), moments["step"].numpy()
    first, second = betas

    def step(used_up: Tensor, learning_rate: float | Tensor, skipped: Tensor | None = None) -> None:
        nonlocal parameters, mean, square, scratch, steps
        assert isinstance(learning_rate, float)
        assert skipped is None
        gradient = used_up.numpy()
        steps += 1
        count = int(steps)
        np.subtract(gradient, mean, out=scratch)
        scratch *= 1.0 - first
        mean += scratch
        gradient *= gradient
        gradient -= square
        gradient *= 1.0 - second
        square += gradient
        np.sqrt(square, out=scratch)
        scratch *= 1.0 / math.sqrt(1.0 - second**count)
        scratch += epsilon
        np.divide(mean, scratch, out=scratch)
        scratch *= learning_rate / (1.0 - first**count)
        parameters -= scratch

    return step
