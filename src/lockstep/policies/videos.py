"""Shows a policy playing: in windows, as text, in video files, and in the videos of a run's evaluations."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lockstep.config.engines import engine_module
from lockstep.config.run import EnvConfig
from lockstep.core.errors import EnvironmentFailureError, one_line
from lockstep.core.files import check_suffix, draft_of
from lockstep.core.life import life
from lockstep.core.process import say
from lockstep.core.shards import keyed_seed
from lockstep.core.user_code.working_directory import keep_working_directory
from lockstep.envs.arrays import ARRAY_ENVIRONMENTS
from lockstep.envs.arrays.base import render_modes
from lockstep.envs.batched.array_envs import EvaluationDraws
from lockstep.envs.description import stepped_as_arrays
from lockstep.envs.graphics import has_screen, prepare_rendering
from lockstep.envs.gymnasium.atari import LIFE_LOST
from lockstep.envs.gymnasium.keyed import environment_failure
from lockstep.envs.gymnasium.make import make_environment
from lockstep.envs.gymnasium.step_info import info_mask, number
from lockstep.policies.gif import GifWriter
from lockstep.policies.policy import Policy
from lockstep.policies.rows import checked_rows
from lockstep.policies.terminal import QuitPlay, Terminal
from lockstep.runs.directory import RunDirectory
from lockstep.runs.trackers.service import Tracker

VIDEO_SUFFIXES = (".mp4", ".gif")
TELL_SECONDS = 5.0  # between two lines that say how far a video is
NO_TEXT = "{} can't be shown as text; --video out.mp4 (or .gif) shows it"


def video_writer(video: Path, fps: int) -> Any:
    """Opens an mp4 or gif file for appending frames.

    Raises:
        ValueError: the name doesn't end in .mp4 or .gif, or a package for videos isn't installed.
    """
    check_suffix(video, VIDEO_SUFFIXES, "video")
    imageio = _imageio("video")
    video.parent.mkdir(parents=True, exist_ok=True)
    if video.suffix == ".gif":
        return GifWriter(video, fps)
    # ffmpeg replaces the forked process at once, so that JAX's threads, which the fork lacks, can't be missed
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
    return imageio.get_writer(video, fps=fps, macro_block_size=2)


class ToldFrames:
    """Passes frames on to the writer of a file, and says on standard error every five seconds how many there are.

    ``most`` is the largest number that there can be, None if there is no limit.
    """

    def __init__(self, writer: Any, video: Path, most: int | None) -> None:
        self._writer, self._video, self._frames = writer, video, 0
        self._of = "frames so far" if most is None else f"of at most {most:,} frames"
        self._next = time.monotonic() + TELL_SECONDS

    def append_data(self, picture: Any) -> None:
        """Takes a frame."""
        self._writer.append_data(picture)
        self._frames += 1
        if (now := time.monotonic()) >= self._next:
            say(f"{self._video}: {self._frames:,} {self._of}")
            self._next = now + TELL_SECONDS

    def close(self) -> None:
        """Closes the writer."""
        self._writer.close()


def _imageio(key: str) -> Any:
    try:
        import imageio
        import imageio_ffmpeg  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(f"{key}: needs {error.name}; pip install 'lockstep-rl[video]'") from None
    return imageio


def drawn_environment(config: EnvConfig, mode: str, device: str = "cpu") -> Any:
    """Makes an environment that renders in a window (``human``), as arrays (``rgb_array``) or as text (``ansi``).

    One that JAX steps is stepped on the ``device``, on which an evaluation steps it too.

    Raises:
        ValueError: it can't render so; one line.
    """
    if config.backend == "envpool":
        raise ValueError(
            "env.backend: envpool, which draws no pictures, and an environment of Gymnasium's would be another one; "
            f"lockstep eval plays {config.id}"
        )
    if config.jax_only:
        kind = ARRAY_ENVIRONMENTS.get(config.id)
        if mode == "ansi" and (kind is None or mode not in render_modes(kind)):
            raise ValueError(NO_TEXT.format(config.id))
        return engine_module("jax").DrawnEnvironment(config, mode, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Gymnasium warns of the mode that the error below names
        try:
            env = make_environment(config, render_mode=mode)
        except ValueError as error:
            if "render_mode" not in str(error):
                raise
            raise ValueError(_undrawn(config.id, mode, f"it takes no render_mode={mode!r}")) from None
        except NotImplementedError:
            raise ValueError(_undrawn(config.id, mode, f"it has no render mode {mode!r}")) from None
    modes = env.metadata.get("render_modes")
    if mode == "ansi" and modes and mode not in modes:  # one that lists no modes is tried
        env.close()
        raise ValueError(NO_TEXT.format(config.id))
    return env


def _undrawn(env_id: str, mode: str, why: str) -> str:
    return NO_TEXT.format(env_id) if mode == "ansi" else f"{env_id} can't be drawn: {why}"


def begin_as_evaluated(env: Any, config: EnvConfig, seed: int, episode: int) -> int:
    """Returns the seed for a reset that starts an episode as an evaluation with ``seed`` does.

    One of our array environments also gets that evaluation's source of random numbers.
    """
    if stepped_as_arrays(config):
        env.unwrapped.draw_from(EvaluationDraws(seed, episode))
    return keyed_seed(seed, "eval", episode)


def play_episode(
    env: Any, policy: Policy, writer: Any, seed: int, deterministic: bool
) -> tuple[float, int, int | None]:
    """Plays one episode, rendered before every step; returns its return, length, and score if there is one.

    Without a writer the environment renders itself in a window.

    Raises:
        QuitPlay: a key was pressed that ends the play, or the window was closed.
        EnvironmentFailureError: the environment raised.
    """
    name, masked, total, steps, over = policy.config.env.id, policy.environment["mask_from"], 0.0, 0, False
    in_window = writer is None
    with _named(name, "reset", in_window):
        observation, info = env.reset(seed=seed)
    policy.reset()
    while not over and steps < policy.config.eval.max_steps:
        if writer is not None:
            writer.append_data(_frame(env))
        with _named(name, "step" if steps else "reset", in_window):  # rows as training makes them
            row = policy.observation.encode(observation, info_mask(env, info, masked))
        try:
            rows = checked_rows(policy.observation, policy.action, row[None])
        except ValueError as error:
            raise EnvironmentFailureError(f"environment {name} gave what no policy is shown: {error}") from error
        action = policy.action.native(policy.act(rows, deterministic)[0])
        with _named(name, "step", in_window):
            observation, reward, terminated, truncated, info = env.step(action)
            total, steps, over = total + number(reward), steps + 1, bool(terminated or truncated)
        if info.get(LIFE_LOST):
            policy.reset()
        life.progressed()
    return total, steps, info.get("score")


@contextlib.contextmanager
def _named(name: str, where: str, in_window: bool) -> Iterator[None]:
    """Turns errors that the environment raises into ones that name it; not those of frames, files or keys.

    If its window is closed, an environment may call ``sys.exit()``, which ends the play as well.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if in_window and isinstance(error, SystemExit) and not error.code:
            raise QuitPlay from error
        raise environment_failure(f"environment {name}", where, error) from error


def _frame(env: Any) -> Any:
    try:
        frame = env.render()
    except Exception as error:
        hint = (
            "; on a machine without a screen MUJOCO_GL=egl or MUJOCO_GL=osmesa may help"
            if "mujoco" in str(env.spec.entry_point)
            else ""
        )
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{env.spec.id} can't be rendered here: {why}{hint}") from None
    if frame is None:
        raise ValueError(
            NO_TEXT.format(env.spec.id)
            if env.render_mode == "ansi"
            else f"{env.spec.id} gives no picture in render mode {env.render_mode}"
        )
    return frame


def frames_per_second(env: Any) -> int:
    """Returns the frame rate that an environment declares, in whole numbers from 1 on, or 30."""
    return max(1, round(env.metadata.get("render_fps") or 30))


def play(
    policy: Policy,
    target: Path | str | None,
    episodes: int = 1,
    seed: int | None = None,
    deterministic: bool = True,
) -> list[tuple[float, int, int | None]]:
    """Plays episodes in a window (target None), into a video file, or as text (``"terminal"``).

    ``seed`` keys their starts and the noise of samples as in an evaluation one by one, None: the run's own; actions are
    the most likely ones, or samples. A key ends the play in a terminal, closing the window does otherwise. A video gets
    its name once it is complete; if it takes long, lines on standard error say how far it is.

    Returns:
        Return, length and score (None if there is none) of each episode that was played to its end.

    Raises:
        ValueError: the environment can't be rendered here, or a package for videos isn't installed.
    """
    config, first = policy.config, policy.config.seed if seed is None else seed
    prepare_rendering(has_screen())
    mode = "human" if target is None else "ansi" if target == "terminal" else "rgb_array"
    video = target.resolve() if isinstance(target, Path) else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(keep_working_directory())
        env = drawn_environment(config.env, mode, config.device)
        fps, writer, played = frames_per_second(env), None, []
        stack.callback(env.close)
        if isinstance(target, Path) and video is not None:
            file = video_writer(stack.enter_context(draft_of(video)), fps)
            limit = policy.environment.get("max_episode_steps")
            most = None if limit is None else episodes * min(limit, config.eval.max_steps)
            writer = ToldFrames(file, target, most)
        elif target:
            writer = Terminal(fps)
        if writer is not None:
            stack.callback(writer.close)
        policy.reset(first)
        with contextlib.suppress(QuitPlay):
            for episode in range(episodes):
                start = begin_as_evaluated(env, config.env, first, episode)
                played.append(play_episode(env, policy, writer, start, deterministic))
    return played


def check_video(config: EnvConfig) -> None:
    """Renders one frame of an environment, so that a run that records videos fails before it starts if it can't.

    Raises:
        ValueError: it can't be rendered here, or a package for videos isn't installed; one line.
    """
    _imageio("eval.record_video")
    prepare_rendering(screen=False)
    try:
        with keep_working_directory(), contextlib.closing(drawn_environment(config, "rgb_array")) as env:
            env.reset(seed=0)
            _frame(env)
    except ValueError as error:
        goes_on = "--eval.record-video false goes on without videos"  # the run may have started on another machine
        raise ValueError(f"eval.record_video: {error}; {goes_on}") from None


def record_evaluation(policy: Policy, video: Path) -> float:
    """Records the first episode of a policy's evaluation, with its most likely actions, as an mp4 file.

    The file gets its name once it is complete.

    Returns:
        The episode's return.

    Raises:
        ValueError: the environment can't be rendered here.
        OSError: the file can't be written.
        EnvironmentFailureError: the environment raised.
    """
    prepare_rendering(screen=False)
    env = drawn_environment(policy.config.env, "rgb_array", policy.config.device)
    with (
        contextlib.closing(env),
        draft_of(video) as draft,
        contextlib.closing(video_writer(draft, frames_per_second(env))) as writer,
    ):
        start = begin_as_evaluated(env, policy.config.env, policy.config.seed, 0)
        score, *_ = play_episode(env, policy, writer, start, True)
    return score


class EvaluationVideos:
    """Records a run's evaluations, if wanted, on the process that writes; a failure ends the videos, not the run."""

    def __init__(self, run: RunDirectory, trackers: Tracker, wanted: bool) -> None:
        self._run, self._trackers, self._wanted = run, trackers, wanted

    def record(self, policy: Callable[[], Policy], step: int) -> None:
        """Records an episode at this environment step; ``policy`` is called only if a file is to be written."""
        path = self._run.video_path(step) if self._wanted else None
        if path is None:
            return
        try:
            record_evaluation(policy(), path)
        except Exception as error:
            self._wanted = False
            self._run.warn(f"{path} can't be recorded: {one_line(error)}; no more videos, training goes on")
        else:
            self._trackers.video("eval/video", path, step)
