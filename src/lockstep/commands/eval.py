"""``lockstep eval`` plays many whole episodes of a policy, and reports them in numbers, files and a histogram."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lockstep.commands.parser import LATEST, CommandParser, add_policy_options, at_least_one, from_home, policy_of
from lockstep.core.files import as_json
from lockstep.core.process import say
from lockstep.launch.request import config_named
from lockstep.policies.baselines import BASELINES, Actor, Baseline
from lockstep.policies.evaluation import BATCH, evaluate, flattered, start_of
from lockstep.policies.policy import Policy
from lockstep.policies.results import (
    check_files,
    draw_histogram,
    facts_of,
    in_words,
    save_figure,
    write_csv,
    write_json,
    written,
)


def main(argv: Sequence[str]) -> int:
    """Runs ``lockstep eval ARGV``: prints returns and lengths of whole episodes, whose starts are keyed by the seed."""
    options = _options(argv)
    prints_json, json_file = options.json == "", Path(options.json) if options.json else None
    check_files(json_file, options.csv, options.histogram)
    actor = actor_of(options)
    seed = start_of(actor, options.seed)
    if isinstance(actor, Policy) and (why := flattered(actor, options.checkpoint, seed, not options.stochastic)):
        say(f"lockstep: warning: {why}")
    table = evaluate(actor, options.episodes, options.seed, not options.stochastic, options.batch)
    facts = facts_of(actor, table, not options.stochastic)
    if json_file is not None:
        how = {"policy": options.policy or options.run, "seed": seed}
        how |= {"params_sha256": actor.params_sha256} if isinstance(actor, Policy) else {}
        write_json(json_file, {**facts, **how}, table)
    if options.csv is not None:
        write_csv(options.csv, table)
    if options.histogram is not None:
        title = f"{options.policy or options.run}: {facts['environment']}, {facts['episodes']} episodes"
        save_figure(draw_histogram(title, table), options.histogram)
    words = in_words(actor, facts) + written(json_file, options.csv, options.histogram)
    print(as_json(facts) if prints_json else words)
    return 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(prog="lockstep eval", description="Returns of a policy over whole episodes.")
    parser.add_argument(
        "run", nargs="?", help="name, run directory or checkpoint directory; with --policy also an environment id"
    )
    add_policy_options(parser)
    parser.add_argument("--policy", choices=BASELINES, help="a baseline in place of the run's policy")
    parser.add_argument("--episodes", type=at_least_one, default=20, help="how many (default: 20)")
    parser.add_argument("--batch", type=at_least_one, default=BATCH, help=f"of them at a time (default: {BATCH})")
    parser.add_argument(
        "--json", type=from_home, nargs="?", const="", help="print one JSON object, or write it with every episode"
    )
    parser.add_argument("--csv", type=Path, help="write every episode")
    parser.add_argument("--histogram", type=Path, help="draw returns (or scores) and lengths into a png, svg or pdf")
    options = parser.parse_args(argv)
    if options.run is None and options.json:  # `eval --json RUN`
        options.run, options.json = options.json, ""
    if options.run is None:
        parser.error("which run?")
    return options


def actor_of(options: argparse.Namespace) -> Actor:
    """Loads the policy that options name: a run's, or a baseline for the environment of a run, config file or id.

    Raises:
        ValueError: one line, if there is none, or an option doesn't apply to a baseline.
    """
    if options.policy is None:
        return policy_of(options.run, options.checkpoint, options)
    if options.checkpoint != LATEST:
        raise ValueError(f"checkpoint: {options.checkpoint} is asked for, and --policy {options.policy} has none")
    if options.stochastic:
        raise ValueError(f"stochastic: --policy {options.policy} has no most likely actions; leave --stochastic out")
    return Baseline(options.policy, config_named(options.run, options.runs_dir, options.trust))
