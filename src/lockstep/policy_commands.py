"""``lockstep eval`` and ``lockstep play``: a trained policy in numbers and in pictures."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.command_parser import CommandParser
from lockstep.config import EnvConfig
from lockstep.envs.description import describe, make_environment
from lockstep.envs.keyed import action_mask_of, environment_failure
from lockstep.envs.registry import make_envs
from lockstep.evaluation import run_episodes, summarize
from lockstep.launch.process import EXIT_FAILURE, fail_now, report_failure
from lockstep.policy import Policy, load_policy
from lockstep.shards import keyed_seed


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
    print(
        f"{policy.config.env.id} after {policy.global_step:,} training steps, {summary['episodes']} episodes: "
        f"return {summary['return_mean']:,.2f} ± {summary['return_std']:,.2f} "
        f"(min {summary['return_min']:,.2f}, max {summary['return_max']:,.2f}), length {summary['length_mean']:,.1f}"
    )
    return 0


def evaluate(policy: Policy, episodes: int, seed: int | None = None, deterministic: bool = True) -> dict[str, Any]:
    """Mean, standard deviation, minimum and maximum return and mean length of a policy's episodes.

    Raises:
        EnvironmentFailureError: an environment raised, died or hung.
    """
    config = policy.config
    description = describe(config.env)
    start = config.seed if seed is None else seed
    envs = make_envs(config.env, description, start, range(episodes), fail_now, "eval")
    policy.reset()
    try:
        table = run_episodes(envs, lambda rows: policy.native(rows, deterministic), config.eval.max_steps)
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
    if options.video is None and not _has_screen():
        raise ValueError("there is no screen here; --video out.mp4 writes a file instead")
    try:
        returns = play(policy, options.video, options.episodes, options.seed, deterministic=not options.stochastic)
    except OSError as error:
        report_failure(f"{options.video} can't be written: {error}")
        return EXIT_FAILURE
    where = f" → {options.video}" if options.video else ""
    print(f"{policy.config.env.id}: return {', '.join(f'{r:,.2f}' for r in returns)}{where}")
    return 0


def _has_screen() -> bool:
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _prepare_rendering(has_screen: bool) -> None:
    os.environ.setdefault("SDL_NO_SIGNAL_HANDLERS", "1")  # pygame would swallow SIGTERM
    if not has_screen:
        os.environ.setdefault("MUJOCO_GL", "egl")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


def _writer(video: Path, fps: int) -> Any:
    if video.suffix != ".mp4":
        raise ValueError(f"video: {video} must end in .mp4")
    try:
        import imageio
        import imageio_ffmpeg  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(f"video: needs {error.name}; pip install 'lockstep-rl[video]'") from None
    video.parent.mkdir(parents=True, exist_ok=True)
    return imageio.get_writer(video, fps=fps, macro_block_size=2)


def play(
    policy: Policy, video: Path | None, episodes: int = 1, seed: int | None = None, deterministic: bool = True
) -> list[float]:
    """Run episodes in a window, or into a video file; returns their returns.

    Raises:
        ValueError: the environment can't be rendered here, or what a video needs isn't installed.
    """
    config = policy.config
    _prepare_rendering(_has_screen())
    env = _drawn_environment(config.env, "rgb_array" if video else "human")
    writer = _writer(video, int(env.metadata.get("render_fps") or 30)) if video else None
    returns = []
    try:
        for episode in range(episodes):
            start = keyed_seed(config.seed if seed is None else seed, "eval", episode)
            returns.append(_play_episode(env, policy, writer, start, deterministic))
    finally:
        if writer is not None:
            writer.close()
        env.close()
    return returns


def _drawn_environment(config: EnvConfig, mode: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Gymnasium warns of the mode that the error below names
        try:
            return make_environment(config, render_mode=mode)
        except ValueError as error:
            if "render_mode" not in str(error):
                raise
            raise ValueError(f"{config.id} can't be drawn: it takes no render_mode={mode!r}") from None


def _play_episode(env: Any, policy: Policy, writer: Any, seed: int, deterministic: bool) -> float:
    """One episode, drawn before every step; its return."""
    name, where, total, steps, over = policy.config.env.id, "reset", 0.0, 0, False
    policy.reset()
    try:
        observation, info = env.reset(seed=seed)
        where = "step"
        while not over and steps < policy.config.eval.max_steps:
            if writer is not None:
                writer.append_data(_frame(env))
            mask = action_mask_of(env, policy.environment["mask_from"], info)
            observation, reward, terminated, truncated, info = env.step(policy(observation, deterministic, mask))
            total, steps, over = total + float(reward), steps + 1, terminated or truncated
    except (ValueError, OSError):
        raise
    except Exception as error:
        raise environment_failure(f"environment {name}", where, error) from error
    return total


def _frame(env: Any) -> Any:
    try:
        frame = env.render()
    except Exception as error:
        hint = (
            "; on a machine without a screen MUJOCO_GL=egl or MUJOCO_GL=osmesa may help"
            if "mujoco" in str(env.spec.entry_point)
            else ""
        )
        raise ValueError(f"{env.spec.id} can't be rendered here: {type(error).__name__}: {error}{hint}") from None
    if frame is None:
        raise ValueError(f"{env.spec.id} gives no picture in render mode rgb_array")
    return frame
