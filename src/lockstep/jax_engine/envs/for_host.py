"""Environments that only JAX can step, as the host's loops take them: evaluation, inside training and after it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp

from lockstep.config.run import EnvConfig
from lockstep.core.shards import keyed_seed
from lockstep.envs.description import EnvDescription
from lockstep.envs.gymnasium.keyed import environment_failure, episode_key
from lockstep.envs.host_envs import Buffers, HostEnvs, buffer_layout
from lockstep.jax_engine.envs.environments import make_environment
from lockstep.jax_engine.envs.protocol import JaxEnvironment, Step, Tree, pick
from lockstep.jax_engine.nets.encoders import encode_rows
from lockstep.jax_engine.setup.set_up import use_compilation_cache
from lockstep.jax_engine.shards.blocks import each_shard
from lockstep.jax_engine.shards.keys import key_of, keyed


def reset_draws(env: JaxEnvironment, seeds: Array) -> Tree:
    """Draws what resets need, keyed by the seeds of their episodes, uint32 ``[n]``."""
    return jax.vmap(lambda seed: env.reset_random(keyed(_key(seed), 0), ()))(seeds)


def step_draws(env: JaxEnvironment, seeds: Array, elapsed: Array) -> Tree:
    """Draws what steps need, keyed by their episodes' seeds and the steps done in them, int32 ``[n]``; or None."""
    return jax.vmap(lambda seed, t: env.step_random(keyed(_key(seed), t + 1), ()))(seeds, elapsed)


def _key(seed: Array) -> Array:
    return key_of(jnp.stack([jnp.zeros((), jnp.uint32), seed.astype(jnp.uint32)]))


def native(description: EnvDescription, rows: np.ndarray) -> np.ndarray:
    """Turns rows of actions into what a :class:`JaxEnvironment` takes."""
    layout = description.action
    return np.asarray(layout.natives(rows), np.int32 if layout.discrete else np.float32)


class JaxEnvs(HostEnvs):
    """One batch of an environment of JAX's, with keyed resets, time limit and same-step autoreset.

    It is stepped group by group, so that a group's bits don't depend on how many there are.

    Args:
        config: which environment.
        description: its spaces.
        seed: the run's seed.
        env_ids: global ids of the environments.
        purpose: of the keys.
        keys: what stands for each environment in them.
        group: environments of a group; divides their number.
        device: where they are stepped.
    """

    replayed = False

    def __init__(
        self,
        config: EnvConfig,
        description: EnvDescription,
        seed: int,
        env_ids: Sequence[int],
        purpose: str,
        keys: Sequence[int],
        group: int,
        device: Any,
    ) -> None:
        layout = buffer_layout(description, len(env_ids), 1)
        super().__init__(description, env_ids, Buffers(**{k: np.zeros(s, d) for k, (s, d) in layout.items()}))
        self._env, self._device = make_environment(config), device
        self._seed, self._purpose, self._keys = seed, purpose, list(keys)
        self._limit = self._env.max_episode_steps
        self._seeds, self._elapsed = np.zeros(len(env_ids), np.uint32), np.zeros(len(env_ids), np.int32)
        self._groups = (len(env_ids) // group, group)
        self._state: Tree = None
        one_reset, one_step = partial(_reset, self._env, description), partial(_step, self._env, description)
        self._reset, self._step = self._in_groups(one_reset), self._in_groups(one_step)
        self._pick = jax.jit(pick)

    def _in_groups(self, function: Any) -> Any:
        def whole(owned: Array, *trees: Tree) -> Tree:
            cut = jax.tree.map(lambda x: x.reshape(*self._groups, *x.shape[1:]), trees)
            out = each_shard(function, self._groups[0], owned, *cut)
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out)

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
            key = episode_key(self._purpose, self._keys[row], int(self.buffers.episodes[row]))
            self._seeds[row] = keyed_seed(self._seed, self._purpose, *key)

    def reset(self) -> None:
        """See :meth:`HostEnvs.reset`.

        Raises:
            EnvironmentFailureError: the environment raised.
        """
        self._choose_seeds(range(self.num_envs))
        self._state, rows = self._reset("reset", self._seeds)
        self.buffers.observations[:] = rows
        self._elapsed[:] = 0

    def step(self) -> None:
        """See :meth:`HostEnvs.step`; errors as :meth:`reset`."""
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
        named = {name: np.asarray(leaf) for name, leaf in _named(self._state)}
        return [
            {name: leaf[row] for name, leaf in named.items()} | {"elapsed": np.asarray(self._elapsed[row])}
            for row in range(self.num_envs)
        ]

    def restore(self, env: int, actions: np.ndarray, hashes: np.ndarray, state: dict[str, np.ndarray]) -> bool:
        """See :meth:`HostEnvs.restore`; it comes back by its arrays."""
        if self._state is None:
            observations = self.buffers.observations.copy()
            self.reset()
            self.buffers.observations[:] = observations
        self._choose_seeds([env])
        self._elapsed[env] = state["elapsed"]
        leaves = [(name, np.array(leaf)) for name, leaf in _named(self._state)]
        for name, leaf in leaves:
            leaf[env] = state[name]
        self._state = jax.tree.unflatten(jax.tree.structure(self._state), [leaf for _, leaf in leaves])
        return True


def _reset(env: JaxEnvironment, description: EnvDescription, seeds: Array) -> tuple[Tree, Array]:
    state, observation = env.reset(reset_draws(env, seeds))
    return state, encode_rows(description.observation, observation)


def _step(
    env: JaxEnvironment, description: EnvDescription, state: Tree, actions: Array, seeds: Array, elapsed: Array
) -> tuple[Step, Array]:
    step = env.step(state, actions, step_draws(env, seeds, elapsed))
    rows = encode_rows(description.observation, step.observation)
    return step._replace(observation=None, terms={}), rows


def _named(state: Tree) -> list[tuple[str, Any]]:
    """Leaves of a state by their path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in flat]


def make_jax_envs(
    config: EnvConfig,
    description: EnvDescription,
    seed: int,
    env_ids: Sequence[int],
    purpose: str,
    keys: Sequence[int],
    group: int,
    device: str,
) -> JaxEnvs:
    """Makes :class:`JaxEnvs` on a device given by name: ``cpu``, ``cuda`` or ``tpu``."""
    use_compilation_cache()
    place = jax.local_devices(backend="cpu" if device == "cpu" else None)[0]
    return JaxEnvs(config, description, seed, env_ids, purpose, keys, group, place)
