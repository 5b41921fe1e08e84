"""Shows which device or process owns which shards and environments, for ``lockstep verify --setup``."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from lockstep.config.checks import resolve
from lockstep.config.engines import engine_module
from lockstep.config.run import Config
from lockstep.core.errors import one_line
from lockstep.core.process import end_with_parent, failure_line
from lockstep.core.shards import ShardPlan
from lockstep.core.topology import without_launcher


def setup_of(config: Config, ranks: int, processes: int) -> str:
    """Describes the set-up of one world size, in lines; uses a fresh process, in which the engine can make its devices.

    Args:
        config: the run's config, resolved.
        ranks: number of processes (engine torch) or devices (engine jax).
        processes: number of processes that share the devices.

    Raises:
        ValueError: one line, if this machine has no such devices.
    """
    command = [sys.executable, "-P", "-m", "lockstep.proof.setup", *map(str, (ranks, processes, os.getpid()))]
    text = json.dumps(config.model_dump(mode="json"))  # by standard input: others can read a process's arguments
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, errors="replace", env=without_launcher(), check=False
    )
    if done.returncode:
        raise ValueError(failure_line(done.stderr, done.returncode))
    return done.stdout.rstrip()


def setup_lines(config: Config, ranks: int, processes: int) -> list[str]:
    """Returns the lines of :func:`setup_of`, found in this process."""
    where, names = engine_module(config.engine).name_ranks(config, ranks, processes)
    shards, each = config.shards, config.envs // config.shards
    lines = [
        f"{config.env.id} · {config.engine} · {where} · {config.envs} environments in {shards} shards of {each} · "
        f"{config.reduction}"
    ]
    for rank, name in enumerate(names):
        plan = ShardPlan(config.envs, shards, ranks, rank)
        first, last = plan.shards.start, plan.shards.stop - 1
        lines.append(f"  {name}: shards {first} to {last}, environments {first * each} to {(last + 1) * each - 1}")
    return lines


def _main(text: str, ranks: int, processes: int) -> int:
    config = resolve(Config.model_validate_json(text), ranks)
    try:
        print("\n".join(setup_lines(config, ranks, processes)), flush=True)
    except ValueError as error:
        print(f"lockstep: error: {one_line(error)}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    ranks, processes, parent = map(int, sys.argv[1:])
    end_with_parent(parent)
    code = _main(sys.stdin.read(), ranks, processes)
    os._exit(code)  # closing a back end is slow
