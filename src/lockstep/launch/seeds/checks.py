"""Several seeds: which are asked for, and whether they can share one program."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.config.run import Config, RunOptions
from lockstep.config.sections import SERVICES
from lockstep.core.topology import Topology
from lockstep.envs.description import stepped_as_arrays
from lockstep.launch.defaults import RunRequest
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
    """Returns the seeds, in order, that a run is to be resumed with; a group that was killed early may have none yet.

    Raises:
        ValueError: the run isn't a group of just these; one line.
    """
    there = seeds_of(path)
    if sorted(seeds) != there and (there or not could_be_group(path, seeds)):
        what = f"has seeds {', '.join(map(str, there))}" if there else "is one run"
        raise ValueError(f"seeds: {', '.join(map(str, seeds))} with --resume {path}, which {what}; leave seeds out")
    return sorted(seeds)


def why_apart(options: RunOptions, config: Config, processes: int) -> str | None:
    """Says why seeds can't be agents of one program, so that they are trained in processes of their own; None: one."""
    if config.engine == "torch":
        return "engine torch trains one agent a process"
    if not (config.env.jax_only or stepped_as_arrays(config.env)):
        return f"{config.env.id} is stepped on the host"
    log = config.log
    found: list[tuple[str, Any]] = [
        ("nproc", options.nproc if processes > 1 else None),
        ("max_restarts", options.max_restarts),
        ("launcher", options.launcher if options.launcher != "local" else None),
        ("seeds_at_once", options.seeds_at_once),
        ("fsdp", config.fsdp),
        ("eval.interval", config.eval.interval),
        ("checkpoint.mirror", config.checkpoint.mirror),
        ("proof.trace", config.proof.trace),
        ("log.console", log.console if log.console == "full" else None),
        *((f"log.{name}", getattr(log, name)) for name in SERVICES),
    ]
    return next((f"with {key} each seed is a program of its own" for key, value in found if value), None)
