"""Records what a rank holds at the steps that are compared: parameters, gradients, moments, rates, statistics."""

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
from lockstep.doctor.watch.torch.inspection import Inventory, look_around
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


class OptimizerWatch:
    """Watches one optimiser of the script, or one group of the vectors that ZeRO steps one after another.

    Attributes:
        index: the optimiser's number, in the order of first steps.
        boundaries: numbers of steps taken when each phase of forward passes without gradients began.
        rates: learning rates of all groups as last seen.
        seen_passes: how many forward passes belong to earlier steps.
        through: wrappers through whose ``forward`` its gradients were made so far.
        last_step: steps that all optimisers together had taken when it took its last one.
        part: ids of the vectors that it updates, if they may be this rank's parts of a model; None if it holds whole
            parameters.
        sharded: ids of those vectors that are known to be parts.
        kept: a strong reference to the optimiser, so that its state can be written when the script has ended; None if
            the script may let it go before.
    """

    def __init__(self, index: int, optimizer: Optimizer) -> None:
        self.index = index
        self.kept: Optimizer | None = optimizer
        self._optimizer = weakref.ref(optimizer)
        self._tensors = [weakref.ref(tensor) for tensor in tensors_of(optimizer)]
        self.steps = 0
        self.boundaries = Boundaries()
        self.rates: list[float | None] = []
        self.seen_passes = 0
        self.through: set[str] = set()
        self.last_step = 0
        self.part: frozenset[int] | None = None
        self.sharded: frozenset[int] = frozenset()

    def updates(self, optimizer: Optimizer) -> bool:
        """Returns whether this watch stands for what an optimiser updates now."""
        if self.optimizer is not optimizer:
            return False
        return self.part is None or not self.part.isdisjoint(map(id, tensors_of(optimizer)))

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimiser; None once the script has let it go."""
        return self._optimizer()

    @property
    def gone(self) -> bool:
        """Whether the script has let the optimiser go, and all tensors that it updated when it took its first step."""
        return self.optimizer is None and all(tensor() is None for tensor in self._tensors)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimiser's parameter groups, or those of ``part``; empty once it is gone."""
        optimizer, part = self.optimizer, self.part
        groups = [] if optimizer is None else optimizer.param_groups
        return groups if part is None else [g for g in groups if not part.isdisjoint(map(id, g["params"]))]

    @property
    def state(self) -> Mapping[Any, Any]:
        """The optimiser's state by parameter, and what it keeps beside; empty once it is gone."""
        optimizer = self.optimizer
        return {} if optimizer is None else optimizer.state


def was_made(cls: type[Optimizer] = Optimizer) -> bool:
    """Returns whether this process ever made an optimiser of a class or a subclass: PyTorch then wraps ``step``."""
    return hasattr(cls.step, "hooked") or any(was_made(derived) for derived in cls.__subclasses__())


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
        self._whole: tuple[Callable[[], Any], set[int], dict[str, Taken]] = (lambda: None), set(), {}

    def first_seen(self, watch: OptimizerWatch) -> None:
        """Looks for models and normalisers before an optimiser's first step, and writes what the optimiser holds."""
        seen: dict[str, Any] = {}
        if self._worth_a_look(watch):
            self._looks += 1
            self.inventory = look_around(self.inventory)
            seen = {"made": [_sizes(each) for each in self.inventory.optimizers], "untrained": self._untrained()}
            if self.inventory.unplaced:
                gc.collect()  # unreachable normalisers would be compared, too
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
            "sizes": [tensor.numel() for tensor in parameters.values()],
            "settings": [_settings(group) for group in watch.groups],
            "state": sum(isinstance(x, Tensor) for p in watch.state for x in _moments(watch, p).values()),
            "unknown": sorted(inventory.unknown),
            "unplaced": sorted(name for name in inventory.unplaced if inventory.normalizers[name]() is not None),
        }
        self._writer.add({"kind": "optimizer", "optimizer": watch.index} | facts | seen)

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
        found = [] if self.inventory.wrappers else [p for watch in watches for p in _parameters(watch).values()]
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
        parameters = _parameters(watch)
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        parts: Parts = {"gradients": {n: g.coalesce().values() if g.is_sparse else g for n, g in gradients.items()}}
        parts["gathered"] = gathered | self._whole_before(watch)
        parts["own"], parts["stepped"] = self.own_gradients.beside(parameters)
        if watch.steps == 0:
            parts |= self._state(watch)
        fixed = [place for place, p in parameters.items() if not p.requires_grad]
        facts = {"inputs": inputs, "through": sorted(watch.through), "fixed": fixed} | source
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
        self._write(watch, watch.steps, "after", parts, {"broadcast": sent})

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
        return {place: names[id(p)] for place, p in _parameters(watch).items() if id(p) in names}

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

    def _state(self, watch: OptimizerWatch) -> Parts:
        parameters = _parameters(watch)
        moments = {
            f"{name}.{key}": value
            for name, parameter in parameters.items()
            for key, value in _moments(watch, parameter).items()
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
                if name == "moments":  # smaller than their parameter: sharded
                    sharded |= {k for k, x in tensors.items() if 1 < x.numel() < parameters[_place(k)].numel()}
                entries, numbers = take_part(tensors, most, sharded)
                event["parts"][name] = part = {"tensors": entries}
                arrays.append((part, numbers))
        self._writer.add(event, arrays)


def _rate(rate: Any) -> float | None:
    try:
        return float(rate)
    except (TypeError, ValueError, RuntimeError):
        return None


def _sizes(optimizer: Optimizer) -> list[int]:
    return [tensor.numel() for group in optimizer.param_groups for tensor in group["params"]]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a parameter group's settings except learning rates, as JSON types; skips what isn't a number or text."""
    found = {}
    for name, value in group.items():
        if name in ("lr", "initial_lr", "params"):
            continue
        value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        parts = value if isinstance(value, (tuple, list)) else [value]
        if all(part is None or isinstance(part, (bool, int, float, str)) for part in parts):
            found[name] = list(parts) if isinstance(value, (tuple, list)) else value
    return found


def _moments(watch: OptimizerWatch, parameter: Any) -> Mapping[str, Any]:
    """Returns what an optimiser keeps of a parameter; nothing if it isn't a mapping, as a number beside them."""
    state = watch.state.get(parameter)
    return state if isinstance(state, Mapping) else {}


def _place(key: str) -> str:
    """Returns the parameter's place from a moment's: ``0.2`` from ``0.2.exp_avg``."""
    return ".".join(key.split(".")[:2])


def _parameters(watch: OptimizerWatch) -> dict[str, Tensor]:
    """Returns an optimiser's parameters by place, ``group.number``; places agree between ranks even if names don't."""
    groups = watch.groups
    return {f"{g}.{p}": parameter for g, group in enumerate(groups) for p, parameter in enumerate(group["params"])}
