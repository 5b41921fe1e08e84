"""Keeps a sample of this rank's own gradients, as ``backward`` left them, before the script reduces them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lockstep.doctor.watch.torch.values import sampled

NUMBERS = 64
"""Kept of each gradient: enough to tell a sum over ranks from a mean."""


class OwnGradients:
    """Hears of every gradient that is accumulated, while it listens."""

    def __init__(self) -> None:
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._kept: dict[int, Tensor] = {}

    def listen(self, parameters: Iterable[Tensor]) -> None:
        """Keep the gradients of some parameters from now on."""
        for parameter in parameters:
            if id(parameter) not in self._hooks and parameter.requires_grad and parameter.is_leaf:
                self._hooks[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._accumulated)

    def stop(self) -> None:
        """Take all hooks out, and forget."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._kept.clear()

    def beside(self, parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Of parameters by places: what ``backward`` left since the last step, and what their gradients are now."""
        kept = {place: self._kept.pop(id(p)) for place, p in parameters.items() if id(p) in self._kept}
        now = {place: gradient for place in kept if (gradient := parameters[place].grad) is not None}
        return kept, {place: sampled(gradient.detach(), NUMBERS) for place, gradient in now.items() if _plain(gradient)}

    def _accumulated(self, parameter: Tensor) -> None:
        if torch.compiler.is_compiling() or not _plain(parameter.grad):
            return
        assert parameter.grad is not None
        self._kept[id(parameter)] = sampled(parameter.grad.detach(), NUMBERS).clone()


def _plain(gradient: Tensor | None) -> bool:
    """Whether a gradient is there, dense and wholly this rank's."""
    return gradient is not None and gradient.layout == torch.strided and not hasattr(gradient, "placements")
