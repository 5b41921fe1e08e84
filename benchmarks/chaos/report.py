"""The faults of all runs as a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.chaos.campaign import Campaign
from benchmarks.report import table


def faults_table(campaigns: Sequence[Campaign]) -> str:
    """One line for each kind of fault and engine: how often, how long until all had ended, what was trained again."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for campaign in campaigns:
        engine = campaign.case.partition(",")[0]
        for fault in campaign.faults:
            rows.setdefault((fault["fault"], engine), []).append(fault)
    lines = []
    for (fault, engine), found in sorted(rows.items()):
        seconds = [row["seconds"] for row in found]
        lost = [row["iterations_lost"] for row in found]
        lines.append(
            [
                fault,
                engine,
                str(len(found)),
                f"{statistics.median(seconds):.2f} s ({max(seconds):.2f} s)",
                f"{statistics.median(lost):.0f} ({max(lost)})",
            ]
        )
    head = ["fault", "engine", "times", "over after, median (most)", "iterations trained again, median (most)"]
    return table(head, lines)


def totals(campaigns: Sequence[Campaign]) -> str:
    """One sentence on all runs."""
    faults = sum(len(campaign.faults) for campaign in campaigns)
    broken = sum(len(campaign.problems) for campaign in campaigns)
    return f"{faults} faults over {len(campaigns)} runs, {broken} broken promises"
