"""Writes an optimiser's state at the steps that are compared: parameters, gradients, moments, rates, statistics."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.doctor.watch.boundaries import Boundaries
from lockstep.doctor.watch.schedule import Schedule
from lockstep.doctor.watch.side_store import OPTIMIZED, SideWriter
from lockstep.doctor.watch.torch.flat_parts import holds_vectors, tensors_of
from lockstep.doctor.watch.torch.inspection import Inventory, look_around, numbers_of
from lockstep.doctor.watch.torch.own_gradients import OwnGradients
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
"""Libraries that explain some findings, if it is their models that are trained."""
Parts = dict[str, dict[str, Any]]


class OptimizerWatch:
    """One optimiser of the script, or what it updates at once of a rank's parts of a model.

    Attributes:
        index: in the order of first steps.
        boundaries: numbers of steps taken when a phase of forward passes without gradients began.
        rates: learning rates of all groups as last seen.
        seen_passes: how many forward passes belong to earlier steps.
        through: wrappers through whose ``forward`` its gradients were made so far.
        last_step: steps that all optimisers together had taken when it took its last one.
        part: ids of the vectors that it updates, where it may hold this rank's parts of a model: ZeRO steps groups of
            them one after another. None where it holds whole parameters.
        sharded: ids of those of them that are known to be parts.
        kept: the optimiser itself, so that it is there when the script has ended; None for one that may go before.
    """

    def __init__(self, index: int, optimizer: Optimizer) -> None:
        self.index = index
        self.kept: Optimizer | None = optimizer
        self._optimizer = weakref.ref(optimizer)
        self.steps = 0
        self.boundaries = Boundaries()
        self.rates: list[float] = []
        self.seen_passes = 0
        self.through: set[str] = set()
        self.last_step = 0
        self.part: frozenset[int] | None = None
        self.sharded: frozenset[int] = frozenset()

    def updates(self, optimizer: Optimizer) -> bool:
        """Whether it is what an optimiser updates now."""
        if self.optimizer is not optimizer:
            return False
        return self.part is None or not self.part.isdisjoint(map(id, tensors_of(optimizer)))

    @property
    def optimizer(self) -> Optimizer | None:
        """Itself; None once the script has let it go."""
        return self._optimizer()

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Its groups of parameters; none once it is gone."""
        optimizer, part = self.optimizer, self.part
        groups = [] if optimizer is None else optimizer.param_groups
        return groups if part is None else [g for g in groups if not part.isdisjoint(map(id, g["params"]))]

    @property
    def state(self) -> Mapping[Tensor, Mapping[str, Any]]:
        """Its state by parameter; none once it is gone."""
        optimizer = self.optimizer
        return {} if optimizer is None else optimizer.state


def was_made(cls: type[Optimizer] = Optimizer) -> bool:
    """Whether this process ever made an optimiser, of a class or one derived from it: PyTorch then wraps its step."""
    return hasattr(cls.step, "hooked") or any(was_made(derived) for derived in cls.__subclasses__())


class StepRecorder:
    """Writes what one rank holds at checked steps, by an ``inventory`` of modules and normalisers as last looked up.

    ``own_gradients`` hears of gradients before anything reduces them.
    """

    def __init__(self, writer: SideWriter, schedule: Schedule) -> None:
        self._writer, self._schedule = writer, schedule
        self.own_gradients = OwnGradients()
        self.inventory = Inventory()
        self._whole: tuple[Callable[[], Any], set[int], dict[str, Taken]] = (lambda: None), set(), {}

    def first_seen(self, watch: OptimizerWatch) -> None:
        """Before an optimiser's first step."""
        self.inventory = look_around(self.inventory)
        if self.inventory.unplaced:
            gc.collect()  # what nothing holds any more is no normaliser
        optimizer, inventory = watch.optimizer, self.inventory
        if inventory.by_parts and optimizer is not None and holds_vectors(optimizer, inventory.owners):
            watch.part = frozenset(map(id, tensors_of(optimizer)))
            watch.sharded = watch.part & inventory.sharded
        parameters = _parameters(watch)
        bases = {base for p in parameters.values() for base in inventory.owners.get(id(p), ())}
        libraries = [name for name in LIBRARIES if any(base.startswith(f"{name}.") for base in bases)]
        facts = {
            "wrappers": sorted(inventory.wrappers),
            "libraries": libraries,
            "names": self.names(watch),
            "wrapped": [place for place, p in parameters.items() if id(p) in inventory.wrapped],
            "by_parts": bool(watch.sharded),
            "settings": [_settings(group) for group in watch.groups],
            "state": sum(isinstance(x, Tensor) for state in watch.state.values() for x in state.values()),
            "unknown": sorted(inventory.unknown),
            "unplaced": sorted(name for name in inventory.unplaced if inventory.normalizers[name]() is not None),
        }
        self._writer.add({"kind": "optimizer", "optimizer": watch.index} | facts)

    def listen(self, watches: Iterable[OptimizerWatch]) -> None:
        """Keep gradients of these optimisers as ``backward`` leaves them; of none any more if there are none.

        Wrapped models reduce within it.
        """
        found = [] if self.inventory.wrappers else [p for watch in watches for p in _parameters(watch).values()]
        self.own_gradients.listen(found)

    def note_rates(self, watch: OptimizerWatch) -> None:
        """Write learning rates, before a step, when they changed.

        Ones that are tensors are read only at checked steps: a GPU would have to wait.
        """
        rates = [group.get("lr", 0.0) for group in watch.groups]
        if rates == watch.rates:
            return
        if any(isinstance(rate, Tensor) for rate in rates) and not self._schedule.includes(watch.steps + 1):
            return
        rates = [float(rate) for rate in rates]
        if rates != watch.rates:
            self._writer.add({"kind": "rates", "optimizer": watch.index, "step": watch.steps, "rates": rates})
            watch.rates = rates

    def before(self, watch: OptimizerWatch, inputs: str, gathered: dict[str, Taken]) -> None:
        """Before a checked step.

        ``inputs`` are words of what forward passes were given, empty if none was seen; ``gathered`` is what was
        taken of parameters of a sharded model in its last forward pass.
        """
        parameters = _parameters(watch)
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        parts: Parts = {"gradients": {n: g.coalesce().values() if g.is_sparse else g for n, g in gradients.items()}}
        parts["gathered"] = gathered | self._whole_before(watch)
        parts["own"], parts["stepped"] = self.own_gradients.beside(parameters)
        if watch.steps == 0:
            parts |= self._state(watch)
        fixed = [place for place, p in parameters.items() if not p.requires_grad]
        facts = {"inputs": inputs, "through": sorted(watch.through), "fixed": fixed}
        self._write(watch, watch.steps + 1, "before", parts, facts)

    def after(self, watch: OptimizerWatch, used: Container[int]) -> None:
        """After a checked step; ``used`` are ids of modules that had a forward pass so far."""
        buffers = {n: b for n, b in self.inventory.buffers(used) if b.numel()}
        normalizers: dict[str, Tensor] = {}
        for name, find in self.inventory.normalizers.items():
            thing = find()
            if thing is not None:
                normalizers |= {f"{name}.{key}": value for key, value in numbers_of(thing).items()}
        parts = self._state(watch) | {
            "frozen": dict(self.inventory.frozen(used)),
            "buffers": buffers,
            "normalizers": normalizers,
        }
        sent = sorted(name for name, buffer in buffers.items() if id(buffer) in self.inventory.broadcast)
        self._write(watch, watch.steps, "after", parts, {"broadcast": sent})

    def last(self, watch: OptimizerWatch) -> None:
        """Writes the state in which the script ended, so that the steps since the last checked one count."""
        self._write(watch, watch.steps, "end", self._state(watch), {})

    def models(self, phase: int) -> None:
        """Writes what every model holds when a phase (from 1) of forward passes without gradients begins."""
        if not self.inventory.modules:  # of a rank that took no step so far
            self.inventory = look_around()
        whole = [(name, p) for name, p in self.inventory.parameters() if readable(p) and not shards_of(p)]
        with torch.no_grad():
            digests = {name: digest(local(p)) for name, p in whole if id(p) not in self.inventory.sharded}
        self._writer.add({"kind": "models", "phase": phase, "digests": digests})

    def names(self, watch: OptimizerWatch) -> dict[str, str]:
        """The names that the optimiser's parameters have in their modules, by their places."""
        names = self.inventory.names
        return {place: names[id(p)] for place, p in _parameters(watch).items() if id(p) in names}

    def _whole_before(self, watch: OptimizerWatch) -> dict[str, Taken]:
        """Takes of parameters that are updated by parts, before an optimiser steps the first of its groups.

        Of those after it the parts come to the other ranks later; they are given what was taken then.
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

    def _state(self, watch: OptimizerWatch) -> Parts:
        parameters = _parameters(watch)
        moments = {
            f"{name}.{key}": value
            for name, parameter in parameters.items()
            for key, value in watch.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }
        return {"parameters": parameters, "moments": moments}

    def _write(self, watch: OptimizerWatch, step: int, when: str, parts: Parts, facts: dict[str, Any]) -> None:
        most = DENSE_NUMBERS if step <= self._schedule.first else SPARSE_NUMBERS
        event: dict[str, Any] = {"kind": "check", "optimizer": watch.index, "step": step, "when": when} | facts
        event["parts"], arrays = {}, []
        parameters = _parameters(watch)
        own = {place for place, p in parameters.items() if id(p) in self.inventory.sharded | watch.sharded}
        with torch.no_grad():
            for name, tensors in parts.items():
                sharded = {key for key in tensors if name in OPTIMIZED and _place(key) in own}
                if name == "moments":  # those that are smaller than their parameter
                    sharded |= {k for k, x in tensors.items() if 1 < x.numel() < parameters[_place(k)].numel()}
                entries, numbers = take_part(tensors, most, sharded)
                event["parts"][name] = part = {"tensors": entries}
                arrays.append((part, numbers))
        self._writer.add(event, arrays)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group's settings but for the learning rate: numbers, words and tuples of them, of JSON types."""
    found = {}
    for name, value in group.items():
        if name in ("lr", "initial_lr", "params"):
            continue
        value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        parts = value if isinstance(value, (tuple, list)) else [value]
        if all(part is None or isinstance(part, (bool, int, float, str)) for part in parts):
            found[name] = list(parts) if isinstance(value, (tuple, list)) else value
    return found


def _place(key: str) -> str:
    """The parameter's place of a moment's, ``0.2`` of ``0.2.exp_avg``."""
    return ".".join(key.split(".")[:2])


def _parameters(watch: OptimizerWatch) -> dict[str, Tensor]:
    """The optimiser's parameters by their places, ``group.number``: the same on every rank, as names may not be."""
    groups = watch.groups
    return {f"{g}.{p}": parameter for g, group in enumerate(groups) for p, parameter in enumerate(group["params"])}
