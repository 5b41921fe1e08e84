"""Programs and rows that need no peer and no training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.comparison import Row
from benchmarks.programs import Program


@pytest.fixture
def scripted(tmp_path: Path) -> Callable[..., Program]:
    """A program of the given Python lines; ``say(text)`` writes one line into its pipe and waits until it is read."""

    def make(body: str, copies: int = 1) -> Program:
        script = tmp_path / "script.py"
        opening = "import fcntl, sys, termios, time\nlines = open(sys.argv[1], 'w')\n"
        say = "def say(text='x'):\n    print(text, file=lines, flush=True)\n"
        say += "    while any(fcntl.ioctl(lines, termios.FIONREAD, bytes(4))):\n        time.sleep(1e-4)\n"
        script.write_text(opening + say + body)
        command = (sys.executable, str(script), "{lines}")
        return Program("T1", "scripted", "CartPole-v1", command, 10, copies=copies, package="scripted")

    return make


@pytest.fixture
def row() -> Callable[..., Row]:
    """A row with these rates."""

    def make(*rates: float, ours: bool = False, framework: str = "torch", env: str = "CartPole-v1", **rest) -> Row:
        reduction = rest.pop("reduction", "exact") if ours else None
        label = rest.pop("label", "Lockstep, exact" if ours else f"peer {framework}")
        scaling = rest.pop("scaling", None)
        made = Row(rest.pop("case", "T1"), label, env, reduction, framework, scaling, ours, rest.pop("devices", None))
        made.batched = rest.pop("batched", False)
        made.rates, made.cores, made.failures = list(rates), [1.0] * len(rates), rest.pop("failures", [])
        return made

    return make
