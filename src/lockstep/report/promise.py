"""Says what takes a run out of the promise that its config alone decides its bytes, on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.report.lengths import lengths_of
from lockstep.report.reading import RunFiles, objects
from lockstep.report.timing import world_sizes
from lockstep.report.words import setting
from lockstep.runs.listing import number


def leaves_of(run: RunFiles) -> list[str]:
    """Returns why a run, or one of several seeds, is outside the promise of equal bytes, one line each."""
    return [
        *ranks_matter(run.config),
        *_regrouped(run),
        *_restarted(run),
        *lengthened(run),
        *_moved(run),
        *_reordered(run),
    ]


def changed(run: RunFiles) -> str | None:
    """Returns why a run's config doesn't give the run's agents again, though a new run has as many ranks; else None."""
    runs = run.seeds or [run]
    sizes = {ranks for one in runs for _, _, ranks in world_sizes(one)}
    if any(map(lengthened, runs)):
        return "its length was changed on the way (see Proof)"
    if any(map(_restarted, runs)):
        return "environments began new episodes where it was resumed (see Interruptions)"
    if ranks_matter(run.config) and len(sizes) > 1:
        return "not all of it was trained on one number of ranks (see Proof)"
    if any(map(_moved, runs)):
        return "not all of it was trained with the same hardware and versions (see Proof)"
    if any(map(_reordered, runs)):
        return "its sums were added in another order from a resume on (see Proof)"
    return None


def ranks_matter(config: Mapping[str, Any]) -> list[str]:
    """Returns the settings that give up equal bytes for every world size, one line each."""
    out = []
    if config.get("reduction") == "fast":
        out.append("reduction fast: agents of other world sizes are equal up to the order of sums, not in their bytes")
    if config.get("fsdp"):
        out.append("fsdp: parameters and gradients are summed by the framework")
    if (number(config, "sync_period") or 1) > 1:
        out.append(f"sync_period {config['sync_period']}: ranks take steps by themselves before they are averaged")
    return out


def lengthened(run: RunFiles) -> list[str]:
    """Returns a line for each change of a run's ``total_steps`` and schedules: its config gives another agent."""
    return [
        f"total_steps was {setting(row['was'])} until step {setting(row['global_step'])} and is "
        f"{setting(row['is'])} since, and schedules follow it: a new run of this config is another run"
        for row in lengths_of(run.path, run.config, links=False)
    ]


def _regrouped(run: RunFiles) -> list[str]:
    if not ranks_matter(run.config) or len(world_sizes(run)) < 2:
        return []
    return ["its number of ranks was changed on the way: a new run, on whatever number of ranks, is another run"]


def _restarted(run: RunFiles) -> list[str]:
    if not run.summary.get("restarted_environments"):
        return []
    return ["environments began new episodes where it was resumed: from there on it is another run than without a stop"]


def _moved(run: RunFiles) -> list[str]:
    """Returns a line if a run went on with hardware or versions that may round differently from those it began with."""
    since = number(run.summary, "first_machine_until")
    if since is None:
        return []
    return [f"from step {since:.0f} on its hardware or versions are others than those it began with"]


def _reordered(run: RunFiles) -> list[str]:
    """Returns a line for each setting that changed on the way and orders the sums of a run with reduction fast."""
    said = ({name: setting(value) for name, value in row.items()} for row in objects(run.summary, "orders"))
    return [
        f"{row.get('setting')} was {row.get('was')} until step {row.get('global_step')} and is {row.get('is')} since, "
        "and with reduction fast the order of sums follows it"
        for row in said
    ]
