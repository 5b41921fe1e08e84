"""Prints a plan: one table per target, and lines that explain it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lockstep.planning.prediction import PARTS, Outlook, Prediction
from lockstep.scaling.tables import print_numbers
from lockstep.training.costs import Collective

UNITS = ("", "k", "M", "G", "T", "P", "E")


def amount(value: float, unit: str = "") -> str:
    """Formats a number with a prefix: ``1.23 GB``, ``45.6 MFLOP``."""
    power = 0
    while abs(value) >= 999.5 and power < len(UNITS) - 1:
        value, power = value / 1000, power + 1
    text = f"{value:.3g}" if value < 99.95 else f"{value:.0f}"
    return f"{text} {UNITS[power]}{unit}".strip()


def duration(seconds: float) -> str:
    """Formats seconds: ``850 µs``, ``12.3 ms``, ``4.56 s``, ``2.1 h``."""
    rounded = float(f"{seconds:.3g}")
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (300.0, 1.0, "s"), (7200.0, 1 / 60, "min")):
        if rounded < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"


def print_outlook(outlook: Outlook) -> None:
    """Prints the plan for a target."""
    _print_table(outlook)
    for line in lines(outlook):
        print(line)
    print()


def _print_table(outlook: Outlook) -> None:
    unit = "ranks" if outlook.chip.endswith("machine") else "devices"
    heads = [unit, "num_envs", "fits", "steps/s", "range", "iteration", "efficiency", "limited by"]
    heads += ["$ for the run"] if outlook.price is not None else []
    rows = []
    for one in outlook.predictions:
        rates = one.rates
        row = [str(one.devices), f"{one.num_envs:,}", fits(outlook, one), amount(rates["likely"])]
        row += [f"{amount(rates['worst'])} – {amount(rates['best'])}", duration(one.seconds["likely"])]
        row += [f"{outlook.efficiency(one):.0%}", one.limit]
        cost = outlook.cost(one)
        row += [] if cost is None else [f"{cost[1]:,.2f} ({cost[0]:,.2f} – {cost[2]:,.2f})"]
        rows.append(row)
    title = f"{outlook.target}: {outlook.devices} x {outlook.chip}, engine {outlook.engine}"
    print_numbers(title, heads, rows, prose=("limited by",))


def fits(outlook: Outlook, one: Prediction) -> str:
    """Formats the share of a device's memory that a run needs, or the factor by which it doesn't fit."""
    needed = outlook.needed(one)
    if not needed:
        return "?"
    if needed <= 1:
        return f"yes, {needed:.0%}"
    return f"no, by {math.ceil(100 * needed - 1e-6) / 100:.2f}x" if needed < 10 else f"no, by {needed:,.0f}x"


def lines(outlook: Outlook) -> list[str]:
    """Returns lines, for the most devices, on what each holds and computes, what they exchange, and where time goes."""
    last = outlook.predictions[-1]
    each = "rank" if outlook.chip.endswith("machine") else "device"
    out = [f"  a {each} of {last.devices} holds {_listed(last.memory)}"]
    if outlook.largest_num_envs is not None:
        out.append(f"  largest num_envs that fits: {outlook.largest_num_envs:,} on {last.devices} devices")
    iteration = (
        f"  an iteration of one: {amount(outlook.flops, 'FLOP')}, {amount(outlook.bytes, 'B')} of memory traffic, "
    )
    iteration += f"{amount(outlook.kernels)} kernels ({outlook.source})"
    if last.utilization is not None:
        iteration += f"; {last.utilization:.2%} of the peak"
    out.append(iteration)
    out.append(f"  collectives of an iteration: {collectives_text(last.collectives)}")
    total = sum(last.parts.values())
    shares = [f"{name} {last.parts[name] / total:.0%}" for name in PARTS if last.parts[name] / total >= 0.005]
    out.append(f"  its time: {', '.join(shares)}")
    shares = [f"{name} {value / total:.0%}" for name, value in last.limits.items() if value / total >= 0.005]
    out.append(f"  limited by: {', '.join(shares)}")
    return out + [f"  note: {note}" for note in outlook.notes]


def _listed(memory: dict[str, float]) -> str:
    return ", ".join(f"{kind} {amount(size, 'B')}" for kind, size in memory.items() if size)


def collectives_text(found: Sequence[Collective]) -> str:
    """Formats collectives: ``320 all-gather of 434 kB (gradients)``."""
    if not found:
        return "none"
    return ", ".join(f"{x.count:g} {x.kind} of {amount(x.bytes, 'B')} ({x.purpose})" for x in found)
