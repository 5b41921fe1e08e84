"""Keeps what finished runs learnt; makes the tables of docs/results.md and the pictures of curves from that alone.

python -m benchmarks.learning keep --commit COMMIT RUN [RUN ...]    # to benchmarks/results/learning.json
python -m benchmarks.learning keep --to learning-more.json …        # to a file of its own: a table of its own
python -m benchmarks.learning draw                                  # tables and pictures from them; needs matplotlib

A RUN is a run directory, of a preset and a seed; FILE=RUN is one of a config file in this repository and a seed, and
is refused if the run is of another config. Of a run that holds an evaluation.json (lockstep eval RUN --json
RUN/evaluation.json), its mean and standard deviation are kept as well, with --times also how long it took.
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
from typing import TYPE_CHECKING, Any

from benchmarks.tables import table
from lockstep.config.command_line import read_request
from lockstep.launch.resume import may_change
from lockstep.runs.stored import differences, stored_config

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "benchmarks/results/learning.json"
EVALUATION = "evaluation.json"
PAGE, PICTURE = ROOT / "docs/results.md", ROOT / "docs/curves.png"
PONG, PONG_PICTURE = FIGURES.with_name("learning-pong.json"), ROOT / "docs/pong.png"
BEGIN, END = "<!-- written by python -m benchmarks.learning draw -->\n", "<!-- until here -->\n"

BESIDE = """\
![curves](curves.png)

On 1, 2 and 4 ranks the CartPole run has one `params_sha256`, and all its metrics except times are equal.

### Other commits, processors and tasks

"""
"""What the page has between the table of the picture's runs and the others."""

VERSIONS = ("lockstep", "torch", "numpy", "gymnasium", "mujoco", "python", "machine", "cpu", "cpu capability", "device")
"""What a summary says of software and machine; the agents are functions of the config and of these."""
NOT_LOADED = "not loaded"
KEPT = ("environment", "seed", "world_size", "global_step", "final_return", "params_sha256")
BESIDES = ("seed", "cuda_graphs")
"""Settings in which a run may differ from its config file; the second says nothing on a CPU."""
POINTS = 120
"""Points of a curve that are kept."""
CLEANRL = {"HalfCheetah-v5": (1442.64, 46.03), "Hopper-v5": (2382.86, 271.74), "Walker2d-v5": (2287.95, 571.78)}
"""Returns and their spread that CleanRL's documentation reports, of the same environments' version before: -v4."""
RANKS, SEEDS = ("CartPole-v1", 0), "HalfCheetah-v5"
"""The panels: one seed on several numbers of ranks, several seeds of an environment."""
Figures = dict[str, Any]


def kept(runs: Sequence[Path | tuple[Path, Path]], commit: str, times: bool = False) -> Figures:
    """Reads finished run directories, each by itself or with its config file; ``times``: how long they took, too.

    Raises:
        ValueError: a run isn't finished, says another commit, or isn't of its config file, or two are of other versions
            or machines; one line.
    """
    versions: dict[str, str] = {}
    out = []
    for file, run in ((None, run) if isinstance(run, Path) else run for run in runs):
        summary = json.loads((run / "summary.json").read_text())
        if summary["status"] != "finished":
            raise ValueError(f"{run}: status {summary['status']!r}; only finished runs are kept")
        said = summary.get("commit")  # of the directory it was started in; None: in no repository
        if said is not None and said != commit:
            raise ValueError(f"{run}: its summary says commit {said}, not {commit}")
        mine = {name: summary[name] for name in VERSIONS if summary.get(name, NOT_LOADED) != NOT_LOADED}
        for name, value in mine.items():
            if versions.setdefault(name, value) != value:
                raise ValueError(f"{run}: {name} {value}, and {versions[name]} in the runs before; keep them apart")
        took = {"minutes": round(summary["wall_time"] / 60, 1)} if times else {}
        config = {} if file is None else {"config": _checked(file, run)}
        out.append({name: summary[name] for name in KEPT} | config | took | _evaluated(run, summary) | _curve(run))
    facts = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commit": commit}
    return {"facts": facts | {name: versions[name] for name in VERSIONS if name in versions}, "runs": out}


def _checked(file: Path, run: Path) -> str:
    """The config file's path in this repository, if the run is of that config, whatever its seed."""
    asked = read_request([str(file)]).config.model_dump(mode="json")
    found = differences(stored_config(run, warn=False).model_dump(mode="json"), asked)
    for key, has, wanted in found:
        if key == "total_steps" or not (key in BESIDES or may_change(key)):
            raise ValueError(f"{run}: {key} is {has}, and {wanted} by {file}")
    return file.resolve().relative_to(ROOT).as_posix()


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
    first, *others = map(_table, every)
    return f"{BEGIN}{first}\n{BESIDE}{chr(10).join(others)}{END}"


def _table(figures: Figures) -> str:
    evaluated, timed = (any(name in run for run in figures["runs"]) for name in ("evaluation", "minutes"))
    rows = []
    for (name, config), runs in _by_task(figures["runs"]).items():
        seeds = {run["seed"]: run for run in reversed(runs)}
        ordered = [seeds[seed] for seed in sorted(seeds)]
        returns = [run["final_return"] for run in ordered]
        cleanrl = ""
        if config is None and name in CLEANRL:
            published, spread = CLEANRL[name]
            cleanrl = f" (CleanRL, -v4: {published:,.0f} ± {spread:,.0f})"
        rows.append(
            (
                name if config is None else f"{name} by [{Path(config).name}](../{config})",
                f"{runs[0]['global_step']:,}",
                *(
                    [", ".join(f"{run['minutes']:.0f} on {run['world_size']} ranks" for run in ordered)]
                    if timed
                    else []
                ),
                ", ".join(map(str, sorted(seeds))),
                ", ".join(map(number, returns)),
                number(sum(returns) / len(returns)) + cleanrl,
                *([_evaluations(ordered)] if evaluated else []),
                ", ".join(run["params_sha256"][:8] for run in ordered),
            )
        )
    head = ["preset", "steps", *(["minutes"] if timed else []), "seeds", "final return", "mean"]
    head += [*(["evaluation"] if evaluated else []), "`params_sha256` begins"]
    return f"{in_short(figures['facts'])}.\n\n{table(head, rows)}\n"


def _by_task(runs: Sequence[dict[str, Any]]) -> dict[tuple[str, str | None], list[dict[str, Any]]]:
    """Runs by environment and config file, None of presets, in the order of the first of each."""
    found: dict[tuple[str, str | None], list[dict[str, Any]]] = {}
    for run in runs:
        found.setdefault((run["environment"], run.get("config")), []).append(run)
    return found


def _evaluations(runs: Sequence[dict[str, Any]]) -> str:
    """Means and standard deviations; the number of episodes once if it is the same of all."""
    found = [run.get("evaluation") for run in runs]
    counts = {one["episodes"] for one in found if one is not None}
    said = [
        "–"
        if one is None
        else f"{number(one['return_mean'])} ± {number(one['return_std'])}"
        + (f" ({one['episodes']} episodes)" if len(counts) > 1 else "")
        for one in found
    ]
    each = " each" if len(runs) > 1 else ""
    return ", ".join(said) + (f" ({counts.pop()} episodes{each})" if len(counts) == 1 else "")


def with_block(page: str, made: str) -> str:
    """The page with the part between the marks replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + made + after


def draw(text: str, out: Path) -> None:
    """Draws two panels of figures as the file has them: a seed on several numbers of ranks, and several seeds."""
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
    _finish(figure, text, out)


def draw_one(text: str, out: Path) -> None:
    """Draws the curves of figures as the file has them in one panel, each with its ranks and minutes."""
    from matplotlib.figure import Figure

    runs = json.loads(text)["runs"]
    figure = Figure(figsize=(8.6, 3.4), layout="constrained")
    axis = figure.subplots()
    for run in runs:
        took = f"{run['world_size']} ranks, {run['minutes']:.0f} minutes, {run['params_sha256'][:8]}"
        axis.plot(run["steps"], run["returns"], linewidth=2, label=took)
    axis.set_title(runs[0]["environment"], fontsize=11)
    _finish(figure, text, out)


def _finish(figure: Figure, text: str, out: Path) -> None:
    """Writes a picture that names its figures' digest, commit and versions."""
    for axis in figure.axes:
        axis.set(xlabel="global environment steps", ylabel="mean return, last 100 episodes")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    said = in_short(json.loads(text)["facts"])
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
    parser.add_argument("runs", nargs="*", type=_run, metavar="[FILE=]RUN")
    parser.add_argument("--commit", help="of the code that trained the runs, all 40 digits")
    parser.add_argument("--times", action="store_true", help="keep how many minutes each run took")
    parser.add_argument("--to", default=FIGURES.name, help="file in benchmarks/results, learning-….json")
    options = parser.parse_intermixed_args(argv)
    if options.what == "keep":
        if not options.runs or not options.commit:
            parser.error("keep needs run directories and --commit")
        (FIGURES.parent / options.to).write_text(written(kept(options.runs, options.commit, options.times)))
        return
    PAGE.write_text(with_block(PAGE.read_text(), block(every_figure())))
    draw(FIGURES.read_text(), PICTURE)
    draw_one(PONG.read_text(), PONG_PICTURE)


def _run(word: str) -> Path | tuple[Path, Path]:
    file, _, run = word.rpartition("=")
    return (Path(file), Path(run)) if file.endswith(".yaml") else Path(word)


if __name__ == "__main__":
    main(sys.argv[1:])
