"""Detects what happens to a module between its backward passes: rollouts, and replaced parameters."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.utils.hooks import RemovableHandle

from lockstep.integrations.attach.process_group import Same

ROLLOUTS = 2
"""After this many phases that all ranks spent under ``eval()``, passes under ``eval()`` count as rollouts."""


class _Watch:
    """A forward pre-hook that records passes without gradients, in training mode and in evaluation mode.

    Copies and pickles of the module get a hook that nobody reads.
    """

    def __init__(self) -> None:
        self.training = self.evaluating = False

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and not torch.is_grad_enabled():
            if module.training:
                self.training = True
            else:
                self.evaluating = True

    def __reduce__(self) -> tuple[type[_Watch], tuple[()]]:
        return (_Watch, ())


class _Registrations:
    """Tells every :class:`Phases` when any module gets a parameter or a submodule, through process-wide hooks.

    The hooks hold weak references only. :meth:`discard` removes them, not the garbage collector: it may run during a
    hook's own call, when hooks can't be removed.
    """

    def __init__(self) -> None:
        self._told: weakref.WeakSet[Phases] = weakref.WeakSet()
        self._handles: list[RemovableHandle] = []

    def add(self, phases: Phases) -> None:
        self._told.add(phases)
        if not self._handles:
            self._handles.append(module_hooks.register_module_parameter_registration_hook(self._registered))
            self._handles.append(module_hooks.register_module_module_registration_hook(self._joined))

    def discard(self, phases: Phases) -> None:
        self._told.discard(phases)
        if not self._told:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def _registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        for phases in self._told:
            phases.registered(module, name, parameter)

    def _joined(self, module: nn.Module, name: str, part: nn.Module | None) -> None:
        for phases in self._told:
            phases.joined(module, name, part)


_registrations = _Registrations()


class Phases:
    """Hooks modules to see rollouts and replaced parameters, which the parameters' own hooks can't see.

    A forward pass without gradients counts as a rollout if the module is in training mode; under ``module.eval()`` it
    is an evaluation, which one rank may run alone. But if all ranks ran such passes only under ``eval()``, in
    :data:`ROLLOUTS` phases, then passes under ``eval()`` count as rollouts from there on.
    """

    def __init__(self, modules: Sequence[nn.Module], check: bool) -> None:
        self._check, self._watch = check, _Watch()
        self._under_eval: bool | None = None  # whether rollouts run under eval(); None: not known yet
        self._agreed = 0
        self._handles: list[RemovableHandle] = []
        self._parts = {part for module in modules for part in module.modules()}
        self._known = {id(p) for module in modules for p in module.parameters()}
        if check:
            watched = {
                m for module in modules for m in (module, *module.children()) if any(True for _ in m.parameters())
            }
            self._handles += [m.register_forward_pre_hook(self._watch) for m in watched]
        _registrations.add(self)

    def telling(self) -> int:
        """Returns 1 if the mode of rollouts isn't known yet and this phase ran passes only under ``eval()``, else 0."""
        return int(self._under_eval is None and self._watch.evaluating and not self._watch.training)

    def told(self, ranks: Sequence[int]) -> None:
        """Takes every rank's :meth:`telling`, in rank order, and begins the next phase."""
        if self._under_eval is None:
            self._agreed += all(ranks)
            if self._watch.training or any(ranks) != all(ranks):
                self._under_eval = False
            elif self._agreed == ROLLOUTS:
                self._under_eval = True
        self._watch.training = self._watch.evaluating = False

    def said(self) -> list[Same]:
        """Returns what ranks must agree on at the end of a backward pass."""
        if not self._check:
            return []
        seen = self._watch.training or (self._watch.evaluating and bool(self._under_eval))
        way = "" if self._under_eval else "do so under module.eval(), or "
        advice = (
            "one of them has stopped its epochs early (decide together, with lockstep.stop_if), or runs the module "
            f"without gradients alone ({way}attach with check_phases=False)"
        )
        return [Same("had begun {} rollouts since its last backward pass", int(seen), advice, parted=False)]

    def remove(self) -> None:
        """Removes the hooks."""
        _registrations.discard(self)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """Raises a one-line ``ValueError`` if an attached module gets a parameter that ``attach`` didn't see."""
        if module in self._parts and parameter is not None and id(parameter) not in self._known:
            raise ValueError(
                f"attach: parameter {name} of {type(module).__name__} is replaced after attach, which doesn't know the "
                "new one: detach(), replace it, and attach again, on every rank"
            )

    def joined(self, module: nn.Module, name: str, part: nn.Module | None) -> None:
        """Raises like :meth:`registered` for the parameters of a submodule that an attached module gets."""
        if module in self._parts and part is not None:
            for parameter_name, parameter in part.named_parameters():
                self.registered(module, f"{name}.{parameter_name}", parameter)
