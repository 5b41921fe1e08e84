"""Measures one job in fresh training processes, which it watches until they have done their iterations."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.engines import VISIBLE
from lockstep.config.run import Config
from lockstep.core.process import command_that_ends_with_us, failure_line
from lockstep.core.topology import without_launcher
from lockstep.launch.world import world_words
from lockstep.runs.directory import TIMING
from lockstep.scaling.plan import Job, Plan

POLL_SECONDS = 0.2
GRACE_SECONDS = 10.0

Progress = Callable[[int, int], None]
"""Called repeatedly with the iterations done and those wanted."""


@dataclass
class Outcome:
    """The outcome of a job.

    Attributes:
        records: one per iteration, as in ``timing.jsonl``, with ``copy`` (which of the simultaneous runs, from 0) and
            ``measured`` (whether it counts).
        error: why it failed, in one line, or None.
        seconds: wall time, including the start of processes.
    """

    records: list[dict[str, Any]]
    error: str | None = None
    seconds: float = 0.0


@dataclass
class Training:
    """A ``lockstep train`` in a fresh process, and what it has recorded so far."""

    process: subprocess.Popen[bytes]
    timing: Path
    stderr: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    _read: int = 0

    def watch(self) -> bool:
        """Reads new records; returns whether the process still runs."""
        running = self.process.poll() is None
        if self.timing.is_file():
            with self.timing.open("rb") as file:
                file.seek(self._read)
                whole = file.read().rpartition(b"\n")[0]
            self._read += len(whole) + bool(whole)
            self.records += [json.loads(line) for line in whole.splitlines()]
        return running

    def error(self) -> str:
        """Returns why the process failed, in one line."""
        return failure_line(self.stderr.read_text(errors="replace"), self.process.returncode)


def start_training(
    config: Config,
    world_size: int,
    name: str,
    directory: Path,
    steps: int | None,
    environment: Mapping[str, str] | None = None,
) -> Training:
    """Starts ``lockstep train`` on ``world_size`` ranks (engine jax: devices of one process).

    Args:
        config: what to train.
        world_size: number of ranks.
        name: name of the run.
        directory: where the run's directory is made.
        steps: global environment steps after which it stops; None: only when it is told to.
        environment: variables to add to those of this process.
    """
    source = directory / f"{name}.json"
    source.write_text(config.model_dump_json(), encoding="utf-8")
    words = command_that_ends_with_us("train", str(source), "--trust", *world_words(config, world_size))
    words += ["--name", name, "--runs-dir", str(directory), "--quiet"]
    words += [] if steps is None else ["--stop-at-step", str(steps)]
    stderr = directory / f"{name}.stderr"
    with stderr.open("wb") as file:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            env=without_launcher() | dict(environment or {}),
            start_new_session=True,  # so that Ctrl-C reaches only this process
        )
    return Training(process, directory / name / TIMING, stderr)


def stop(trainings: Sequence[Training]) -> None:
    """Stops what still runs: at its next iteration by SIGTERM, or, after a grace period, by a kill."""
    for training in trainings:
        if training.process.poll() is None:
            training.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    for training in trainings:
        try:
            training.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            training.process.kill()
            training.process.wait()


def measure(job: Job, plan: Plan, directory: Path, progress: Progress) -> Outcome:
    """Runs a job of a sweep and returns its outcome, even if a run fails; makes ``directory`` and removes it again."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    started = time.monotonic()
    try:
        outcome = (_run if job.kind == "run" else _ceiling)(job.world_size, plan, directory, progress)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    outcome.seconds = time.monotonic() - started
    return outcome


def _run(world_size: int, plan: Plan, directory: Path, progress: Progress) -> Outcome:
    wanted = plan.warmup_iters + plan.iters
    training = start_training(plan.sized(world_size), world_size, "run", directory, plan.steps(world_size))
    try:
        while training.watch():
            progress(len(training.records), wanted)
            time.sleep(POLL_SECONDS)
    finally:
        stop([training])
    records = [r | {"copy": 0, "measured": r["iteration"] > plan.warmup_iters} for r in training.records]
    if training.process.returncode:
        return Outcome(records, training.error())
    if len(records) != wanted:
        return Outcome(records, f"{len(records)} iterations were recorded instead of {wanted}")
    return Outcome(records)


def _ceiling(copies: int, plan: Plan, directory: Path, progress: Progress) -> Outcome:
    """Runs ``copies`` single-rank runs at once until all have done enough iterations side by side."""
    config, wanted = plan.sized(1), plan.warmup_iters + plan.iters
    trainings: list[Training] = []
    measured: list[list[bool]] = []
    failed = None
    try:
        for number, own in enumerate(own_devices(config.device, copies)):
            trainings.append(start_training(config, 1, f"copy_{number}", directory, None, own))
        while True:
            running = [training.watch() for training in trainings]
            failed = next((t for t, runs in zip(trainings, running, strict=True) if not runs), None)
            measured = side_by_side([t.records for t in trainings], plan.warmup_iters)
            done = min(sum(flags) for flags in measured)
            progress(min(wanted, plan.warmup_iters + done, *(len(t.records) for t in trainings)), wanted)
            if failed is not None or done >= plan.iters:
                break
            time.sleep(POLL_SECONDS)
    finally:
        stop(trainings)
    records = [
        record | {"copy": copy, "measured": flag}
        for copy, (training, flags) in enumerate(zip(trainings, measured, strict=True))
        for record, flag in zip(training.records, flags, strict=True)
    ]
    return Outcome(records, None if failed is None else failed.error())


def side_by_side(copies: Sequence[Sequence[dict[str, Any]]], warmup_iters: int) -> list[list[bool]]:
    """Marks the iterations that count: those during all of which every run was past its warm-up and still recorded.

    ``ended`` and ``t_iter`` of each run's records, which are in order, say when an iteration took place.
    """
    if any(len(records) <= warmup_iters for records in copies):
        return [[False] * len(records) for records in copies]

    def began(record: dict[str, Any]) -> float:
        return record["ended"] - max(record["t_iter"])

    opens = max(began(records[warmup_iters]) for records in copies)
    closes = min(records[-1]["ended"] for records in copies)
    return [
        [number >= warmup_iters and began(r) >= opens and r["ended"] <= closes for number, r in enumerate(records)]
        for records in copies
    ]


def own_devices(device: str, copies: int) -> list[dict[str, str]]:
    """Returns, for each independent run, the environment variable that shows it one device; none on CPUs."""
    if device not in VISIBLE:
        return [{}] * copies
    given = os.environ.get(VISIBLE[device])
    names = [str(n) for n in range(copies)] if given is None else [part.strip() for part in given.split(",")]
    return [{VISIBLE[device]: name} for name in names[:copies]]
