"""``lockstep eval``: a policy over many whole episodes, in numbers, files and a histogram."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.commands.parser import CommandParser, at_least_one
from lockstep.config.command_line import read_request
from lockstep.core.process import fail_now
from lockstep.envs.describe import describe
from lockstep.envs.description import arguments_of
from lockstep.envs.registry import make_envs
from lockstep.launch.rank import engine_module
from lockstep.policies.baselines import BASELINES, Actor, Baseline
from lockstep.policies.evaluation import run_episodes, summarize
from lockstep.policies.policy import Policy, load_policy
from lockstep.policies.results import check_files, draw_histogram, save_figure, write_csv, write_json, written

BATCH = 256
"""Environments of one batch: more episodes than these are played batch after batch."""
GAME = {"kwargs", "max_episode_steps", "frame_skip", "sticky_actions", "atari"}
"""Settings of an environment that make it another game."""


def eval_command(argv: Sequence[str]) -> int:
    """``lockstep eval RUN``: returns and lengths over whole episodes with keyed starts."""
    options = _options(argv)
    prints_json, json_file = options.json == "", Path(options.json) if options.json else None
    check_files(json_file, options.csv, options.histogram)
    actor = actor_of(options)
    table = evaluate(actor, options.episodes, options.seed, not options.stochastic, options.batch)
    facts = facts_of(actor, table, not options.stochastic)
    if json_file is not None:
        how = {"policy": options.policy or options.run, "seed": start_of(actor, options.seed)}
        write_json(json_file, {**facts, **how}, table)
    if options.csv is not None:
        write_csv(options.csv, table)
    if options.histogram is not None:
        title = f"{options.policy or options.run}: {facts['environment']}, {facts['episodes']} episodes"
        save_figure(draw_histogram(title, table), options.histogram)
    print(
        json.dumps(facts)
        if prints_json
        else in_words(actor, facts) + written(json_file, options.csv, options.histogram)
    )
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
    parser.add_argument("--json", nargs="?", const="", help="print one JSON object, or write it with every episode")
    parser.add_argument("--csv", type=Path, help="write every episode")
    parser.add_argument("--histogram", type=Path, help="draw returns (or scores) and lengths into a png, svg or pdf")
    options = parser.parse_args(argv)
    if options.run is None and options.json:  # `eval --json RUN`
        options.run, options.json = options.json, ""
    if options.run is None:
        parser.error("which run?")
    return options


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Which checkpoint, from where, and how its actions are chosen."""
    parser.add_argument("--checkpoint", default="latest", help="latest, best or a step number (default: latest)")
    parser.add_argument("--runs-dir", default="runs", help="where runs given by name lie (default: runs)")
    parser.add_argument("--seed", type=int, help="of the episodes' starts (default: the run's)")
    parser.add_argument("--stochastic", action="store_true", help="sample actions instead of taking the most likely")


def actor_of(options: argparse.Namespace) -> Actor:
    """The policy that options name: a run's, or a baseline for the environment of a run, config file or id."""
    if options.policy is None:
        return load_policy(options.run, options.checkpoint, options.runs_dir)
    inside = Path(options.runs_dir) / options.run
    target = str(inside) if (inside / "config.json").is_file() else options.run
    return Baseline(options.policy, read_request([target]).config)


def start_of(actor: Actor, seed: int | None) -> int:
    """The seed of the episodes' starts."""
    return actor.config.seed if seed is None else seed


def evaluate(
    actor: Actor, episodes: int, seed: int | None = None, deterministic: bool = True, batch: int = BATCH
) -> np.ndarray:
    """Play whole episodes, batch after batch; the k-th one starts alike whatever the batches are.

    Returns:
        float64 ``[episodes, 4]``, see :func:`lockstep.policies.evaluation.run_episodes`.

    Raises:
        EnvironmentFailureError: an environment raised, died or hung.
    """
    config, start = actor.config, start_of(actor, seed)
    if config.device != "cpu":
        engine_module(config.engine).check_device(config.device, 1)
    actor.reset(start)
    bounds = [*range(0, episodes, batch), episodes]
    parts = [play_batch(actor, start, range(first, last), deterministic) for first, last in itertools.pairwise(bounds)]
    return np.concatenate(parts)


def play_batch(actor: Actor, start: int, numbers: range, deterministic: bool) -> np.ndarray:
    """One episode in each of as many environments, whose starts have these numbers; ``[n, 4]``."""
    config = actor.config
    envs = make_envs(config.env, describe(config.env), start, numbers, fail_now, "eval", device=config.device)
    actor.reset()

    def act(rows: np.ndarray) -> np.ndarray:
        actor.forget(envs.buffers.lost)  # a lost life ended an episode in training
        return actor.native(rows, deterministic)

    try:
        return run_episodes(envs, act, config.eval.max_steps)
    finally:
        envs.close()


def facts_of(actor: Actor, table: np.ndarray, deterministic: bool = True) -> dict[str, Any]:
    """The summary of an evaluation's table, and of what it is."""
    env = actor.config.env
    settings = env.model_dump(mode="json", include=GAME) | {"kwargs": arguments_of(env)}
    facts = {"environment": env.id, "env_settings": settings}
    return summarize(table) | facts | {"stochastic": not deterministic, "global_step": actor.global_step}


def in_words(actor: Actor, facts: dict[str, Any]) -> str:
    """One line."""
    more = f", success rate {facts['success_rate']:.0%}" if "success_rate" in facts else ""
    if "score_mean" in facts:
        more += f", score {facts['score_mean']:,.2f} (max {facts['score_max']:,.0f})"
    trained = f"after {actor.global_step:,} training steps"
    if isinstance(actor, Baseline):
        trained = actor.name
    elif isinstance(actor, Policy) and actor.cloned:
        trained = "by a cloned policy"
    return (
        f"{facts['environment']} {trained}, {facts['episodes']} episodes: "
        f"return {facts['return_mean']:,.2f} ± {facts['return_std']:,.2f} "
        f"(min {facts['return_min']:,.2f}, max {facts['return_max']:,.2f}), "
        f"length {facts['length_mean']:,.1f}{more}"
    )
