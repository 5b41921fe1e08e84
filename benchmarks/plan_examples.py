"""Plans three runs for hardware that isn't here, and keeps what ``lockstep plan`` says of them.

``python -m benchmarks.plan_examples`` writes ``benchmarks/results/plan-examples.json`` and the tables of docs/plan.md.
Nothing of them has been held to such hardware. Programs for TPUs are compiled where libtpu is installed.
"""

from __future__ import annotations

import datetime
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.commit import short_commit
from benchmarks.plan_check import ROOT, into_page
from lockstep.planning.report import amount, duration

MARK = "plan_examples"
KEPT = ROOT / "benchmarks" / "results" / "plan-examples.json"
PAGE = ROOT / "docs" / "plan.md"
TARGETS = ("--on", "h100:8", "--on", "tpu:v5e:16x16")
WIDE = "--network.hidden-sizes 4096 4096 4096 4096 --num-envs 4096 --num-shards 256 --num-steps 32"
EXAMPLES = {
    "Humanoid-v5, whose simulator runs on the host": "Humanoid-v5 --num-envs 256 --num-shards 256",
    "GridWorldPixels, whose simulator runs on the device": (
        "lockstep/GridWorldPixels-v0 --num-envs 4096 --num-shards 256"
    ),
    "A policy of 100 million parameters": f"Humanoid-v5 {WIDE}",
}


def planned(words: str, directory: Path) -> dict[str, Any]:
    """What ``lockstep plan`` writes of a run."""
    command = [sys.executable, "-m", "lockstep", "plan", *shlex.split(words), *TARGETS]
    command += ["--runs-dir", str(directory), "--name", "example"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = json.loads((directory / "example" / "plan.json").read_text())
    del found["table"]  # planning/chips.json
    return found


def table(found: dict[str, Any]) -> list[str]:
    """The rows of a plan in Markdown: the fewest and the most devices of each target, and some between."""
    lines = ["| | devices | memory | steps/s | range | iteration | efficiency | limited by |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for target in found["targets"]:
        name = f"{target['target']}, engine {target['engine']}"
        for one in _some(target["predictions"]):
            rates, share = one["steps_per_second"], one["share_of_memory"]
            fits = f"{share:.1%}" if share <= 1 else f"doesn't fit, by {share:.3g} ×"
            cells = [name, one["devices"], fits, amount(rates["likely"])]
            cells += [f"{amount(rates['worst'])} – {amount(rates['best'])}", duration(one["seconds"]["likely"])]
            lines.append("| " + " | ".join(map(str, [*cells, f"{one['efficiency']:.0%}", one["limited_by"]])) + " |")
            name = ""
    return lines


def _some(predictions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return predictions if len(predictions) <= 4 else [p for p in predictions if p["devices"] in (1, 8, 64, 256)]


def text(kept: dict[str, Any]) -> str:
    """The section of the page that kept plans make."""
    lines = [f"Planned {kept['date']} at commit {kept['commit']} on a machine with {kept['machine']}."]
    for title, found in kept["plans"].items():
        lines += ["", f"### {title}", "", "```", f"lockstep plan {EXAMPLES[title]} {' '.join(TARGETS)}", "```"]
        sources = dict.fromkeys(f"{target['target']}: {target['source']}" for target in found["targets"])
        lines += ["", *table(found), "", f"Costs of {'; '.join(sources)}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Plans all, keeps it, and writes the page."""
    with tempfile.TemporaryDirectory() as directory:
        plans = {title: planned(words, Path(directory, str(n))) for n, (title, words) in enumerate(EXAMPLES.items())}
    kept = {
        "date": datetime.date.today().isoformat(),
        "commit": short_commit(),
        "machine": next(iter(plans.values()))["machine"],
        "plans": plans,
    }
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(into_page(PAGE.read_text(), text(kept), MARK))


if __name__ == "__main__":
    main()
