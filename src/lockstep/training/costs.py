"""What an iteration costs a device, as an engine tells it: kernels by part, bytes that it holds, collectives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

FLOAT = 4
"""Bytes of float32, in which parameters, moments and gradients are held."""

Grows = Literal["count", "size", "not"]
"""What a device's further shards add to a part: more kernels, larger ones, or nothing."""


class Kernel(NamedTuple):
    """A kernel of a device: operations in floating point, bytes to and from its memory, calls in an iteration.

    ``kind`` is ``matmul`` for what runs on matrix units, else ``vector``.
    """

    flops: float
    bytes: float
    calls: float
    kind: str = "vector"


@dataclass(frozen=True)
class Part:
    """One part of an iteration on a device.

    Attributes:
        name: ``rollout``, ``evaluate``, ``gradients`` or ``optimizer``.
        kernels: of one iteration.
        grows: what further shards add.
    """

    name: str
    kernels: tuple[Kernel, ...]
    grows: Grows

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
        ratio = shards / before
        if self.grows == "not" or ratio == 1.0:
            return self
        if self.grows == "count":
            kernels = tuple(k._replace(calls=k.calls * ratio) for k in self.kernels)
        else:
            kernels = tuple(k._replace(flops=k.flops * ratio, bytes=k.bytes * ratio) for k in self.kernels)
        return Part(self.name, kernels, self.grows)


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
            ``activations``.
        collectives: as a compiled program has them; empty where nothing was compiled for that many devices.
        host_steps: whether environments are stepped on the host.
        source: where the numbers come from, in words.
    """

    shards: int
    parts: tuple[Part, ...]
    memory: dict[str, float]
    collectives: tuple[Collective, ...] = ()
    host_steps: bool = False
    source: str = "shapes"

    def to_json(self) -> dict[str, Any]:
        """Returns the costs as JSON has them."""
        return asdict(self)

    @classmethod
    def of_json(cls, value: dict[str, Any]) -> Costs:
        """Reads what :meth:`to_json` gave."""
        parts = tuple(Part(p["name"], tuple(Kernel(*k) for k in p["kernels"]), p["grows"]) for p in value["parts"])
        collectives = tuple(Collective(*c) for c in value["collectives"])
        return cls(**value | {"parts": parts, "collectives": collectives})


def merged(kernels: Iterable[Kernel]) -> tuple[Kernel, ...]:
    """Counts kernels that are alike once, with all their calls; in the order in which they come first."""
    calls: dict[tuple[float, float, str], float] = {}
    for kernel in kernels:
        key = kernel.flops, kernel.bytes, kernel.kind
        calls[key] = calls.get(key, 0.0) + kernel.calls
    return tuple(Kernel(flops, size, count, kind) for (flops, size, kind), count in calls.items())
