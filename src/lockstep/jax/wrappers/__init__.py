"""Wraps functional environments for your own training loops; the engine needs no wrappers.

Each takes an environment (:class:`~lockstep.jax_engine.envs.functional.Environment`, gymnax's own, or another wrapper),
accepts steps of either form, and returns five values, with ``terminated`` and ``truncated`` in ``info``. Inside a
wrapper gymnax's own environments don't reset by themselves; :class:`AutoResetWrapper` does that. They compose::

    env, params = make("CartPole-v1")
    env = EpisodeStatisticsWrapper(AutoResetWrapper(env))
    env = RewardNormalizationWrapper(ObservationNormalizationWrapper(VmapWrapper(env)))
    obs, state = env.reset(jax.random.split(key, num_envs), params)
"""

from __future__ import annotations

from lockstep.jax.wrappers.batch import (
    ObservationNormalizationWrapper,
    RewardNormalizationWrapper,
    VmapWrapper,
)
from lockstep.jax.wrappers.single import (
    AutoResetWrapper,
    ClipActionWrapper,
    EpisodeStatisticsWrapper,
    FrameStackWrapper,
    RescaleActionWrapper,
    Wrapper,
)

__all__ = [
    "AutoResetWrapper",
    "ClipActionWrapper",
    "EpisodeStatisticsWrapper",
    "FrameStackWrapper",
    "ObservationNormalizationWrapper",
    "RescaleActionWrapper",
    "RewardNormalizationWrapper",
    "VmapWrapper",
    "Wrapper",
]
