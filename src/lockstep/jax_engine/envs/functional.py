"""Environments as JAX's own libraries write them: one environment, two pure functions with a key and parameters.

``reset(key, params) -> (obs, state)`` and ``step(key, state, action, params)``, which returns five values ``(obs,
state, reward, done, info)``, as gymnax 0.0.x and most code that was written for it, or six ``(obs, state, reward,
terminated, truncated, info)``, as gymnax 1.x. What both forms have in common, and what a class of one's own offers.
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
    """The time limit in steps, of environments that :func:`lockstep.jax.make` makes."""

    max_steps_in_episode: int = 1000

    def __call__(self) -> EnvParams:
        """Gives itself: ``env.default_params()`` and ``env.default_params`` are the same."""
        return self

    def replace(self, **changes: Any) -> EnvParams:
        """Makes a copy with some of them changed."""
        return dataclasses.replace(self, **changes)


class Environment:
    """One environment as pure functions: what a class of one's own offers; deriving from this one is a convenience.

    One that has ``render(state, params)`` too, which gives a picture (a NumPy array uint8 ``[height, width, 3]``) and
    isn't traced, can be recorded by ``lockstep play``, with ``render_fps`` pictures a second.

    The functions are traced by ``jax.jit`` and batched by ``jax.vmap``: no branch on an array's value, no side effects.
    A state is any pytree of arrays, of one structure, shapes and dtypes from the reset on.

    Attributes:
        autoreset: whether ``step`` begins the next episode by itself. The engine does that for environments which
            don't (and replaces the reset of those that do by its own); a step that does must leave what the episode
            saw last in ``info["final_obs"]``, for a truncated episode's bootstrap.
        step_draws: whether ``step`` uses its key; one that doesn't may say False, and gets None. A wrapper of one's own
            says it for itself: what it only hands on of the one inside isn't believed.
        max_episode_steps: time limit in steps that the engine counts, or None; ``params.max_steps_in_episode``, where
            there is such a field, is taken for one as well.
    """

    autoreset: bool = False
    step_draws: bool = True
    max_episode_steps: int | None = None

    @property
    def default_params(self) -> Any:
        """Parameters for :meth:`reset` and :meth:`step`, a pytree or None."""
        return None

    def reset(self, key: Array, params: Any = None) -> tuple[Tree, Tree]:
        """Begins an episode: observation and state."""
        raise TypeError(f"{type(self).__name__} has no reset(key, params) -> (obs, state)")

    def step(self, key: Array, state: Tree, action: Array, params: Any = None) -> tuple[Any, ...]:
        """Takes one step.

        Args:
            key: of this step.
            state: of the last reset or step.
            action: as ``action_space`` says: int32 ``[]`` (Discrete), int32 ``[k]`` or float32 ``[*shape]``.
            params: parameters.

        Returns:
            ``(obs, state, reward, done, info)`` or ``(obs, state, reward, terminated, truncated, info)``: reward a
            number, the flags bool. In ``info``, if one likes: ``truncated`` (five values: the episode ended by a limit
            of the environment's own; not given, every ``done`` is an end that doesn't bootstrap), ``success`` (bool),
            ``reward_terms`` (numbers by name, which are logged).
        """
        raise TypeError(f"{type(self).__name__} has no step(key, state, action, params)")

    def observation_space(self, params: Any = None) -> Any:
        """Gymnasium's or gymnax's space of an observation."""
        raise TypeError(f"{type(self).__name__} has no observation_space(params)")

    def action_space(self, params: Any = None) -> Any:
        """Gymnasium's or gymnax's space of an action."""
        raise TypeError(f"{type(self).__name__} has no action_space(params)")


class Outcome(NamedTuple):
    """A step's values, whichever of the two forms it has; ``terminated`` and ``truncated`` told apart."""

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
        """Gives the form of five values; ``info`` tells how the episode ended."""
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
    """Says whether the steps of an environment are given keys.

    Not if its class, or it itself, says that they draw nothing; of our wrappers the one inside is asked. What another's
    wrapper hands on by ``__getattr__`` was said of the steps inside, and not of its own.
    """
    if inspect.getattr_static(env, "step_draws", None) is not None:
        return bool(env.step_draws)
    module = getattr(getattr(type(env), "step", None), "__module__", None) or ""
    ours = module.partition(".")[0] == _PACKAGE
    return gets_keys(env._env) if ours and hasattr(env, "_env") else True


def tells_truncation(values: tuple[Any, ...]) -> bool:
    """Says whether what a step returns tells an episode's end from its being cut off."""
    return len(values) == 6 or found(values[-1], TRUNCATED) is not None


def with_limit(params: Any, steps: Any, name: str) -> Any:
    """Parameters with another time limit: by their own ``replace``, of a NamedTuple, or of a dataclass.

    Raises:
        ValueError: they are none of these; one line.
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
    """Finds the first of these entries that there is, or None."""
    return next((info[name] for name in names if name in info), None)


def strong(tree: Tree) -> Tree:
    """Arrays of exactly their dtype: a Python number's weak one would change what a loop carries."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.asarray(leaf).dtype), tree)
