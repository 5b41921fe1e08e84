"""Holds ``lockstep plan`` to measurements on one machine: from runs of one rank it predicts what is then measured.

``python -m benchmarks.plan_check`` takes each case in turn: runs of one rank that never meet, from which the plan
predicts, and then the run itself; ``--repeats`` times, all cases in each repeat, so that what drifts meanwhile falls on
both. A repeat's error is predicted over measured time of an iteration, less one. A case's error is the median of its
repeats' errors without their signs: with signs, one that is too high and one that is too low would look like none.
``--cases`` chooses; ``--out FILE.md`` writes the table, ``FILE.json`` beside it every repeat, ``--docs`` puts the table
into docs/plan.md. ``--again`` measures nothing: it writes the kept table and the page's once more from the kept
repeats. Network namespaces need root and iproute2; without them these cases are left out with a reason. It exits with
1 if the cases' median error is above 15 % or the largest above 30 %. A quiet machine is a condition.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.commit import short_commit
from benchmarks.network_hosts import NoHostsError, joined_hosts
from lockstep.config.run import Config
from lockstep.core.machine import cpu_model
from lockstep.core.topology import available_cores, without_launcher
from lockstep.envs.describe import describe
from lockstep.launch.request import described_run
from lockstep.networks.spec import PolicyNet, net_options
from lockstep.planning.hardware import parse_rate
from lockstep.planning.measure import copy_rate
from lockstep.planning.prediction import Prediction
from lockstep.planning.this_machine import ETHERNET, Machine, measure, predict
from lockstep.runs.directory import TIMING
from lockstep.scaling.measure import start_training, stop
from lockstep.scaling.plan import Plan

ROOT = Path(__file__).parents[1]
KEPT, PAGE = ROOT / "benchmarks/results/plan.md", ROOT / "docs/plan.md"
TITLE = "# Plans held to measurements"
MEDIAN, WORST = 0.15, 0.30
PORT = 29517
MARK = "plan_check"

SMALL = ("CartPole-v1", "--num-envs", "64", "--num-steps", "64")
WIDE = ("CartPole-v1", "--num-envs", "16", "--num-steps", "64", "--ppo.num-epochs", "2", "--ppo.num-minibatches", "2")
WIDE += ("--network.hidden-sizes",)
SLEEPY = ("benchmarks.sleepy:SleepyCartPole-v0", "--num-envs", "16", "--num-steps", "32")


@dataclass(frozen=True)
class Case:
    """One row: a run, on how many ranks, and what stands between them.

    Attributes:
        rate: of the link between two hosts, as ``tc`` and ``--link`` say it; None: ranks of one host. ``burst`` is
            what passes at any rate after a pause: little beside a message, enough for the rate to be reached.
        environment: variables of the ranks.
    """

    name: str
    words: tuple[str, ...]
    ranks: int
    rate: str | None = None
    burst: str = "32kb"
    environment: dict[str, str] = field(default_factory=dict)


def sleeping(chance: str, seconds: str) -> dict[str, str]:
    """What the environment of :mod:`benchmarks.sleepy` is told."""
    return {"SLEEP_CHANCE": chance, "SLEEP_SECONDS": seconds}


CASES = (
    Case("2 ranks, CartPole", SMALL, 2),
    Case("2 ranks, HalfCheetah", ("HalfCheetah-v5", "--num-envs", "8", "--num-steps", "64"), 2),
    Case("2 JAX devices, CartPole", (*SMALL, "--engine", "jax"), 2),
    Case(
        "2 JAX devices, HalfCheetah", ("HalfCheetah-v5", "--num-envs", "8", "--num-steps", "64", "--engine", "jax"), 2
    ),
    Case("3 uneven ranks (3, 3, 2 shards on 2 cores)", SMALL, 3),
    Case("2 hosts, 100 Mbit/s", (*WIDE, "256", "256"), 2, "100mbit"),
    Case("2 hosts, 1 Gbit/s", (*WIDE, "768", "768"), 2, "1gbit", "512kb"),
    Case("2 ranks, each step 1 ms more on average", SLEEPY, 2, environment=sleeping("1", "0.001")),
    Case("2 ranks, a step in 100 takes 30 ms more", SLEEPY, 2, environment=sleeping("0.01", "0.03")),
)


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Gives processes that are started meanwhile these variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def predicted(case: Case, config: Config, warmup_iters: int, iters: int) -> Prediction:
    """Predicts a case from runs of one rank that are made now."""
    description = describe(config.env)
    net = PolicyNet(**net_options(config, description.observation, description.action))
    parameters = sum(_size(shape) for shape in net.shapes().values())
    hosts = case.rate is not None
    network = parse_rate(case.rate) if case.rate else ETHERNET
    machine = Machine(1 if hosts else case.ranks, network, copy_rate())
    # such hosts are namespaces of this machine, whose cores all ranks share
    measured = measure(config, case.ranks, case.ranks, warmup_iters, iters, lambda _: None)
    return predict(config, description, measured, machine, {"parameters": 4.0 * parameters})


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def measured_seconds(case: Case, config: Config, warmup_iters: int, iters: int) -> dict[str, float]:
    """Trains the case itself; mean seconds of an iteration (``t_iter``) and of its parts."""
    plan = Plan(config, "strong", (case.ranks,), warmup_iters=warmup_iters, iters=iters)
    sized, steps = plan.sized(case.ranks), plan.steps(case.ranks)
    directory = Path(tempfile.mkdtemp(prefix="plan-check-"))
    try:
        records = (_on_hosts if case.rate else _here)(case, sized, steps, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    counted = [r for r in records if r["iteration"] > warmup_iters]
    names = [name for name in counted[0] if name.startswith("t_") and isinstance(counted[0][name], list)]
    return {name: statistics.fmean(statistics.fmean(r[name]) for r in counted) for name in names}


def _here(case: Case, config: Config, steps: int, directory: Path) -> list[dict[str, Any]]:
    training = start_training(config, case.ranks, "run", directory, steps)
    try:
        while training.watch():
            time.sleep(0.05)
    finally:
        stop([training])
    if training.process.returncode:
        raise RuntimeError(training.error())
    return training.records


def _on_hosts(case: Case, config: Config, steps: int, directory: Path) -> list[dict[str, Any]]:
    """Trains on two network namespaces, whose cables let no more than the case's rate through."""
    source = directory / "run.json"
    source.write_text(config.model_dump_json())
    words = [sys.executable, "-m", "lockstep", "train", str(source), "--trust", "--name", "run", "--quiet"]
    words += ["--runs-dir", str(directory), "--stop-at-step", str(steps)]
    with joined_hosts(case.ranks) as hosts:
        for host in hosts:
            host.slow_down(str(case.rate), burst=case.burst)
        place = {"WORLD_SIZE": str(case.ranks), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
        place |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(PORT)}
        processes = [
            subprocess.Popen(
                host.command(*words),
                env=without_launcher() | place | {"RANK": str(rank)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, host in enumerate(hosts)
        ]
        try:
            said = [process.communicate(timeout=600)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError(" ".join(said))
    return [json.loads(line) for line in (directory / "run" / TIMING).read_text().splitlines()]


# --- the table ------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """What came of a case: of each repeat its prediction and what was measured, seconds; or why there is nothing."""

    case: str
    ranks: int
    predicted: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)
    one_rank: list[float] = field(default_factory=list)
    parts: list[dict[str, dict[str, float]]] = field(default_factory=list)
    skipped: str | None = None

    @property
    def errors(self) -> list[float]:
        """Of each repeat, predicted over measured, less one."""
        return [p / m - 1 for p, m in zip(self.predicted, self.measured, strict=True)]

    @property
    def error(self) -> float:
        """The median over repeats of the errors without their signs."""
        return statistics.median(map(abs, self.errors))

    @property
    def worst(self) -> float:
        """The error of the repeat that was farthest off, with its sign."""
        return max(self.errors, key=abs)

    @property
    def within(self) -> int:
        """Repeats whose measured time lies within the range."""
        return sum(low <= m <= high for low, m, high in zip(self.low, self.measured, self.high, strict=True))


def check(cases: list[Case], repeats: int, warmup_iters: int, iters: int, say: Callable[[str], None]) -> list[Row]:
    """Predicts and measures every case, ``repeats`` times in turn."""
    rows = {case.name: Row(case.name, case.ranks) for case in cases}
    for repeat in range(1, repeats + 1):
        for case in cases:
            row = rows[case.name]
            if row.skipped is not None:
                continue
            try:
                _once(case, row, warmup_iters, iters)
            except NoHostsError as error:
                row.skipped = str(error)
                continue
            say(
                f"[{repeat}/{repeats}] {case.name}: {row.predicted[-1] * 1e3:.1f} ms predicted, "
                f"{row.measured[-1] * 1e3:.1f} measured"
            )
    return list(rows.values())


def _once(case: Case, row: Row, warmup_iters: int, iters: int) -> None:
    with environment(case.environment):
        config = described_run("plan", case.words[0], [*case.words[1:]])
        config = Plan(config, "strong", (case.ranks,)).sized(case.ranks)
        said = predicted(case, config, warmup_iters, iters)
        seen = measured_seconds(case, config, warmup_iters, iters)
    row.measured.append(seen["t_iter"])
    row.parts.append({"predicted": said.parts, "measured": seen})
    row.predicted.append(said.seconds["likely"])
    row.low.append(said.seconds["best"])
    row.high.append(said.seconds["worst"])
    row.one_rank.append(said.parts["rollout"] + said.parts["gradients"] + said.parts["other"])


COLUMNS = (
    "Milliseconds of an iteration, medians over repeats; alone: the ranks' parts as runs of one rank, at once, that "
    "never meet; error: median over repeats of how far off predictions were, without signs; worst repeat: the one "
    "farthest off."
)


def origin(repeats: int, commit: str) -> str:
    """Says when, where and how the rows are measured."""
    return (
        f"{datetime.date.today()}, commit {commit}, {cpu_model()}, {available_cores()} cores, {repeats} repeats, load "
        f"average before {LOAD:.1f}. `python -m benchmarks.plan_check --repeats {repeats}`."
    )


def kept(path: Path) -> tuple[str, list[Row]]:
    """Returns where a kept table's rows came from, and the rows that lie beside it."""
    said = path.read_text().split("\n\n")[1]
    return said.partition(" Milliseconds ")[0], [
        Row(**row) for row in json.loads(path.with_suffix(".json").read_text())
    ]


def table(rows: list[Row], measured: str) -> str:
    """Writes the rows as Markdown, with where they came from (``measured``) and what they come to."""
    done = [row for row in rows if row.skipped is None]
    lines = [
        f"{measured} {COLUMNS}",
        "",
        "| case | alone | predicted | range | measured | error | worst repeat | within the range |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.skipped is not None:
            lines.append(f"| {row.case} | | | | | left out: {row.skipped} | | |")
            continue
        alone, said, low, high, seen = (
            1e3 * statistics.median(x) for x in (row.one_rank, row.predicted, row.low, row.high, row.measured)
        )
        lines.append(
            f"| {row.case} | {alone:.1f} | {said:.1f} | {low:.1f} – {high:.1f} | {seen:.1f} | {row.error:.0%} | "
            f"{row.worst:+.0%} | {row.within} of {len(row.measured)} |"
        )
    if done:
        errors, worst = [row.error for row in done], max((row.worst for row in done), key=abs)
        lines += ["", f"Errors of the cases: median {statistics.median(errors):.0%}, largest {max(errors):.0%}."]
        lines[-1] += f" Worst single repeat: {worst:+.0%}."
    return "\n".join(lines) + "\n"


def misses(rows: list[Row]) -> bool:
    """Whether the errors are larger than what is aimed at."""
    errors = [row.error for row in rows if row.skipped is None]
    return bool(errors) and bool(statistics.median(errors) > MEDIAN or max(errors) > WORST)


def into_page(page: str, text: str, mark: str = MARK) -> str:
    """Puts a text between the marks of a page, in the place of what stands there."""
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    before, found, rest = page.partition(begin)
    if not found or end not in rest:
        raise ValueError(f"the page has no {begin} and {end} to put the text between")
    return f"{before}{begin}\n{text}{end}{rest.partition(end)[2]}"


def write(text: str, out: Path | None, page: Path | None) -> None:
    """Writes a table into a file of its own and between the marks of a page; None: not there."""
    if out is not None:
        out.write_text(f"{TITLE}\n\n{text}")
    if page is not None:
        page.write_text(into_page(page.read_text(), text))


LOAD = os.getloadavg()[0]


def main() -> None:
    """Checks as the command line says, prints the table, and writes it where that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", help="numbers from 1 on, in the order of the table: 1,2,6")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup-iters", type=int, default=4)
    parser.add_argument("--iters", type=int, default=30)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--docs", action="store_true", help="put the table into docs/plan.md")
    parser.add_argument("--again", action="store_true", help="write the kept tables again from the kept repeats")
    options = parser.parse_args()
    if options.again:
        measured, rows = kept(KEPT)
        write(table(rows, measured), KEPT, PAGE)
        return
    chosen = range(1, len(CASES) + 1) if options.cases is None else map(int, options.cases.split(","))
    cases = [CASES[number - 1] for number in chosen]
    rows = check(cases, options.repeats, options.warmup_iters, options.iters, lambda x: print(x, file=sys.stderr))
    text = table(rows, origin(options.repeats, short_commit()))
    print(text)
    if options.out is not None:
        options.out.with_suffix(".json").write_text(json.dumps([vars(row) for row in rows], indent=1) + "\n")
    write(text, options.out, PAGE if options.docs else None)
    sys.exit(int(misses(rows)))


if __name__ == "__main__":
    main()
