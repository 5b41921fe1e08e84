"""Summarises the records of a sweep in its two tables: one row per run, and one row per world size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from lockstep.scaling.measure import Outcome
from lockstep.scaling.plan import Job, Plan

Row = dict[str, Any]

PARTS = ("t_rollout", "t_learn", "t_comm", "t_wait", "t_other")
"""Parts of an iteration, in seconds; they add up to ``t_iter``."""

MEANS = ("t_iter", *PARTS, "collectives", "bytes")
BY_RANK = ("t_rollout", "t_learn", "t_wait", "t_other", "bytes", "peak_memory_mb", "peak_gpu_memory_mb")
PEAKS = ("peak_memory_mb", "peak_gpu_memory_mb")

# 97.5 % quantiles of Student's t, by degrees of freedom from 1 to 30.
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
NORMAL = 1.959964


def student(freedom: int) -> float:
    """Returns the 97.5 % quantile of Student's t: from the table, then by Abramowitz and Stegun 1964, 26.7.5."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Returns the 95 % confidence interval of a mean (Student's t), or None for fewer than two values."""
    if len(values) < 2:
        return None
    half = student(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def ratio_interval(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Returns the 95 % confidence interval of a geometric mean of ratios, or None for fewer than two."""
    bounds = interval([math.log(r) for r in ratios])
    return None if bounds is None else (math.exp(bounds[0]), math.exp(bounds[1]))


def mean(values: Iterable[float | None]) -> float | None:
    """Returns the mean of the values that aren't None, or None if there are none."""
    there = [v for v in values if v is not None]
    return statistics.fmean(there) if there else None


def ratio_mean(ratios: Sequence[float]) -> float | None:
    """Returns the geometric mean, in which ratios 2 and 1/2 average to 1; None if there are none."""
    return statistics.geometric_mean(ratios) if ratios else None


# --- one row a run ----------------------------------------------------------------------------------------------


def run_row(job: Job, plan: Plan, outcome: Outcome) -> Row:
    """Summarises what one job measured; for a failed job, measured columns are None.

    ``steps_per_second`` is the sum over simultaneous runs. Times are in seconds, means over the measured iterations and
    over ranks (for a ceiling, over its runs). ``bytes`` is what a rank contributes. ``…_by_rank`` are means by rank, of
    memory the peaks. What an engine can't tell (the parts of a compiled program) is None.
    """
    config = plan.sized(job.world_size if job.kind == "run" else 1)
    row: Row = {
        "run": job.name,
        "kind": job.kind,
        "world_size": job.world_size,
        "repeat": job.repeat,
        "status": "ok" if outcome.error is None else "failed",
        "error": outcome.error,
        "seconds": outcome.seconds,
        "num_envs": config.num_envs,
        "num_shards": config.num_shards,
    }
    columns = ("iterations", "steps_per_second", "t_iter_median", *MEANS, *PEAKS, *(f"{k}_by_rank" for k in BY_RANK))
    row |= dict.fromkeys(columns)
    if outcome.error is None:
        row |= _measured([r for r in outcome.records if r["measured"]])
    return row


def _measured(records: Sequence[Row]) -> Row:
    copies = [[r for r in records if r["copy"] == copy] for copy in sorted({r["copy"] for r in records})]
    told = {key for key in (*BY_RANK, "t_iter", "t_comm") if key in records[0]}
    by_rank = {key: [m for copy in copies for m in _rank_means(copy, key)] for key in told}
    for key in told.intersection(PEAKS):
        by_rank[key] = [max(r[key][rank] for r in copy) for copy in copies for rank in range(len(copy[0][key]))]
    out: Row = {
        "iterations": len(records),
        "steps_per_second": sum(sum(r["steps"] for r in copy) / _seconds(copy) for copy in copies),
        "t_iter_median": statistics.median(statistics.fmean(r["t_iter"]) for r in records),
    }
    if "collectives" in records[0]:
        out["collectives"] = statistics.fmean(r["collectives"] for r in records)
    out |= {key: statistics.fmean(by_rank[key]) for key in MEANS if key in told}
    out |= {key: max(by_rank[key]) for key in PEAKS if key in told}
    return out | {f"{key}_by_rank": by_rank[key] for key in BY_RANK if key in told}


def _rank_means(records: Sequence[Row], key: str) -> list[float]:
    return [statistics.fmean(r[key][rank] for r in records) for rank in range(len(records[0][key]))]


def _seconds(records: Sequence[Row]) -> float:
    return sum(statistics.fmean(r["t_iter"]) for r in records)


# --- one row a world size ---------------------------------------------------------------------------------------


def summary_rows(rows: Sequence[Row], plan: Plan) -> list[Row]:
    """Summarises a sweep by world size: means over the repeats that ended well, None if there are none.

    ``speedup`` is steps/s divided by those of the smallest world size in the same repeat, ``efficiency`` the speed-up
    divided by the ratio of ranks, ``ceiling_efficiency`` steps/s divided by those of as many independent runs in the
    same repeat. These ratios are geometric means; ``…_low`` and ``…_high`` bound the 95 % confidence interval of the
    last two over the repeats.
    """
    well = {(r["kind"], r["world_size"], r["repeat"]): r for r in rows if r["status"] == "ok"}
    return [_summary_row(n, rows, well, plan) for n in plan.world_sizes]


def _summary_row(world_size: int, rows: Sequence[Row], well: dict[tuple[str, int, int], Row], plan: Plan) -> Row:
    repeats = range(1, plan.repeats + 1)
    runs = [well[key] for r in repeats if (key := ("run", world_size, r)) in well]
    ceiling_kind = "ceiling" if world_size > 1 else "run"  # one independent run is a run on one rank
    ceilings = [well[key] for r in repeats if (key := (ceiling_kind, world_size, r)) in well and plan.ceiling]
    base = plan.world_sizes[0]
    speedups = _ratios(well, ("run", world_size), ("run", base), plan)
    efficiencies = [s * base / world_size for s in speedups]
    of_ceiling = _ratios(well, ("run", world_size), (ceiling_kind, world_size), plan) if plan.ceiling else []
    config = plan.sized(world_size)
    row: Row = {
        "world_size": world_size,
        "mode": plan.mode,
        "num_envs": config.num_envs,
        "num_shards": config.num_shards,
        "steps_per_iteration": config.steps_per_iteration,
        "runs": len(runs),
        "failed": sum(r["status"] != "ok" and r["world_size"] == world_size for r in rows),
    }
    row["steps_per_second"] = mean(r["steps_per_second"] for r in runs)
    row["speedup"] = ratio_mean(speedups)
    row |= _with_interval("efficiency", efficiencies, certain=world_size == base)
    row["ceiling_steps_per_second"] = mean(r["steps_per_second"] for r in ceilings)
    row |= _with_interval("ceiling_efficiency", of_ceiling, certain=world_size == 1)
    row |= {key: mean(r[key] for r in runs) for key in (*MEANS, "t_iter_median")}
    row |= {key: max((r[key] for r in runs if r[key] is not None), default=None) for key in PEAKS}
    return row


def _ratios(
    well: dict[tuple[str, int, int], Row], above: tuple[str, int], below: tuple[str, int], plan: Plan
) -> list[float]:
    """Returns steps/s of one kind of job divided by those of another, for each repeat that has both."""
    pairs = [((*above, r), (*below, r)) for r in range(1, plan.repeats + 1)]
    return [well[a]["steps_per_second"] / well[b]["steps_per_second"] for a, b in pairs if a in well and b in well]


def _with_interval(name: str, values: Sequence[float], certain: bool = False) -> Row:
    """Returns geometric mean and confidence interval; no interval if the ratio is ``certain``: 1 by definition."""
    bounds = None if certain else ratio_interval(values)
    low, high = bounds if bounds is not None else (None, None)
    return {name: ratio_mean(values), f"{name}_low": low, f"{name}_high": high}
