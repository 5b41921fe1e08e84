"""Accounts for what backward passes have added to gradients since these were last the same on every rank.

Only that part is reduced: what a gradient held before is the same everywhere, be it zeros, or the reduced gradient of
an earlier pass, clipped or not.
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
    """A gradient that backward passes have added to, and its version when the last of them was done.

    ``base`` is a copy of what it held before, None if there was none.
    """

    base: Tensor | None
    grad: Tensor
    version: int


class Increments:
    """Hooks on parameters that keep account of what is added to their gradients, and isn't reduced yet: ``added``.

    They call back whenever something was added to one, within the backward pass.

    Parameters keep this alive, and whom it calls back, by one of their hooks. The other can't: PyTorch hides it from
    the garbage collector, which then would never free a module that leads back to itself.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], names: Sequence[str], added: Callable[[], None]) -> None:
        self.parameters, self.names = parameters, names
        self.added: dict[int, _Added] = {}
        self._bases: dict[int, Tensor] = {}
        self._in_this_pass: set[int] = set()
        self._notify = added
        self._handles: list[RemovableHandle] = []
        for index, parameter in enumerate(parameters):
            self._handles.append(parameter.register_hook(partial(self._before, index)))
            self._handles.append(
                parameter.register_post_accumulate_grad_hook(partial(_after, weakref.ref(self), index))
            )

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, index: int, _: Tensor) -> None:
        """The gradient is about to be added to (or only computed, by ``autograd.grad``)."""
        grad = self.parameters[index].grad
        if grad is None:
            self.added.pop(index, None)
            self._bases.pop(index, None)
        elif index not in self.added or self._zeroed(index, grad):
            self.added.pop(index, None)
            self._bases[index] = grad.detach().clone()

    def _zeroed(self, index: int, grad: Tensor) -> bool:
        """Whether the script has zeroed, in place, a gradient that isn't reduced yet."""
        known = self.added[index]
        if known.base is None or (grad is known.grad and grad._version == known.version):
            return False
        if grad.any():
            raise UnreducedGradientError(
                f"the gradient of {self.names[index]} was changed between a backward pass under no_sync() and the one "
                "that would have reduced it: change gradients after they are reduced"
            )
        return True

    def after(self, index: int, parameter: Tensor) -> None:
        """Something was added to a gradient."""
        grad = parameter.grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise ValueError(f"attach: the gradient of {self.names[index]} is sparse; make the layer with sparse=False")
        known = self.added.get(index)
        base = known.base if known else self._bases.pop(index, None)
        self.added[index] = _Added(base, grad, grad._version)
        self._in_this_pass.add(index)
        self._notify()

    def outstanding(self, index: int) -> bool:
        """Whether a gradient that exists holds something that isn't reduced."""
        return index in self.added and self.parameters[index].grad is not None

    def pass_ends(self) -> None:
        """Forget what the script has zeroed since it was added.

        Raises:
            UnreducedGradientError: a gradient was taken away within the pass.
        """
        for index in [index for index in self.added if self.parameters[index].grad is None]:
            if index in self._in_this_pass:
                raise UnreducedGradientError(
                    f"the gradient of {self.names[index]} was taken away before the backward pass ended (by an "
                    "optimiser that steps inside of it?): step when it is done"
                )
            del self.added[index]
        self._in_this_pass.clear()

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
        """Put reduced increments, by index of the parameter, in place of what this rank added, and forget that."""
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
        if targets:  # else a pass within this pass has brought everything
            torch._foreach_copy_(targets, values)  # pyright: ignore[reportPrivateImportUsage]
        self.added.clear()


def _after(increments: weakref.ref[Increments], index: int, parameter: Tensor) -> None:
    known = increments()
    if known is not None:
        known.after(index, parameter)
