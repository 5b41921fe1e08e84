"""``lockstep play``: a trained policy in a window, in the terminal, or in a video."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.commands.eval import add_policy_options
from lockstep.commands.parser import CommandParser, at_least_one
from lockstep.core.process import EXIT_FAILURE, report_failure
from lockstep.core.shards import keyed_seed
from lockstep.policies.policy import Policy, load_policy
from lockstep.policies.videos import (
    Terminal,
    check_suffix,
    drawn_environment,
    frames_per_second,
    has_screen,
    play_episode,
    prepare_rendering,
    video_writer,
)


def play_command(argv: Sequence[str]) -> int:
    """``lockstep play RUN``: a window; ``--video`` an mp4 or gif file, ``--terminal`` text."""
    parser = CommandParser(prog="lockstep play", description="Watch a trained policy, or record it.")
    parser.add_argument("run", help="name, run directory or checkpoint directory")
    add_policy_options(parser)
    parser.add_argument("--video", type=Path, help="write an mp4 or gif file instead of opening a window")
    parser.add_argument("--terminal", action="store_true", help="write the environment as text, where it can be")
    parser.add_argument("--episodes", type=at_least_one, default=1, help="how many (default: 1)")
    options = parser.parse_args(argv)
    if options.video is not None:
        if options.terminal:
            raise ValueError(f"video: {options.video} with --terminal; give one of them")
        check_suffix(options.video)
    policy = load_policy(options.run, options.checkpoint, options.runs_dir)
    if options.video is None and not options.terminal and not has_screen():
        raise ValueError("there is no screen here; --video out.mp4 (or .gif) writes a file instead, --terminal text")
    target = "terminal" if options.terminal else options.video
    try:
        episodes = play(policy, target, options.episodes, options.seed, deterministic=not options.stochastic)
    except OSError as error:
        if options.video is None:
            raise
        report_failure(f"{options.video} can't be written: {error}")
        return EXIT_FAILURE
    where = f" → {options.video}" if options.video else ""
    said = [f"return {r:,.2f}" + (f" (score {s}, {n} steps)" if s is not None else "") for r, n, s in episodes]
    print(f"{policy.config.env.id}: {', '.join(said)}{where}")
    return 0


def play(
    policy: Policy,
    target: Path | str | None,
    episodes: int = 1,
    seed: int | None = None,
    deterministic: bool = True,
) -> list[tuple[float, int, int | None]]:
    """Run episodes in a window, into a video file, or as text.

    Args:
        policy: that plays.
        target: a video file, ``"terminal"``, or None for a window.
        episodes: how many.
        seed: of their starts; None: the run's.
        deterministic: the most likely actions, else samples.

    Returns:
        Of each its return, length, and score (None where the environment has none).

    Raises:
        ValueError: the environment can't be rendered here, or what a video needs isn't installed.
    """
    config = policy.config
    prepare_rendering(has_screen())
    mode = "human" if target is None else "ansi" if target == "terminal" else "rgb_array"
    env = drawn_environment(config.env, mode)
    writer = _writer(target, frames_per_second(env))
    played = []
    try:
        for episode in range(episodes):
            start = keyed_seed(config.seed if seed is None else seed, "eval", episode)
            played.append(play_episode(env, policy, writer, start, deterministic))
    finally:
        if writer is not None:
            writer.close()
        env.close()
    return played


def _writer(target: Path | str | None, fps: int) -> Any:
    if target is None:
        return None
    return video_writer(target, fps) if isinstance(target, Path) else Terminal(fps)
