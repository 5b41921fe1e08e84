"""Sets scaling that others have published beside what the plan's rules for collectives give: an illustration.

``python -m benchmarks.plan_published`` prints a table as Markdown. The seconds of an iteration on few devices are the
publication's own; what is predicted is what the collectives add on many, by the same table of chips and the same
assumptions for every row (weak scaling, nothing overlaps, nobody waits for a slower one). Nothing is tuned by row.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.planning.accelerators import link_of
from lockstep.planning.hardware import CASES, assumptions, chips
from lockstep.training.costs import Collective


@dataclass(frozen=True)
class Published:
    """One publication's run: what it measured, and what of it the prediction takes.

    Attributes:
        seconds: of an iteration on ``few`` devices, as published; its collectives among them.
        each: collectives of an iteration.
        published: efficiency on ``many`` devices against ``few``.
        per_host: devices of a host there.
        inputs: where the numbers come from, in words.
    """

    name: str
    chip: str
    few: int
    many: int
    per_host: int
    seconds: float
    each: tuple[Collective, ...]
    published: str
    inputs: str


PARAMETERS_8B = 8.03e9
ROWS = (
    Published(
        "Isaac Lab, Cartpole-Direct (RL Games)",
        "l40",
        1,
        16,
        4,
        4096 * 32 / 260_000,
        (Collective("all-reduce", "gradients", 64, 4 * 1_400), Collective("all-reduce", "KL", 64, 4)),
        "84 %",
        "260,000 and 3,500,000 steps/s; 4,096 environments a GPU, 32 steps, 8 epochs of 8 minibatches, 1,400 "
        "parameters",
    ),
    Published(
        "Isaac Lab, Velocity-Rough-G1 (rsl_rl)",
        "l40",
        1,
        16,
        4,
        4096 * 24 / 62_000,
        (Collective("all-reduce", "gradients", 20, 4 * 650_000), Collective("all-reduce", "KL", 20, 4)),
        "97 %",
        "62,000 and 960,000 steps/s; 4,096 environments a GPU, 24 steps, 5 epochs of 4 minibatches, 650,000 parameters",
    ),
    Published(
        "torchtitan, Llama 3.1 8B, FSDP2",
        "h100",
        8,
        128,
        8,
        2 * 8192 / 5_762,
        (
            Collective("all-gather", "parameters", 2, 2 * PARAMETERS_8B),
            Collective("reduce-scatter", "gradients", 1, 4 * PARAMETERS_8B / 128),
        ),
        "97–98 %",
        "5,762 tokens/s a GPU on 8; sequences of 8,192, 2 a GPU; parameters gathered in bfloat16 for both passes, "
        "gradients scattered in float32",
    ),
)


def efficiency(row: Published, case: str) -> float:
    """Predicts how much of linear is left on ``many`` devices: what collectives take there beyond those on ``few``."""
    added = _seconds(row, row.many, case) - _seconds(row, row.few, case)
    return row.seconds / (row.seconds + max(0.0, added))


def overlapped(row: Published) -> float:
    """Predicts the same where collectives run beside everything else, as FSDP's can: the longer of the two decides."""
    return row.seconds / max(row.seconds, _seconds(row, row.many, "likely"))


def _seconds(row: Published, devices: int, case: str) -> float:
    if devices == 1:
        return 0.0
    link = link_of(chips()[row.chip], devices, row.per_host, assumptions(case))
    total = 0.0
    for one in row.each:
        size = one.bytes * row.many / devices if one.kind == "reduce-scatter" else one.bytes
        total += one.count * (link.latency + link.transfer(one._replace(bytes=size), devices))
    return total


def main() -> None:
    """Prints the table."""
    print("| published | devices | published efficiency | predicted | best – worst | if all overlaps | inputs |")
    print("|---" * 7 + "|")
    for row in ROWS:
        best, likely, worst = (efficiency(row, case) for case in CASES)
        print(
            f"| {row.name} | {row.few} → {row.many} {chips()[row.chip].name} | {row.published} | {likely:.0%} | "
            f"{worst:.0%} – {best:.0%} | {overlapped(row):.0%} | {row.inputs} |"
        )


if __name__ == "__main__":
    main()
