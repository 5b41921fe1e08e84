"""Environments in the form of JAX's own libraries: one environment as two pure functions of a key and parameters.

These are ``reset(key, params) -> (obs, state)`` and ``step(key, state, action, params)``. A step returns five values
``(obs, state, reward, done, info)``, as in gymnax 0.0.x and most code written for it, or six
``(obs, state, reward, terminated, truncated, info)``, as in gymnax 1.x. This module has what both forms share, and the
base class for a user's own environments.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lockstep.jax_engine.envs.protocol import Tree

LIMIT = "max_steps_in_episode"
FINAL = ("final_obs", "final_observation")
TRUNCATED = ("truncated", "truncation", "TimeLimit.truncated")
TERMS = "reward_terms"
_PACKAGE = __name__.partition(".")[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EnvParams:
    """The time limit in steps of environments that :func:`lockstep.jax.make` makes."""

    max_steps_in_episode: int = 1000

    def __call__(self) -> EnvParams:
        """Returns itself, so that ``env.default_params()`` and ``env.default_params`` are the same."""
        return self

    def replace(self, **changes: Any) -> EnvParams:
        """Makes a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


class Environment:
    """One environment as pure functions; a user's own class offers these, and may derive from this one for convenience.

    The functions are traced by ``jax.jit`` and batched by ``jax.vmap``: no branch on an array's value, no side effects.
    A state is any pytree of arrays, with one structure, shapes and dtypes from the reset on.

    ``lockstep play`` can record an environment that also has ``render(state, params)``. That returns a picture (a NumPy
    array uint8 ``[height, width, 3]``) and isn't traced. ``render_fps`` is the number of pictures per second.

    Attributes:
        autoreset: whether ``step`` begins the next episode by itself. The engine resets in any case; gymnax's own
            autoreset is removed. A step that resets must leave the episode's last observation in
            ``info["final_obs"]``, for the bootstrap of a truncated episode.
        step_draws: whether ``step`` uses its key; if it is False, the key is None. A user's own wrapper must say it for
            itself: a value that it passes on from the environment inside doesn't count.
        max_episode_steps: time limit in steps that the engine counts, or None; a field ``params.max_steps_in_episode``
            is a time limit too.
    """

    autoreset: bool = False
    step_draws: bool = True
    max_episode_steps: int | None = None

    @property
    def default_params(self) -> Any:
        """Parameters for :meth:`reset` and :meth:`step`, a pytree or None."""
        return None

    def reset(self, key: Array, params: Any = None) -> tuple[Tree, Tree]:
        """Begins an episode; returns observation and state."""
        raise TypeError(f"{type(self).__name__} has no reset(key, params) -> (obs, state)")

    def step(self, key: Array, state: Tree, action: Array, params: Any = None) -> tuple[Any, ...]:
        """Takes one step.

        Args:
            key: of this step.
            state: from the last reset or step.
            action: in ``action_space``: int32 ``[]`` (Discrete), int32 ``[k]`` or float32 ``[*shape]``.
            params: parameters.

        Returns:
            ``(obs, state, reward, done, info)`` or ``(obs, state, reward, terminated, truncated, info)``: the reward is
            a number, the flags are bool. ``info`` may have ``success`` (bool, or a number that is above 0.5),
            ``reward_terms`` (numbers by name, which are logged), and, with five values, ``truncated``: the episode was
            ended by the environment's own limit. Without it, no ``done`` bootstraps.
        """
        raise TypeError(f"{type(self).__name__} has no step(key, state, action, params)")

    def observation_space(self, params: Any = None) -> Any:
        """Returns the space of an observation, of Gymnasium or gymnax."""
        raise TypeError(f"{type(self).__name__} has no observation_space(params)")

    def action_space(self, params: Any = None) -> Any:
        """Returns the space of an action, of Gymnasium or gymnax."""
        raise TypeError(f"{type(self).__name__} has no action_space(params)")


class Outcome(NamedTuple):
    """A step's values from either of the two forms, with ``terminated`` and ``truncated`` told apart."""

    observation: Tree
    state: Tree
    reward: Array
    terminated: Array
    truncated: Array
    info: dict[str, Any]

    @property
    def done(self) -> Array:
        """Whether the episode ended."""
        return self.terminated | self.truncated

    def values(self) -> tuple[Tree, Tree, Array, Array, dict[str, Any]]:
        """Returns the form of five values; ``info`` tells how the episode ended."""
        info = self.info | {"terminated": self.terminated, "truncated": self.truncated}
        return self.observation, self.state, self.reward, self.done, info


def outcome(values: tuple[Any, ...]) -> Outcome:
    """Reads what a step returned, in either form."""
    if len(values) == 6:
        return Outcome(*values)
    observation, state, reward, done, info = values
    if "terminated" in info and "truncated" in info:
        return Outcome(observation, state, reward, info["terminated"], info["truncated"], info)
    truncated = found(info, TRUNCATED)
    truncated = jnp.zeros_like(done) if truncated is None else jnp.asarray(truncated, bool) & done
    return Outcome(observation, state, reward, done & ~truncated, truncated, info)


def gets_keys(env: Any) -> bool:
    """Returns whether the steps of an environment are given keys.

    They aren't if its class, or the environment itself, says that they draw nothing. One of our wrappers passes the
    question to the environment inside. Another's wrapper that forwards the attribute by ``__getattr__`` does get keys,
    because the attribute speaks for the steps inside and not for its own.
    """
    if inspect.getattr_static(env, "step_draws", None) is not None:
        return bool(env.step_draws)
    module = getattr(getattr(type(env), "step", None), "__module__", None) or ""
    ours = module.partition(".")[0] == _PACKAGE
    return gets_keys(env._env) if ours and hasattr(env, "_env") else True


def tells_truncation(values: tuple[Any, ...]) -> bool:
    """Returns whether a step's values tell termination from truncation."""
    return len(values) == 6 or found(values[-1], TRUNCATED) is not None


def with_limit(params: Any, steps: Any, name: str) -> Any:
    """Changes the time limit of parameters, by their own ``replace`` or as a NamedTuple or dataclass.

    Raises:
        ValueError: if they are none of these; the message is one line.
    """
    changes = {LIMIT: steps}
    for method in ("replace", "_replace"):
        if callable(getattr(params, method, None)):
            return getattr(params, method)(**changes)
    if dataclasses.is_dataclass(params) and not isinstance(params, type):
        return dataclasses.replace(params, **changes)
    raise ValueError(
        f"env.max_episode_steps: {steps}, but {name}'s parameters ({type(params).__name__}) can't be changed; make "
        "them a dataclass, a NamedTuple or a class with replace(), or leave it out"
    )


def found(info: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Returns the first of these entries that there is, or None."""
    return next((info[name] for name in names if name in info), None)


def strong(tree: Tree) -> Tree:
    """Converts leaves to arrays with a strong dtype, because a Python number's weak one would change a loop's carry."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.asarray(leaf).dtype), tree)
