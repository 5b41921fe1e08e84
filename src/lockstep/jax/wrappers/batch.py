"""Wraps batches of functional environments, see :mod:`lockstep.jax.wrappers`."""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jax import Array, lax

from lockstep.jax.wrappers.single import FINAL_OBS, Wrapper
from lockstep.jax_engine.envs.functional import FINAL, found, outcome, strong
from lockstep.jax_engine.envs.protocol import Tree

EPSILON = 1e-8
SAMPLES, BATCHES = 1 << 24, 1 << 20
"""How many samples and batches :class:`RunningMoments` hold."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RunningMoments:
    """Count ``[]``, mean and sum of squared deviations ``m2`` (of one sample's shape), float32.

    Up to :data:`SAMPLES` samples, or :data:`BATCHES` batches if those are more, all samples count alike. From then on
    the moments are a window of :data:`BATCHES` batches, out of which older samples fade, because float32 couldn't count
    further and would lose more and more of what is added to ``m2``. The count of a full window ends in a half, if
    float32 has one at that size.
    """

    count: Array
    mean: Array
    m2: Array

    @classmethod
    def empty(cls, shape: tuple[int, ...]) -> RunningMoments:
        """Returns the moments of no samples of this shape."""
        return cls(jnp.zeros((), jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))

    @property
    def variance(self) -> Array:
        """Population variance; ones with fewer than two samples."""
        return jnp.where(self.count > 1, self.m2 / jnp.maximum(self.count, 1), 1.0)

    def merged(self, samples: Array, axis_name: str | tuple[str, ...] | None = None) -> RunningMoments:
        """Returns the moments with samples ``[n, …]`` added, on all devices along ``axis_name`` (Chan et al. 1983)."""
        x = samples.astype(jnp.float32)
        count, mean = jnp.asarray(x.shape[0], jnp.float32), x.mean(0)
        m2 = jnp.square(x - mean).sum(0)
        if axis_name is not None:  # every device has as many samples
            whole = lax.pmean(mean, axis_name)
            m2 = lax.psum(m2 + count * jnp.square(mean - whole), axis_name)
            count, mean = lax.psum(count, axis_name), whole
        window = BATCHES * count
        full = (self.count > jnp.maximum(SAMPLES, window) - count) | (self.count % 1 > 0)
        kept = jnp.where(full, jnp.minimum(self.count, window + 0.5 - count), self.count)
        share = jnp.where(full, kept / self.count, 1.0)
        total = kept + count
        delta = mean - self.mean
        m2 = self.m2 * share + m2 + jnp.square(delta) * (kept * count / total)
        return RunningMoments(total, self.mean + delta * (count / total), m2)


class VmapWrapper(Wrapper):
    """Maps an environment over a batch: keys, states, actions and results are ``[n, …]``; parameters are shared.

    For more than one episode, the environment must reset by itself.
    """

    batched = True

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        if getattr(self._env, "batched", False):
            raise ValueError(f"VmapWrapper: {type(env).__name__} is a batch of environments already; leave it out")

    def reset(self, key: Array, params: Any = None) -> tuple[Tree, Tree]:
        """See :meth:`Wrapper.reset`; ``key`` are ``n`` keys."""
        return jax.vmap(lambda each: self._env.reset(each, params))(key)

    def step(self, key: Array, state: Tree, action: Array, params: Any = None) -> tuple[Any, ...]:
        """See :meth:`Wrapper.step`; ``key`` are ``n`` keys."""
        one = lambda k, s, a: outcome(self._env.step(k, s, a, params)).values()  # noqa: E731
        return jax.vmap(one)(key, state, action)


class _BatchWrapper(Wrapper):
    """Base of wrappers that see the whole batch; puts one environment into a batch first."""

    batched = True

    def __init__(self, env: Any, axis_name: str | tuple[str, ...] | None, clip: float) -> None:
        super().__init__(env if getattr(env, "batched", False) else VmapWrapper(env))
        if not clip > 0:
            raise ValueError(f"{type(self).__name__}: clip {clip} must be above 0")
        self._axis_name, self._clip = axis_name, clip


class ObservationNormalizationWrapper(_BatchWrapper):
    """Normalises observations to zero mean and unit variance, by running statistics that all environments share.

    Each step's observations of the whole batch, and of all devices along ``axis_name``, are added to one mean and
    variance, which then normalise these observations and ``final_obs``. Only floating-point observations are
    normalised. In the state, ``"moments"`` is the same for all environments and has no batch axis.

    Args:
        env: a batch of environments, or one (which is batched, see :class:`VmapWrapper`).
        axis_name: axis of a mesh (``shard_map``) over which the batch is spread as well.
        clip: greatest absolute value of a component.
    """

    def __init__(self, env: Any, axis_name: str | tuple[str, ...] | None = None, clip: float = 10.0) -> None:
        super().__init__(env, axis_name, clip)

    def observation_space(self, params: Any = None) -> gymnasium.Space:
        """See :meth:`Wrapper.observation_space`."""
        return _normalised_space(super().observation_space(params), self._clip)

    def reset(self, key: Array, params: Any = None) -> tuple[Tree, Tree]:
        """See :meth:`Wrapper.reset`; ``key`` are ``n`` keys."""
        observation, state = self._env.reset(key, params)
        observation = strong(observation)
        moments = [RunningMoments.empty(x.shape[1:]) for x in _floats(observation)]
        moments = self._merged(moments, observation)
        return self._normalized(moments, observation), {"env": state, "moments": moments}

    def step(self, key: Array, state: Tree, action: Array, params: Any = None) -> tuple[Any, ...]:
        """See :meth:`Wrapper.step`; ``key`` are ``n`` keys."""
        result = self._inner(key, state["env"], action, params)
        moments = self._merged(state["moments"], result.observation)
        final, info = found(result.info, FINAL), result.info
        if final is not None:
            info = info | {FINAL_OBS: self._normalized(moments, final)}
        following = {"env": result.state, "moments": moments}
        seen = self._normalized(moments, result.observation)
        return result._replace(observation=seen, state=following, info=info).values()

    def _merged(self, moments: list[RunningMoments], observation: Tree) -> list[RunningMoments]:
        return [each.merged(x, self._axis_name) for each, x in zip(moments, _floats(observation), strict=True)]

    def _normalized(self, moments: list[RunningMoments], observation: Tree) -> Tree:
        following = iter(moments)

        def one(x: Array) -> Array:
            if not _is_float(x):
                return x
            each = next(following)
            scaled = (x - each.mean) / jnp.sqrt(each.variance + EPSILON)
            return jnp.clip(scaled, -self._clip, self._clip)

        return jax.tree.map(one, observation)


class RewardNormalizationWrapper(_BatchWrapper):
    """Divides rewards by the standard deviation of the discounted return, which all environments share.

    In the state, ``"moments"`` is the same for all environments and has no batch axis; ``"returns"`` ``[n]`` is each
    one's discounted return so far, which begins anew when an episode ends.

    Args:
        env: a batch of environments, or one (which is batched, see :class:`VmapWrapper`).
        gamma: discount.
        axis_name: axis of a mesh (``shard_map``) over which the batch is spread as well.
        clip: greatest absolute value of a reward.
    """

    def __init__(
        self, env: Any, gamma: float = 0.99, axis_name: str | tuple[str, ...] | None = None, clip: float = 10.0
    ) -> None:
        super().__init__(env, axis_name, clip)
        self._gamma = gamma

    def reset(self, key: Array, params: Any = None) -> tuple[Tree, Tree]:
        """See :meth:`Wrapper.reset`; ``key`` are ``n`` keys."""
        observation, state = self._env.reset(key, params)
        count = jax.tree.leaves(observation)[0].shape[0]
        returns = jnp.zeros(count, jnp.float32)
        return observation, {"env": state, "moments": RunningMoments.empty(()), "returns": returns}

    def step(self, key: Array, state: Tree, action: Array, params: Any = None) -> tuple[Any, ...]:
        """See :meth:`Wrapper.step`; ``key`` are ``n`` keys."""
        result = self._inner(key, state["env"], action, params)
        returns = state["returns"] * self._gamma + jnp.asarray(result.reward, jnp.float32)
        moments = state["moments"].merged(returns, self._axis_name)
        reward = jnp.clip(result.reward / jnp.sqrt(moments.variance + EPSILON), -self._clip, self._clip)
        returns = jnp.where(result.done, 0.0, returns)
        following = {"env": result.state, "moments": moments, "returns": returns}
        return result._replace(reward=reward, state=following).values()


def _is_float(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _floats(observation: Tree) -> list[Array]:
    return [leaf for leaf in jax.tree.leaves(observation) if _is_float(leaf)]


def _normalised_space(space: gymnasium.Space, clip: float) -> gymnasium.Space:
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: _normalised_space(part, clip) for name, part in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([_normalised_space(part, clip) for part in space.spaces])
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return spaces.Box(-clip, clip, space.shape, np.float32)
    return space
