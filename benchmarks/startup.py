"""Measures how long `lockstep train` takes from its start to the first logged iteration, by number of ranks.

``python -m benchmarks.startup --ranks 1,2,4,8 --repeats 5 [--before TREE] [--out FILE]``: with ``--before`` a second
checkout is measured in turn with this one.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lockstep import __version__
from lockstep.core.machine import cpu_model

ROOT = Path(__file__).parents[1]
WORDS = ("CartPole-v1", "--total-steps", "4096", "--quiet", "--eval.interval", "0", "--log.no-tensorboard")
LIMIT = 600.0


def seconds_to_first_iteration(tree: Path, ranks: int, directory: Path) -> float:
    """Start a run of that checkout; the seconds until the first line of its metrics can be read."""
    command = [sys.executable, "-m", "lockstep", "train", *WORDS, "--nproc", str(ranks), "--runs-dir", str(directory)]
    metrics = directory / "run" / "metrics.jsonl"
    started = time.perf_counter()
    process = subprocess.Popen([*command, "--name", "run"], env={**os.environ, "PYTHONPATH": str(tree / "src")})
    try:
        while not (metrics.is_file() and metrics.stat().st_size):
            if process.poll() not in (None, 0) or time.perf_counter() - started > LIMIT:
                raise RuntimeError(f"{tree}: no iteration was logged")
            time.sleep(0.002)
        return time.perf_counter() - started
    finally:
        process.wait()


def measure(trees: list[Path], ranks: list[int], repeats: int) -> dict[tuple[Path, int], list[float]]:
    """Seconds of every checkout and number of ranks, taken in turn after one round that isn't counted."""
    taken: dict[tuple[Path, int], list[float]] = {(tree, number): [] for tree in trees for number in ranks}
    for repeat in range(repeats + 1):
        for (tree, number), seconds in taken.items():
            with tempfile.TemporaryDirectory() as directory:
                found = seconds_to_first_iteration(tree, number, Path(directory))
            if repeat:
                seconds.append(found)
    return taken


def report(taken: dict[tuple[Path, int], list[float]], trees: list[Path], ranks: list[int], commit: str) -> str:
    """The table as Markdown: medians, and each beside one rank of the same checkout."""
    repeats = len(next(iter(taken.values())))
    lines = [
        "# Start-up",
        "",
        "Seconds from the start of `lockstep train CartPole-v1 --nproc N` to the first logged iteration, medians of "
        f"{repeats} interleaved runs (range in brackets). Made by `python -m benchmarks.startup`.",
        "",
        f"{datetime.date.today()}, commit {commit}, lockstep {__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores of {cpu_model()}.",
        "",
        "| ranks | " + " | ".join(f"{name} | beside one rank" for name in ("now", "before")[: len(trees)]) + " |",
        "|---|" + "---|---|" * len(trees),
    ]
    for number in ranks:
        cells = []
        for tree in trees:
            seconds, one = taken[tree, number], statistics.median(taken[tree, ranks[0]])
            middle = statistics.median(seconds)
            cells.append(f"{middle:.2f} ({min(seconds):.2f} to {max(seconds):.2f}) | {middle / one:.2f} |")
        lines.append(f"| {number} | " + " ".join(cells))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, and write the report if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="1,2,4,8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--before", type=Path, help="another checkout, measured in turn")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    trees = [ROOT, *([options.before] if options.before else [])]
    ranks = [int(word) for word in options.ranks.split(",")]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    text = report(measure(trees, ranks, options.repeats), trees, ranks, commit.strip())
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
