"""Checks that the seeds of a request fit its other options, and the group that it resumes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.core.topology import Topology
from lockstep.launch.request import RunRequest
from lockstep.launch.seeds.making import could_be_group
from lockstep.runs.groups import seeds_of


def check_seeds(request: RunRequest, topology: Topology) -> None:
    """Raises a one-line ``ValueError``, with what works instead, if a group of seeds can't be trained as asked."""
    options, config = request.options, request.config
    asked = f"seeds: {options.seeds}" if options.seeds is not None else f"num_seeds: {options.num_seeds}"
    if options.seeds is not None and "seed" in request.overrides:
        raise ValueError(f"seed: {config.seed} with seeds {options.seeds}; leave seed out")
    if topology.launched:
        raise ValueError(f"{asked}, but another launcher started this rank; start lockstep train by itself")
    if config.log.jsonl is not None:
        raise ValueError(
            f"log.jsonl: {config.log.jsonl} with several seeds; each has a metrics.jsonl of its own, and one file "
            "can't hold all: leave it out"
        )


def check_resumed_seeds(path: Path, seeds: Sequence[int]) -> list[int]:
    """Returns the sorted seeds with which a group is resumed; a group that was killed early may have no runs yet.

    Raises:
        ValueError: the run isn't a group of exactly these seeds; one line.
    """
    there = seeds_of(path)
    if sorted(seeds) != there and (there or not could_be_group(path, seeds)):
        what = f"has seeds {', '.join(map(str, there))}" if there else "is one run"
        raise ValueError(f"seeds: {', '.join(map(str, seeds))} with --resume {path}, which {what}; leave seeds out")
    return sorted(seeds)
