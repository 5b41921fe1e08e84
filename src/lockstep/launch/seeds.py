"""Several seeds in one run: what that doesn't go together with."""

from __future__ import annotations

from typing import Any

from lockstep.config.run import Config, RunOptions
from lockstep.config.sections import SERVICES
from lockstep.envs.description import stepped_as_arrays

EACH = "start a run for each --seed"


def check_seeds(options: RunOptions, config: Config, processes: int) -> None:
    """Raises a one-line ``ValueError``, with what works instead, if ``num_seeds`` agents can't be trained at once."""
    if options.num_seeds == 1:
        return
    asked = f"num_seeds: {options.num_seeds}"
    if options.resume is not None:
        raise ValueError(f"{asked} with --resume {options.resume}; each seed is resumed by itself: --resume RUN/seed_N")
    if options.max_restarts:
        raise ValueError(f"{asked} with max_restarts {options.max_restarts}; each seed is resumed by itself: {EACH}")
    if processes > 1:
        raise ValueError(
            f"{asked} with {processes} processes; seeds share the devices of one: leave the others out, or {EACH}"
        )
    if not (config.env.jax_only or stepped_as_arrays(config.env)):
        raise ValueError(
            f"{asked}: {config.env.id} is stepped on the host, and seeds share a program only with an environment "
            f"inside it (lockstep/…, gymnax/…, brax/…, playground/…); {EACH}"
        )
    for key, value, instead in _refused(config):
        raise ValueError(f"{key}: {value} with num_seeds {options.num_seeds}; {instead}")


def _refused(config: Config) -> list[tuple[str, Any, str]]:
    log = config.log
    found: list[tuple[str, Any, str]] = [
        ("fsdp", config.fsdp and "true", f"every seed's parameters are whole on each device: leave it out, or {EACH}"),
        ("eval.interval", config.eval.interval, "evaluate each seed afterwards: lockstep eval RUN/seed_N"),
        ("checkpoint.mirror", config.checkpoint.mirror, f"a mirror holds one run; {EACH}"),
        ("proof.trace", config.proof.trace and "true", f"{EACH} that is to be traced"),
        ("log.console", log.console == "full" and "full", "what is shown sums up all seeds: leave it out"),
        (
            "log.jsonl",
            log.jsonl,
            "every seed has a metrics.jsonl of its own, and one file can't hold all: leave it out",
        ),
    ]
    services = [name for name in SERVICES if getattr(log, name)]
    found += [(f"log.{name}", "true", f"a process logs one run there, not one a seed; {EACH}") for name in services]
    return [one for one in found if one[1]]
