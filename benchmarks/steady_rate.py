"""Steady-state speed of a program from outside: the times at which its once-per-iteration lines arrive.

Nothing that a program does between two iterations can hide from this clock.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.process_tree import ProcessTree
from benchmarks.programs import Program

SKIPPED_SHARE = 0.25
FEWEST_LINES = 4
PAUSE = 0.02
"""Seconds between two looks at the lines: who reads each at once takes time from what runs on all cores."""


def variables(threads: int = 1) -> dict[str, str]:
    """Environment variables of a process with so many threads and no GPU."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    others = {"CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    others["JAX_TRACEBACK_FILTERING"] = "off"  # else the last line of an error is about this
    return dict.fromkeys(names, str(threads)) | others


class MeasurementError(Exception):
    """A run that gives no figure; one line says why."""


@dataclass
class Measured:
    """One run of a program.

    Attributes:
        steps_per_second: in the steady state.
        cores: CPU seconds over wall seconds of the whole run, start-up included.
        records: ours only: the metrics records of the steady state, the first of which precedes it.
        wall: seconds that the steady state lasted.
        cpu: CPU seconds of a million steps in the steady state, of all its processes; None where it wasn't seen.
        memory: most bytes that its processes held at a time, start-up included; None where it wasn't seen.
    """

    steps_per_second: float
    cores: float
    wall: float
    records: list[dict[str, Any]] = field(default_factory=list)
    cpu: float | None = None
    memory: int | None = None


@dataclass
class _Pipe:
    """The reading end of one process's lines."""

    path: str
    descriptor: int
    times: list[float] = field(default_factory=list)
    text: bytes = b""

    def read(self) -> None:
        with suppress(BlockingIOError):
            chunk = os.read(self.descriptor, 1 << 16)
            self.times += [time.perf_counter()] * chunk.count(b"\n")
            self.text += chunk


def steady_window(times: list[float]) -> tuple[int, int]:
    """First and last index of the steady state: the first quarter of the lines is left out.

    Raises:
        MeasurementError: there are too few lines.
    """
    if len(times) < FEWEST_LINES:
        raise MeasurementError(f"{len(times)} iterations are too few to measure; at least {FEWEST_LINES}")
    return max(1, int(len(times) * SKIPPED_SHARE)), len(times) - 1


def steady_rate(times: list[float], steps_per_iteration: int) -> float:
    """Steps a second of one process from the arrival times (seconds) of its lines.

    Raises:
        MeasurementError: there are too few lines, or all that count came at once.
    """
    first, last = steady_window(times)
    return _rate(times[first : last + 1], steps_per_iteration)


def _rate(times: list[float], steps_per_iteration: int) -> float:
    if times[-1] == times[0]:
        raise MeasurementError(f"the last {len(times)} iterations came at once: their pipe was read too late")
    return (len(times) - 1) * steps_per_iteration / (times[-1] - times[0])


def joint_rate(all_times: list[list[float]], steps_per_iteration: int) -> float:
    """Steps a second of several processes together, while all of them are in their steady state.

    Args:
        all_times: arrival times of each process's lines.
        steps_per_iteration: of one process.

    Raises:
        MeasurementError: they hardly ran at the same time, or lines of one came at once.
    """
    begin = max(times[steady_window(times)[0]] for times in all_times)
    end = min(times[-1] for times in all_times)
    inside = [[t for t in times if begin <= t <= end] for times in all_times]
    if any(len(times) < FEWEST_LINES for times in inside):
        raise MeasurementError("the copies hardly ran at the same time; more iterations are needed")
    return sum(_rate(times, steps_per_iteration) for times in inside)


def last_line(log: Path) -> str:
    """The last line of a program's output that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


def _start(program: Program, work: Path, pipe: _Pipe, log: Path) -> subprocess.Popen[bytes]:
    config = work / "config.json"
    if program.config is not None:
        config.write_text(json.dumps(program.config))
    places = {"{lines}": pipe.path, "{work}": str(work / "runs"), "{config}": str(config)}
    command = [places.get(word, word) for word in program.command]
    with log.open("wb") as output:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | variables(program.threads),
                cwd=work,  # where simulators leave their logs
                start_new_session=True,
            )
        except OSError as error:
            raise MeasurementError(f"{command[0]} can't be started: {error.strerror}") from error


def _follow(processes: list[subprocess.Popen[bytes]], pipes: list[_Pipe], timeout: float, tree: ProcessTree) -> bool:
    """Read lines until every process has ended; False if that takes too long."""
    deadline = time.monotonic() + timeout
    by_descriptor = {pipe.descriptor: pipe for pipe in pipes}
    while True:
        running = any(process.poll() is None for process in processes)
        ready, _, _ = select.select(list(by_descriptor), [], [], 0.2 if running else 0.0)
        for descriptor in ready:
            by_descriptor[descriptor].read()
        tree.look_if_due(timed=all(pipe.times for pipe in pipes))
        if not ready and not running:
            return True
        if time.monotonic() > deadline:
            return False
        if ready and running:
            time.sleep(PAUSE)


def kill(processes: list[subprocess.Popen[bytes]]) -> None:
    """End those that still run, with the ranks and workers that they started."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def measure(program: Program, timeout: float, tree: ProcessTree | None = None) -> Measured:
    """Run a program once (or its copies at once) and time it.

    Args:
        program: what to run.
        timeout: seconds after which they are killed.
        tree: how their memory and CPU time are looked at.

    Raises:
        MeasurementError: it failed, or took too long.
    """
    tree = tree or ProcessTree()
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        directory, pipes, processes, logs = Path(name), [], [], []
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        try:
            for copy in range(program.copies):
                work = directory / str(copy)
                work.mkdir()
                path = str(work / "lines")
                os.mkfifo(path)
                pipes.append(_Pipe(path, os.open(path, os.O_RDWR | os.O_NONBLOCK)))
                logs.append(work / "log")
                processes.append(_start(program, work, pipes[-1], logs[-1]))
            tree.roots = {process.pid for process in processes}
            in_time = _follow(processes, pipes, timeout, tree)
        finally:
            kill(processes)
            for pipe in pipes:
                os.close(pipe.descriptor)
        wall = time.perf_counter() - started
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if not in_time:
            raise MeasurementError(f"killed after {timeout:.0f} s; {last_line(logs[0])}")
        for process, log in zip(processes, logs, strict=True):
            if process.returncode != 0:
                raise MeasurementError(f"exit status {process.returncode}: {last_line(log)}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return evaluate(program, [pipe.times for pipe in pipes], pipes[0].text, cpu / wall, tree)


def evaluate(program: Program, all_times: list[list[float]], text: bytes, cores: float, tree: ProcessTree) -> Measured:
    """What the lines of a finished run say; ``text`` is what the first copy wrote."""
    times = all_times[0]
    first, last = steady_window(times)
    each = program.steps_per_iteration
    rate = steady_rate(times, each) if program.copies == 1 else joint_rate(all_times, each)
    records = [json.loads(line) for line in text.splitlines()[first : last + 1]] if program.is_ours else []
    wall = times[last] - times[first]
    busy = tree.cores_between(times[first], times[last])
    cpu = None if busy is None else busy / rate * 1e6
    return Measured(rate, cores, wall, records, cpu, tree.peak)
