"""Steps one Gymnasium environment, whose k-th episode is seeded by ``(seed, purpose, global env id, k)`` alone."""

from __future__ import annotations

import contextlib
import inspect
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from lockstep.core.errors import EnvironmentFailureError, one_line
from lockstep.core.life import life
from lockstep.core.process import say
from lockstep.envs.gymnasium.make import make_environment
from lockstep.envs.gymnasium.step_info import info_mask, number
from lockstep.envs.gymnasium.time_limit import without_time_limit
from lockstep.envs.gymnasium.watched import WatchedEnv, own_statistics
from lockstep.envs.gymnasium.wrappers import stateful, vouches_for_state
from lockstep.envs.host_envs import WantedEnvs
from lockstep.envs.restore.replay import row_hashes
from lockstep.envs.restore.snapshot import check_savable, named

CLOSE_LIMIT = 30.0
"""Seconds that an environment may take to close, by default."""


def wrong_number(env: gymnasium.Env, where: str, error: BaseException) -> str | None:
    """Returns a message if a step or reset returned the wrong number of values, with its source line; else None."""
    found = (
        re.search(r"unpack \(expected (\d+)(?:, got (\d+))?\)", str(error)) if isinstance(error, ValueError) else None
    )
    frames = traceback.extract_tb(error.__traceback__)
    ours = bool(frames) and Path(frames[-1].filename).is_relative_to(Path(__file__).parent)
    theirs = bool(frames) and "gymnasium" in Path(frames[-1].filename).parts
    if found is None or not (ours or theirs) or found[1] != ("5" if where == "step" else "2"):
        return None
    got = f"{found[2]} values" if found[2] else "something else"
    returns = f"{where}() must return {_WANTED[where]}, and returned {got}"
    return f"{returns}, as for Gymnasium's older interface ({_source_of(env, where)})"


_WANTED = {"step": "observation, reward, terminated, truncated, info", "reset": "observation, info"}


def _source_of(env: gymnasium.Env, where: str) -> str:
    """Returns file and line of a function of an environment, inside all wrappers."""
    function = getattr(type(env.unwrapped), where)
    try:
        return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"
    except (OSError, TypeError):
        return f"{type(env.unwrapped).__module__}.{type(env.unwrapped).__qualname__}.{where}"


def takes_no_seed(where: str, error: BaseException) -> str | None:
    """Returns a message that shows how to write a seeded reset, if ``error`` says that this one isn't; else None."""
    found = re.search(r"(\w+)\.reset\(\) got an unexpected keyword argument '(?:seed|options)'", str(error))
    if where != "reset" or found is None or not isinstance(error, TypeError):
        return None
    return (
        f"{found[1]}.reset() takes no seed; write def reset(self, *, seed=None, options=None), and begin it with "
        "super().reset(seed=seed)"
    )


def environment_failure(name: str, where: str, error: BaseException) -> EnvironmentFailureError:
    """Turns an error that an environment raised into one of a single line that says where."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = one_line(error)
    return EnvironmentFailureError(f"{name} raised in {where}: {type(error).__name__}: {text}{at}")


class StillClosingError(BaseException):
    """Interrupts a close that takes too long; no ``except Exception`` in an environment's code can catch it."""


@contextlib.contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raises :class:`StillClosingError` after ``seconds`` in a block of the main thread; other threads go on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    within = True

    def interrupt(*_: object) -> None:
        if within:
            raise StillClosingError

    previous = signal.signal(signal.SIGALRM, interrupt)
    set_by_others = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)  # repeatedly, as code may catch the first
    try:
        yield
    finally:
        within = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if previous is None else previous)
        signal.setitimer(signal.ITIMER_REAL, *set_by_others)


def close_environment(env: gymnasium.Env, name: str, limit: float = CLOSE_LIMIT) -> bool:
    """Closes an environment; prints a warning if it raises an error or takes longer than ``limit`` seconds.

    Neither ends the run. Returns False if it took too long; the environment is then left as it is.
    """
    try:
        with _interrupted_after(limit):
            env.close()
    except (Exception, SystemExit) as error:
        say(f"lockstep: warning: {environment_failure(name, 'close', error)}")
    except StillClosingError:
        said = f"{name} wasn't closed within {limit:g} s, and is left behind"
        say(f"lockstep: warning: {said}")
        return False
    return True


def _array(name: object, value: Any) -> np.ndarray:
    """Copies an array of an environment's own state; raises a ``TypeError`` if no checkpoint holds it."""
    array = np.array(value)  # a copy: the environment may go on with this one
    check_savable(name, array)
    return array


class KeyedEnv:
    """Steps one Gymnasium environment with keyed resets, observations as rows and bounded actions.

    It is environment number ``row`` of ``wanted``.

    Attributes:
        limit: steps after which the caller truncates an episode; None: the environment does so itself, if at all.
        elapsed: steps that :meth:`step` has taken since the last reset.
    """

    def __init__(self, wanted: WantedEnvs, row: int) -> None:
        self._wanted, self._number = wanted, row
        self._description = wanted.description
        self._env = make_environment(wanted.config)
        life.progressed()
        self._bare, self.limit = without_time_limit(self._env)
        self._as_make_resets: dict[str, Any] = {} if self._bare is self._env else {"options": None}
        self._wrapped = stateful(wanted.config)
        self._all_allowed = np.ones(self._description.action.outputs, np.float32)
        self._watched: WatchedEnv | None = None
        if wanted.purpose == "reset" and wanted.env_ids[row] == 0:
            self._watched = WatchedEnv(self._bare, self._env.observation_space, self._description.id)
            if (said := own_statistics(self._env)) is not None:
                say(f"lockstep: warning: {self._description.id}: {said}")
        self.elapsed = 0

    @property
    def _name(self) -> str:
        return f"environment {self._wanted.env_ids[self._number]} ({self._description.id})"

    @property
    def unwrapped(self) -> gymnasium.Env:
        """The environment inside all wrappers."""
        return self._env.unwrapped

    @property
    def watched(self) -> bool:
        """Whether its observations are still compared with its space."""
        return self._watched is not None and self._watched.left > 0

    @property
    def stepped(self) -> gymnasium.Env | WatchedEnv:
        """The object whose ``step`` and ``reset`` to call."""
        return self._watched if self._watched is not None and self._watched.left else self._bare

    def failure(self, where: str, error: BaseException) -> EnvironmentFailureError:
        """Turns an error of this environment into one of a single line that names the environment."""
        said = wrong_number(self._env, where, error) or takes_no_seed(where, error)
        if said:
            return EnvironmentFailureError(f"{self._name}: {said}")
        return environment_failure(self._name, where, error)

    def check_info(self, info: Any) -> None:
        """Raises an :class:`EnvironmentFailureError` if what a step returned as its info is no mapping."""
        if not isinstance(info, Mapping):
            shown, line = one_line(repr(info))[:80], _source_of(self._env, "step")
            text = f"step() must return {_WANTED['step']}, and its info must be a dict and is {shown} ({line})"
            raise EnvironmentFailureError(f"{self._name}: {text}")

    def reset(self, episode: int, row: np.ndarray) -> None:
        """Starts the k-th episode and writes its first observation into ``row`` ``[width]``."""
        seed = self._wanted.episode_seed(self._number, episode)
        try:
            observation, info = self.stepped.reset(seed=seed, **self._as_make_resets)
            self.write(row, observation, info)
        except (Exception, SystemExit) as error:
            raise self.failure("reset", error) from error
        self.elapsed = 0

    def write(self, row: np.ndarray, observation: Any, info: Mapping[str, Any], ended: bool = False) -> None:
        """Writes an observation into its row; needs no mask if it ``ended`` an episode, as no action follows.

        Raises:
            ValueError: a part doesn't have its space's shape; one line.
        """
        layout = self._description.observation
        masked = layout.mask is not None and not ended
        mask = info_mask(self._env, info, self._description.mask_from) if masked else self._all_allowed
        layout.encode_into(row, observation, mask)  # whoever acts on it looks whether it allows anything

    def step(self, action: np.ndarray, row: np.ndarray) -> tuple[float, bool]:
        """Takes one row of actions, clipped to their bounds; writes the observation, returns reward and if it ended."""
        try:
            native = self._description.action.native(action)
            observation, reward, terminated, truncated, info = self.stepped.step(native)
            self.elapsed += 1
            ended = bool(terminated or truncated) or (self.limit is not None and self.elapsed >= self.limit)
            self.write(row, observation, info, ended)
            return number(reward), ended
        except (Exception, SystemExit) as error:
            raise self.failure("step", error) from error

    @property
    def has_hooks(self) -> bool:
        """Whether the environment has state hooks."""
        return self._hooks is not None

    @property
    def _hooks(self) -> Any:
        return None if self._wrapped else vouches_for_state(self._env)

    def save_state(self) -> dict[str, np.ndarray] | None:
        """Returns the arrays of ``get_env_state()``; None if the environment lacks one of the hooks, or gave none."""
        hooks = self._hooks
        if hooks is None:
            return None
        try:
            return {name: _array(name, value) for name, value in named(hooks.get_env_state()).items()} or None
        except (Exception, SystemExit) as error:
            raise self.failure("get_env_state", error) from error

    def restore(
        self,
        episode: int,
        actions: np.ndarray,
        hashes: np.ndarray,
        row: np.ndarray,
        state: dict[str, np.ndarray],
        progressed: Callable[[], None],
    ) -> bool:
        """Restores the k-th episode: by its state hooks, else by replaying its actions and checking every step.

        Args:
            episode: the episode's number.
            actions: its actions ``[length, …]``.
            hashes: uint64 ``[length]``, of each step's observation and reward.
            row: the observation at the end.
            state: arrays for the state hooks; empty: none.
            progressed: called after each step.

        Returns:
            False if the episode isn't exactly restored; the environment then stays as the check left it.
        """
        current = np.zeros_like(row)
        self.reset(episode, current)
        hooks = self._hooks
        if state:
            if hooks is None:  # it had some when this was saved
                return False
            try:
                hooks.set_env_state({name: value.copy() for name, value in state.items()})  # copies: it may keep them
            except (Exception, SystemExit) as error:
                raise self.failure("set_env_state", error) from error
            self._set_elapsed_steps(len(actions), hooks)
            return True
        for action, expected in zip(actions, hashes, strict=True):
            reward, ended = self.step(action, current)
            progressed()
            if ended or row_hashes(current[None], np.array([reward]))[0] != expected:
                return False
        return bool(np.array_equal(current, row, equal_nan=True))

    def _set_elapsed_steps(self, steps: int, hooks: Any) -> None:
        """Sets the steps that time limits have counted, but not those that the object ``hooks`` has set inside it."""
        self.elapsed = steps
        env, inside = self._bare, False
        while isinstance(env, gymnasium.Wrapper):
            inside = inside or env is hooks
            if isinstance(env, gymnasium.wrappers.TimeLimit) and not (inside and env._elapsed_steps):
                env._elapsed_steps = steps
            env = env.env

    def close(self, limit: float = CLOSE_LIMIT) -> bool:
        """Closes the environment; see :func:`close_environment`."""
        return close_environment(self._env, self._name, limit)
