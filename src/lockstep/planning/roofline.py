"""Computes how long kernels take on a device, by the roofline: arithmetic, memory traffic or launch, the longest."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.planning.hardware import Assumptions, Chip
from lockstep.training.costs import Kernel, Part

LIMITS = ("compute", "memory", "launches")


@dataclass(frozen=True)
class Roofline:
    """The rates that a device is assumed to reach.

    Attributes:
        compute: operations per second by kind of kernel: ``matmul``, ``matmul_bf16`` and ``vector``.
        memory: bytes per second.
        launch: the least seconds that a kernel takes.
    """

    compute: dict[str, float]
    memory: float
    launch: float

    @classmethod
    def of(cls, chip: Chip, engine: str, assumed: Assumptions) -> Roofline:
        """Makes a roofline of a chip's peaks and the shares of them that are assumed."""
        full, low = chip.peaks["fp32"] * assumed.compute, chip.peaks["bf16"] * assumed.compute
        compute = {"matmul": full, "matmul_bf16": low, "vector": full}
        return cls(compute, chip.memory_rate * assumed.memory, assumed.kernel[f"{engine}:{chip.platform}"])

    def kernel(self, kernel: Kernel) -> tuple[float, str]:
        """Returns the seconds of one call of a kernel, the longest of three (Williams et al. 2009), and which it is."""
        times = (kernel.flops / self.compute[kernel.kind], kernel.bytes / self.memory, self.launch)
        longest = max(times)
        return longest, LIMITS[times.index(longest)]

    def part(self, part: Part, beside: int = 1) -> dict[str, float]:
        """Returns the seconds of a part of an iteration, by what limits its kernels.

        ``beside`` kernels run in parallel, which speeds up those that are limited by launches.
        """
        out: dict[str, float] = dict.fromkeys(LIMITS, 0.0)
        for kernel in part.kernels:
            seconds, limit = self.kernel(kernel)
            out[limit] += seconds * kernel.calls / (beside if limit == "launches" else 1)
        return out
