"""How the checks that need a GPU are judged: what a command left, and what of it must be so."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TENSOR_STEPS, TENSOR_ITERATIONS = 128, 20
"""Of the run that must stay on the GPU."""
SHARING = (1, 2, 3, 8)
"""Ranks that share a GPU."""
GRAPHS = 2
"""That a run captures: of a step of its rollouts, and of an optimiser step."""
LEARNED = 2.0
"""Returns that are this many times those of the first iteration were learned."""
SOLVED = 400.0
"""Return of CartPole-v1, whose best is 500, from which on it is taken as learned."""


@dataclass(frozen=True)
class Outcome:
    """One command that has ended.

    Attributes:
        code: its exit status.
        output: what it printed, errors included.
        summary: ``summary.json`` of the run that ``--name`` or ``--resume`` names, with the rows of a sweep of
            ``bench`` under ``world_sizes``; empty if there is none.
        metrics: its ``metrics.jsonl``.
        timing: its ``timing.jsonl``.
    """

    code: int
    output: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, Any]] = ()
    timing: Sequence[Mapping[str, Any]] = ()

    @property
    def rate(self) -> float:
        """Environment steps a second, after the first quarter of a run: what compiles or captures is in that.

        Raises:
            ValueError: the run has too few rows for that; ``KeyError``: they don't say how long iterations took.
        """
        skipped = max(1, len(self.metrics) // 4)
        if len(self.metrics) <= skipped:
            raise ValueError(f"{len(self.metrics)} rows of metrics.jsonl are too few for a speed")
        seconds = sum(row["time/t_iter"] for row in self.metrics[skipped:])
        return (self.metrics[-1]["global_step"] - self.metrics[skipped - 1]["global_step"]) / seconds

    @property
    def last_line(self) -> str:
        """The last line that was printed."""
        return next((line.strip() for line in reversed(self.output.splitlines()) if line.strip()), "nothing printed")


@dataclass(frozen=True)
class Verdict:
    """Whether what must be seen was seen, and the figures to keep."""

    passed: bool
    figures: str


def returns(run: Outcome) -> tuple[float, float]:
    """Mean episode return of the first iteration that has one, and the final one."""
    values = (row.get("rollout/episode_return_mean") for row in run.metrics)
    return float(next(value for value in values if value is not None)), float(run.summary["final_return"])


def solves_cartpole(run: Outcome) -> Verdict:
    final = float(run.summary["final_return"])
    on_gpu = "cuda:0" in run.output
    return Verdict(on_gpu and final >= SOLVED, f"final return {final:.1f}, {run.rate:,.0f} steps/s")


def learns(run: Outcome) -> Verdict:
    first, final = returns(run)
    on_gpu = run.summary["platform"] == "gpu"
    return Verdict(on_gpu and final >= LEARNED * first, f"return {first:.1f} → {final:.1f}, {run.rate:,.0f} steps/s")


def rises(run: Outcome) -> Verdict:
    first, final = returns(run)
    return Verdict(final > first, f"return {first:.2f} → {final:.2f}")


def refuses(run: Outcome) -> Verdict:
    lines = [line for line in run.output.splitlines() if line.strip()]
    wanted = run.code == 2 and len(lines) == 1 and "GPUs" in run.output and not run.summary and not run.metrics
    return Verdict(wanted, f"exit status {run.code}: {run.last_line}")


def same_bytes(run: Outcome) -> Verdict:
    rows = json.loads(run.last_line)
    different = [f"{row['world_size']}: {row['difference']}" for row in rows if not row["equal"]]
    sizes = ", ".join(str(row["world_size"]) for row in rows)
    return Verdict(len(rows) > 1 and not different, "; ".join(different) or f"equal on {sizes}")


def same_bytes_by_nccl(verified: Outcome, run: Outcome) -> Verdict:
    found, carrier = same_bytes(verified), run.summary["collectives"]
    return Verdict(found.passed and carrier == "nccl", f"{found.figures}; collectives by {carrier}")


def resumes(stopped: Outcome, resumed: Outcome, whole: Outcome) -> Verdict:
    digests = [outcome.summary["state_sha256"] for outcome in (resumed, whole)]
    went_on = stopped.summary["global_step"] < resumed.summary["global_step"]
    return Verdict(went_on and digests[0] == digests[1], " and ".join(digest[:8] for digest in digests))


def same_state_on_one_gpu(*runs: Outcome) -> Verdict:
    """Of each kind of run, by as many ranks as :data:`SHARING` says."""
    sets, passed, said = len(runs) // len(SHARING), True, []
    for number in range(sets):
        own = runs[number * len(SHARING) : (number + 1) * len(SHARING)]
        digests = [run.summary["state_sha256"] for run in own]
        sizes = tuple(run.summary["world_size"] for run in own)
        on_gpu = all("cuda:0" in run.output for run in own)
        passed &= sizes == SHARING and on_gpu and len(set(digests)) == 1
        said.append(f"{', '.join(digest[:8] for digest in digests)} (shards {own[0].summary['shards_on_a_rank']})")
    return Verdict(passed and sets > 0, "; ".join(said))


def stays_on_gpu(run: Outcome) -> Verdict:
    copies = int(run.last_line.removeprefix("copies "))
    steps = TENSOR_STEPS * TENSOR_ITERATIONS
    return Verdict(0 < copies < steps, f"{copies} copies in {steps} steps")


def never_waits(run: Outcome) -> Verdict:
    updates = int(run.last_line.removeprefix("updates "))
    return Verdict(updates > 0, f"{updates} updates without a wait")


def same_bits_replayed(run: Outcome, base: Outcome) -> Verdict:
    same = run.summary["state_sha256"] == base.summary["state_sha256"]
    graphs, replays = map(int, re.findall(r"\d+", run.last_line.removeprefix("graphs ")))
    figures = f"{graphs} graphs, {replays} replays; {speeds(run, base).figures}"
    captured = graphs == GRAPHS and replays >= 2 * len(run.metrics) > 0
    return Verdict(same and captured, figures + ("" if same else "; the bits are others"))


def same_bits_in_branches(*runs: Outcome) -> Verdict:
    """Of each kind of run, with branches and without."""
    passed, said = len(runs) > 0, []
    for run, base in zip(runs[::2], runs[1::2], strict=True):
        same = run.summary["state_sha256"] == base.summary["state_sha256"]
        forks = int(run.last_line.removeprefix("forks "))
        passed &= same and forks > 0
        shards = run.summary["shards_on_a_rank"]
        said.append(f"{speeds(run, base).figures} (shards {shards})" + ("" if same else "; the bits are others"))
    return Verdict(passed, "; ".join(said))


def speeds(run: Outcome, base: Outcome) -> Verdict:
    return Verdict(True, f"{run.rate:,.0f} against {base.rate:,.0f} steps/s: {run.rate / base.rate:.2f} ×")


def another_precision(run: Outcome, base: Outcome) -> Verdict:
    differs = run.summary["params_sha256"] != base.summary["params_sha256"]
    return Verdict(differs, speeds(run, base).figures + ("" if differs else "; the bits are those of fp32"))


def less_memory(run: Outcome, base: Outcome) -> Verdict:
    peaks = [max(row["peak_gpu_memory_mb"][0] for row in outcome.timing) for outcome in (run, base)]
    return Verdict(0 < peaks[0] < peaks[1], f"peak of a rank {peaks[0]:,.0f} against {peaks[1]:,.0f} MiB")


def names_gpu_memory(run: Outcome) -> Verdict:
    rule = re.search(r"\d+ on a GPU of \d+ GB", run.output)
    return Verdict(rule is not None, rule[0] if rule else "no line names the GPU's memory")


def measures_both(run: Outcome) -> Verdict:
    by_size = {row["world_size"]: row for row in run.summary["world_sizes"]}
    comm, peak = by_size[2]["t_comm"], by_size[2]["peak_gpu_memory_mb"]
    rates = ", ".join(f"{row['steps_per_second']:,.0f} steps/s on {size}" for size, row in by_size.items())
    return Verdict(comm > 0 and peak > 0, f"{rates}; t_comm {1e3 * comm:.1f} ms, peak {peak:,.0f} MiB")


def reduces_gradients(run: Outcome) -> Verdict:
    said = re.findall(r"backend (\w+) difference ([\d.e+-]+|nan)", run.output)
    close = all(float(difference) < 1e-5 for _, difference in said)
    passed = len(said) == 2 and close and {backend for backend, _ in said} == {"nccl"}
    return Verdict(passed, "; ".join(f"{backend}, difference {difference}" for backend, difference in said))


def solves_by_sb3(run: Outcome) -> Verdict:
    means = [float(mean) for mean in re.findall(r"mean return over 20 episodes: ([\d.]+)", run.output)]
    return Verdict(bool(means) and min(means) >= SOLVED, f"mean returns {', '.join(f'{mean:.1f}' for mean in means)}")
