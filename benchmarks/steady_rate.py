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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.process_tree import ProcessTree
from benchmarks.programs import Program

SKIPPED_SHARE = 0.25
FEWEST_LINES = 4
AT_ONCE = 0.1
"""Two lines less than this share of the mean time apart were written at once."""
CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
"""Where a program keeps what JAX compiles: each finds an empty place, so that ours and the peers' all compile."""
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


def steady_window(times: list[float], calls: Sequence[float] = ()) -> tuple[int, int]:
    """First and last index of the steady state, which begins after a quarter of the lines and what came with the next.

    Args:
        times: arrival times of lines.
        calls: see :func:`end_of_burst`.

    Raises:
        MeasurementError: there are too few lines, or all that count came at once.
    """
    if len(times) < FEWEST_LINES:
        raise MeasurementError(f"{len(times)} iterations are too few to measure; at least {FEWEST_LINES}")
    return end_of_burst(times, max(1, int(len(times) * SKIPPED_SHARE)), calls), len(times) - 1


def end_of_burst(times: Sequence[float], first: int, calls: Sequence[float] = ()) -> int:
    """Index of the last of the lines that were written at once with line ``first``.

    Their work was done when the first of them came: counted in what follows, it would have taken no time.

    Args:
        times: arrival times of lines.
        first: index of one of them.
        calls: for each line a number that all lines of one call of a compiled program have in common, if that is known;
            who reads may be in the middle of them.

    Raises:
        MeasurementError: no line came later.
    """
    last, end = len(times) - 1, first
    near = AT_ONCE * (times[last] - times[first]) / (last - first)
    while end < last and (times[end + 1] - times[end] <= near or (calls and calls[end + 1] == calls[end])):
        end += 1
    if end == last:
        raise MeasurementError(f"the last {last + 1 - first} iterations came at once; more of them are needed")
    return end


def steady_rate(times: list[float], steps_per_iteration: int, calls: Sequence[float] = ()) -> float:
    """Steps a second of one process from the arrival times (seconds) of its lines; for ``calls`` see `end_of_burst`.

    Raises:
        MeasurementError: there are too few lines, or all that count came at once.
    """
    first, last = steady_window(times, calls)
    return _rate(times[first : last + 1], steps_per_iteration)


def _rate(times: Sequence[float], steps_per_iteration: int) -> float:
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
    return sum(_rate(times[end_of_burst(times, 0) :], steps_per_iteration) for times in inside)


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
                env=os.environ | variables(program.threads) | {CACHE_VARIABLE: str(work / "compiled")},
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
    times, each = all_times[0], program.steps_per_iteration
    records = [json.loads(line) for line in text.splitlines()] if program.is_ours else []
    calls = [record["time/t_iter"] for record in records] if program.framework == "jax" else []
    first, last = steady_window(times, calls)
    rate = steady_rate(times, each, calls) if program.copies == 1 else joint_rate(all_times, each)
    wall = times[last] - times[first]
    busy = tree.cores_between(times[first], times[last])
    cpu = None if busy is None else busy / rate * 1e6
    return Measured(rate, cores, wall, records[first : last + 1], cpu, tree.peak)
