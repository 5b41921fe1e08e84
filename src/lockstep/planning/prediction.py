"""Holds what a plan says of a target, and of the run on each number of its devices."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.planning.hardware import CASES, Case
from lockstep.training.costs import Collective

PARTS = ("environments", "rollout", "evaluate", "gradients", "optimizer", "collectives", "waiting", "other")
"""Parts of an iteration's time, in order."""


@dataclass(frozen=True)
class Prediction:
    """What is predicted for a run on some number of devices.

    Attributes:
        seconds: seconds per iteration, by case.
        parts: seconds of each of :data:`PARTS` in the likely case.
        limits: seconds of the likely case by what limits them: ``compute``, ``memory``, ``launches``, ``links``,
            ``latency``, ``host``, ``waiting``.
        limits_of: the same for each part.
        steps: global environment steps per iteration.
        collectives: collectives of an iteration.
        memory: bytes of a device, by kind.
        utilization: share of the peak rate at the run's precision that is reached in the likely case; None on CPUs.
    """

    devices: int
    num_envs: int
    steps: int
    seconds: dict[Case, float]
    parts: dict[str, float]
    limits: dict[str, float]
    limits_of: dict[str, dict[str, float]]
    collectives: tuple[Collective, ...]
    memory: dict[str, float]
    utilization: float | None = None

    @property
    def rates(self) -> dict[Case, float]:
        """Environment steps per second, by case."""
        return {case: self.steps / self.seconds[case] for case in CASES}

    @property
    def limit(self) -> str:
        """The part that takes most of the time, and what limits it most, in words."""
        part = max(self.parts, key=lambda name: self.parts[name])
        limits = self.limits_of[part]
        limit = max(limits, key=lambda name: limits[name])
        return f"{part} ({LIMIT_WORDS[limit]})"


LIMIT_WORDS = {
    "compute": "arithmetic",
    "memory": "memory bandwidth",
    "launches": "launching small kernels",
    "links": "bytes on the links",
    "latency": "latency of collectives",
    "host": "the host's processor",
    "waiting": "the slowest rank",
}


@dataclass(frozen=True)
class Outlook:
    """The plan for a target.

    Attributes:
        target: the target as it was given.
        chip: the kind of device, in words.
        engine: the engine that the run would use.
        source: where the costs come from.
        devices: number of devices of the whole target.
        capacity: bytes of a device's memory, or of a host's, which its CPU ranks share; 0 if unknown.
        predictions: one per number of devices, ascending.
        flops: operations of an iteration on the first device, for the most devices that are planned.
        bytes: bytes to and from memory, likewise.
        kernels: launched kernels, likewise.
        largest_num_envs: the most environments that fit the most devices; 0: not even the networks fit.
        price: $ per hour of the whole target; None: it wasn't given.
        sharing: the most devices that share ``capacity``; 1 except for CPU ranks.
        notes: what the user should know, one line each.
    """

    target: str
    chip: str
    engine: str
    source: str
    devices: int
    capacity: float
    predictions: tuple[Prediction, ...]
    flops: float = 0.0
    bytes: float = 0.0
    kernels: float = 0.0
    largest_num_envs: int | None = None
    price: float | None = None
    total_steps: int = 0
    sharing: int = 1
    notes: tuple[str, ...] = field(default=())

    def efficiency(self, one: Prediction) -> float:
        """Returns the speed-up over the smallest number of devices, divided by the ratio of devices."""
        base = self.predictions[0]
        rates = one.rates["likely"] / base.rates["likely"]
        return rates * base.devices / one.devices

    def needed(self, one: Prediction) -> float:
        """Returns the share of the memory that all devices sharing it need; above 1 the run doesn't fit; 0: unknown."""
        needed = sum(one.memory.values()) * min(one.devices, self.sharing)
        return needed / self.capacity if self.capacity else 0.0

    def fits(self, one: Prediction) -> bool | None:
        """Returns whether a device has the memory that a run needs; None if the device's memory is unknown."""
        return self.needed(one) <= 1 if self.capacity else None

    def cost(self, one: Prediction) -> tuple[float, float, float] | None:
        """Returns the dollars of the whole run by case (best, likely, worst); fewer devices cost their share.

        A run takes whole iterations, the last of which may exceed ``total_steps``.
        """
        if self.price is None:
            return None
        iterations = -(-self.total_steps // one.steps)
        hours = [iterations * one.seconds[case] / 3600 for case in CASES]
        best, likely, worst = (self.price * one.devices / self.devices * x for x in hours)
        return best, likely, worst

    def to_json(self) -> dict[str, Any]:
        """Returns the outlook as JSON types, with the figures that are derived from it."""
        out = asdict(self)
        for row, one in zip(out["predictions"], self.predictions, strict=True):
            row["collectives"] = [x._asdict() for x in one.collectives]
            row |= {"steps_per_second": one.rates, "efficiency": self.efficiency(one), "limited_by": one.limit}
            row |= {"fits": self.fits(one), "share_of_memory": self.needed(one), "dollars": self.cost(one)}
        return out
