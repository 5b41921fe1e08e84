"""``lockstep compare`` compares policies by the episodes that they play, and groups of seeds by their runs."""

from __future__ import annotations

import itertools
import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.commands.parser import LATEST, CommandParser, add_policy_options, at_least_one, from_home, policy_of
from lockstep.config.redact import shown_value
from lockstep.core.files import as_json
from lockstep.core.process import say
from lockstep.launch.resume import may_change
from lockstep.policies.comparison import comparison, draw, in_words
from lockstep.policies.evaluated import Evaluated, EvaluatedGroup
from lockstep.policies.evaluation import evaluate, flattered
from lockstep.policies.results import check_files, facts_of, is_evaluation, read_json, save_figure, write_text, written
from lockstep.report.settings import seeds_in_words
from lockstep.runs.directory import SEED
from lockstep.runs.finding import find_run, seeds_in
from lockstep.runs.listing import printable
from lockstep.runs.stored import differences
from lockstep.training.own_loss.recorded import told_apart

EPISODES, SEED_OF_STARTS = 100, 0


class Recorded(NamedTuple):
    """A run's config as JSON, and its directory."""

    config: dict[str, Any]
    path: Path


def main(argv: Sequence[str]) -> int:
    """Runs ``lockstep compare RUN RUN …``: prints means with intervals and effect sizes, and may draw a plot."""
    options = _parser().parse_args(argv)
    if options.json and any(Path(place, options.json).is_dir() for place in ("", options.runs_dir)):
        options.runs, options.json = [options.json, *options.runs], ""  # `compare --json RUN RUN`
    json_file = Path(options.json) if options.json else None
    if json_file is not None and is_evaluation(json_file):
        raise ValueError(f"json: {json_file} is an evaluation and would be lost; to print, put --json behind the runs")
    if len(options.runs) < 2:
        raise ValueError(f"compare: {options.runs[0]} with what? give two or more runs or evaluations")
    check_files(json_file, None, options.plot, "plot", compares=True)
    _check_asked(options)
    called = dict(zip(options.runs, short_names(options.runs), strict=True))
    pairs = [_evaluated(run, called[run], options) for run in options.runs]
    them = [evaluated for evaluated, _ in pairs]
    recorded = {evaluated.name: record for evaluated, record in pairs if record is not None}
    found = comparison(them) | {"settings": settings_that_differ(recorded)}
    if json_file is not None:
        write_text(json_file, as_json(found, indent=1) + "\n")
    if options.plot is not None:
        save_figure(draw(them, found), options.plot)
    words = [in_words(found), *settings_in_words(found["settings"])]
    shown = "\n".join(printable(line) for each in words for line in each.split("\n"))  # files may hold anything
    files = written(json_file, options.plot)
    if files and "\n" in shown:  # behind several lines they would seem to belong to the last one
        files = f"\n{files.strip()}"
    print(as_json(found) if options.json == "" else shown + files)
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="lockstep compare", description="Compare policies by their episodes, or groups of seeds by their runs."
    )
    parser.add_argument(
        "runs",
        type=from_home,
        nargs="+",
        help="runs, or files of lockstep eval --json FILE, or groups of seeds; the first is the measure",
    )
    add_policy_options(parser, seed=SEED_OF_STARTS)
    parser.add_argument("--episodes", type=at_least_one, help=f"of each run (default: {EPISODES})")
    parser.add_argument("--json", type=from_home, nargs="?", const="", help="print one JSON object, or write it")
    parser.add_argument("--plot", type=Path, help="draw distributions and means into a png, svg or pdf")
    return parser


def _asked(options: Namespace) -> dict[str, Any]:
    """Returns the options that were given about how runs play, by the names that evaluation files use."""
    given = {"episodes": options.episodes, "seed": options.seed, "stochastic": options.stochastic or None}
    return {name: value for name, value in given.items() if value is not None}


def _check_asked(options: Namespace) -> None:
    """Raises a one-line ``ValueError`` if an option applies to none of the arguments."""
    runs = [run for run in options.runs if not _is_file(run)]
    if not runs and (names := list(_asked(options))):
        raise ValueError(f"{names[0]}: these files are of episodes that are played already; leave --{names[0]} out")
    whole = [run for run in runs if find_run(run, options.runs_dir, single=False)[1] == LATEST]
    if not whole and options.checkpoint != LATEST:
        raise ValueError(f"checkpoint: {options.checkpoint} is asked for, and none of these is a whole run")


def _is_file(run: str) -> bool:
    return Path(run).suffix == ".json"


def _evaluated(run: str, name: str, options: Namespace) -> tuple[Evaluated, Recorded | None]:
    """Reads an evaluation's file, or plays a run or each run of a group; facts and config are the first one's."""
    if _is_file(run):
        facts, table = read_json(Path(run))
        vain = [f"--{key}" for key, value in _asked(options).items() if facts.get(key) not in (value, None)]
        if vain:
            say(f"lockstep: warning: {', '.join(vain)}: without effect on {run}, whose episodes are played already")
        return Evaluated(name, facts, table), None
    seeds = seeds_in(find_run(run, options.runs_dir, single=False)[0])
    if not seeds:
        facts, table, record = _played(run, options)
        return Evaluated(name, facts, table), record
    each = [_played(seed, options) for seed in seeds]
    facts, table, record = each[0]
    config = record.config | {"seed": seeds_in_words([int(seed.name.removeprefix(SEED)) for seed in seeds])}
    trained = {seed.name: known["global_step"] for seed, (known, _, _) in zip(seeds, each, strict=True)}
    return EvaluatedGroup(name, facts, table, [other for _, other, _ in each], trained), record._replace(config=config)


def _played(run: str | Path, options: Namespace) -> tuple[dict[str, Any], np.ndarray, Recorded]:
    path, which = find_run(str(run), options.runs_dir)
    if which != LATEST and options.checkpoint != LATEST:
        say(f"lockstep: warning: --checkpoint: without effect on {run}, which is a checkpoint itself")
    checkpoint = options.checkpoint if which == LATEST else LATEST
    policy = policy_of(run, checkpoint, options)
    seed = SEED_OF_STARTS if options.seed is None else options.seed
    if why := flattered(policy, checkpoint, seed, not options.stochastic):
        say(f"lockstep: warning: {run}: {why}")
    table = evaluate(policy, options.episodes or EPISODES, seed, not options.stochastic)
    facts = facts_of(policy, table, not options.stochastic) | {"seed": seed}
    return facts, table, Recorded(policy.config.model_dump(mode="json"), path)


def settings_that_differ(recorded: Mapping[str, Recorded]) -> dict[str, dict[str, Any]]:
    """Returns the settings that affect the agent and differ between runs: by key, each run's value by name.

    Checkpoints tell losses of the same name apart. Secrets in values aren't shown.
    """
    losses = told_apart(list(recorded.values()))
    dumped = {
        name: record.config | {"ppo": record.config["ppo"] | {"loss": loss}}
        for (name, record), loss in zip(recorded.items(), losses, strict=True)
    }
    pairs = itertools.pairwise(dumped.values())
    found = dict.fromkeys(key for one, other in pairs for key, _, _ in differences(one, other))  # in the config's order
    keys = [key for key in found if key == "total_steps" or not may_change(key)]
    return {key: {name: shown_value(value_at(values, key), key) for name, values in dumped.items()} for key in keys}


def value_at(values: dict[str, Any], key: str) -> Any:
    """Returns the setting of a dotted key in a config as JSON."""
    found: Any = values
    for part in key.split("."):
        found = found[part]
    return found


def settings_in_words(settings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a line for each setting that differs."""
    return [
        f"{key}: {', '.join(f'{json.dumps(value, ensure_ascii=False)} ({name})' for name, value in values.items())}"
        for key, values in settings.items()
    ]


def short_names(runs: Sequence[str]) -> list[str]:
    """Returns short names of runs: the end of each path, as long as it takes to tell different paths apart.

    Files lose their suffix unless that would make them equal to another argument.
    """
    others = {Path(run) for run in runs if not _is_file(run)}
    stems = [Path(run).with_suffix("") if _is_file(run) else Path(run) for run in runs]
    paths = [Path(run) if _is_file(run) and stem in others else stem for run, stem in zip(runs, stems, strict=True)]

    def called(path: Path, parts: int) -> str:
        return printable("/".join(path.parts[-parts:]) or str(path))

    out = []
    for path in paths:
        different = {other for other in paths if other != path}
        most = len(path.parts)
        enough = (n for n in range(1, most) if called(path, n) not in {called(other, n) for other in different})
        out.append(called(path, next(enough, most)))
    return out
