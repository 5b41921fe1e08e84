"""Steps one Gymnasium environment, whose k-th episode is seeded by ``(seed, purpose, global env id, k)`` alone."""

from __future__ import annotations

import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from lockstep.core.errors import EnvironmentFailureError
from lockstep.core.life import life
from lockstep.core.spaces import MASK
from lockstep.envs.gymnasium.make import make_environment
from lockstep.envs.gymnasium.time_limit import without_time_limit
from lockstep.envs.gymnasium.wrappers import stateful, vouches_for_state
from lockstep.envs.host_envs import WantedEnvs
from lockstep.envs.restore.replay import row_hashes

WATCHED_STEPS = 200
"""Steps of the first environment whose observations are compared with its space."""

OWN_STATISTICS = {
    gymnasium.wrappers.NormalizeObservation: "--normalize.observations",
    gymnasium.wrappers.NormalizeReward: "--normalize.returns",
}


def wrong_number(env: gymnasium.Env, where: str, error: BaseException) -> str | None:
    """Says in Gymnasium's words that a step or reset returned another number of values, and where it is written."""
    found = (
        re.search(r"unpack \(expected (\d+)(?:, got (\d+))?\)", str(error)) if isinstance(error, ValueError) else None
    )
    frames = traceback.extract_tb(error.__traceback__)
    ours = bool(frames) and Path(frames[-1].filename).is_relative_to(Path(__file__).parent)
    theirs = bool(frames) and "gymnasium" in Path(frames[-1].filename).parts
    if found is None or not (ours or theirs) or found[1] != ("5" if where == "step" else "2"):
        return None
    wanted = "observation, reward, terminated, truncated, info" if where == "step" else "observation, info"
    function = getattr(type(env.unwrapped), where)
    try:
        line = f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"
    except (OSError, TypeError):
        line = f"{type(env.unwrapped).__module__}.{type(env.unwrapped).__qualname__}.{where}"
    got = f"{found[2]} values" if found[2] else "something else"
    return f"{where}() must return {wanted}, and returned {got}, as for Gymnasium's older interface ({line})"


def takes_no_seed(where: str, error: BaseException) -> str | None:
    """Says how a reset is written that Gymnasium can seed, where this one can't."""
    found = re.search(r"(\w+)\.reset\(\) got an unexpected keyword argument '(?:seed|options)'", str(error))
    if where != "reset" or found is None or not isinstance(error, TypeError):
        return None
    return (
        f"{found[1]}.reset() takes no seed; write def reset(self, *, seed=None, options=None), and begin it with "
        "super().reset(seed=seed)"
    )


def own_statistics(env: gymnasium.Env) -> str | None:
    """Names a wrapper whose statistics are one environment's and in no checkpoint, and the option that is the run's."""
    inner: Any = env
    while isinstance(inner, gymnasium.Wrapper):
        for kind, option in OWN_STATISTICS.items():
            if isinstance(inner, kind):
                return (
                    f"it is wrapped in {kind.__name__}, whose statistics are of each environment alone and in no "
                    f"checkpoint, so that an evaluation begins without them; leave it out, and give {option}"
                )
        inner = inner.env
    return None


def environment_failure(name: str, where: str, error: BaseException) -> EnvironmentFailureError:
    """Puts what an environment raised into one line that says where."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return EnvironmentFailureError(f"{name} raised in {where}: {type(error).__name__}: {text}{at}")


def close_environment(env: gymnasium.Env, name: str) -> None:
    """Closes an environment; an error of its own is told in a line, and nobody fails for it."""
    try:
        env.close()
    except (Exception, SystemExit) as error:
        print(f"lockstep: warning: {environment_failure(name, 'close', error)}", file=sys.stderr, flush=True)


def stated_success(info: Mapping[str, Any]) -> int:
    """Reads what an environment's info says of its task: 1 solved, -1 not solved, 0 nothing.

    ``is_success`` (Gymnasium-Robotics, Stable-Baselines3) goes before ``success`` (Meta-World, ManiSkill). What is no
    single number or bool says nothing.
    """
    for name in ("is_success", "success") if info else ():
        if name in info:
            value = np.asarray(info[name])
            if value.size == 1 and value.dtype.kind in "biuf":
                return 1 if value.item() > 0.5 else -1
    return 0


def stated_score(info: Mapping[str, Any]) -> float:
    """Points of a game so far, where an environment's info has a number ``score``; else NaN."""
    value = np.asarray(info["score"]) if "score" in info else np.asarray(None)
    return float(value.item()) if value.size == 1 and value.dtype.kind in "iuf" else math.nan


def stated_metrics(info: Mapping[str, Any]) -> dict[str, float]:
    """Reads an environment's own metrics of an episode: the finite single numbers and bools under ``"metrics"``."""
    found = info.get("metrics")
    if not isinstance(found, Mapping):
        return {}
    values = {str(name): np.asarray(value) for name, value in found.items()}
    numbers = {name: float(v.item()) for name, v in values.items() if v.size == 1 and v.dtype.kind in "biuf"}
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def stated_mask(env: gymnasium.Env, info: Mapping[str, Any], source: str) -> np.ndarray | None:
    """Reads which actions are allowed, where that comes apart from the observation; several indices one after another.

    The source is ``method`` (the environment's ``action_masks()``), ``info`` (of the last step or reset) or ``""``.
    """
    if not source:
        return None
    if source == "method":
        mask = env.get_wrapper_attr("action_masks")()
    elif MASK in info:
        mask = info[MASK]
    else:
        raise ValueError(f"env.action_mask is 'info', but info has no {MASK!r}; it has {sorted(info)}")
    return np.concatenate([np.ravel(part) for part in mask]) if isinstance(mask, tuple | list) else np.ravel(mask)


def outside(space: gymnasium.Space, observation: Any, name: str = "") -> str | None:
    """Says how an observation differs from its space: by a key, its shape, its dtype or a value.

    A NaN is none of these, and is named with the environment that gave it (``envs.numbers``).
    """
    what = f"the observation{f' under {name!r}' if name else ''}"
    if isinstance(space, gymnasium.spaces.Dict) and isinstance(observation, Mapping):
        missing, more = set(space.spaces) - set(observation), set(observation) - set(space.spaces)
        if missing or more:
            return f"{what} has other keys than its space: {sorted(missing | more)}"
        wrong = [key for key, part in space.spaces.items() if not part.contains(observation[key])]
        return outside(space.spaces[wrong[0]], observation[wrong[0]], f"{name}/{wrong[0]}".lstrip("/"))
    array = np.asarray(observation)
    if array.shape != space.shape and space.shape is not None:
        return f"{what} has shape {array.shape}, its space says {space.shape}"
    if isinstance(space, gymnasium.spaces.Box):
        if not np.can_cast(array.dtype, space.dtype):
            return f"{what} is of dtype {array.dtype}, its space says {space.dtype}"
        if np.isnan(array).any():
            return None
        below, above = array < space.low, array > space.high
        if (below | above).any():
            at = tuple(int(i) for i in np.argwhere(below | above)[0])
            low, high = space.low[at], space.high[at]
            return f"{what} is {array[at]:g} at {list(at)}, its space says {low:g} to {high:g}"
    return f"{what} is {' '.join(str(observation).split())[:80]}, which isn't in {space}"


def number(reward: Any) -> float:
    """A reward as a float, also one that comes as an array of a single element; else a ``TypeError`` that shows it."""
    try:
        return float(reward.item()) if isinstance(reward, np.ndarray) else float(reward)
    except (TypeError, ValueError):
        shown = " ".join(repr(reward).split())[:80]
        raise TypeError(f"the reward returned by step() must be a number, and is {shown}") from None


class WatchedEnv:
    """Steps the run's first environment, and warns once of what its spaces don't say, in its first steps and resets."""

    def __init__(self, env: gymnasium.Env, space: gymnasium.Space, name: str) -> None:
        self._env, self._space, self._name = env, space, name
        self.left = WATCHED_STEPS

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """See ``gymnasium.Env.step``."""
        observation, reward, terminated, truncated, info = self._env.step(action)
        if self.left:
            self.look(observation, reward)
        return observation, reward, terminated, truncated, info

    def look(self, observation: Any, reward: Any = 0.0) -> None:
        """Looks at an observation and a reward."""
        self.left -= 1
        said = None
        if np.ndim(np.asarray(reward)):
            said = f"the reward returned by step() must be a number, and is an array of shape {np.shape(reward)}"
        elif not self._space.contains(observation):
            said = outside(self._space, observation)
        if said is not None:
            self.left = 0
            print(f"lockstep: warning: {self._name}: {said}", file=sys.stderr, flush=True)


class KeyedEnv:
    """A Gymnasium environment with keyed resets, observations as rows and bounded actions.

    It is number ``row`` of those wanted.

    Attributes:
        limit: steps after which an episode is truncated, where its stepper counts them; None: the environment does.
        elapsed: steps since the last reset that :meth:`step` took.
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
                print(f"lockstep: warning: {self._description.id}: {said}", file=sys.stderr, flush=True)
        self.elapsed = 0

    @property
    def _name(self) -> str:
        return f"environment {self._wanted.env_ids[self._number]} ({self._description.id})"

    @property
    def unwrapped(self) -> gymnasium.Env:
        """The environment inside of all wrappers."""
        return self._env.unwrapped

    @property
    def watched(self) -> bool:
        """Whether its observations are still compared with its space."""
        return self._watched is not None and self._watched.left > 0

    @property
    def stepped(self) -> gymnasium.Env | WatchedEnv:
        """What has the ``step`` of its environment."""
        return self._watched if self._watched is not None and self._watched.left else self._bare

    def failure(self, where: str, error: BaseException) -> EnvironmentFailureError:
        """Puts what it raised into one line that names it."""
        said = wrong_number(self._env, where, error) or takes_no_seed(where, error)
        if said:
            return EnvironmentFailureError(f"{self._name}: {said}")
        return environment_failure(self._name, where, error)

    def reset(self, episode: int, row: np.ndarray) -> None:
        """Starts the k-th episode; writes its first observation into ``row`` ``[width]``."""
        seed = self._wanted.episode_seed(self._number, episode)
        try:
            observation, info = self._bare.reset(seed=seed, **self._as_make_resets)
            if self._watched is not None and self._watched.left:
                self._watched.look(observation)
            self.write(row, observation, info)
        except (Exception, SystemExit) as error:
            raise self.failure("reset", error) from error
        self.elapsed = 0

    def write(self, row: np.ndarray, observation: Any, info: Mapping[str, Any], ended: bool = False) -> None:
        """Writes an observation into its row; nobody acts on the one that ends an episode, which needs no mask."""
        layout = self._description.observation
        masked = layout.mask is not None and not ended
        mask = stated_mask(self._env, info, self._description.mask_from) if masked else self._all_allowed
        layout.encode_into(row, observation, mask)

    def step(self, action: np.ndarray, row: np.ndarray) -> tuple[float, bool]:
        """Takes one row of actions, clipped to their bounds, and writes the observation; the reward, and if it ended.

        For one environment by itself; many are stepped by :class:`lockstep.envs.gymnasium.sweep.Sweep`.
        """
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
    def _hooks(self) -> Any:
        return None if self._wrapped else vouches_for_state(self._env)

    def save_state(self) -> dict[str, np.ndarray] | None:
        """The arrays of an environment that offers ``get_env_state()`` and ``set_env_state(arrays)``, else None."""
        return None if self._hooks is None else {k: np.asarray(v) for k, v in self._hooks.get_env_state().items()}

    def restore(
        self,
        episode: int,
        actions: np.ndarray,
        hashes: np.ndarray,
        row: np.ndarray,
        state: dict[str, np.ndarray],
        progressed: Callable[[], None],
    ) -> bool:
        """Brings back the k-th episode: by its state hooks, else by replaying its actions and checking every step.

        ``hashes``, uint64 ``[length]``, are of each step's observation and reward, ``row`` is the observation at the
        end, and ``progressed`` is called after each step. False says that it isn't exactly back, and the environment is
        left as the check found it.
        """
        current = np.zeros_like(row)
        self.reset(episode, current)
        if state and self._hooks is not None:
            self._hooks.set_env_state(state)
            self._set_elapsed_steps(len(actions))
            return True
        for action, expected in zip(actions, hashes, strict=True):
            reward, ended = self.step(action, current)
            progressed()
            if ended or row_hashes(current[None], np.array([reward]))[0] != expected:
                return False
        return bool(np.array_equal(current, row, equal_nan=True))

    def _set_elapsed_steps(self, steps: int) -> None:
        self.elapsed = steps
        env = self._bare
        while isinstance(env, gymnasium.Wrapper):
            if isinstance(env, gymnasium.wrappers.TimeLimit):
                env._elapsed_steps = steps
            env = env.env

    def close(self) -> None:
        """Closes the environment; see :func:`close_environment`."""
        close_environment(self._env, self._name)
