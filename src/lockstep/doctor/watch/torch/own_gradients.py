"""Keeps a sample of this rank's own gradients, as ``backward`` left them, before the script reduces them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lockstep.doctor.watch.torch.values import capturing, readable, sampled

NUMBERS = 64
"""How many numbers are kept of each gradient: enough to tell a sum over ranks from a mean."""


class OwnGradients:
    """Samples the gradients that autograd accumulates in some parameters; ``seconds`` is the time spent on it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._kept: dict[int, Tensor] = {}

    def listen(self, parameters: Iterable[Tensor]) -> None:
        """Samples the gradients of these parameters from now on, and of no others."""
        wanted = {id(p): p for p in parameters if p.requires_grad and p.is_leaf}
        for gone in self._hooks.keys() - wanted.keys():
            self._hooks.pop(gone).remove()
            self._kept.pop(gone, None)
        for number in wanted.keys() - self._hooks.keys():
            self._hooks[number] = wanted[number].register_post_accumulate_grad_hook(self._accumulated)

    def beside(self, parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns samples by place: what ``backward`` left since the last call, and the gradients as they are now."""
        kept = {place: self._kept.pop(id(p)) for place, p in parameters.items() if id(p) in self._kept}
        now = {place: gradient for place in kept if (gradient := parameters[place].grad) is not None}
        return kept, {place: sampled(gradient.detach(), NUMBERS) for place, gradient in now.items() if _plain(gradient)}

    def hooked(self, parameters: Iterable[Tensor]) -> bool:
        """Returns whether the script has hooks of its own on these parameters, which may reduce within ``backward``."""
        for p in parameters:
            ours = id(p) in self._hooks
            if p._backward_hooks or len(p._post_accumulate_grad_hooks or ()) > ours:  # pyright: ignore[reportAttributeAccessIssue]
                return True
        return False

    def _accumulated(self, parameter: Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        began = time.perf_counter()
        if _plain(parameter.grad) and not capturing():
            assert parameter.grad is not None
            with contextlib.suppress(Exception):  # the script's backward pass must go on
                self._kept[id(parameter)] = sampled(parameter.grad.detach(), NUMBERS).clone()
        self.seconds += time.perf_counter() - began


def _plain(gradient: Tensor | None) -> bool:
    """Returns whether a gradient exists, is dense and isn't a DTensor."""
    return gradient is not None and readable(gradient) and not hasattr(gradient, "placements")
