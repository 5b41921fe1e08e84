"""Evaluates between updates: whole episodes with the likeliest actions, the same ones each time, on one device."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from lockstep.config.sections import EvalConfig
from lockstep.jax.ppo import PPO, PPOTrainState
from lockstep.jax_engine.distributed.placement import gathered
from lockstep.jax_engine.program.program import Program
from lockstep.jax_engine.setup.set_up import COMPILER_OPTIONS
from lockstep.jax_engine.shards.keys import key_of, key_words, keyed


class _Running(NamedTuple):
    """The running episodes: which are ``over``, and returns and lengths so far, ``[episodes]``."""

    time: Array
    state: Any
    observation: Any
    over: Array
    returns: Array
    lengths: Array


class Evaluator:
    """Runs ``episodes`` episodes of a program's environment, keyed by ``(seed, "eval")``.

    An episode ends at the environment's time limit, or else after ``EvalConfig.max_steps``. Every process runs all of
    them, so that their bits are the same on any number of devices.
    """

    def __init__(self, program: Program, episodes: int) -> None:
        assert program.env is not None
        self._env, self._episodes = program.env, episodes
        self._limit = program.env.max_episode_steps or EvalConfig().max_steps
        self._words = key_words(program.config.seed, "eval")
        self._run = jax.jit(self._whole_episodes, compiler_options=COMPILER_OPTIONS)

    def __call__(self, state: PPOTrainState) -> tuple[float, float]:
        """Returns the episodes' mean return and mean length."""
        agent = jax.tree.map(gathered, state.agent_state)
        returns, lengths = (np.asarray(x, np.float64) for x in self._run(agent, self._words))
        return float(returns.mean()), float(lengths.mean())

    def _whole_episodes(self, agent: PPOTrainState, words: Array) -> tuple[Array, Array]:
        env, count, key = self._env, self._episodes, key_of(words)
        state, observation = env.reset(env.reset_random(keyed(key, 0), (count,)))
        observation = _holding(observation, self._seen_after(agent, state, observation, key))
        zeros = jnp.zeros(count)
        begun = _Running(jnp.int32(0), state, observation, jnp.zeros(count, bool), zeros, jnp.zeros(count, jnp.int32))

        def going_on(now: _Running) -> Array:
            return (now.time < self._limit) & ~now.over.all()

        def step(now: _Running) -> _Running:
            random = env.step_random(keyed(key, 1, now.time), (count,))
            stepped = env.step(now.state, PPO.act(agent, now.observation), random)
            going = ~now.over
            return _Running(
                now.time + 1,
                stepped.state,
                _holding(stepped.observation, now.observation),
                now.over | stepped.terminated | stepped.truncated,
                now.returns + jnp.where(going, stepped.reward, 0.0),
                now.lengths + going,
            )

        ended = lax.while_loop(going_on, step, begun)
        return ended.returns, ended.lengths

    def _seen_after(self, agent: PPOTrainState, state: Any, observation: Any, key: Array) -> Any:
        """Returns the shapes and dtypes of what a step observes."""

        def seen() -> Any:
            random = self._env.step_random(keyed(key, 1, 0), (self._episodes,))
            return self._env.step(state, PPO.act(agent, observation), random).observation

        return jax.eval_shape(seen)


def _holding(observation: Any, other: Any) -> Any:
    """Widens an observation to dtypes that hold another's values too, as reset and step may observe in two dtypes."""
    return jax.tree.map(lambda x, like: x.astype(jnp.promote_types(x.dtype, like.dtype)), observation, other)
