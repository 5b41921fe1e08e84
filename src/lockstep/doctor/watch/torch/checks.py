"""Records what a rank holds at the steps that are compared: parameters, gradients, moments, rates, statistics."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Container, Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.doctor.watch.schedule import Schedule
from lockstep.doctor.watch.side_store import OPTIMIZED, SideWriter
from lockstep.doctor.watch.torch.flat_parts import holds_vectors, tensors_of
from lockstep.doctor.watch.torch.inspection import Inventory, look_around
from lockstep.doctor.watch.torch.optimizer_watch import (
    OptimizerWatch,
    moments_of,
    parameters_of,
    place_of,
    settings_of,
    sizes_of,
)
from lockstep.doctor.watch.torch.own_gradients import OwnGradients
from lockstep.doctor.watch.torch.running_statistics import numbers_of
from lockstep.doctor.watch.torch.values import (
    DENSE_NUMBERS,
    SPARSE_NUMBERS,
    Taken,
    digest,
    local,
    readable,
    shards_of,
    take,
    take_part,
)

LIBRARIES = ("stable_baselines3",)
"""Libraries that explain some findings if a model of theirs is trained."""
Parts = dict[str, dict[str, Any]]


FEW_LOOKS, MANY_LOOKS = 4, 16
"""Looks at all objects, which take up to a second each, that any new optimiser is worth, and that an unknown one is."""


class StepRecorder:
    """Writes what one rank holds at checked steps.

    Attributes:
        inventory: the modules and normalisers that were found at the last look.
        own_gradients: samples gradients before anything reduces them.
    """

    def __init__(self, writer: SideWriter, schedule: Schedule) -> None:
        self._writer, self._schedule = writer, schedule
        self.own_gradients = OwnGradients()
        self.inventory = Inventory()
        self._looks = 0
        self._numbers: MutableMapping[Any, int] = WeakIdKeyDictionary()
        self._next = itertools.count()
        self._watches: list[OptimizerWatch] = []
        self._sharing: set[int] = set()  # optimisers that were seen to leave gradients of other parameters
        self._whole: tuple[Callable[[], Any], set[int], dict[str, Taken]] = (lambda: None), set(), {}

    def first_seen(self, watch: OptimizerWatch) -> None:
        """Looks for models and normalisers before an optimiser's first step, and writes what the optimiser holds."""
        seen: dict[str, Any] = {}
        if self._worth_a_look(watch):
            self._looks += 1
            self.inventory = look_around(self.inventory)
            seen = {"made": [sizes_of(each) for each in self.inventory.optimizers], "untrained": self._untrained()}
            if self.inventory.unplaced:
                gc.collect()  # unreachable normalisers would be compared, too
        optimizer, inventory = watch.optimizer, self.inventory
        if inventory.by_parts and optimizer is not None and holds_vectors(optimizer, inventory.owners):
            watch.part = frozenset(map(id, tensors_of(optimizer)))
            watch.sharded = watch.part & inventory.sharded
        parameters = parameters_of(watch)
        bases = {base for p in parameters.values() for base in inventory.owners.get(id(p), ())}
        held = {id(p): name for name, p in inventory.parameters()}
        libraries = [name for name in LIBRARIES if any(base.startswith(f"{name}.") for base in bases)]
        facts = {
            "wrappers": sorted(inventory.wrappers),
            "libraries": libraries,
            "names": self.names(watch),
            "tensors": {place: self._number(p) for place, p in parameters.items()},
            "wrapped": [place for place, p in parameters.items() if id(p) in inventory.wrapped],
            "by_parts": bool(watch.sharded),
            "sizes": [tensor.numel() for tensor in parameters.values()],
            "settings": [settings_of(group) for group in watch.groups],
            "state": sum(isinstance(x, Tensor) for p in watch.state for x in moments_of(watch, p).values()),
            "unknown": sorted(inventory.unknown),
            "unplaced": sorted(name for name in inventory.unplaced if inventory.normalizers[name]() is not None),
        }
        self._writer.add({"kind": "optimizer", "optimizer": watch.index} | facts | seen)
        self._watches.append(watch)
        for each in self._watches if seen else ():  # a module may be part of another one by now
            where = {place: held[id(p)] for place, p in each.tensors().items() if id(p) in held}
            self._writer.add({"kind": "held", "optimizer": each.index, "held": where})

    def _number(self, tensor: Tensor) -> int:
        """Returns a tensor's number, the same as long as it lives."""
        if tensor not in self._numbers:
            self._numbers[tensor] = next(self._next)
        return self._numbers[tensor]

    def _untrained(self) -> list[int]:
        """Returns numbers of elements of the parameters in modules that no optimiser updates."""
        roots = [root for _, _, ref in self.inventory.modules if (root := ref()) is not None]
        parameters = {id(p): p for root in roots for p in root.parameters() if id(p) not in self.inventory.optimized}
        return sorted(p.numel() for p in parameters.values())

    def _worth_a_look(self, watch: OptimizerWatch) -> bool:
        """Returns whether to look for models again: rarely if a script has an optimiser for each parameter or plan."""
        if self._looks < FEW_LOOKS:
            return True
        known = watch.optimizer in self.inventory.optimizers
        return not known and (self._looks < MANY_LOOKS or watch.index & (watch.index - 1) == 0)

    def listen(self, watches: Iterable[OptimizerWatch]) -> None:
        """Samples these optimisers' gradients, and no others', as ``backward`` leaves them.

        Samples none if a model is wrapped in DDP or FSDP, which reduce within ``backward``.
        """
        found = [] if self.inventory.wrappers else [p for watch in watches for p in parameters_of(watch).values()]
        self.own_gradients.listen(found)

    def note_rates(self, watch: OptimizerWatch) -> None:
        """Writes learning rates before a step if they have changed.

        Rates that are tensors are read only at checked steps, because reading them waits for the GPU. A rate that is no
        number, because the optimiser computes its own, is written as None.
        """
        rates = [group.get("lr", 0.0) for group in watch.groups]
        if any(isinstance(rate, Tensor) for rate in rates):
            if not self._schedule.includes(watch.steps + 1):
                return
        elif rates == watch.rates:
            return
        rates = [_rate(rate) for rate in rates]
        if rates != watch.rates:
            self._writer.add({"kind": "rates", "optimizer": watch.index, "step": watch.steps, "rates": rates})
            watch.rates = rates

    def before(self, watch: OptimizerWatch, inputs: str, source: dict[str, Any], gathered: dict[str, Taken]) -> None:
        """Writes gradients before a checked step; before the first step, also parameters and moments.

        Args:
            watch: the optimiser that is about to step.
            inputs: words that stand for the data of forward passes; empty if none was seen.
            source: a word for what the rollout had collected, and hashes of rows of it that these passes were given.
            gathered: samples of a sharded model's parameters from its last forward pass.
        """
        parameters = parameters_of(watch)
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        parts: Parts = {"gradients": {n: g.coalesce().values() if g.is_sparse else g for n, g in gradients.items()}}
        parts["gathered"] = gathered | self._whole_before(watch)
        parts["whole"] = self._shared(watch)
        parts["own"], parts["stepped"] = self.own_gradients.beside(parameters)
        if watch.steps == 0:
            parts |= self._state(watch)
        fixed = [place for place, p in parameters.items() if not p.requires_grad]
        facts: dict[str, Any] = {"inputs": inputs, "through": sorted(watch.through), "fixed": fixed} | source
        facts["hooked"] = self.own_gradients.hooked(parameters.values())
        self._write(watch, watch.steps + 1, "before", parts, facts)

    def after(self, watch: OptimizerWatch, used: Container[int], stepped: Container[int]) -> None:
        """Writes all state after a checked step.

        Args:
            watch: the optimiser that has made the step.
            used: ids of modules that had a forward pass so far.
            stepped: ids of all parameters of optimisers that have made a step so far.
        """
        buffers = {n: b for n, b in self.inventory.buffers(used) if b.numel()}
        normalizers: dict[str, Tensor] = {}
        for name, find in self.inventory.normalizers.items():
            thing = find()
            if thing is not None:
                normalizers |= {f"{name}.{key}": value for key, value in numbers_of(thing).items()}
        parts = self._state(watch) | {
            "frozen": dict(self.inventory.frozen(used)),
            "unstepped": dict(self.inventory.unstepped(stepped)),
            "buffers": buffers,
            "normalizers": normalizers,
        }
        sent = sorted(name for name, buffer in buffers.items() if id(buffer) in self.inventory.broadcast)
        seen = dict(self.inventory.parameters(used)) if parts["unstepped"] else {}
        unused = [name for name in parts["unstepped"] if name not in seen]
        self._write(watch, watch.steps, "after", parts, {"broadcast": sent, "unused": unused})

    def last(self, watch: OptimizerWatch) -> None:
        """Writes an optimiser's state at the script's end, so that the steps since the last checked one count."""
        self._write(watch, watch.steps, "end", self._state(watch), {})

    def models(self, phase: int) -> None:
        """Writes digests of every model's parameters when a phase (from 1) of passes without gradients begins."""
        if not self.inventory.modules:  # this rank has taken no step so far
            self.inventory = look_around()
        whole = [(name, p) for name, p in self.inventory.parameters() if readable(p) and not shards_of(p)]
        with torch.no_grad():
            digests = {name: digest(local(p)) for name, p in whole if id(p) not in self.inventory.sharded}
        self._writer.add({"kind": "models", "phase": phase, "digests": digests})

    def names(self, watch: OptimizerWatch) -> dict[str, str]:
        """Returns the names that an optimiser's parameters have in their modules, by place."""
        names = self.inventory.names
        return {place: names[id(p)] for place, p in parameters_of(watch).items() if id(p) in names}

    def _whole_before(self, watch: OptimizerWatch) -> dict[str, Taken]:
        """Samples the parameters that are updated by parts, before an optimiser steps its first group.

        The following groups get the same samples, because ranks exchange their parts only after the last group.
        """
        optimizer = watch.optimizer
        if watch.part is None or optimizer is None:
            return {}
        whose, given, taken = self._whole
        if whose() is not optimizer or watch.index in given:
            with torch.no_grad():
                given, taken = set(), {n: take(p) for n, p in self.inventory.updated_by_parts() if readable(p)}
        self._whole = weakref.ref(optimizer), {*given, watch.index}, taken
        return taken

    def _shared(self, watch: OptimizerWatch) -> dict[str, Tensor]:
        """Returns all models' parameters if some that no optimiser updates had gradients at a step of this one.

        Other ranks may update these and send them (ZeRO by hand). Parameters without a place are left out.
        """
        found = {n: p for n, p in self.inventory.parameters() if p.requires_grad}
        if any(p.grad is not None for p in found.values() if id(p) not in self.inventory.optimized):
            self._sharing.add(watch.index)
        return found if watch.index in self._sharing else {}

    def _state(self, watch: OptimizerWatch) -> Parts:
        parameters = parameters_of(watch)
        moments = {
            f"{name}.{key}": value
            for name, parameter in parameters.items()
            for key, value in moments_of(watch, parameter).items()
            if isinstance(value, Tensor)
        }
        return {"parameters": parameters, "moments": moments}

    def _write(self, watch: OptimizerWatch, step: int, when: str, parts: Parts, facts: dict[str, Any]) -> None:
        most = DENSE_NUMBERS if step <= self._schedule.first else SPARSE_NUMBERS
        event: dict[str, Any] = {"kind": "check", "optimizer": watch.index, "step": step, "when": when} | facts
        event["parts"], arrays = {}, []
        parameters = parameters_of(watch)
        own = {place for place, p in parameters.items() if id(p) in self.inventory.sharded | watch.sharded}
        with torch.no_grad():
            for name, tensors in parts.items():
                sharded = {key for key in tensors if name in OPTIMIZED and place_of(key) in own}
                if name == "moments":  # smaller than their parameter: sharded
                    sharded |= {k for k, x in tensors.items() if 1 < x.numel() < parameters[place_of(k)].numel()}
                entries, numbers = take_part(tensors, most, sharded)
                event["parts"][name] = part = {"tensors": entries}
                arrays.append((part, numbers))
        self._writer.add(event, arrays)


def _rate(rate: Any) -> float | None:
    try:
        return float(rate)
    except (TypeError, ValueError, RuntimeError):
        return None
