"""What of a machine decides the last bits of a result: its processor and the instructions that it has."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
INSTRUCTION_SETS = ("avx512f", "avx2", "avx", "sve", "asimd")


def _cpuinfo(*keys: str) -> str:
    """The first value of one of the keys, where the system tells it."""
    with contextlib.suppress(OSError):
        for line in CPUINFO.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in keys:
                return value.strip()
    return ""


def cpu_model() -> str:
    """The processor's name, where the system tells it."""
    return _cpuinfo("model name") or platform.processor()


def cpu_features() -> tuple[str, ...]:
    """The processor's features by the kernel's names, sorted; empty where the system doesn't tell them."""
    return tuple(sorted(_cpuinfo("flags", "Features").split()))


def instruction_set() -> str:
    """The widest vector instructions that the processor has, such as ``avx2``; the architecture where none is known."""
    features = cpu_features()
    return next((name for name in INSTRUCTION_SETS if name in features), platform.machine())
