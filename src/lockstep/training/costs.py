"""The costs of an iteration on a device, as an engine reports them: kernels by part, bytes held, collectives."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

FLOAT = 4
"""Bytes of a float32; parameters, moments and gradients are float32."""

Grows = Literal["count", "size", "additions", "not"]
"""How a part grows with a device's shards: more kernels, larger kernels, the additions of a tree, or not at all."""


class Kernel(NamedTuple):
    """A kernel on a device: floating-point operations and bytes to and from memory per call, and calls per iteration.

    ``kind`` is ``matmul`` or ``matmul_bf16`` for products of float32 or bfloat16, else ``vector``.
    """

    flops: float
    bytes: float
    calls: float
    kind: str = "vector"


@dataclass(frozen=True)
class Part:
    """One part of an iteration on a device.

    Attributes:
        name: ``environments``, ``rollout``, ``evaluate``, ``gradients`` or ``optimizer``; several parts may share one.
        kernels: kernels of one iteration.
        grows: how it grows with more shards.
        shards: number of shards that it was counted for; None: those of the :class:`Costs`.
        at_least: number of shards whose size even a device with fewer computes.
        sampling: False for what a rollout launches besides the sampling of actions, which alone is a graph if the host
            steps environments.
        beside: if further shards add kernels: how many shards' kernels may run in parallel, as branches of a graph.
    """

    name: str
    kernels: tuple[Kernel, ...]
    grows: Grows
    shards: int | None = None
    at_least: int = 1
    sampling: bool = True
    beside: int = 1

    @property
    def flops(self) -> float:
        """Floating-point operations of an iteration."""
        return sum(k.flops * k.calls for k in self.kernels)

    @property
    def bytes(self) -> float:
        """Bytes to and from the device's memory in an iteration."""
        return sum(k.bytes * k.calls for k in self.kernels)

    @property
    def calls(self) -> float:
        """Kernel launches of an iteration."""
        return sum(k.calls for k in self.kernels)

    def of_shards(self, shards: float, before: float) -> Part:
        """Returns this part for a device with ``shards`` shards, given that its numbers are for ``before`` of them."""
        ratio = (max(shards, self.at_least) if self.grows == "size" else shards) / before
        if self.grows == "not" or ratio == 1.0:
            return self
        if self.grows == "additions":
            return self._added(shards, before)
        if self.grows == "count":
            kernels = tuple(k._replace(calls=k.calls * ratio) for k in self.kernels)
        else:
            kernels = tuple(k._replace(flops=k.flops * ratio, bytes=k.bytes * ratio) for k in self.kernels)
        return replace(self, kernels=kernels, shards=None, at_least=1)

    def _added(self, shards: float, before: float) -> Part:
        """Returns the additions of a tree: one less than its shards, in as many rounds as its height."""
        if shards <= 1:
            return Part(self.name, (), self.grows)
        rounds = math.ceil(math.log2(shards)) / math.ceil(math.log2(before))
        size = (shards - 1) / (before - 1) / rounds
        kernels = (k._replace(flops=k.flops * size, bytes=k.bytes * size, calls=k.calls * rounds) for k in self.kernels)
        return Part(self.name, tuple(kernels), self.grows)


class Collective(NamedTuple):
    """Collectives of one kind in an iteration: purpose, number, and the bytes that a device receives from one."""

    kind: str
    purpose: str
    count: float
    bytes: float


@dataclass(frozen=True)
class Costs:
    """The costs of an iteration on a device that owns ``shards`` shards.

    Attributes:
        memory: bytes that the device holds, by kind: ``parameters``, ``moments``, ``gradients``, ``rollout``,
            ``activations``; with FSDP also ``gathered``, the whole parameters that are computed with.
        fewer: the same on fewer devices, by their number, where the engine counted it.
        collectives: those of a compiled program; empty if none was compiled for this number of devices.
        host_steps: whether environments are stepped on the host.
        source: where the numbers come from, in words.
        notes: what they leave out, one line each.
    """

    shards: int
    parts: tuple[Part, ...]
    memory: dict[str, float]
    fewer: dict[int, dict[str, float]] = field(default_factory=dict)
    collectives: tuple[Collective, ...] = ()
    host_steps: bool = False
    source: str = "shapes"
    notes: tuple[str, ...] = ()

    def of_shards(self, shards: int) -> tuple[Part, ...]:
        """Returns the parts of an iteration on a device with ``shards`` shards."""
        return tuple(part.of_shards(shards, part.shards or self.shards) for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        """Returns the costs as JSON."""
        return asdict(self)

    @classmethod
    def of_json(cls, value: dict[str, Any]) -> Costs:
        """Reads what :meth:`to_json` returned."""
        parts = tuple(Part(**p | {"kernels": tuple(Kernel(*k) for k in p["kernels"])}) for p in value["parts"])
        collectives = tuple(Collective(*c) for c in value["collectives"])
        fewer = {int(devices): memory for devices, memory in value["fewer"].items()}
        notes = tuple(value["notes"])
        return cls(**value | {"parts": parts, "fewer": fewer, "collectives": collectives, "notes": notes})


def merged(kernels: Iterable[Kernel]) -> tuple[Kernel, ...]:
    """Merges equal kernels into one with all their calls, in the order of their first occurrence."""
    calls: dict[tuple[float, float, str], float] = {}
    for kernel in kernels:
        key = kernel.flops, kernel.bytes, kernel.kind
        calls[key] = calls.get(key, 0.0) + kernel.calls
    return tuple(Kernel(flops, size, count, kind) for (flops, size, kind), count in calls.items())
