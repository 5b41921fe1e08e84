"""The side-by-side benchmark's results as Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, get_args

from benchmarks.cases import ONE_THREAD, Case, operations_per_step
from benchmarks.comparison import TIMES, Row, best, peers_of, ratio
from benchmarks.profile_split import PARTS
from benchmarks.programs import COPIES, STRONG, WEAK
from benchmarks.ranges import ranges_section
from benchmarks.tables import table, times_text
from benchmarks.targets import MOST_NOISE, VERDICTS, Group, Judged, judge, named, single_rank, two_copies


@dataclass
class Results:
    """All that one run of the benchmark found.

    Attributes:
        facts: date, machine and versions, in the order in which they are shown.
        cases: what was measured.
        rows: one for each program.
        ceilings: by environment and number, steps/s of the environments alone in each round, by who steps them; or an
            error.
        splits: by case, environment and what is ours, seconds of a mean iteration by part; or an error.
        product_rate: floating-point operations a second of one core in XLA's matrix product; or an error; or None.
        problems: what went wrong besides.
    """

    facts: dict[str, str]
    cases: Sequence[Case]
    rows: list[Row] = field(default_factory=list)
    ceilings: dict[tuple[str, int], dict[str, list[float]] | str] = field(default_factory=dict)
    splits: dict[tuple[str, str, str], dict[str, float] | str] = field(default_factory=dict)
    product_rate: float | str | None = None
    problems: list[str] = field(default_factory=list)

    def of_case(self, case: Case) -> list[Row]:
        """The rows of a case's table."""
        return [row for row in self.rows if row.case == case.name and row.scaling is None]

    @property
    def judged(self) -> list[Judged]:
        """All targets of what was measured."""
        return judge(self.rows, (case.name for case in self.cases))

    def as_json(self) -> dict[str, Any]:
        """The same for machines."""
        return {
            "facts": self.facts,
            "problems": self.problems,
            "product_rate": self.product_rate,
            "rows": [row.as_json() for row in self.rows],
            "iterations": {case.name: case.iterations for case in self.cases},
            "titles": {case.name: case.title for case in self.cases},
            "targets": [asdict(judged) for judged in self.judged],
            "ceilings": [{"env": e, "num_envs": n, "result": r} for (e, n), r in self.ceilings.items()],
            "splits": [{"case": c, "env": e, "what": w, "result": r} for (c, e, w), r in self.splits.items()],
        }


FIGURES = ["steps/s", "min – max", "seconds counted", "CPU s a million steps", "memory, MB", "cores"]


def figures(row: Row) -> list[str]:
    """Median, spread, seconds counted, CPU time, memory and cores of a row, or why there are none."""
    if row.median is None:
        return [f"failed: {row.failures[0] if row.failures else 'not run'}", *[""] * (len(FIGURES) - 1)]
    cpu = f"{median(row.cpu):,.1f}" if row.cpu else ""
    memory = f"{median(row.memory) / 1e6:,.0f}" if row.memory else ""
    spread = f"{min(row.rates):,.0f} – {max(row.rates):,.0f}"
    seconds = f"{median(row.seconds):,.1f}" if row.seconds else ""
    return [f"{row.median:,.0f}", spread, seconds, cpu, memory, f"{max(row.cores):.2f}"]


def case_section(results: Results, case: Case) -> str:
    """One case: all programs, and how they compare with the best peers."""
    rows, peers = results.of_case(case), peers_of(results.rows, case.name)
    torch_best, any_best = best(row for row in peers if row.framework == "torch"), best(peers)
    shown = rows + [row for row in peers if row.case != case.name and (row is torch_best or row is any_best)]
    lines = [
        [
            named(row, case.name),
            row.env,
            *figures(row),
            times_text(ratio(row, torch_best)),
            times_text(ratio(row, any_best)),
        ]
        for row in shown
    ]
    head = ["program", "environment", *FIGURES, "of best PyTorch peer", "of best peer"]
    return "\n\n".join(
        [f"## {case.title}", comparison_line(results, case), table(head, lines), *share_line(results, case, rows)]
    )


def comparison_line(results: Results, case: Case) -> str:
    """How many iterations a case has, and which peers its rows are compared with besides its own."""
    text = f"{case.iterations} iterations of every program, of which the first quarter and one more aren't counted."
    other = ONE_THREAD.get(case.name)
    if other is None:
        return text
    if any(row.case == other for row in results.rows):
        return f"{text} Peers of {other}, with one thread, count among the peers here; the table has them if they won."
    return (
        f"{text} Peers of {other}, with one thread, would count among the peers here, but weren't measured in this run."
    )


def counts(judged: Sequence[Judged]) -> str:
    """A table of how many targets of each group have which verdict."""
    lines = []
    for group in get_args(Group):
        found = [one.verdict for one in judged if one.group == group]
        lines.append([group, str(len(found)), *(str(found.count(verdict)) for verdict in VERDICTS)])
    return table(["targets", "all", *VERDICTS], lines)


def targets_section(judged: Sequence[Judged]) -> str:
    """How many targets are met, and each of them with what was reached."""
    lines = []
    for one in judged:
        reached = times_text(one.reached) + (f" ({one.beside})" if one.beside else "")
        lines.append([one.case, one.what, one.over, f"{one.factor:g} ×", reached, f"**{one.verdict}**"])
    text = (
        "A ratio is the median of the repetitions' own ratios. It is within noise where some repetition is on the "
        f"other side of the target, and the median at most {100 * MOST_NOISE:.0f} % away from it. Which peer was the "
        "best is a matter of this run."
    )
    each = table(["case", "ours", "over", "target", "reached", ""], lines)
    return "\n\n".join(["## Targets", counts(judged), text, each])


def variant(row: Row) -> str:
    """What tells our rows of a case apart besides the reduction: the environment, or how many devices."""
    return row.env if row.devices is None else f"{row.devices} device{'s' if row.devices > 1 else ''}"


def share_line(results: Results, case: Case, rows: Sequence[Row]) -> list[str]:
    """How much of what the cores could multiply our rows with JAX make use of."""
    if case.engine != "jax" or results.product_rate is None:
        return []
    if isinstance(results.product_rate, str):
        return [f"XLA's matrix product could not be timed: {results.product_rate}."]
    most = results.product_rate / operations_per_step(case)
    found = [
        f"{variant(row)} {row.reduction} {100 * row.median / most / row.busy:.0f} % of {row.busy:.2f}"
        for row in rows
        if row.ours and row.median is not None and row.busy is not None
    ]
    return [
        f"The matrix products of a step are {operations_per_step(case) / 1e3:,.0f} kFLOP; XLA's product of large "
        f"matrices makes {results.product_rate / 1e9:,.0f} GFLOP/s a core here, so {most:,.0f} steps/s a core would be "
        f"the ceiling. Reached, of so many cores as were at work: {'; '.join(found) or 'not seen'}."
    ]


def scaling_section(results: Results) -> str:
    """Two processes on two cores against one."""
    lines = []
    for row in (row for row in results.rows if row.scaling is not None):
        gains = [ratio(row, of(results.rows, row)) for of in (single_rank, two_copies)]
        lines.append([row.env, row.reduction or "", row.scaling or "", *figures(row), *map(times_text, gains)])
    head = ["environment", "reduction", "what", *FIGURES, "of one rank", "of two independent runs"]
    text = (
        f"One rank is the row of its environment and reduction in T2, right before these in every repetition. Weak: "
        f"“{WEAK}”; strong: “{STRONG}”; the machine's own ceiling: “{COPIES}”."
    )
    return "\n\n".join(["## Two ranks on two cores", text, table(head, lines)])


def split_section(results: Results) -> str:
    """Where an iteration's time goes on one rank."""
    lines = []
    for (case, env, what), split in results.splits.items():
        if isinstance(split, str):
            lines.append([case, env, what, f"failed: {split}", *[""] * len(PARTS)])
            continue
        total = sum(split.values())
        shares = [f"{split[part] * 1e3:.2f} ({100 * split[part] / total:.0f} %)" for part in PARTS]
        lines.append([case, env, what, f"{total * 1e3:.2f}", *shares])
    head = ["case", "environment", "what", "iteration, ms", *PARTS]
    text = (
        "Milliseconds of a mean iteration on one rank, under a profile, and the share of each part. One rank calls no "
        "collective: comm and wait are nought here and stand in the next table."
    )
    return "\n\n".join(["## Where the time goes", text, table(head, lines)])


def ceilings_section(results: Results) -> str:
    """What the environments alone would do."""
    lines = []
    for (env, num_envs), found in results.ceilings.items():
        if isinstance(found, str):
            lines.append([env, str(num_envs), f"failed: {found}", ""])
            continue
        lines.append([env, str(num_envs), *(spread(found.get(who, [])) for who in ("lockstep", "gymnasium"))])
    head = ["environment", "how many", "stepped by Lockstep, steps/s", "by Gymnasium's SyncVectorEnv"]
    text = "Random actions, one thread; medians of interleaved rounds, and their least and most."
    return "\n\n".join(["## The environments alone", text, table(head, lines)])


def spread(rates: Sequence[float]) -> str:
    """Median, least and most of some steps/s."""
    return f"{median(rates):,.0f} ({min(rates):,.0f} – {max(rates):,.0f})" if rates else ""


def times_section(results: Results) -> str:
    """The iteration as every run reports it, with the collectives apart."""
    lines = []
    for row in (row for row in results.rows if row.times):
        mean = {name: sum(times[name] for times in row.times) / len(row.times) for name in row.times[0]}
        what = row.scaling or row.label.partition(f"{row.reduction}")[2].removeprefix(", ") or "one rank"
        parts = [f"{mean[name] * 1e3:.2f}" for name in TIMES]
        lines.append([row.case, row.env, row.reduction or "", what, *parts, f"{100 * mean['accounted']:.0f} %"])
    head = ["case", "environment", "reduction", "what", *(n.removeprefix("t_") + ", ms" for n in TIMES), "of wall time"]
    text = (
        "Means over ranks, as the runs' own `metrics.jsonl` has them; the last column compares their sum with the wall "
        "time in which the iterations' lines arrived."
    )
    return "\n\n".join(["## What the runs report", text, table(head, lines)])


def markdown(results: Results) -> str:
    """The whole report."""
    facts = "\n".join(f"- {name}: {value}" for name, value in results.facts.items())
    parts = ["# Side by side with the peers", facts]
    if results.problems:
        parts.append("\n".join(f"- **{problem}**" for problem in results.problems))
    parts += [targets_section(results.judged), ranges_section(results.rows, [case.name for case in results.cases])]
    parts += [case_section(results, case) for case in results.cases]
    if any(row.scaling is not None for row in results.rows):
        parts.append(scaling_section(results))
    if results.splits:
        parts.append(split_section(results))
    if results.ceilings:
        parts.append(ceilings_section(results))
    parts.append(times_section(results))
    return "\n\n".join(parts) + "\n"
