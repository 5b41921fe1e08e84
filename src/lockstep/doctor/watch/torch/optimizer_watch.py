"""Watches one optimiser of a script, and names what it updates by places that ranks agree on."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lockstep.doctor.watch.boundaries import Boundaries
from lockstep.doctor.watch.torch.flat_parts import tensors_of


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
        self._tensors = {place: weakref.ref(tensor) for place, tensor in _by_place(optimizer.param_groups).items()}
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
        return self.optimizer is None and not self.tensors()

    def tensors(self) -> dict[str, Tensor]:
        """Returns, by place, what is left of the tensors that it held when it took its first step."""
        left = {place: tensor() for place, tensor in self._tensors.items()}
        return {place: tensor for place, tensor in left.items() if tensor is not None}

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimiser's parameter groups, or those of ``part``; empty once it is gone."""
        optimizer, part = self.optimizer, self.part
        groups = [] if optimizer is None else optimizer.param_groups
        return groups if part is None else [g for g in groups if not part.isdisjoint(map(id, g["params"]))]

    @property
    def state(self) -> Mapping[Any, Any]:
        """The optimiser's state by parameter, and what it keeps beside; empty once it is gone.

        That of PyTorch's ZeRO is in the optimiser of this rank's part, which it holds.
        """
        optimizer = self.optimizer
        inner = getattr(optimizer, "optim", None)
        if isinstance(inner, Optimizer) and optimizer is not None and not optimizer.state:
            return inner.state
        return {} if optimizer is None else optimizer.state


def was_made(cls: type[Optimizer] = Optimizer) -> bool:
    """Returns whether this process ever made an optimiser of a class or a subclass: PyTorch then wraps ``step``."""
    return hasattr(cls.step, "hooked") or any(was_made(derived) for derived in cls.__subclasses__())


def sizes_of(optimizer: Optimizer) -> list[int]:
    """Returns numbers of elements of an optimiser's tensors."""
    return [tensor.numel() for group in optimizer.param_groups for tensor in group["params"]]


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
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


def moments_of(watch: OptimizerWatch, parameter: Any) -> Mapping[str, Any]:
    """Returns what an optimiser keeps of a parameter; nothing if it isn't a mapping, as a number beside them."""
    state = watch.state.get(parameter)
    return state if isinstance(state, Mapping) else {}


def place_of(key: str) -> str:
    """Returns the parameter's place from a moment's: ``0.2`` from ``0.2.exp_avg``."""
    return ".".join(key.split(".")[:2])


def parameters_of(watch: OptimizerWatch) -> dict[str, Tensor]:
    """Returns an optimiser's parameters by place, ``group.number``; places agree between ranks even if names don't."""
    return _by_place(watch.groups)


def _by_place(groups: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    return {f"{g}.{p}": parameter for g, group in enumerate(groups) for p, parameter in enumerate(group["params"])}
