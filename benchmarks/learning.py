"""Keeps what finished runs learnt; makes the tables of docs/results.md and the picture of README.md from that alone.

python -m benchmarks.learning keep --commit COMMIT RUN [RUN ...]    # to benchmarks/results/learning.json
python -m benchmarks.learning keep --to learning-more.json …        # to a file of its own: a table, no picture
python -m benchmarks.learning draw                                  # tables and picture from them; needs matplotlib

Of a run that holds an evaluation.json (lockstep eval RUN --json RUN/evaluation.json), its mean and standard deviation
are kept as well.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import table

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "benchmarks/results/learning.json"
EVALUATION = "evaluation.json"
PAGE, PICTURE = ROOT / "docs/results.md", ROOT / "docs/curves.png"
BEGIN, END = "<!-- written by python -m benchmarks.learning draw -->\n", "<!-- until here -->\n"

VERSIONS = ("lockstep", "torch", "numpy", "gymnasium", "mujoco", "python", "machine", "cpu", "cpu capability", "device")
"""What a summary says of software and machine; the agents are functions of the config and of these."""
NOT_LOADED = "not loaded"
KEPT = ("environment", "seed", "world_size", "global_step", "final_return", "params_sha256")
POINTS = 120
"""Points of a curve that are kept."""
CLEANRL = {"HalfCheetah-v5": 1442, "Hopper-v5": 2383, "Walker2d-v5": 2288}
"""Returns that CleanRL's documentation reports for these settings."""
RANKS, SEEDS = ("CartPole-v1", 0), "HalfCheetah-v5"
"""The panels: one seed on several numbers of ranks, several seeds of an environment."""
Figures = dict[str, Any]


def kept(runs: Sequence[Path], commit: str) -> Figures:
    """Reads finished run directories.

    Raises:
        ValueError: a run isn't finished, or two are of other versions or machines; one line.
    """
    versions: dict[str, str] = {}
    out = []
    for run in runs:
        summary = json.loads((run / "summary.json").read_text())
        if summary["status"] != "finished":
            raise ValueError(f"{run}: status {summary['status']!r}; only finished runs are kept")
        mine = {name: summary[name] for name in VERSIONS if summary.get(name, NOT_LOADED) != NOT_LOADED}
        for name, value in mine.items():
            if versions.setdefault(name, value) != value:
                raise ValueError(f"{run}: {name} {value}, and {versions[name]} in the runs before; keep them apart")
        out.append({name: summary[name] for name in KEPT} | _evaluated(run, summary) | _curve(run))
    facts = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commit": commit}
    return {"facts": facts | {name: versions[name] for name in VERSIONS if name in versions}, "runs": out}


def _evaluated(run: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """Number of episodes, mean and standard deviation of returns of the evaluation that lies in a run, if one does."""
    if not (run / EVALUATION).exists():
        return {}
    found = json.loads((run / EVALUATION).read_text())
    if found["global_step"] != summary["global_step"]:
        raise ValueError(
            f"{run}: {EVALUATION} is of step {found['global_step']}, the run's end {summary['global_step']}"
        )
    return {"evaluation": {name: found[name] for name in ("episodes", "return_mean", "return_std")}}


def _curve(run: Path) -> dict[str, list[float]]:
    """Steps and mean returns of the last 100 episodes, thinned out; the last point stays."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    known = [r for r in records if r["rollout/episode_return_mean"] is not None]
    chosen = known[:: -(-len(known) // POINTS)]
    chosen += [] if chosen[-1] is known[-1] else [known[-1]]
    returns = [round(r["rollout/episode_return_mean"], 2) for r in chosen]
    return {"steps": [r["global_step"] for r in chosen], "returns": returns}


def written(figures: Figures) -> str:
    """Figures as the file has them: a line a run."""
    runs = ",\n".join(json.dumps(run) for run in figures["runs"])
    return f'{{"facts": {json.dumps(figures["facts"], indent=1)},\n"runs": [\n{runs}\n]}}\n'


def digest(text: str) -> str:
    """The sha256 by which a picture names the figures that it was drawn from."""
    return hashlib.sha256(text.encode()).hexdigest()


def in_short(facts: dict[str, str]) -> str:
    """Date, commit and versions in one line."""
    names = {"torch": "PyTorch", "numpy": "NumPy", "gymnasium": "Gymnasium", "mujoco": "MuJoCo", "python": "Python"}
    versions = ", ".join(f"{name} {facts[key]}" for key, name in names.items() if key in facts)
    where = " ".join(facts[name] for name in ("cpu", "machine", "cpu capability") if name in facts)
    return f"{facts['date']}, commit {facts['commit'][:7]}, {versions}, {where}"


def number(value: float) -> str:
    """A return, in three digits at least."""
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 10 else f"{value:.2f}"


def every_figure() -> list[Figures]:
    """What is kept: of the picture's runs first, then of each other file."""
    return [json.loads(file.read_text()) for file in (FIGURES, *sorted(FIGURES.parent.glob("learning-*.json")))]


def block(every: Sequence[Figures]) -> str:
    """The part of the page that is made of the figures, between its marks: a table a file."""
    return f"{BEGIN}{chr(10).join(map(_table, every))}{END}"


def _table(figures: Figures) -> str:
    rows, evaluated = [], any("evaluation" in run for run in figures["runs"])
    for name in dict.fromkeys(run["environment"] for run in figures["runs"]):
        runs = [run for run in figures["runs"] if run["environment"] == name]
        seeds = {run["seed"]: run for run in reversed(runs)}
        returns = [seeds[seed]["final_return"] for seed in sorted(seeds)]
        mean = number(sum(returns) / len(returns)) + (f" (CleanRL {CLEANRL[name]:,})" if name in CLEANRL else "")
        agents = [seeds[seed]["params_sha256"][:8] for seed in sorted(seeds)]
        cells = [", ".join(map(str, sorted(seeds))), ", ".join(map(number, returns)), mean, ", ".join(agents)]
        if evaluated:
            cells.insert(3, ", ".join(_evaluation(seeds[seed]) for seed in sorted(seeds)))
        rows.append((name, f"{runs[0]['global_step']:,}", *cells))
    head = ["preset", "steps", "seeds", "final return", "mean", "`params_sha256` begins"]
    if evaluated:
        head.insert(5, "evaluation")
    return f"{in_short(figures['facts'])}.\n\n{table(head, rows)}\n"


def _evaluation(run: dict[str, Any]) -> str:
    found = run.get("evaluation")
    if found is None:
        return "–"
    return f"{number(found['return_mean'])} ± {number(found['return_std'])} ({found['episodes']} episodes)"


def with_block(page: str, made: str) -> str:
    """The page with the part between the marks replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + made + after


def draw(text: str, out: Path) -> None:
    """Draws the picture of figures as the file has them; it names their digest, commit and versions."""
    from matplotlib.figure import Figure

    figures = json.loads(text)
    environment, seed = RANKS
    by_ranks = [run for run in figures["runs"] if (run["environment"], run["seed"]) == RANKS]
    by_seeds = [run for run in figures["runs"] if run["environment"] == SEEDS]
    figure = Figure(figsize=(10.4, 3.7), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, run in enumerate(by_ranks):
        style, width = ["-", "--", ":", "-."][number % 4], 2.8 - 0.5 * number
        ranks = f"{run['world_size']} rank{'s' if run['world_size'] > 1 else ''}: {run['params_sha256'][:8]}"
        left.plot(run["steps"], run["returns"], style, linewidth=width, label=ranks)
    for number, run in enumerate(by_seeds):
        style = ["-", "--", ":", "-."][number % 4]
        right.plot(run["steps"], run["returns"], style, linewidth=2, label=f"seed {run['seed']}")
    left.set_title(f"{environment}, seed {seed}: one agent on any number of ranks", fontsize=11)
    right.set_title(f"{SEEDS}, its preset", fontsize=11)
    for axis in (left, right):
        axis.set(xlabel="global environment steps", ylabel="mean return, last 100 episodes")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    said = in_short(figures["facts"])
    figure.supxlabel(said, fontsize=7, color="0.4")
    figure.savefig(out, dpi=110, metadata={"Figures": digest(text), "Description": said})


def texts_of(png: bytes) -> dict[str, str]:
    """The texts that a PNG file carries, by keyword."""
    found, at = {}, 8
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        if kind == b"tEXt":
            keyword, _, text = png[at + 8 : at + 8 + size].partition(b"\0")
            found[keyword.decode()] = text.decode("latin-1")
        at += size + 12
    return found


def main(argv: Sequence[str]) -> None:
    """Runs ``keep`` or ``draw``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning")
    parser.add_argument("what", choices=("keep", "draw"))
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--commit", help="of the code that trained the runs")
    parser.add_argument("--to", default=FIGURES.name, help="file in benchmarks/results, learning-….json")
    options = parser.parse_intermixed_args(argv)
    if options.what == "keep":
        if not options.runs or not options.commit:
            parser.error("keep needs run directories and --commit")
        (FIGURES.parent / options.to).write_text(written(kept(options.runs, options.commit)))
        return
    PAGE.write_text(with_block(PAGE.read_text(), block(every_figure())))
    draw(FIGURES.read_text(), PICTURE)


if __name__ == "__main__":
    main(sys.argv[1:])
