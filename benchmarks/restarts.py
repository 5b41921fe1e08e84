"""Kills ranks of a run that starts them again, and measures what each loss costs.

``python -m benchmarks.restarts --kills 200 --engine torch`` trains each environment undisturbed, then again on two
ranks of which a random one is killed every few seconds, until there were so many kills. Both runs must be equal, agent
and rows. A recovery is from the kill to the next iteration that is logged. With ``--torchrun`` torchrun starts the
ranks again, from checkpoints, and not our launcher. ``--out FILE.md`` writes a table, and ``FILE.json`` beside it, in
which rows of other engines and environments stay. ``--cost 9`` measures what being ready for restarts costs. It exits
with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import restart_cost
from benchmarks.chaos.compared import differing, result_of
from benchmarks.chaos.processes import MARK, marked, parents, send
from benchmarks.commit import short_commit
from benchmarks.tables import table
from lockstep.core.machine import cpu_model

ENVIRONMENTS = {"CartPole": "CartPole-v1", "HalfCheetah": "HalfCheetah-v5"}
ENGINES = {"torch": ("--engine", "torch"), "jax": ("--engine", "jax", "--devices", "1")}
QUIET = ("--eval.interval", "0", "--log.no-tensorboard", "--quiet")
LIBRARIES = ("lockstep-rl", "torch", "jax", "numpy", "gymnasium")
PROBE = {"CartPole": 40_000, "HalfCheetah": 16_384}  # steps that tell how fast a run is
SPARE = 1.2  # so much longer is a run than the kills should take
HANG_SECONDS, POLL_SECONDS = 600.0, 0.002

OF_A_ROW = ("date", "commit", "load average")
PLACE = ("environment", "engine", "launcher")
Row = dict[str, Any]


def lockstep(environment: str, engine: str, steps: int, directory: Path, name: str) -> list[str]:
    """The command line of a run of one rank."""
    words = [ENVIRONMENTS[environment], *ENGINES[engine], "--total-steps", str(steps), *QUIET]
    return ["lockstep", "train", *words, "--runs-dir", str(directory), "--name", name]


def restarting(words: Sequence[str], kills: int, torchrun: bool) -> list[str]:
    """A command line on two ranks that are started again more often than they are killed."""
    most = ["--max-restarts", str(10 * kills)]
    if not torchrun:
        return [sys.executable, "-m", *words, "--nproc", "2", *most]
    own = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--monitor-interval", "0.1", *most]
    return [sys.executable, "-m", *own, "-m", *words, "--resume", "auto", "--checkpoint.seconds", "1"]


def undisturbed(
    environment: str, engine: str, steps: int, directory: Path, name: str, ranks: int = 1
) -> tuple[dict[str, Any], float]:
    """What comes of a run that nobody touches, and its seconds."""
    words, started = lockstep(environment, engine, steps, directory, name), time.perf_counter()
    subprocess.run([sys.executable, "-m", *words, "--nproc", str(ranks)], check=True)
    return result_of(directory / name), time.perf_counter() - started


def steps_for(environment: str, engine: str, seconds: float, directory: Path) -> int:
    """How many steps take so long on two ranks, start-up and compilation left out: by the rows of a short run."""
    rows = undisturbed(environment, engine, PROBE[environment], directory, "probe", ranks=2)[0]["rows"]
    times = [json.loads(line)["time/t_iter"] for line in (directory / "probe/metrics.jsonl").read_text().splitlines()]
    steps = rows[0]["global_step"]
    return max(PROBE[environment], int(steps * seconds * SPARE / statistics.median(times)))


class Killed:
    """A run under way whose ranks are killed."""

    def __init__(self, command: Sequence[str], run: Path, torchrun: bool) -> None:
        self._run, self._torchrun, self._mark = run, torchrun, uuid.uuid4().hex
        self._said = (run.parent / "stderr").open("w+b")
        environment = {**os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=self._said)

    def ranks(self) -> list[int]:
        """The process of each rank: by the name that ours have; torchrun's are its children."""
        found = marked(self._mark)
        if not self._torchrun:
            return sorted(pid for pid, name in found.items() if name.startswith("lockstep rank"))
        parent = parents()
        return sorted(pid for pid in found if parent.get(pid) == self._process.pid)

    def lines(self) -> list[str]:
        """The whole lines of the run's metrics."""
        try:
            return [line for line in (self._run / "metrics.jsonl").read_text().splitlines(True) if line.endswith("\n")]
        except OSError:
            return []

    def waits(self, condition: Callable[[], Any]) -> Any:
        """The first true value of a condition; None if the run is over before."""
        deadline = time.monotonic() + HANG_SECONDS
        while not (value := condition()):
            if self._process.poll() is not None:
                return None
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing in {HANG_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)
        return value

    def kill(self, source: random.Random) -> tuple[float, int] | None:
        """Kills a rank; the seconds until an iteration is logged, and how many were done again; None: it is over."""
        victims = self.waits(self.ranks)
        if not victims:
            return None
        began = time.perf_counter()
        send([source.choice(victims)], signal.SIGKILL)
        self.waits(lambda: not set(victims) & set(self.ranks()))
        before = self.lines()
        known = set(before)
        news = self.waits(lambda: [line for line in self.lines() if line not in known])
        seconds = time.perf_counter() - began
        if not news:
            return None
        last = json.loads(before[-1])["iteration"] if before else 0
        return seconds, max(0, last - json.loads(news[0])["iteration"] + 1)

    def end(self) -> None:
        """Waits for the end.

        Raises:
            RuntimeError: it ended badly; its last words.
        """
        code = self._process.wait(HANG_SECONDS)
        self._said.seek(0)
        said = self._said.read().decode(errors="replace")
        self._said.close()
        if code:
            raise RuntimeError(f"exit code {code}: {said[-500:]}")

    def close(self) -> None:
        """Leaves nothing behind."""
        send(marked(self._mark), signal.SIGKILL)
        self._process.wait()


def measure(environment: str, engine: str, options: argparse.Namespace, directory: Path) -> Row:
    """Trains undisturbed, then under kills; what that cost, and what differs."""
    source = random.Random(f"{options.seed} {environment} {engine}")
    steps = options.steps or steps_for(environment, engine, options.kills * options.every, directory)
    expected, seconds = undisturbed(environment, engine, steps, directory, "alone")
    words = restarting(lockstep(environment, engine, steps, directory, "killed"), options.kills, options.torchrun)
    killed, recoveries = Killed(words, directory / "killed", options.torchrun), list[tuple[float, int]]()
    started = time.perf_counter()
    try:
        killed.waits(killed.lines)
        while len(recoveries) < options.kills:
            time.sleep(options.every * source.uniform(0.5, 1.5))
            recovery = killed.kill(source)
            if recovery is None:
                break
            recoveries.append(recovery)
        killed.end()
    finally:
        killed.close()
    found = result_of(directory / "killed")
    return {
        "environment": environment,
        "engine": engine,
        "launcher": "torchrun" if options.torchrun else "lockstep",
        "kills": len(recoveries),
        "steps": steps,
        "iterations": len(expected["rows"]),
        "seconds_alone": round(seconds, 1),
        "seconds_killed": round(time.perf_counter() - started, 1),
        "recoveries": [round(seconds, 3) for seconds, _ in recoveries],
        "iterations_again": [again for _, again in recoveries],
        "differs": differing(found, expected),
    }


def report(rows: Sequence[Row], cost: dict[str, Any] | None = None) -> str:
    """The tables as Markdown; each row says when it was measured, and on what."""
    lines = []
    for row in rows:
        taken, again = row["recoveries"] or [0.0], row["iterations_again"] or [0]
        lines.append(
            [
                *(row[name] for name in PLACE),
                str(row["kills"]),
                f"{statistics.median(taken):.2f} s ({min(taken):.2f} to {max(taken):.2f})",
                f"{statistics.median(again):.0f} ({max(again)}) of {row['iterations']:,}",
                ", ".join(row["differs"]) or "nothing",
                f"{row['facts']['date']}, {row['facts']['commit']}",
            ]
        )
    head = ["environment", "engine", "started again by", "kills", "recovery, median (range)"]
    head += ["iterations again, median (most)", "what differs", "date, commit"]
    text = (
        "Two ranks, of which a random one is killed every few seconds; from the kill to the next logged iteration. "
        "Agent, rows and files are compared with a run of one rank that nobody touched. "
        "Made by `python -m benchmarks.restarts`."
    )
    known = {tuple((name, value) for name, value in row["facts"].items() if name not in OF_A_ROW) for row in rows}
    said = [", ".join(f"{name} {value}" for name, value in facts) + "." for facts in sorted(known)]
    parts = ["# Restarts", text, *said, table(head, lines), *([] if cost is None else [restart_cost.section(cost)])]
    return "\n\n".join(parts) + "\n"


def facts_now() -> dict[str, str]:
    """Says when this is measured, and on what; asked before, for the load is then that of others."""
    facts = {"date": str(datetime.date.today()), "commit": short_commit(), "Python": platform.python_version()}
    facts |= {name: version(name) for name in LIBRARIES} | {"cores": f"{os.cpu_count()} of {cpu_model()}"}
    return facts | {"load average": f"{os.getloadavg()[1]:.1f}"}


def keep(rows: Sequence[Row], out: Path | None, cost: dict[str, Any] | None = None) -> None:
    """Prints what was found, each with its facts, and writes it, with the rows of others that are there."""
    kept = None if out is None else out.with_suffix(".json")
    if kept is not None and kept.is_file():
        there = json.loads(kept.read_text())
        every = {tuple(row[name] for name in PLACE): row for row in [*there["rows"], *rows]}
        rows, cost = [every[key] for key in sorted(every)], cost or there.get("cost")
    print(report(rows, cost), flush=True)
    if out is not None and kept is not None:
        kept.write_text(json.dumps({"rows": rows, "cost": cost}, indent=1) + "\n")
        out.write_text(report(rows, cost))


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restarts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="of each run (20)")
    parser.add_argument("--every", type=float, default=3.0, help="seconds of training between two, on average (3)")
    parser.add_argument("--engine", choices=ENGINES, action="append", help="one or more (all)")
    parser.add_argument("--env", choices=ENVIRONMENTS, action="append", help="one or more (all)")
    parser.add_argument("--steps", type=int, help="of each run (as many as the kills should take)")
    parser.add_argument("--seed", type=int, default=0, help="of the kills (0)")
    parser.add_argument("--torchrun", action="store_true", help="it starts ranks again, and not our launcher")
    parser.add_argument("--cost", type=int, metavar="PAIRS", help="no kills: what being ready for restarts costs")
    parser.add_argument("--out", type=Path, help="Markdown file to write; one of the same name in JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures each engine and environment; 0 if nothing differs."""
    options, rows = read_arguments(argv), list[Row]()
    if options.cost is not None:
        facts = facts_now()
        keep([], options.out, {"rates": restart_cost.cost(options.cost), "facts": facts})
        return 0
    for environment in options.env or ENVIRONMENTS:
        for engine in options.engine or ENGINES:
            facts = facts_now()
            with tempfile.TemporaryDirectory(prefix="restarts-") as directory:
                rows.append(measure(environment, engine, options, Path(directory)) | {"facts": facts})
            keep(rows, options.out)
    return int(any(row["differs"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
