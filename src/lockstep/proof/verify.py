"""Runs a config on several world sizes and compares every tensor and metric at each iteration."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.checks import resolve
from lockstep.config.run import Config, LogConfig
from lockstep.core.process import command_that_ends_with_us, said_error
from lockstep.core.temporary import temporary_directory
from lockstep.core.topology import without_launcher
from lockstep.envs.describe import describe
from lockstep.launch.world import world_words
from lockstep.runs.directory import FINGERPRINTS
from lockstep.runs.trackers import METRICS_JSONL


@dataclass(frozen=True)
class Trace:
    """Holds what one world size left.

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
    """Tells of one world size against the first one: equal, or where they first differ."""

    trace: Trace
    equal: bool
    difference: str


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def run_trace(config: Config, world_size: int, iterations: int, directory: Path, processes: int = 1) -> Trace:
    """Trains ``iterations`` iterations on ``world_size`` ranks in fresh processes, tracing fingerprints."""
    name = f"world_size_{world_size}_processes_{processes}"
    source = directory / f"{name}.json"
    source.write_text(config.model_dump_json())
    command = command_that_ends_with_us("train", str(source), "--trust", *world_words(config, world_size, processes))
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
    """Finds where a trace first differs from the reference: iteration, tensor, metric."""
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
    """Runs every world size, ``(ranks, processes that share them)``, and compares each with the first.

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
    with temporary_directory() as directory:
        traces = [run_trace(config, n, iterations, directory, processes) for n, processes in worlds]
    return [compare(traces[0], trace) for trace in traces]


def parse_worlds(text: str, engine: str) -> list[tuple[int, int]]:
    """Reads ``"1,2,2x1"`` as numbers of ranks and processes: ``[(1, 1), (2, 1), (2, 2)]``.

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
