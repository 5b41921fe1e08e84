"""Decides whether the seeds of a group can be agents of one program."""

from __future__ import annotations

from typing import Any

from lockstep.config.run import Config, RunOptions
from lockstep.config.sections import SERVICES
from lockstep.envs.description import stepped_as_arrays


def why_not_one_program(options: RunOptions, config: Config, processes: int) -> str | None:
    """Says why seeds can't be agents of one program and need a process each; None if they can."""
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
