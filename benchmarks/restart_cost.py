"""Measures what it costs a run to be ready for restarts: the states that it keeps in memory meanwhile."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from benchmarks.cases import ARRAY_CARTPOLE, T1
from benchmarks.programs import Program, ours
from benchmarks.steady_rate import measure
from benchmarks.tables import table

LONGER = 6
"""Times as many iterations as the case has, so that many states are kept: one in half a second."""
TIMEOUT = 600.0


def programs() -> tuple[Program, Program]:
    """One rank on the case T1 without restarts, and with them."""
    plain = ours(replace(T1, iterations=LONGER * T1.iterations), ARRAY_CARTPOLE, "exact")
    return plain, replace(plain, label=f"{plain.label}, restarts", command=(*plain.command, "--max-restarts", "1"))


def cost(pairs: int) -> dict[str, Any]:
    """Times both in turn, every second pair in the reverse order; steps/s of each run."""
    plain, ready = programs()
    rates: dict[str, list[float]] = {"without": [], "with": []}
    for pair in range(pairs):
        turn = [("without", plain), ("with", ready)]
        for name, program in turn if pair % 2 == 0 else reversed(turn):
            rates[name].append(round(measure(program, TIMEOUT).steps_per_second))
    return rates


def slower(rates: dict[str, Any]) -> float:
    """Returns the median over the pairs of how much slower a run with restarts is, as a share."""
    return 1.0 - statistics.median(b / a for a, b in zip(rates["without"], rates["with"], strict=True))


def section(found: dict[str, Any]) -> str:
    """Says in Markdown what was ``found``: the ``rates`` that :func:`cost` gave, and ``facts`` of when and of what."""
    rates, facts = found["rates"], found["facts"]
    lines = [[name, f"{statistics.median(r):,.0f}", f"{min(r):,.0f} – {max(r):,.0f}"] for name, r in rates.items()]
    said = (
        f"Of {len(rates['with'])} interleaved pairs of runs of {T1.title} on one rank, with and without "
        f"`--max-restarts`: with it a run is {100 * slower(rates):.1f} % slower (median of the pairs). "
        f"Date {facts['date']}, commit {facts['commit']}, load average before it {facts['load average']}."
    )
    return "\n\n".join(["## What being ready costs", said, table(["restarts", "steps/s", "min – max"], lines)])
