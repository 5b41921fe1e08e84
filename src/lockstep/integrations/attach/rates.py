"""Compares the learning rates that ranks step with: what one rank's own data decide would part the ranks unnoticed."""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.core.errors import OutOfStepError
from lockstep.integrations.attach.process_group import communicator
from lockstep.torch_engine.setup import accelerator

ROUNDING = 1e-9
"""Relative differences up to this are rounding of two hosts' mathematics, and no decision of a rank's own."""

Told = list[list[float | None]]
"""Learning rates of every optimiser's groups; None for what is no number, because the optimiser computes its own."""


class Rates:
    """Keeps the learning rates since the last reduction: those that steps were taken with, and those of now.

    Rates in tensors on an accelerator are read only before a step, and only if they have changed since they were read
    last, because reading them waits for the device.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._stepped: Told = []
        self._read: dict[tuple[int, int], tuple[weakref.ref[Tensor], int, float | None]] = {}

    def before_step(self, number: int) -> None:
        """Notes the rates that an optimiser is about to step with."""
        if not torch.compiler.is_compiling():
            self._stepped.append(self._values(number, wait=True))

    def digest(self) -> int:
        """Returns a number below 2**30 that is the same on ranks with the same rates since the last reduction."""
        return zlib.crc32(repr(self._told()).encode()) >> 2

    def compare(self, digests: Sequence[int]) -> None:
        """Raises if ranks' rates differ, given every rank's :meth:`digest`; a collective if the digests differ.

        Raises:
            OutOfStepError: on every rank, naming the first difference.
        """
        told = self._told()
        self._stepped = []
        if len(set(digests)) == 1:
            return
        everyone: list[Told] = communicator().gather_json(told)
        for rank, theirs in enumerate(everyone):
            for mine, others in zip(everyone[0], theirs, strict=False):
                for first, other in zip(mine, others, strict=False):
                    if _differ(first, other):
                        raise OutOfStepError(
                            f"rank 0 steps with learning rate {first:.6g} and rank {rank} with {other:.6g}: decide it "
                            "from lockstep.all_mean of what each rank measured",
                            ranks_parted="rates",
                        )

    def _told(self) -> Told:
        return [*self._stepped, *(self._values(number, wait=False) for number in range(len(self._optimizers)))]

    def _values(self, number: int, *, wait: bool) -> list[float | None]:
        """Returns an optimiser's rates; those on an accelerator as they were read last, unless it may ``wait``."""
        groups = enumerate(self._optimizers[number].param_groups)
        return [self._value((number, position), group.get("lr"), wait=wait) for position, group in groups]

    def _value(self, key: tuple[int, int], rate: Any, *, wait: bool) -> float | None:
        if not isinstance(rate, Tensor) or rate.device.type == "cpu":
            return _number(rate)
        version = -1 if rate.is_inference() else rate._version
        ref, known, value = self._read.get(key, (None, -1, None))
        same = ref is not None and ref() is rate
        if not wait or (same and known == version >= 0) or accelerator.is_capturing():
            return value if same else None
        value = _number(rate)
        self._read[key] = (weakref.ref(rate), version, value)
        return value


def _number(rate: Any) -> float | None:
    try:
        return float(rate)
    except (TypeError, ValueError, RuntimeError):
        return None


def _differ(first: float | None, other: float | None) -> bool:
    if first is None or other is None:
        return False
    return not math.isclose(first, other, rel_tol=ROUNDING) and not (math.isnan(first) and math.isnan(other))
