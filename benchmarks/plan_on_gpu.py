"""Sets what ``lockstep plan`` says of a GPU beside what the checks on one measured.

``python -m benchmarks.plan_on_gpu`` reads the speeds in ``benchmarks/results/gpu.md``, plans the same commands, and
writes the table of docs/plan.md, kept as ``benchmarks/results/plan-on-gpu.md``.
"""

from __future__ import annotations

import datetime
import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.commit import short_commit
from benchmarks.gpu_checks import CHECKS
from benchmarks.plan_check import ROOT, into_page
from benchmarks.tables import table
from lockstep.planning.report import amount

MARK = "plan_on_gpu"
MEASURED = ROOT / "benchmarks" / "results" / "gpu.md"
KEPT = ROOT / "benchmarks" / "results" / "plan-on-gpu.md"
PAGE = ROOT / "docs" / "plan.md"
TARGETS = {"H100": "h100:1", "H200": "h200:1", "A100": "a100:1"}
"""By what the GPU's name has in it."""
SAYS_GPUS = "- GPUs that PyTorch sees:"
"""How the line of a report begins that names them."""
MEASURED_IF = ("passed", "measured")
"""What the report says of checks whose speeds count."""
WITH, WITHOUT = 0, 1
COMPARED = (
    *(("trains", WITH), ("graphs", WITHOUT)),
    *(("exact", WITHOUT), ("exact", WITH), ("jax-exact", WITHOUT), ("jax-exact", WITH)),
)
"""Checks, and which of their commands."""


class Row(NamedTuple):
    """A command with its measured steps a second, or none, with what came of its check."""

    words: str
    measured: float | None
    result: str = "passed"


def commands(text: str) -> list[Row]:
    """The commands that are compared, of the report of the checks; without a speed where a check didn't end well."""
    found, checks = [], {check.name: check for check in CHECKS}
    for name, number in COMPARED:
        words = " ".join(shlex.split(checks[name].commands[number])[2:-2])  # but for lockstep train, and the name
        row = re.search(rf"^\| {name} \| ([^|]*) \| ([^|]*) \|", text, re.MULTILINE)
        if row is None or row[1] not in MEASURED_IF:
            found.append(Row(words, None, "not in the report" if row is None else row[1]))
            continue
        rates = re.findall(r"([\d,]+)(?= against| steps/s)", row[2])
        found.append(Row(words, float(rates[number].replace(",", "")), row[1]))
    return found


def target_of(text: str) -> str:
    """What ``--on`` calls the GPU of a report; raises a ``ValueError`` for one that plans don't know."""
    said = next((line for line in text.splitlines() if line.startswith(SAYS_GPUS)), "")
    for name, target in TARGETS.items():
        if name in said:
            return target
    raise ValueError(f"{MEASURED}: measured on none of {', '.join(TARGETS)}")


def planned(words: str, target: str) -> dict[str, float]:
    """Steps a second, best, likely and worst, as a plan says them."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "lockstep", "plan", *shlex.split(words), "--on", target]
        command += ["--runs-dir", directory, "--name", "plan"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found = json.loads(Path(directory, "plan", "plan.json").read_text())
    return found["targets"][0]["predictions"][0]["steps_per_second"]


def line(row: Row, rates: dict[str, float]) -> list[str]:
    """One row of the table."""
    span = f"{amount(rates['worst'])} – {amount(rates['best'])}"
    if row.measured is None:
        return [f"`{row.words}`", amount(rates["likely"]), span, f"none: {row.result}", "–", "–"]
    inside = rates["worst"] <= row.measured <= rates["best"]
    error = f"{rates['likely'] / row.measured - 1.0:+.0%}"
    return [f"`{row.words}`", amount(rates["likely"]), span, amount(row.measured), error, "yes" if inside else "no"]


def main() -> None:
    """Plans what was measured, keeps the table, and writes it into the page."""
    text = MEASURED.read_text()
    target, today = target_of(text), datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    rows = [line(row, planned(row.words, target)) for row in commands(text)]
    head = ["`lockstep train`", "planned", "range", "measured", "error", "within the range"]
    said = f"Planned {today} at commit {short_commit()}, `--on {target}`; steps a second."
    body = f"{said}\n\n{table(head, rows)}\n"
    KEPT.write_text(f"# Plans held to a GPU\n\n{body}")
    PAGE.write_text(into_page(PAGE.read_text(), body, MARK))
    print(body)


if __name__ == "__main__":
    main()
