"""``lockstep eval`` and ``lockstep play``: a trained policy in numbers and in pictures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.command_parser import CommandParser
from lockstep.envs.description import describe
from lockstep.envs.registry import make_envs
from lockstep.evaluation import run_episodes, summarize
from lockstep.launch.process import EXIT_FAILURE, fail_now, report_failure
from lockstep.launch.rank import engine_module
from lockstep.policy import Policy, load_policy
from lockstep.shards import keyed_seed
from lockstep.videos import (
    drawn_environment,
    frames_per_second,
    has_screen,
    play_episode,
    prepare_rendering,
    video_writer,
)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def _parser(command: str, description: str) -> CommandParser:
    parser = CommandParser(prog=f"lockstep {command}", description=description)
    parser.add_argument("run", help="name, run directory or checkpoint directory")
    parser.add_argument("--checkpoint", default="latest", help="latest, best or a step number (default: latest)")
    parser.add_argument("--runs-dir", default="runs", help="where runs given by name lie (default: runs)")
    parser.add_argument("--seed", type=int, help="of the episodes' starts (default: the run's)")
    parser.add_argument("--stochastic", action="store_true", help="sample actions instead of taking the most likely")
    return parser


def eval_command(argv: Sequence[str]) -> int:
    """``lockstep eval RUN``: returns and lengths over whole episodes with keyed starts."""
    parser = _parser("eval", "Returns of a trained policy over whole episodes.")
    parser.add_argument("--episodes", type=_positive, default=20, help="how many (default: 20)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    policy = load_policy(options.run, options.checkpoint, options.runs_dir)
    summary = evaluate(policy, options.episodes, options.seed, deterministic=not options.stochastic)
    if options.json:
        print(json.dumps(summary))
        return 0
    success = f", success rate {summary['success_rate']:.0%}" if "success_rate" in summary else ""
    print(
        f"{policy.config.env.id} after {policy.global_step:,} training steps, {summary['episodes']} episodes: "
        f"return {summary['return_mean']:,.2f} ± {summary['return_std']:,.2f} "
        f"(min {summary['return_min']:,.2f}, max {summary['return_max']:,.2f}), "
        f"length {summary['length_mean']:,.1f}{success}"
    )
    return 0


def evaluate(policy: Policy, episodes: int, seed: int | None = None, deterministic: bool = True) -> dict[str, Any]:
    """Mean, standard deviation, minimum and maximum return, mean length and any success rate of a policy's episodes.

    Raises:
        EnvironmentFailureError: an environment raised, died or hung.
    """
    config = policy.config
    if config.device != "cpu":
        engine_module(config.engine).check_device(config.device, 1)
    description = describe(config.env)
    start = config.seed if seed is None else seed
    envs = make_envs(config.env, description, start, range(episodes), fail_now, "eval", device=config.device)
    policy.reset(start)

    def act(rows: np.ndarray) -> np.ndarray:
        policy.forget(envs.buffers.lost)  # a lost life ended an episode in training
        return policy.native(rows, deterministic)

    try:
        table = run_episodes(envs, act, config.eval.max_steps)
    finally:
        envs.close()
    return summarize(table) | {"environment": config.env.id, "global_step": policy.global_step}


def play_command(argv: Sequence[str]) -> int:
    """``lockstep play RUN``: a window, or with ``--video`` an mp4 file."""
    parser = _parser("play", "Watch a trained policy in a window, or record it.")
    parser.add_argument("--video", type=Path, help="write an mp4 file instead of opening a window")
    parser.add_argument("--episodes", type=_positive, default=1, help="how many (default: 1)")
    options = parser.parse_args(argv)
    policy = load_policy(options.run, options.checkpoint, options.runs_dir)
    if options.video is None and not has_screen():
        raise ValueError("there is no screen here; --video out.mp4 writes a file instead")
    try:
        returns = play(policy, options.video, options.episodes, options.seed, deterministic=not options.stochastic)
    except OSError as error:
        report_failure(f"{options.video} can't be written: {error}")
        return EXIT_FAILURE
    where = f" → {options.video}" if options.video else ""
    print(f"{policy.config.env.id}: return {', '.join(f'{r:,.2f}' for r in returns)}{where}")
    return 0


def play(
    policy: Policy, video: Path | None, episodes: int = 1, seed: int | None = None, deterministic: bool = True
) -> list[float]:
    """Run episodes in a window, or into a video file; returns their returns.

    Raises:
        ValueError: the environment can't be rendered here, or what a video needs isn't installed.
    """
    config = policy.config
    prepare_rendering(has_screen())
    env = drawn_environment(config.env, "rgb_array" if video else "human")
    writer = video_writer(video, frames_per_second(env)) if video else None
    returns = []
    try:
        for episode in range(episodes):
            start = keyed_seed(config.seed if seed is None else seed, "eval", episode)
            returns.append(play_episode(env, policy, writer, start, deterministic))
    finally:
        if writer is not None:
            writer.close()
        env.close()
    return returns
