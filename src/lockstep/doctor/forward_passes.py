"""The data that forward passes were given, and whose parameters they went through."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.doctor.inspection import is_ddp
from lockstep.doctor.torch_checks import OptimizerWatch
from lockstep.doctor.torch_values import input_digests

MOST_PASSES = 4096


class Pass(NamedTuple):
    """One call of one module: digests of its data, ids of its parameters, and whether it is DDP's own forward."""

    digests: list[str]
    parameters: frozenset[int]
    ddp: bool


class ForwardPasses:
    """Forward passes with gradients before the steps that are compared."""

    def __init__(self) -> None:
        self._passes: list[Pass] = []
        self._parameters: dict[int, tuple[nn.Module, frozenset[int]]] = {}

    def note(self, module: nn.Module, args: Any) -> None:
        """Remember a call of a module; of very many before one step only the first ones."""
        if len(self._passes) >= MOST_PASSES:
            return
        with torch.no_grad():
            digests = input_digests(args)
        ddp = is_ddp(type(getattr(module, "_orig_mod", module)))  # compiled or not
        if digests or ddp:
            self._passes.append(Pass(digests, self._parameters_of(module), ddp))

    def before_step(self, watch: OptimizerWatch) -> str:
        """One word for the data behind an optimiser's coming step; none if no forward pass was seen.

        It is made of the passes through modules with parameters of this optimiser. If there are none (it updates
        parameters outside of modules, or another's place took theirs), of all.
        """
        new = self._passes[watch.seen_passes :]
        watch.seen_passes = len(self._passes)
        mine = {id(parameter) for group in watch.optimizer.param_groups for parameter in group["params"]}
        own = [each for each in new if not each.parameters.isdisjoint(mine)]
        if any(each.ddp for each in own or new):
            watch.through.add("ddp")
        return _joined([digest for each in own or new for digest in each.digests])

    def clear(self, watches: Sequence[OptimizerWatch]) -> None:
        """Forget them, as no optimiser's next step is a compared one."""
        self._passes.clear()
        self._parameters.clear()
        for watch in watches:
            watch.seen_passes = 0

    def _parameters_of(self, module: nn.Module) -> frozenset[int]:
        known = self._parameters.get(id(module))
        if known is None:  # kept with the module, so that its id stays its own
            ids = frozenset(id(parameter) for parameter in module.parameters())
            known = self._parameters[id(module)] = (module, ids)
        return known[1]


def _joined(digests: list[str]) -> str:
    return hashlib.blake2b("".join(digests).encode(), digest_size=8).hexdigest() if digests else ""
