"""What an iteration costs a device, as an engine tells it: kernels by part, bytes that it holds, collectives."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

FLOAT = 4
"""Bytes of float32, in which parameters, moments and gradients are held."""

Grows = Literal["count", "size", "additions", "not"]
"""What a device's further shards add to a part: more kernels, larger ones, an addition of a tree each, or nothing."""


class Kernel(NamedTuple):
    """A kernel of a device: operations in floating point, bytes to and from its memory, calls in an iteration.

    ``kind`` is ``matmul`` or ``matmul_bf16`` for products of float32 or of bfloat16, else ``vector``.
    """

    flops: float
    bytes: float
    calls: float
    kind: str = "vector"


@dataclass(frozen=True)
class Part:
    """One part of an iteration on a device.

    Attributes:
        name: ``environments``, ``rollout``, ``evaluate``, ``gradients`` or ``optimizer``; several may have one.
        kernels: of one iteration.
        grows: what further shards add.
        shards: of the device that it was counted for; None: those of the :class:`Costs`.
        at_least: shards whose size a device with fewer computes too.
        sampling: false of what a rollout launches beside the sampling of actions, which is a graph alone where the host
            steps environments.
        beside: where further shards add kernels, those of how many may run beside one another, as branches of a graph.
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
        """Operations in floating point of an iteration."""
        return sum(k.flops * k.calls for k in self.kernels)

    @property
    def bytes(self) -> float:
        """Bytes to and from the device's memory in an iteration."""
        return sum(k.bytes * k.calls for k in self.kernels)

    @property
    def calls(self) -> float:
        """Kernels launched in an iteration."""
        return sum(k.calls for k in self.kernels)

    def of_shards(self, shards: float, before: float) -> Part:
        """Returns this part on a device of ``shards`` shards, where it is known for ``before`` of them."""
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
        """Returns a tree's additions, one less than it has shards, made in as many rounds as it is high."""
        if shards <= 1:
            return Part(self.name, (), self.grows)
        rounds = math.ceil(math.log2(shards)) / math.ceil(math.log2(before))
        size = (shards - 1) / (before - 1) / rounds
        kernels = (k._replace(flops=k.flops * size, bytes=k.bytes * size, calls=k.calls * rounds) for k in self.kernels)
        return Part(self.name, tuple(kernels), self.grows)


class Collective(NamedTuple):
    """Collectives of one kind in an iteration: what for, how many, and bytes that a device gets from one."""

    kind: str
    purpose: str
    count: float
    bytes: float


@dataclass(frozen=True)
class Costs:
    """What an iteration costs a device that owns ``shards`` shards.

    Attributes:
        memory: bytes that the device holds, by kind: ``parameters``, ``moments``, ``gradients``, ``rollout``,
            ``activations``; where FSDP cuts parameters, ``gathered`` the whole ones that are computed with.
        collectives: as a compiled program has them; empty where nothing was compiled for that many devices.
        host_steps: whether environments are stepped on the host.
        source: where the numbers come from, in words.
        notes: what they leave out, a line each.
    """

    shards: int
    parts: tuple[Part, ...]
    memory: dict[str, float]
    collectives: tuple[Collective, ...] = ()
    host_steps: bool = False
    source: str = "shapes"
    notes: tuple[str, ...] = ()

    def of_shards(self, shards: int) -> tuple[Part, ...]:
        """Returns what an iteration costs a device of so many shards."""
        return tuple(part.of_shards(shards, part.shards or self.shards) for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        """Returns the costs as JSON has them."""
        return asdict(self)

    @classmethod
    def of_json(cls, value: dict[str, Any]) -> Costs:
        """Reads what :meth:`to_json` gave."""
        parts = tuple(Part(**p | {"kernels": tuple(Kernel(*k) for k in p["kernels"])}) for p in value["parts"])
        collectives = tuple(Collective(*c) for c in value["collectives"])
        return cls(**value | {"parts": parts, "collectives": collectives, "notes": tuple(value["notes"])})


def merged(kernels: Iterable[Kernel]) -> tuple[Kernel, ...]:
    """Counts kernels that are alike once, with all their calls; in the order in which they come first."""
    calls: dict[tuple[float, float, str], float] = {}
    for kernel in kernels:
        key = kernel.flops, kernel.bytes, kernel.kind
        calls[key] = calls.get(key, 0.0) + kernel.calls
    return tuple(Kernel(flops, size, count, kind) for (flops, size, kind), count in calls.items())
