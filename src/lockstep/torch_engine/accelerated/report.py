"""Reports what an update on an accelerator did, in one small vector there that the host reads later."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.torch_engine.setup.accelerator import Download, host_buffer

NUMBERS = ("evaluated", "grad_norm", "steps", "stopped", "failed", "learning_rate")
NOTHING_FAILED = -1.0


class Report:
    """Counts what an update does, float64 on its device; every number is a view of one vector ``[2 T + 6 + …]``.

    Attributes:
        terms: sums of the loss terms over the evaluated minibatches ``[T]``.
        failed_terms: those of the first minibatch whose loss or gradient was not finite ``[T]``.
        evaluated: number of evaluated minibatches, the one that stopped the update included.
        grad_norm: sum of the gradient's norms over optimiser steps; ``steps`` is their number.
        stopped: 1 once the KL stop has ended the update.
        failed: index of the first minibatch that was not finite, or -1; nothing was applied from it on.
        learning_rate: as the last step left it.
    """

    def __init__(self, terms: int, more: int, device: torch.device) -> None:
        self.size = terms
        self._vector = torch.zeros(2 * terms + len(NUMBERS) + more, dtype=torch.float64, device=device)
        self.terms, self.failed_terms = self._vector[:terms], self._vector[terms : 2 * terms]
        numbers = self._vector[2 * terms : 2 * terms + len(NUMBERS)].unbind()
        self.evaluated, self.grad_norm, self.steps, self.stopped, self.failed, self.learning_rate = numbers
        self.more = self._vector[2 * terms + len(NUMBERS) :]
        self._buffer = host_buffer((len(self._vector),), torch.float64, device)

    def clear(self) -> None:
        """Resets all numbers for the next update."""
        self._vector.zero_()
        self.failed.fill_(NOTHING_FAILED)

    def send(self) -> Download:
        """Begins to copy the vector to the host; the last copy must have been read."""
        return Download(self._vector, self._buffer)


class Sent:
    """Holds a report that was sent to the host."""

    def __init__(self, vector: Tensor, terms: int) -> None:
        self.terms, self.failed_terms = (part.numpy().copy() for part in vector[: 2 * terms].split(terms))
        rest = vector[2 * terms :].clone()
        self.numbers = dict(zip(NUMBERS, rest[: len(NUMBERS)].tolist(), strict=True))
        self.more = rest[len(NUMBERS) :]
