"""Reads the place that Slurm gave to this process: a task of a step that srun started."""

from __future__ import annotations

import re
from collections.abc import Mapping

from lockstep.core.host.mpi import Place

STEP = "SLURM_STEP_NODELIST"
"""Set in a step that srun started, but not in a batch script."""


def place_of_task(environ: Mapping[str, str]) -> Place | None:
    """Returns this task's place in its step; None if the step has a single task.

    Raises:
        ValueError: variables are missing or contradict one another; one line.
    """
    tasks = _tasks_of_step(environ)
    if tasks == "1":
        return None
    needed = {name: environ.get(name) for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")}
    if tasks is None or None in needed.values():
        missing = ["SLURM_NTASKS"] if tasks is None else [name for name, value in needed.items() if value is None]
        raise ValueError(
            f"launcher variables: {missing[0]} is not set in this Slurm step; start every rank with srun, or unset "
            f"{STEP}"
        )
    try:
        rank, local_rank, world_size = int(environ["SLURM_PROCID"]), int(environ["SLURM_LOCALID"]), int(tasks)
        counts = tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
        local_world_size = counts[int(environ.get("SLURM_NODEID", 0))]
    except (ValueError, IndexError) as error:
        raise ValueError(
            f"launcher variables: SLURM_PROCID, SLURM_LOCALID, SLURM_NTASKS, SLURM_NODEID and "
            f"SLURM_STEP_TASKS_PER_NODE {environ['SLURM_STEP_TASKS_PER_NODE']!r} make no sense ({error})"
        ) from None
    if not (0 <= rank < world_size == sum(counts) and 0 <= local_rank < local_world_size):
        raise ValueError(
            f"launcher variables: SLURM_PROCID {rank} of {world_size} tasks, SLURM_LOCALID {local_rank} of "
            f"SLURM_STEP_TASKS_PER_NODE {environ['SLURM_STEP_TASKS_PER_NODE']} don't fit together; start every rank "
            "with srun"
        )
    return Place(rank, world_size, local_rank, local_world_size)


def cores_of_task(environ: Mapping[str, str], world_size: int) -> int | None:
    """Returns the cores that Slurm gave each task; None if tasks aren't the ranks, or if Slurm doesn't say."""
    if STEP not in environ or _tasks_of_step(environ) != str(world_size):
        return None
    each = environ.get("SLURM_CPUS_PER_TASK", "")
    return int(each) if each.isdecimal() and int(each) else None


def _tasks_of_step(environ: Mapping[str, str]) -> str | None:
    return environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS"))


def first_host(nodelist: str) -> str:
    """Returns the first host of Slurm's list: ``gpu001`` for ``gpu[001-003,007],cpu1``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    host = re.sub(r"\[([^,\-\]]+)[^\]]*\]", r"\1", first[0] if first else "")
    if not host or "[" in host:
        raise ValueError(f"launcher variables: {STEP} {nodelist!r} names no host")
    return host


def tasks_per_node(text: str) -> list[int]:
    """Parses Slurm's tasks per node: ``[2, 2, 1]`` for ``2(x2),1``; raises a ``ValueError`` for another format."""
    out = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise ValueError(f"{part!r} is no number of tasks")
        out += [int(found[1])] * int(found[2] or 1)
    return out
