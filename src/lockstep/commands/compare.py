"""``lockstep compare`` sets policies side by side by the episodes that they play, and groups of seeds by their runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.commands.eval import check_device
from lockstep.commands.parser import CommandParser, add_policy_options, at_least_one
from lockstep.policies.comparison import Evaluated, EvaluatedGroup, comparison, draw, in_words
from lockstep.policies.evaluation import evaluate
from lockstep.policies.policy import load_policy
from lockstep.policies.results import check_files, facts_of, read_json, save_figure, written
from lockstep.runs.directory import find_run, seeds_in


def main(argv: Sequence[str]) -> int:
    """Runs ``lockstep compare RUN RUN …``: distributions, means with intervals, effect sizes, a plot."""
    parser = CommandParser(
        prog="lockstep compare", description="Compare policies by their episodes, or groups of seeds by their runs."
    )
    parser.add_argument(
        "runs",
        nargs="+",
        help="runs, or files of lockstep eval --json FILE, or groups of seeds; the first is the measure",
    )
    add_policy_options(parser)
    parser.add_argument("--episodes", type=at_least_one, default=100, help="of each run (default: 100)")
    parser.add_argument("--json", nargs="?", const="", help="print one JSON object, or write it")
    parser.add_argument("--plot", type=Path, help="draw distributions and means into a png, svg or pdf")
    parser.set_defaults(seed=0)
    options = parser.parse_args(argv)
    if options.json and any(Path(place, options.json).is_dir() for place in ("", options.runs_dir)):
        options.runs, options.json = [options.json, *options.runs], ""  # `compare --json RUN RUN`
    json_file = Path(options.json) if options.json else None
    if len(options.runs) < 2:
        raise ValueError(f"compare: {options.runs[0]} with what? give two or more runs or evaluations")
    check_files(json_file, None, options.plot)

    def played_by(run: str | Path) -> tuple[dict[str, Any], np.ndarray]:
        policy = load_policy(run, options.checkpoint, options.runs_dir, trust=options.trust)
        check_device(policy)
        table = evaluate(policy, options.episodes, options.seed, not options.stochastic)
        return facts_of(policy, table, not options.stochastic), table

    called = dict(zip(options.runs, short_names(options.runs), strict=True))

    def evaluated(name: str) -> Evaluated:
        path = Path(name)
        if path.suffix == ".json":
            facts, table = read_json(path)
            return Evaluated(called[name], facts, table)
        seeds = seeds_in(find_run(name, options.runs_dir, single=False)[0])
        played = [played_by(seed) for seed in seeds or [name]]
        facts, table = played[0]
        if not seeds:
            return Evaluated(called[name], facts, table)
        return EvaluatedGroup(called[name], facts, table, [each for _, each in played])

    them = [evaluated(name) for name in options.runs]
    found = comparison(them)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(found, indent=1) + "\n")
    if options.plot is not None:
        save_figure(draw(them, found), options.plot)
    print(json.dumps(found) if options.json == "" else in_words(found) + written(json_file, options.plot))
    return 0


def short_names(runs: Sequence[str]) -> list[str]:
    """What runs are called: the last part of each path, and as much before it as tells different paths apart."""
    paths = [Path(run).with_suffix("") if run.endswith(".json") else Path(run) for run in runs]

    def called(path: Path, parts: int) -> str:
        return "/".join(path.parts[-parts:]) or str(path)

    out = []
    for path in paths:
        others = {other for other in paths if other != path}
        most = len(path.parts)
        enough = (n for n in range(1, most) if called(path, n) not in {called(other, n) for other in others})
        out.append(called(path, next(enough, most)))
    return out
