"""Records the data that forward passes were given, and the parameters that they used."""

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
    """One call of one module.

    Attributes:
        digests: of the data in its arguments.
        parameters: ids of all parameters of the module.
        made: whether arguments had tensors that require gradients, so other parameters had made them.
        ddp: whether it is DDP's own forward.
    """

    digests: list[str]
    parameters: frozenset[int]
    made: bool
    ddp: bool


class ForwardPasses:
    """Records forward passes with gradients before compared steps; at most the newest :data:`MOST_PASSES`."""

    def __init__(self) -> None:
        self._passes: deque[Pass] = deque(maxlen=MOST_PASSES)
        self._count = 0
        self._parameters: dict[int, tuple[weakref.ref[nn.Module], frozenset[int]]] = {}

    def note(self, module: nn.Module, args: Any) -> None:
        """Records a call of a module."""
        with torch.no_grad():
            digests = input_digests(args)
        ddp = is_ddp(type(getattr(module, "_orig_mod", module)))  # compiled or not
        made = any(tensor.requires_grad for tensor in tensors_in(args))
        self._passes.append(Pass(digests, self._parameters_of(module), made, ddp))
        self._count += 1

    def before_step(self, watch: OptimizerWatch) -> str:
        """Returns a word for the data of each pass behind an optimiser's coming step, in order; empty if none was seen.

        The passes are those through modules with parameters of this optimiser. All passes count if there are none (it
        updates parameters outside modules, or parameters were replaced), or if an outermost one of them was given what
        other modules had computed from the data.
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
        """Forgets all passes, because no optimiser's next step is compared."""
        self._passes.clear()
        self._parameters.clear()

    def _parameters_of(self, module: nn.Module) -> frozenset[int]:
        known = self._parameters.get(id(module))
        if known is None or known[0]() is not module:
            ids = frozenset(id(parameter) for parameter in module.parameters())
            known = self._parameters[id(module)] = (weakref.ref(module), ids)
        return known[1]


def _outermost(passes: Sequence[Pass]) -> list[Pass]:
    """Returns the passes through modules whose parameters aren't a proper subset of another pass's."""
    kinds = {each.parameters for each in passes}
    outer = {kind for kind in kinds if not any(kind < other for other in kinds)}
    return [each for each in passes if each.parameters in outer]


def _joined(digests: list[str]) -> str:
    return hashlib.blake2b("".join(digests).encode(), digest_size=8).hexdigest()
