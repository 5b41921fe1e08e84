"""``lockstep play`` shows a trained policy in a window, in the terminal, or in a video."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.commands.parser import CommandParser, add_policy_options, at_least_one, policy_of
from lockstep.core.errors import one_line
from lockstep.core.files import check_suffix, is_finite, why_unwritten
from lockstep.core.process import EXIT_FAILURE, report_failure
from lockstep.envs.graphics import has_screen
from lockstep.policies.videos import VIDEO_SUFFIXES, play
from lockstep.runs.listing import printable
from lockstep.runs.shown.numerals import format_points, spec_of


def main(argv: Sequence[str]) -> int:
    """Runs ``lockstep play RUN``: opens a window, writes a file (``--video``) or prints text (``--terminal``)."""
    parser = CommandParser(prog="lockstep play", description="Watch a trained policy, or record it; keys don't steer.")
    parser.add_argument("run", help="name, run directory or checkpoint directory")
    add_policy_options(parser)
    parser.add_argument("--video", type=Path, help="write an mp4 or gif file instead of opening a window")
    parser.add_argument(
        "--terminal", action="store_true", help="write the environment as text, where it can be; q ends it"
    )
    parser.add_argument("--episodes", type=at_least_one, default=1, help="how many (default: 1)")
    options = parser.parse_args(argv)
    if options.video is not None:
        if options.terminal:
            raise ValueError(f"video: {options.video} with --terminal; give one of them")
        check_suffix(options.video, VIDEO_SUFFIXES, "video")
    policy = policy_of(options.run, options.checkpoint, options)
    if options.video is None and not options.terminal and not has_screen():
        raise ValueError("there is no screen here; --video out.mp4 (or .gif) writes a file instead")
    target = "terminal" if options.terminal else options.video
    try:
        episodes = play(policy, target, options.episodes, options.seed, deterministic=not options.stochastic)
    except OSError as error:
        if options.video is None:
            raise
        report_failure(f"{options.video} can't be written: {_reason(options.video, error)}")
        return EXIT_FAILURE
    where = f" → {options.video}" if options.video else ""
    said = [_episode(*episode) for episode in episodes]
    print(f"{policy.config.env.id}: {', '.join(said) or 'ended before an episode was over'}{where}")
    return 0


def _episode(total: float, length: int, score: Any) -> str:
    """Describes an episode; what an environment calls its score may be anything."""
    points = format_points(score) if is_finite(score) else printable(str(score))
    return f"return {total:{spec_of(total)}}" + ("" if score is None else f" (score {points}, {length} steps)")


def _reason(video: Path, error: OSError) -> str:
    """Returns why a video can't be written: tries the path itself, because ffmpeg's error may be a mere broken pipe."""
    if (above := next((place for place in video.parents if place.exists()), None)) and not above.is_dir():
        return f"{above} is no directory"
    try:
        video.parent.mkdir(parents=True, exist_ok=True)
        was_there = video.exists()
        video.touch()
        if not was_there:
            video.unlink()
    except OSError as own:
        return why_unwritten(own)
    return one_line(why_unwritten(error))[:200]
