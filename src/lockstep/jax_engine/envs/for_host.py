"""Lets the host's loops step environments that only JAX can step, for evaluation during training and after it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp

from lockstep.envs.description import EnvDescription
from lockstep.envs.gymnasium.keyed import environment_failure
from lockstep.envs.host_envs import HostEnvs, WantedEnvs, by_row
from lockstep.jax_engine.envs.environments import make_environment
from lockstep.jax_engine.envs.protocol import JaxEnvironment, Step, Tree, pick
from lockstep.jax_engine.nets.encoders import encode_rows
from lockstep.jax_engine.setup.kept_programs import use_compilation_cache
from lockstep.jax_engine.shards.blocks import each_shard
from lockstep.jax_engine.shards.keys import key_of, keyed
from lockstep.jax_engine.shards.saved import check_fit, from_saved, named_leaves, to_saved

ELAPSED = "elapsed"
"""The name, beside those of a state's leaves, under which an episode's number of steps is saved."""


def reset_draws(env: JaxEnvironment, seeds: Array) -> Tree:
    """Draws the random numbers of resets, keyed by their episodes' seeds, uint32 ``[n]``."""
    return jax.vmap(lambda seed: env.reset_random(keyed(_key(seed), 0), ()))(seeds)


def step_draws(env: JaxEnvironment, seeds: Array, elapsed: Array) -> Tree:
    """Draws the random numbers of steps, keyed by their episodes' seeds and steps so far, int32 ``[n]``; or None."""
    return jax.vmap(lambda seed, t: env.step_random(keyed(_key(seed), t + 1), ()))(seeds, elapsed)


def _key(seed: Array) -> Array:
    return key_of(jnp.stack([jnp.zeros((), jnp.uint32), seed.astype(jnp.uint32)]))


def native(description: EnvDescription, rows: np.ndarray) -> np.ndarray:
    """Converts rows of actions to those that a :class:`JaxEnvironment` takes."""
    layout = description.action
    return np.asarray(layout.natives(rows), np.int32 if layout.discrete else np.float32)


class JaxEnvs(HostEnvs):
    """A batch of a JAX environment, with keyed resets, a time limit and same-step autoreset.

    It is stepped shard by shard, so that a shard's bits don't depend on the number of shards.
    """

    replayed = False

    def __init__(self, wanted: WantedEnvs, device: Any) -> None:
        super().__init__(wanted.description, wanted.env_ids)
        self._wanted, self._env, self._device = wanted, make_environment(wanted.config), device
        self._limit = self._env.max_episode_steps
        self._seeds, self._elapsed = np.zeros(self.num_envs, np.uint32), np.zeros(self.num_envs, np.int32)
        size = wanted.shard_size or self.num_envs
        self._groups = (self.num_envs // size, size)
        self._state: Tree = None
        one_reset, one_step = (partial(each, self._env, wanted.description) for each in (_reset, _step))
        self._reset, self._step = self._in_groups(one_reset), self._in_groups(one_step)
        self._pick = jax.jit(pick)

    def _in_groups(self, function: Any) -> Any:
        def whole(owned: Array, *trees: Tree) -> Tree:
            cut = jax.tree.map(lambda x: x.reshape(*self._groups, *x.shape[1:]), trees)
            out = each_shard(function, self._groups[0], owned, *cut)
            return jax.tree.map(lambda x: x.reshape(self.num_envs, *x.shape[2:]), out)

        compiled = jax.jit(whole)

        def call(where: str, *trees: Tree) -> Tree:
            try:
                with jax.default_device(self._device):
                    return jax.block_until_ready(compiled(np.int32(self._groups[0]), *trees))
            except Exception as error:
                raise environment_failure(f"environments ({self.description.id})", where, error) from error

        return call

    def _choose_seeds(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._seeds[row] = self._wanted.episode_seed(row, self.buffers.episodes[row])

    def reset(self) -> None:
        """See :meth:`HostEnvs.reset`.

        Raises:
            EnvironmentFailureError: if the environment raised.
        """
        self.buffers.observations[:] = self._begin()

    def _begin(self) -> Array:
        """Starts every episode; returns the rows of their first observations."""
        self._choose_seeds(range(self.num_envs))
        self._state, rows = self._reset("reset", self._seeds)
        self._elapsed[:] = 0
        return rows

    def step(self) -> None:
        """See :meth:`HostEnvs.step`; raises what :meth:`reset` raises."""
        b = self.buffers
        actions = native(self.description, b.actions)
        step, rows = self._step("step", self._state, actions, self._seeds, self._elapsed)
        self._state = step.state
        self._elapsed += 1
        b.rewards[:], b.terminated[:], b.observations[:] = step.reward, step.terminated, rows
        b.truncated[:] = step.truncated
        if self._limit is not None:
            b.truncated |= self._elapsed >= self._limit
        b.truncated &= ~b.terminated
        if step.success is not None:
            b.successes[:] = np.where(step.success, 1, -1)
        if step.score is not None:
            b.scores[:] = step.score
        done = b.terminated | b.truncated
        if done.any():
            self._begin_next(done)

    def _begin_next(self, done: np.ndarray) -> None:
        b = self.buffers
        b.final_observations[done] = b.observations[done]
        b.episodes[done] += 1
        self._choose_seeds(np.flatnonzero(done).tolist())
        fresh, rows = self._reset("reset", self._seeds)
        self._state = self._pick(done, fresh, self._state)
        b.observations[done] = np.asarray(rows)[done]
        self._elapsed[done] = 0

    def save_states(self) -> list[dict[str, np.ndarray] | None]:
        """See :meth:`HostEnvs.save_states`."""
        named = {name: to_saved(np.asarray(leaf)) for name, leaf in self._named()}
        return by_row({**named, ELAPSED: self._elapsed}, self.num_envs)

    def restore(self, env: int, actions: np.ndarray, hashes: np.ndarray, state: dict[str, np.ndarray]) -> bool:
        """See :meth:`HostEnvs.restore`; restores from the state's arrays, without a replay.

        Raises:
            ValueError: they aren't those of this environment; one line.
        """
        if self._state is None:
            self._begin()
        leaves = [(name, np.array(leaf)) for name, leaf in self._named()]
        saved = {name: np.asarray(value) for name, value in state.items()}
        elapsed = saved.pop(ELAPSED)
        check_fit({name: leaf[env] for name, leaf in leaves}, saved)
        self._choose_seeds([env])
        self._elapsed[env] = elapsed
        for name, leaf in leaves:
            leaf[env] = from_saved(saved[name], leaf.dtype)
        self._state = jax.tree.unflatten(jax.tree.structure(self._state), [leaf for _, leaf in leaves])
        return True

    def _named(self) -> list[tuple[str, Any]]:
        return named_leaves(self._state, (ELAPSED,))


def _reset(env: JaxEnvironment, description: EnvDescription, seeds: Array) -> tuple[Tree, Array]:
    state, observation = env.reset(reset_draws(env, seeds))
    return state, encode_rows(description.observation, observation)


def _step(
    env: JaxEnvironment, description: EnvDescription, state: Tree, actions: Array, seeds: Array, elapsed: Array
) -> tuple[Step, Array]:
    step = env.step(state, actions, step_draws(env, seeds, elapsed))
    rows = encode_rows(description.observation, step.observation)
    return step._replace(observation=None, terms={}), rows


def make_jax_envs(wanted: WantedEnvs) -> JaxEnvs:
    """Makes :class:`JaxEnvs` on the device that ``wanted`` names: ``cpu``, ``cuda`` or ``tpu``."""
    use_compilation_cache()
    return JaxEnvs(wanted, jax.local_devices(backend="cpu" if wanted.device == "cpu" else None)[0])
