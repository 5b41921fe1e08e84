"""Steps of a recurrent actor on a CPU, one after another, as a rollout takes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.torch_engine.plain.cores import Core, CoreWeights
from lockstep.torch_engine.plain.layers import ACTIVATIONS, Layer
from lockstep.torch_engine.plain.products import RowProduct, laid_out


class _Buffers:
    """Holds what steps of ``n`` rows of each of ``k`` shards are computed in."""

    def __init__(self, core: Core, weights: CoreWeights, layers: Sequence[np.ndarray], k: int, n: int) -> None:
        self.input, self.hidden = RowProduct(weights.input, k, n), RowProduct(weights.hidden, k, n)
        self.layers = [RowProduct(weight, k, n) for weight in layers]
        self.run = core.empty_run(k, 1, n)


class Stepper:
    """Computes an actor's steps with the weights that it had when this was made.

    Args:
        core: the actor's own, of one trunk.
        layers: those after it, weights ``[out, in]`` and biases ``[1, out]``; all but the last have the ``activation``.
    """

    def __init__(self, core: Core, layers: Sequence[Layer], activation: str) -> None:
        self._core, self._weights = core, core.weights()
        self._layers = [laid_out(weight.T[None]) for weight, _ in layers]
        self._biases = [bias.copy() for _, bias in layers]
        self._activate = ACTIVATIONS[activation][0]
        self._buffers: dict[tuple[int, int], _Buffers] = {}

    def __call__(
        self, observations: np.ndarray, state: np.ndarray, resets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Computes logits or means of one step ``[k, rows, action outputs]``, and the core's state after it.

        Takes contiguous observations ``[k, rows, width]``; the state before, ``[k, rows, parts, size]``; and resets
        ``[k, rows]``, 1.0 where nothing is carried into the step.
        """
        shape = k, n = resets.shape
        if shape not in self._buffers:
            self._buffers[shape] = _Buffers(self._core, self._weights, self._layers, k, n)
        buffers = self._buffers[shape]
        run = buffers.run
        run.first[:, 0] = state.transpose(2, 0, 1, 3)
        run.resets[0] = bool(resets.any())
        if run.resets[0]:
            np.subtract(1.0, resets, out=run.keep[0, 0, :, :, 0])
        projected = buffers.input(observations[None])
        projected += self._weights.input_bias
        self._core.run(self._weights, projected[None], run, buffers.hidden)
        x = run.states[0, 0]
        for layer, (product, bias) in enumerate(zip(buffers.layers, self._biases, strict=True)):
            x = product(x)
            x += bias
            if layer < len(self._biases) - 1:
                x = self._activate(x)
        return x[0].copy(), run.states[:, 0, 0].transpose(1, 2, 0, 3)
