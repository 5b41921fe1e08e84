"""Remembers the data that forward passes were given, and whose parameters they went through."""

from __future__ import annotations

import hashlib
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.doctor.watch.side_store import BETWEEN_WORDS
from lockstep.doctor.watch.torch.checks import OptimizerWatch
from lockstep.doctor.watch.torch.inspection import is_ddp
from lockstep.doctor.watch.torch.values import input_digests, tensors_in

MOST_PASSES = 4096


class Pass(NamedTuple):
    """One call of one module: its data, its parameters, and what else went in.

    ``digests`` are of data, ``parameters`` ids of all that the module holds; ``made`` tells whether tensors went in
    that parameters had made, and ``ddp`` whether it is DDP's own forward.
    """

    digests: list[str]
    parameters: frozenset[int]
    made: bool
    ddp: bool


class ForwardPasses:
    """Forward passes with gradients before the steps that are compared, the newest ones of very many."""

    def __init__(self) -> None:
        self._passes: deque[Pass] = deque(maxlen=MOST_PASSES)
        self._count = 0
        self._parameters: dict[int, tuple[weakref.ref[nn.Module], frozenset[int]]] = {}

    def note(self, module: nn.Module, args: Any) -> None:
        """Remember a call of a module."""
        with torch.no_grad():
            digests = input_digests(args)
        ddp = is_ddp(type(getattr(module, "_orig_mod", module)))  # compiled or not
        made = any(tensor.requires_grad for tensor in tensors_in(args))
        self._passes.append(Pass(digests, self._parameters_of(module), made, ddp))
        self._count += 1

    def before_step(self, watch: OptimizerWatch) -> str:
        """Words of the data behind an optimiser's coming step, one a pass, in order; empty if none was seen.

        They are those of the passes through modules with parameters of this optimiser, and those of all passes where
        there are none of these (it updates parameters outside of modules, or others took their place), and where an
        outermost one of them was given what other modules had made of their data.
        """
        fresh = min(self._count - watch.seen_passes, len(self._passes))
        new = list(self._passes)[len(self._passes) - fresh :]
        watch.seen_passes = self._count
        mine = {id(parameter) for group in watch.groups for parameter in group["params"]}
        own = [each for each in new if not each.parameters.isdisjoint(mine)]
        if any(each.ddp for each in own or new):
            watch.through.add("ddp")
        alone = own and not any(each.made for each in _outermost(own))
        return BETWEEN_WORDS.join(_joined(each.digests) for each in (own if alone else new) if each.digests)

    def clear(self) -> None:
        """Forget them, as no optimiser's next step is a compared one."""
        self._passes.clear()
        self._parameters.clear()

    def _parameters_of(self, module: nn.Module) -> frozenset[int]:
        known = self._parameters.get(id(module))
        if known is None or known[0]() is not module:
            ids = frozenset(id(parameter) for parameter in module.parameters())
            known = self._parameters[id(module)] = (weakref.ref(module), ids)
        return known[1]


def _outermost(passes: Sequence[Pass]) -> list[Pass]:
    """Passes through modules that are no parts of others among them."""
    kinds = {each.parameters for each in passes}
    outer = {kind for kind in kinds if not any(kind < other for other in kinds)}
    return [each for each in passes if each.parameters in outer]


def _joined(digests: list[str]) -> str:
    return hashlib.blake2b("".join(digests).encode(), digest_size=8).hexdigest()
