"""Notices what happens to a module between its backward passes: rollouts, and parts that are replaced."""

from __future__ import annotations

import weakref
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.utils.hooks import RemovableHandle

from lockstep.integrations.attach.process_group import Same

ROLLOUTS = 2
"""So many of all ranks under ``eval()`` tell that rollouts are run so."""


class _Watch:
    """A forward hook that notices passes without gradients, in training and in evaluation mode.

    Copies and pickles of the module don't watch.
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
    """Tells :class:`Phases` of every parameter and part that some module gets, by hooks of the whole process.

    These keep nobody alive: whoever is gone is told no more. They stay until the last one leaves, for a collection of
    garbage may fall into their own call, where hooks can't be taken away.
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
    """Hooks on modules for what the parameters' own hooks can't see.

    A rollout is what runs a module without gradients in training mode: a rank that evaluates (``module.eval()``) does
    that alone, rightly. Where rollouts are run under ``eval()`` every rank does so, and none in training mode: if that
    was so twice, such passes are taken for rollouts.
    """

    def __init__(self, modules: Sequence[nn.Module], known: Container[int], check: bool) -> None:
        self._check, self._watch = check, _Watch()
        self._under_eval: bool | None = None  # whether rollouts run so; not known at first
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
        """1 if, while it isn't known how rollouts are run, this one was run in evaluation mode alone; else 0."""
        return int(self._under_eval is None and self._watch.evaluating and not self._watch.training)

    def told(self, ranks: Sequence[int]) -> None:
        """Learn what all ranks are :meth:`telling`; the next phase begins."""
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
        """Take the hooks away."""
        _registrations.discard(self)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def registered(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """Raise a one-line ``ValueError`` if a parameter that a module gets takes the place of one that is known."""
        if module in self._parts and parameter is not None and id(parameter) not in self._known:
            raise ValueError(
                f"attach: parameter {name} of {type(module).__name__} is replaced after attach, which doesn't know the "
                "new one: detach(), replace it, and attach again, on every rank"
            )

    def joined(self, module: nn.Module, name: str, part: nn.Module | None) -> None:
        """The same, of the parameters of a part."""
        if module in self._parts and part is not None:
            for parameter_name, parameter in part.named_parameters():
                self.registered(module, f"{name}.{parameter_name}", parameter)
