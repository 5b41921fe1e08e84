"""Runs every check that needs a GPU, where there is one: ``python -m benchmarks.on_gpu [--list] [--only NAME …]``.

Prints a line a check and writes the table with date, commit, versions and devices to ``gpu.md``. Exit status: 0 if
every check passed, measured or was skipped, 1 if one failed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import peer_environment
from benchmarks.commit import short_commit
from benchmarks.gpu_checks import CHECKS, Check, verdict
from benchmarks.gpu_judges import Outcome, Verdict
from benchmarks.tables import table

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("lockstep-rl", "torch", "jax", "jaxlib", "numpy", "gymnasium", "mujoco", "ale-py", "stable-baselines3")
DEVICES = Path("/dev")
NO_GPU = "no GPU: neither PyTorch nor JAX sees one here; --list shows what would be run"
KILLED = 124
"""Exit status of a command that was given up, as ``timeout`` has it."""
PROGRAMS = {
    "lockstep": [sys.executable, "-m", "lockstep"],
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
FRAMEWORKS = {"torch": "PyTorch", "jax": "JAX"}
SEEN_BY = {
    "torch": "import torch, json; torch.cuda.init(); n = torch.cuda.device_count(); "
    "print(json.dumps([torch.cuda.get_device_name(i) for i in range(n)]))",
    "jax": "import jax, json; print(json.dumps([d.device_kind for d in jax.devices('cuda')]))",
}

Run = Callable[[str, Check, Path], Outcome]
"""Runs a check's command in a directory."""


@dataclass(frozen=True)
class Result:
    """A check with what came of it; ``verdict`` is None where it was skipped, and ``figures`` says why.

    Without ``figures`` it hasn't been run yet.
    """

    check: Check
    verdict: Verdict | None = None
    figures: str = ""
    seconds: float = 0.0

    @property
    def word(self) -> str:
        """In one word, or two."""
        if self.verdict is None:
            return "skipped" if self.figures else "not run"
        if not self.verdict.passed:
            return "FAILED"
        return "measured" if self.check.measures else "passed"


@dataclass(frozen=True)
class Seen:
    """What a framework sees: the names of GPUs; ``problem`` is why it can't start any, if it is installed."""

    names: Sequence[str] = ()
    problem: str | None = None

    @property
    def in_words(self) -> str:
        """For the report."""
        return ", ".join(self.names) or (f"none: {self.problem}" if self.problem else "none")


def devices_of(engine: str) -> Seen:
    """Asks a framework which GPUs it sees, in a process of its own."""
    if importlib.util.find_spec(engine) is None:
        return Seen()
    result = subprocess.run([sys.executable, "-c", SEEN_BY[engine]], capture_output=True, text=True)
    if result.returncode == 0:
        return Seen(json.loads(result.stdout.splitlines()[-1]))
    last = next((line.strip() for line in reversed(result.stderr.splitlines()) if line.strip()), "no error is shown")
    return Seen(problem=f"{FRAMEWORKS[engine]} can't start CUDA: {last[:300]}")


def has_gpu(seen: Mapping[str, Seen]) -> bool:
    """Whether this machine has a GPU: one that a framework sees, or of which NVIDIA's driver knows."""
    return any(one.names for one in seen.values()) or any(DEVICES.glob("nvidia[0-9]*"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON lines file, none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def outcome_of(code: int, stdout: str, stderr: str, run: Path | None) -> Outcome:
    """What a command left; of one that ended well the last line printed is the last of its output, else of its errors.

    Args:
        code: exit status.
        stdout: its output.
        stderr: its errors.
        run: the directory of the run that it names, or None.
    """
    output = f"{stderr}\n{stdout}" if code == 0 else f"{stdout}\n{stderr}"
    if run is None:
        return Outcome(code, output)
    path = run / "summary.json"
    summary = json.loads(path.read_text()) if path.is_file() else {}
    summary = {"world_sizes": summary} if isinstance(summary, list) else summary
    return Outcome(code, output, summary, read_lines(run / "metrics.jsonl"), read_lines(run / "timing.jsonl"))


def run_directory(words: Sequence[str], directory: Path) -> Path | None:
    """The directory of the run that a command line names."""
    for before, name in itertools.pairwise(words):
        if before in ("--name", "--resume"):
            return directory / "runs" / name
    return None


def command_runner(timeout: float, logs: Path | None = None, shared: bool = False) -> Run:
    """Runs commands as processes, each for ``timeout`` seconds at most; what each prints is kept in ``logs``.

    Where checks share a GPU, those of engine jax take the memory that they need, instead of three quarters at once.
    """

    def run(command: str, check: Check, directory: Path) -> Outcome:
        program, *words = shlex.split(command.format(root=ROOT))
        paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **check.environment}
        if shared and not check.timed:
            environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        line = [*PROGRAMS[program], *words]
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            given: dict[str, Any] = {"cwd": directory, "env": environment, "stdout": out, "stderr": errors}
            with subprocess.Popen(line, start_new_session=True, **given) as process:
                try:
                    code, ended = process.wait(timeout), ""
                except subprocess.TimeoutExpired:
                    code, ended = KILLED, f"\nkilled after {timeout:.0f} s"
                finally:  # with the ranks that it started
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
            out.seek(0)
            errors.seek(0)
            stdout, stderr = out.read(), errors.read() + ended
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
            with (logs / f"{check.name}.log").open("a") as log:
                log.write(f"$ {shown_line(command, check)}\n{stderr}\n{stdout}\nexit {code}\n\n")
        return outcome_of(code, stdout, stderr, None if code == KILLED else run_directory(words, directory))

    return run


def reason_to_skip(check: Check, seen: Mapping[str, Seen]) -> str | None:
    """Why a check can't be run here, or None."""
    number = len(seen[check.engine].names)
    if number < check.gpus:
        return f"needs {check.gpus} GPU{'s' if check.gpus > 1 else ''}, {FRAMEWORKS[check.engine]} sees {number}"
    missing = [name for name in check.modules if importlib.util.find_spec(name) is None]
    return f"needs the package {missing[0]}" if missing else None


def run_check(check: Check, seen: Mapping[str, Seen], run: Run) -> Result:
    """Runs one check's commands, up to the first that ends otherwise than it must, and judges them.

    Of a framework that is there and can't start CUDA every check fails.
    """
    if (problem := seen[check.engine].problem) is not None:
        return Result(check, Verdict(False, problem), problem)
    if (reason := reason_to_skip(check, seen)) is not None:
        return Result(check, None, reason)
    started, outcomes = time.perf_counter(), []
    with tempfile.TemporaryDirectory(prefix="lockstep-gpu-") as directory:
        for command in check.commands:
            outcomes.append(run(command, check, Path(directory)))
            if (outcomes[-1].code != 0) != check.fails:
                break
    judged = verdict(check, outcomes)
    figures = "; ".join(filter(None, [judged.figures, *warnings_of(outcomes)]))
    return Result(check, judged, figures, time.perf_counter() - started)


def warnings_of(outcomes: Sequence[Outcome]) -> list[str]:
    """What commands warned of, each warning once: that a step couldn't be captured as a graph, say."""
    lines = (line.strip() for outcome in outcomes for line in outcome.output.splitlines())
    return list(dict.fromkeys(line for line in lines if line.startswith("lockstep: warning: ")))


def facts(seen: Mapping[str, Seen]) -> dict[str, str]:
    """What a reader has to know to judge the figures."""
    found = peer_environment.versions(Path(sys.executable), PACKAGES)
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": short_commit(),
        "versions": ", ".join(f"{name} {version}" for name, version in found.items()),
        **{f"GPUs that {name} sees": seen[engine].in_words for engine, name in FRAMEWORKS.items()},
    }


def shown_line(command: str, check: Check) -> str:
    """A command line of a check, as one types it in the repository."""
    variables = " ".join(f"{name}={value}" for name, value in check.environment.items())
    return f"{variables} {command.replace('{root}/', '')}".strip()


def shown(check: Check) -> str:
    """A check's command lines."""
    return "; ".join(shown_line(command, check) for command in check.commands)


def markdown(results: Sequence[Result], said: dict[str, str]) -> str:
    """The report."""
    rows = [
        [r.check.name, r.word, r.figures, f"{r.seconds:.0f}" if r.verdict else "", r.check.seen, f"`{shown(r.check)}`"]
        for r in results
    ]
    words = ("passed", "measured", "FAILED", "skipped", "not run")
    numbers = {word: sum(result.word == word for result in results) for word in words}
    counts = ", ".join(f"{number} {word}" for word, number in numbers.items() if number or word != "not run")
    lines = "\n".join(f"- {name}: {text}" for name, text in said.items())
    head = ["check", "result", "figures", "seconds", "what must be seen", "commands"]
    return (
        "\n\n".join(["# Checks on GPUs", f"By `python -m benchmarks.on_gpu`: {counts}.", lines, table(head, rows)])
        + "\n"
    )


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_gpu", description="The checks that need a GPU.")
    parser.add_argument("--list", action="store_true", help="show the checks and run none")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this check; may be given several times")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds after which a command is given up")
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="checks beside one another, but for those of speed (1)"
    )
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep there what the commands print")
    parser.add_argument(
        "--out", type=Path, help="file (benchmarks/results/gpu.md; build/benchmarks/gpu.md with --only)"
    )
    arguments = parser.parse_args(argv)
    if arguments.at_once < 1:
        parser.error(f"--at-once: {arguments.at_once} must be at least 1")
    known = {check.name: check for check in CHECKS}
    if unknown := [name for name in arguments.only or () if name not in known]:
        parser.error(f"--only: {unknown[0]!r} is no check; there are {', '.join(known)}")
    arguments.checks = [known[name] for name in arguments.only or known]
    arguments.out = arguments.out or ROOT / ("build/benchmarks" if arguments.only else "benchmarks/results") / "gpu.md"
    return arguments


def main(argv: Sequence[str] | None = None, run: Run | None = None, seen: Mapping[str, Seen] | None = None) -> int:
    """Runs the checks; ``run`` and ``seen`` stand in for the processes and for what the frameworks see."""
    arguments = read_arguments(argv)
    if arguments.list:
        for check in arguments.checks:
            print(f"{check.name} ({check.gpus} GPU{'s' if check.gpus > 1 else ''}): {check.seen}\n    {shown(check)}")
        return 0
    seen = seen or {engine: devices_of(engine) for engine in SEEN_BY}
    if not has_gpu(seen):
        print(NO_GPU)
        return 2
    said = facts(seen)
    run = run or command_runner(arguments.timeout, arguments.logs, shared=arguments.at_once > 1)
    results = {check.name: Result(check) for check in arguments.checks}

    def done(result: Result) -> None:
        results[result.check.name] = result
        print(f"{result.check.name}: {result.word} ({result.figures})", flush=True)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(markdown(list(results.values()), said))

    with ThreadPoolExecutor(arguments.at_once) as pool:
        started = [pool.submit(run_check, check, seen, run) for check in arguments.checks if not check.timed]
        for future in as_completed(started):
            done(future.result())
    for check in arguments.checks:
        if check.timed:
            done(run_check(check, seen, run))
    print(f"written: {arguments.out}")
    return 1 if any(result.word == "FAILED" for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
