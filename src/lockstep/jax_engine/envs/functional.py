"""Environments as JAX's own libraries write them: one environment, two pure functions with a key and parameters.

``reset(key, params) -> (obs, state)`` and ``step(key, state, action, params)``, which returns five values ``(obs,
state, reward, done, info)``, as gymnax 0.0.x and most code that was written for it, or six ``(obs, state, reward,
terminated, truncated, info)``, as gymnax 1.x. :class:`FunctionalAdapter` makes a batch of them for the engine.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lockstep.jax_engine.envs.default_params import default_params, that_may_be_called
from lockstep.jax_engine.envs.functional_checks import check_functions, space_of
from lockstep.jax_engine.envs.protocol import Step, Tree

LIMIT = "max_steps_in_episode"
FINAL = ("final_obs", "final_observation")
TRUNCATED = ("truncated", "truncation", "TimeLimit.truncated")
SUCCESS = ("is_success", "success")
TERMS = "reward_terms"
CLASSIC_CONTROL = ("Acrobot-v1", "CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0")


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
        step_draws: whether ``step`` uses its key; one that doesn't may say False, and gets None.
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


class GymnaxEnvironment(Environment):
    """A gymnax environment, of either signature, without its own autoreset.

    gymnax 1.x tells time limits from ends; of 0.0.x, whose ``done`` is both, the end is what ``is_terminal`` says
    without a limit. Spaces get the dtype of what is really observed, and ``images`` (MinAtar's boards of zeros and
    ones) become bytes.
    """

    def __init__(self, env: Any, images: bool = False) -> None:
        self._env, self._images, self._pictures = env, images, None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._env, name)

    @property
    def default_params(self) -> Any:
        """Of gymnax; they may be called, and give themselves."""
        return that_may_be_called(self._env.default_params)

    def reset(self, key: Array, params: Any = None) -> tuple[Tree, Tree]:
        """See :meth:`Environment.reset`."""
        observation, state = self._env.reset_env(key, self._given(params))
        return self._seen(observation), state

    def step(self, key: Array, state: Tree, action: Array, params: Any = None) -> tuple[Any, ...]:
        """See :meth:`Environment.step`."""
        params = self._given(params)
        observation, state, reward, done, info = self._env.step_env(key, state, action, params)
        done = jnp.asarray(done, bool)
        if hasattr(self._env, "is_truncated"):
            ended, truncated = done, jnp.asarray(self._env.is_truncated(state, params), bool)
        elif hasattr(params, LIMIT) and hasattr(self._env, "is_terminal"):
            endless = with_limit(params, jnp.iinfo(jnp.int32).max, type(self._env).__name__)
            ended = jnp.asarray(self._env.is_terminal(state, endless), bool) & done
            truncated = done & ~ended
        else:
            ended, truncated = done, jnp.zeros_like(done)
        return Outcome(
            self._seen(observation), state, jnp.asarray(reward, jnp.float32), ended, truncated, info
        ).values()

    def observation_space(self, params: Any = None) -> gymnasium.Space:
        """See :meth:`Environment.observation_space`."""
        params = self._given(params)
        space = space_of(self._env.observation_space(params))
        if isinstance(space, gymnasium.spaces.Box):
            seen, _ = jax.eval_shape(lambda key: self.reset(key, params), jax.random.key_data(jax.random.key(0)))
            space = gymnasium.spaces.Box(
                space.low.astype(seen.dtype), space.high.astype(seen.dtype), seen.shape, seen.dtype.type
            )
        return space

    def action_space(self, params: Any = None) -> gymnasium.Space:
        """See :meth:`Environment.action_space`."""
        return space_of(self._env.action_space(self._given(params)))

    def render(self, state: Tree, params: Any = None) -> np.ndarray:
        """Draws the picture of a state, drawn by gymnax with matplotlib."""
        if self._pictures is None:
            from lockstep.jax_engine.envs.renderers import GymnaxRenderer

            self._pictures = GymnaxRenderer(self._env, self._given(params), state)
        return self._pictures(state)

    @property
    def render_fps(self) -> int:
        """As gymnax plays them."""
        return 20 if self._env.name in CLASSIC_CONTROL else 10

    def _given(self, params: Any) -> Any:
        return self._env.default_params if params is None else params

    def _seen(self, observation: Tree) -> Tree:
        return observation.astype(jnp.uint8) if self._images else observation


def without_autoreset(env: Any) -> Any:
    """Takes the reset from a gymnax environment; any other, a wrapper around gymnax too, is left as it is."""
    return GymnaxEnvironment(env) if hasattr(type(env), "step_env") else env


def resets_itself(env: Any) -> bool:
    """Says whether ``step`` begins the next episode: as it says, else as gymnax's wrappers do."""
    said = getattr(env, "autoreset", None)
    return hasattr(env, "step_env") if said is None else bool(said)


class FunctionalAdapter:
    """A batch of one functional environment, for the engine.

    Keys are handed over as arrays of bits (uint32), which every function of ``jax.random`` takes, and keys in a state
    are kept so, so that a state is nothing but plain arrays.

    Args:
        env: as :class:`Environment`, or of gymnax.
        params: None: its ``default_params``.
        max_episode_steps: time limit; None: the environment's own.
        name: id of the environment in errors; None: it is named by its class.

    Attributes:
        limit_note: what the user should know of ends at the time limit, or None.

    Raises:
        ValueError: its functions don't fit its spaces, or can't be traced; one line. Nothing is compiled for it.
    """

    def __init__(
        self, env: Any, params: Any = None, max_episode_steps: int | None = None, name: str | None = None
    ) -> None:
        where = f"env: {type(env).__name__}" if name is None else f"env.id: {name}"
        name = name or type(env).__name__
        if getattr(env, "batched", False):
            raise ValueError(
                f"{where} is a whole batch of environments, and the engine makes its own; give the environment "
                "inside, and normalize.observations or normalize.returns instead of wrappers"
            )
        self._env = without_autoreset(env)
        self._params: Any = default_params(self._env) if params is None else params
        if max_episode_steps is not None and hasattr(self._params, LIMIT):
            self._params = with_limit(self._params, max_episode_steps, name)
        own = getattr(self._env, "max_episode_steps", None) or getattr(self._params, LIMIT, None)
        self.max_episode_steps: int | None = max_episode_steps or (None if own is None else int(own))
        self._autoreset = resets_itself(self._env)
        self._draws = bool(getattr(self._env, "step_draws", True))
        self.observation_space, self.action_space, self._keys, shapes = check_functions(
            self._env, self._params, jax.random.key_data(jax.random.key(0)), where, FINAL if self._autoreset else ()
        )
        self.limit_note = None
        if hasattr(self._params, LIMIT) and not tells_truncation(shapes):
            self.limit_note = (
                f"{name}: its step doesn't tell {LIMIT} ({self.max_episode_steps}) from a real end, so that every end "
                "counts as one and none bootstraps; return info['truncated'], or six values"
            )

    def reset_random(self, key: Array, shape: tuple[int, ...]) -> Tree:
        """See :meth:`lockstep.jax_engine.envs.protocol.JaxEnvironment.reset_random`: keys, uint32 ``[*shape, 2]``."""
        keys = jax.random.split(key, shape)
        return jax.random.key_data(keys) if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) else keys

    def step_random(self, key: Array, shape: tuple[int, ...]) -> Tree:
        """See :meth:`lockstep.jax_engine.envs.protocol.JaxEnvironment.step_random`: keys, or None."""
        return self.reset_random(key, shape) if self._draws else None

    def reset(self, random: Tree) -> tuple[Tree, Tree]:
        """See :meth:`lockstep.jax_engine.envs.protocol.JaxEnvironment.reset`."""
        return jax.vmap(self._reset)(random)

    def step(self, state: Tree, action: Array, random: Tree) -> Step:
        """See :meth:`lockstep.jax_engine.envs.protocol.JaxEnvironment.step`."""
        return jax.vmap(self._step)(state, action, random)

    @property
    def can_render(self) -> bool:
        """Whether the environment has ``render(state, params)``."""
        return hasattr(self._env, "render")

    @property
    def render_fps(self) -> int | None:
        """Pictures a second that the environment's are meant for, if it says so."""
        return getattr(self._env, "render_fps", None)

    def render(self, state: Tree) -> np.ndarray:
        """Draws the picture of the first environment of a state, uint8 ``[height, width, 3]``."""
        return self._env.render(self._keys.typed(jax.tree.map(lambda x: x[0], state)), self._params)

    def _reset(self, key: Array) -> tuple[Tree, Tree]:
        observation, state = self._env.reset(key, self._params)
        return self._keys.plain(state), strong(observation)

    def _step(self, state: Tree, action: Array, key: Array | None) -> Step:
        values = self._env.step(key, self._keys.typed(state), action, self._params)
        result = outcome(values)
        observation = result.observation
        if self._autoreset:
            final = found(result.info, FINAL)
            observation = jax.tree.map(lambda last, next_: jnp.where(result.done, last, next_), final, observation)
        success = found(result.info, SUCCESS)
        return Step(
            self._keys.plain(result.state),
            strong(observation),
            jnp.asarray(result.reward, jnp.float32),
            jnp.asarray(result.terminated, bool),
            jnp.asarray(result.truncated, bool),
            None if success is None else jnp.asarray(success, bool),
            {term: jnp.asarray(value, jnp.float32) for term, value in result.info.get(TERMS, {}).items()},
        )


def strong(tree: Tree) -> Tree:
    """Arrays of exactly their dtype: a Python number's weak one would change what a loop carries."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.asarray(leaf).dtype), tree)
