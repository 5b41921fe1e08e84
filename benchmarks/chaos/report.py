"""The faults of all runs as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.chaos.campaign import Campaign
from benchmarks.tables import table


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


AIMED = ("commit", "evaluation")
"""Moments that a fault can miss."""
MANY = 20
"""Commits of which at least one must be struck, or nothing was tried."""


def aims(campaigns: Sequence[Campaign]) -> dict[str, dict[str, int]]:
    """How many faults were aimed at each moment that can be missed, of how many it can be told, and how many struck."""
    counts = {}
    for moment in AIMED:
        said = [row.get("struck") for campaign in campaigns for row in campaign.faults if row["moment"] == moment]
        told = [struck for struck in said if struck is not None]
        counts[moment] = {"aimed": len(said), "told": len(told), "struck": sum(told)}
    return counts


def in_words(counts: Mapping[str, Mapping[str, int]]) -> str:
    """The same as a sentence a moment."""
    return "\n".join(
        f"aimed at {'an' if moment == 'evaluation' else 'a'} {moment}: {found['aimed']} faults, "
        f"{found['struck']} of the {found['told']} that can be told struck it"
        for moment, found in counts.items()
    )


def missed(counts: Mapping[str, Mapping[str, int]]) -> str | None:
    """Says that commits were aimed at and never struck, if that is so: nothing can be said of torn ones then."""
    found = counts["commit"]
    if found["aimed"] < MANY or found["struck"]:
        return None
    return f"none of {found['aimed']} faults aimed at a commit struck one"
