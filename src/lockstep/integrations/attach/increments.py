"""Tracks what backward passes have added to gradients since these were last the same on every rank.

Only that part is reduced. What a gradient held before is already the same on every rank: zeros, or the reduced gradient
of an earlier pass, clipped or not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.core.errors import UnreducedGradientError


class _Added(NamedTuple):
    """A gradient that backward passes have added to, and its version after the last of them.

    ``base`` is a copy of the gradient before them; None if there was none.
    """

    base: Tensor | None
    grad: Tensor
    version: int


def current_pass() -> int:
    """Returns the number of the backward pass whose hooks run in this thread; a nested pass has its own."""
    return torch._C._current_graph_task_id()


class Increments:
    """Hooks parameters and records in ``added`` what was added to their gradients and isn't reduced yet.

    The callback ``added`` of the constructor runs, within the backward pass, whenever something was added.

    The parameters' first hook keeps this object and the callback alive. The second holds only a weak reference: PyTorch
    hides it from the garbage collector, so a strong one would leak every module that takes part in a cycle.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], names: Sequence[str], added: Callable[[], None]) -> None:
        self.parameters, self.names = parameters, names
        self.added: dict[int, _Added] = {}
        self._bases: dict[int, Tensor] = {}
        self._passes: dict[int, int] = {}  # by parameter, the pass that added last
        self._notify = added
        self._handles: list[RemovableHandle] = []
        for index, parameter in enumerate(parameters):
            self._handles.append(parameter.register_hook(partial(self._before, index)))
            self._handles.append(
                parameter.register_post_accumulate_grad_hook(partial(_after, weakref.ref(self), index))
            )

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, index: int, _: Tensor) -> None:
        """Copies the gradient before autograd adds to it (or only computes one, for ``autograd.grad``)."""
        grad = self.parameters[index].grad
        if grad is None:
            self.added.pop(index, None)
            self._bases.pop(index, None)
        elif index not in self.added or self._zeroed(index, grad):
            self.added.pop(index, None)
            self._bases[index] = grad.detach().clone()

    def _zeroed(self, index: int, grad: Tensor) -> bool:
        """Returns whether the script has zeroed, in place, a gradient that isn't reduced yet.

        Raises:
            UnreducedGradientError: the gradient was changed in another way; clipping each rank's part, for instance,
                isn't clipping the mean.
        """
        known = self.added[index]
        if grad is known.grad and (grad._version == known.version or (known.base is None and _is_part(grad))):
            return False
        if grad.any():
            raise UnreducedGradientError(
                f"the gradient of {self.names[index]} was changed before it was reduced, by the script, a hook, or DDP "
                "outside of its own no_sync(): change gradients after the backward pass that reduces them"
            )
        return True

    def after(self, index: int, parameter: Tensor) -> None:
        """Records that autograd added to a gradient, and calls back; raises ``ValueError`` if it is sparse."""
        grad = parameter.grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise ValueError(f"attach: the gradient of {self.names[index]} is sparse; make the layer with sparse=False")
        known = self.added.get(index)
        base = known.base if known else self._bases.pop(index, None)
        self.added[index] = _Added(base, grad, grad._version)
        self._passes[index] = current_pass()
        self._notify()

    def outstanding(self, index: int) -> bool:
        """Returns whether a parameter's gradient exists and holds something that isn't reduced."""
        return index in self.added and self.parameters[index].grad is not None

    def pass_ends(self, number: int) -> None:
        """Ends a backward pass: forgets additions to gradients that the script has since set to None.

        What a pass that failed has added is no mistake of this one.

        Raises:
            UnreducedGradientError: a gradient was set to None within the pass.
        """
        for index in [index for index in self.added if self.parameters[index].grad is None]:
            if self._passes.get(index) == number:
                raise UnreducedGradientError(
                    f"the gradient of {self.names[index]} was taken away before the backward pass ended (by an "
                    "optimiser that steps inside of it?): step when it is done"
                )
            del self.added[index]
        self._passes = {index: other for index, other in self._passes.items() if other != number}

    def increment(self, index: int) -> Tensor:
        """Returns what was added to a gradient; zeros if nothing was."""
        parameter, known = self.parameters[index], self.added.get(index)
        if known is None or parameter.grad is None:
            return torch.zeros_like(parameter)
        if self._zeroed(index, parameter.grad):
            del self.added[index]
            return torch.zeros_like(parameter)
        grad = parameter.grad.detach()
        return grad if known.base is None else grad - known.base

    @torch.no_grad()
    def settle(self, reduced: dict[int, Tensor]) -> None:
        """Replaces what this rank added to each gradient by ``reduced[index]``, and clears ``added``."""
        targets, values = [], []
        for index, value in reduced.items():
            parameter, known = self.parameters[index], self.added.get(index)
            base = None
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            else:
                base = known.base if known else parameter.grad.detach().clone()
            targets.append(parameter.grad.detach())
            values.append(value if base is None else value.to(base.dtype) + base)
        if targets:  # else a backward pass nested in this one has reduced everything
            torch._foreach_copy_(targets, values)  # pyright: ignore[reportPrivateImportUsage]
        self.added.clear()


def _is_part(grad: Tensor) -> bool:
    """Returns whether a gradient is a part of a larger tensor, as of parameters that the model concatenates.

    Its version counts the changes of all parts.
    """
    return grad.untyped_storage().nbytes() > grad.numel() * grad.element_size()


def _after(increments: weakref.ref[Increments], index: int, parameter: Tensor) -> None:
    known = increments()
    if known is not None:
        known.after(index, parameter)
