"""Holds what a plan says: of a target, and of the run on each number of its devices."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.planning.hardware import CASES, Case
from lockstep.training.costs import Collective

PARTS = ("environments", "rollout", "evaluate", "gradients", "optimizer", "collectives", "waiting", "other")
"""Where the time of an iteration goes, in order."""


@dataclass(frozen=True)
class Prediction:
    """What is predicted of a run on a number of devices.

    Attributes:
        seconds: of an iteration, by case.
        parts: seconds of each of :data:`PARTS` in the likely case.
        limits: seconds of the likely case by what limits them: ``compute``, ``memory``, ``launches``, ``links``,
            ``latency``, ``host``, ``waiting``.
        limits_of: the same of each part by itself.
        steps: global environment steps of an iteration.
        collectives: of an iteration.
        memory: bytes of a device by kind.
        utilization: share of the peak at the run's precision that its operations make in the likely case.
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
        """Environment steps a second, by case."""
        return {case: self.steps / self.seconds[case] for case in CASES}

    @property
    def limit(self) -> str:
        """What takes most of the time, in words: the part, and what limits it most."""
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
    """What is planned for a target.

    Attributes:
        target: as it was given; ``chip`` in words.
        engine: that the run would use, ``source`` where its costs come from.
        devices: of the whole target.
        capacity: bytes of a device's memory, or of a host's that its CPU ranks share.
        sharing: devices at most that share it; 1, but for CPU ranks.
        flops: of an iteration on the first device of the most; ``bytes`` to and from memory, ``kernels`` launched.
        predictions: by number of devices, ascending.
        largest_num_envs: that fit the most devices; 0: the networks alone don't.
        price: of the whole target, $ an hour; None: it wasn't given.
        notes: what the user should know, a line each.
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
        """Speed-up over the smallest number of devices, over the ratio of devices."""
        base = self.predictions[0]
        rates = one.rates["likely"] / base.rates["likely"]
        return rates * base.devices / one.devices

    def needed(self, one: Prediction) -> float:
        """Share of the memory that is needed, by all that share it: above 1 a run does not fit, by this factor."""
        needed = sum(one.memory.values()) * min(one.devices, self.sharing)
        return needed / self.capacity if self.capacity else 0.0

    def fits(self, one: Prediction) -> bool | None:
        """Tells whether a device has the memory that a run needs; None: it isn't known how much it has."""
        return self.needed(one) <= 1 if self.capacity else None

    def cost(self, one: Prediction) -> tuple[float, float, float] | None:
        """Dollars of the whole run, ``total_steps``, by case; a part of the target's devices costs their share."""
        if self.price is None:
            return None
        hours = [self.total_steps / one.rates[case] / 3600 for case in CASES]
        best, likely, worst = (self.price * one.devices / self.devices * x for x in hours)
        return best, likely, worst

    def to_json(self) -> dict[str, Any]:
        """Returns all of it as JSON has it, with what is worked out of it."""
        out = asdict(self)
        for row, one in zip(out["predictions"], self.predictions, strict=True):
            row["collectives"] = [x._asdict() for x in one.collectives]
            row |= {"steps_per_second": one.rates, "efficiency": self.efficiency(one), "limited_by": one.limit}
            row |= {"fits": self.fits(one), "share_of_memory": self.needed(one), "dollars": self.cost(one)}
        return out
