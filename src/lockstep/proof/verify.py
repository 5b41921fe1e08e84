"""``lockstep verify``: run a config on several world sizes and compare every tensor and metric at each iteration."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lockstep.commands.parser import CommandParser
from lockstep.config.checks import resolve
from lockstep.config.command_line import parse_arguments, read_request
from lockstep.config.run import Config, LogConfig, RunOptions
from lockstep.core.process import EXIT_FAILURE, command_that_ends_with_us, said_error
from lockstep.core.topology import without_launcher
from lockstep.envs.describe import describe
from lockstep.launch.world import world_words
from lockstep.proof.setup import setup_of
from lockstep.runs.directory import FINGERPRINTS
from lockstep.runs.trackers import METRICS_JSONL


@dataclass(frozen=True)
class Trace:
    """What one world size left.

    Attributes:
        world_size: number of ranks; of devices with the JAX engine.
        error: the run's own error, or None.
        tensors: each iteration's fingerprints by tensor name; ``metrics`` each iteration's metrics without times.
        processes: that shared the devices (JAX engine).
    """

    world_size: int
    error: str | None
    tensors: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    processes: int = 1

    @property
    def label(self) -> str:
        """The world size, as ``--world-sizes`` has it."""
        return f"{self.processes}x{self.world_size // self.processes}" if self.processes > 1 else str(self.world_size)


@dataclass(frozen=True)
class Comparison:
    """One world size against the first one: equal, or where they first differ."""

    trace: Trace
    equal: bool
    difference: str


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def run_trace(config: Config, world_size: int, iterations: int, directory: Path, processes: int = 1) -> Trace:
    """Train ``iterations`` iterations on ``world_size`` ranks in fresh processes, tracing fingerprints."""
    name = f"world_size_{world_size}_processes_{processes}"
    source = directory / f"{name}.json"
    source.write_text(config.model_dump_json())
    command = command_that_ends_with_us("train", str(source), *world_words(config, world_size, processes))
    command += ["--name", name, "--runs-dir", str(directory), "--quiet"]
    command += ["--stop-at-step", str(iterations * config.steps_per_iteration)]
    done = subprocess.run(command, capture_output=True, text=True, env=without_launcher(), check=False)
    error = said_error(done.stderr, done.returncode) if done.returncode else None
    metrics = [
        {k: v for k, v in record.items() if not k.startswith("time/")}
        for record in _lines(directory / name / METRICS_JSONL)
    ]
    return Trace(world_size, error, _lines(directory / name / FINGERPRINTS), metrics, processes)


def _first_difference(reference: dict[str, Any], other: dict[str, Any]) -> list[str]:
    keys = [*reference, *(key for key in other if key not in reference)]
    return [key for key in keys if other.get(key, _MISSING) != reference.get(key, _MISSING)]


_MISSING = object()


def compare(reference: Trace, trace: Trace) -> Comparison:
    """Where a trace first differs from the reference: iteration, tensor, metric."""
    if trace.error is not None:
        return Comparison(trace, False, trace.error)
    for kind in ("tensors", "metrics"):
        if len(getattr(trace, kind)) != len(getattr(reference, kind)):
            return Comparison(
                trace, False, f"{len(getattr(trace, kind))} iterations against {len(getattr(reference, kind))}"
            )
    if not trace.tensors or not trace.metrics:
        return Comparison(trace, False, "no iteration was traced")
    rows = zip(reference.tensors, trace.tensors, reference.metrics, trace.metrics, strict=True)
    for number, (tensors, other_tensors, metrics, other_metrics) in enumerate(rows, 1):
        names = _first_difference(tensors, other_tensors)
        values = _first_difference(metrics, other_metrics)
        if names or values:
            parts = [f"{len(names)} of {len(tensors) - 1} tensors, first {names[0]}"] if names else ["no tensor"]
            if values:
                key = values[0]
                parts.append(f"metric {key}: {metrics.get(key)} against {other_metrics.get(key)}")
            return Comparison(trace, False, f"iteration {number}: {'; '.join(parts)}")
    return Comparison(trace, True, "")


def verify(config: Config, worlds: Sequence[tuple[int, int]], iterations: int) -> list[Comparison]:
    """Run every world size and compare each with the first.

    Args:
        config: the run; it is resolved for the first world size.
        worlds: numbers of ranks, and of the processes that share them (JAX engine; else 1).
        iterations: how many iterations each trains.

    Raises:
        ValueError: a world size can't share the config's shards; before anything is started.
    """
    config = resolve(config, worlds[0][0])
    for world_size, _ in worlds:
        resolve(config, world_size)
    describe(config.env)
    proof = config.proof.model_copy(update={"trace": True, "interval": 1})
    log = LogConfig(tensorboard=False)
    steps = max(config.total_steps, iterations * config.steps_per_iteration)
    config = config.model_copy(update={"proof": proof, "log": log, "total_steps": steps})
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as directory:
        traces = [run_trace(config, n, iterations, Path(directory), processes) for n, processes in worlds]
    return [compare(traces[0], trace) for trace in traces]


def _print(config: Config, results: Sequence[Comparison], iterations: int) -> None:
    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table(title=f"{config.env.id}, seed {config.seed}, {iterations} iterations, reduction {config.reduction}")
    table.add_column("world size" if config.engine == "torch" else "devices", justify="right")
    table.add_column("equal")
    table.add_column("tensors", justify="right")
    table.add_column("first difference", overflow="fold")
    for result in results:
        tensors = str(len(result.trace.tensors[0]) - 1) if result.trace.tensors else "–"
        table.add_row(result.trace.label, "yes" if result.equal else "NO", tensors, result.difference)
    console.print(table)
    if all(result.equal for result in results):
        print("verified: every tensor and every metric has the same bytes at every iteration")
    else:
        print("NOT VERIFIED: the run depends on its world size, or a rank left the others; see the first difference")


def parse_worlds(text: str, engine: str) -> list[tuple[int, int]]:
    """``"1,2,2x1"`` as numbers of ranks and processes: ``[(1, 1), (2, 1), (2, 2)]``.

    Raises:
        ValueError: it is no such list, or has processes of several devices where every rank is a process.
    """
    found = [re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)", part.strip()) for part in text.split(",")]
    matches = [match for match in found if match is not None]
    if len(matches) < len(found):
        also = "" if engine == "torch" else ", or 2x1 for two processes of one device each"
        raise ValueError(f"world-sizes: {text!r} is not a list of numbers of ranks such as 1,2,4{also}")
    for match in matches:
        if match[1] and engine == "torch":
            raise ValueError(f"world-sizes: {match[0]}: with engine torch every rank is a process; give a number alone")
    return [(int(match[1] or 1) * int(match[2]), int(match[1] or 1)) for match in matches]


def verify_command(argv: Sequence[str]) -> int:
    """``lockstep verify CONFIG``: exit status 0 if every world size gives the same bytes, 1 if not."""
    parser = CommandParser(
        prog="lockstep verify",
        description="Train a config for some iterations on several world sizes and compare every tensor and metric.",
        allow_abbrev=False,
        epilog="Every option of lockstep train that describes the run is accepted too, e.g. --seed 3 --num-envs 64.",
    )
    parser.add_argument("config", metavar="CONFIG_FILE_OR_ENV_ID")
    parser.add_argument(
        "--world-sizes",
        default="1,2,4",
        help="numbers of ranks, the first is the reference (default: 1,2,4); engine jax: of devices, simulated ones on "
        "a CPU, in one process, or 2x1 for two processes of one device each",
    )
    parser.add_argument("--iterations", type=int, default=5, help="iterations of each (default: 5)")
    parser.add_argument(
        "--setup",
        action="store_true",
        help="train nothing: show each world size's devices, and which shards and environments each owns",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options, rest = parser.parse_known_args(list(argv))
    if options.iterations < 1:
        raise ValueError(f"iterations: {options.iterations} is below 1")
    given = parse_arguments(rest)
    for key in given.settings:
        if key in RunOptions.model_fields:
            raise ValueError(f"{key}: verify starts its own runs; give only what describes the run")
    if given.positional:
        raise ValueError(f"{given.positional[0]!r}: one config file or environment id is enough, before the options")
    request = read_request([options.config, *rest])
    worlds = parse_worlds(options.world_sizes, request.config.engine)
    if options.setup:
        for ranks, processes in worlds:
            print(setup_of(resolve(request.config, ranks), ranks, processes))
        return 0
    results = verify(request.config, worlds, options.iterations)
    if options.json:
        rows = [{"world_size": r.trace.world_size, "equal": r.equal, "difference": r.difference} for r in results]
        if request.config.engine == "jax":
            rows = [row | {"processes": r.trace.processes} for row, r in zip(rows, results, strict=True)]
        print(json.dumps(rows))
    else:
        _print(request.config, results, options.iterations)
    return 0 if all(result.equal for result in results) else EXIT_FAILURE
