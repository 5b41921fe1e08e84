"""Measures how long `lockstep train` takes from its start to the first logged iteration, by number of ranks.

``python -m benchmarks.startup --ranks 1,2,4,8 --repeats 5 [--before TREE] [--out FILE]``: with ``--before`` a second
checkout is measured in turn with this one. ``--run "WORDS"``, any number of times, measures one rank of other runs in
place of the ranks. What is in FILE stays: each measurement becomes a section at its end.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.commit import short_commit
from lockstep import __version__
from lockstep.core.machine import cpu_model

ROOT = Path(__file__).parents[1]
CARTPOLE = "CartPole-v1"
WORDS = ("--total-steps", "4096", "--quiet", "--eval.interval", "0", "--log.no-tensorboard")
LIMIT = 600.0


def seconds_to_first_iteration(tree: Path, run: str, directory: Path) -> float:
    """Start a run of that checkout; the seconds until the first line of its metrics can be read."""
    command = [sys.executable, "-m", "lockstep", "train", *shlex.split(run), *WORDS, "--runs-dir", str(directory)]
    metrics = directory / "run" / "metrics.jsonl"
    started = time.perf_counter()
    process = subprocess.Popen([*command, "--name", "run"], env={**os.environ, "PYTHONPATH": str(tree / "src")})
    try:
        while not (metrics.is_file() and metrics.stat().st_size):
            if process.poll() not in (None, 0) or time.perf_counter() - started > LIMIT:
                raise RuntimeError(f"{tree}: no iteration was logged")
            time.sleep(0.002)
        return time.perf_counter() - started
    except BaseException:
        process.kill()
        raise
    finally:
        process.wait()


Taken = dict[tuple[Path, str], list[float]]
"""Seconds by checkout and run."""


def measure(trees: list[Path], runs: list[str], repeats: int) -> Taken:
    """Seconds of every checkout and run, taken in turn after one round that isn't counted."""
    taken: Taken = {(tree, run): [] for run in runs for tree in trees}
    for repeat in range(repeats + 1):
        for (tree, run), seconds in taken.items():
            with tempfile.TemporaryDirectory() as directory:
                found = seconds_to_first_iteration(tree, run, Path(directory))
            if repeat:
                seconds.append(found)
    return taken


def made(commit: str) -> str:
    """When, of what, and where."""
    return (
        f"{datetime.date.today()}, commit {commit}, lockstep {__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores of {cpu_model()}."
    )


def heading(what: str, commit: str) -> str:
    """Of a section, which stands beside earlier ones of its kind."""
    return f"## {what}, {datetime.date.today()}, {commit}"


def cell(seconds: list[float]) -> str:
    """Their median and range."""
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


def of_ranks(number: int) -> str:
    """The run with so many ranks."""
    return f"{CARTPOLE} --nproc {number}"


def report(taken: Taken, trees: list[Path], ranks: list[int], commit: str) -> str:
    """A section with the table of ranks: medians, and each beside one rank of the same checkout."""
    repeats = len(next(iter(taken.values())))
    lines = [
        heading("Ranks", commit),
        "",
        f"Seconds from the start of `lockstep train {CARTPOLE} --nproc N` to the first logged iteration, medians of "
        f"{repeats} interleaved runs (range in brackets). Made by `python -m benchmarks.startup`.",
        "",
        made(commit),
        "",
        "| ranks | " + " | ".join(f"{name} | beside one rank" for name in ("now", "before")[: len(trees)]) + " |",
        "|---|" + "---|---|" * len(trees),
    ]
    for number in ranks:
        cells = []
        for tree in trees:
            seconds, one = taken[tree, of_ranks(number)], statistics.median(taken[tree, of_ranks(ranks[0])])
            cells.append(f"{cell(seconds)} | {statistics.median(seconds) / one:.2f} |")
        lines.append(f"| {number} | " + " ".join(cells))
    return "\n".join(lines) + "\n"


def report_of_runs(taken: Taken, trees: list[Path], runs: list[str], commit: str) -> str:
    """A section with the table of other runs."""
    repeats = len(next(iter(taken.values())))
    lines = [
        heading("Other runs", commit),
        "",
        "Seconds from the start of `lockstep train RUN` to the first logged iteration, medians of "
        f"{repeats} interleaved runs (range in brackets), compiled programs in the cache. Made by "
        "`python -m benchmarks.startup --run RUN …`.",
        "",
        made(commit),
        "",
        "| run | " + " | ".join(("now", "before")[: len(trees)]) + " |",
        "|---|" + "---|" * len(trees),
    ]
    for run in runs:
        lines.append(f"| `{run}` | " + " ".join(f"{cell(taken[tree, run])} |" for tree in trees))
    if len(trees) > 1:
        lines += ["", f"Before is commit {short_commit(trees[1])}."]
    return "\n".join(lines) + "\n"


def append(file: Path, section: str) -> None:
    """Writes a section behind all that is there."""
    before = file.read_text() if file.is_file() else "# Start-up\n"
    file.write_text(f"{before.rstrip()}\n\n{section}")


def main() -> None:
    """Measure, print, and write the report if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="1,2,4,8")
    parser.add_argument("--run", action="append", help="words of a run, measured in place of the ranks")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--before", type=Path, help="another checkout, measured in turn")
    parser.add_argument("--out", type=Path, help="file, to whose end a section goes")
    options = parser.parse_args()
    trees = [ROOT, *([options.before] if options.before else [])]
    ranks = [int(word) for word in options.ranks.split(",")]
    commit = short_commit()
    runs = options.run or [of_ranks(number) for number in ranks]
    taken = measure(trees, runs, options.repeats)
    text = report_of_runs(taken, trees, runs, commit) if options.run else report(taken, trees, ranks, commit)
    print(text)
    if options.out is not None:
        append(options.out, text)


if __name__ == "__main__":
    main()
