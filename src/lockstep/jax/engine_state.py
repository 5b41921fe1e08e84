"""Converts a train state from and to the engine's: agent, environments, and what makes resuming exact."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax import Array
from jax import numpy as jnp

from lockstep.jax.ppo import Normalizer, PPOTrainState
from lockstep.jax_engine.distributed.mesh import replicate_sharding
from lockstep.jax_engine.distributed.placement import fetch, gathered, replicate_on_mesh
from lockstep.jax_engine.nets.nets import PolicyNet
from lockstep.jax_engine.nets.parameters import ParameterLayout
from lockstep.jax_engine.shards.keys import is_key, key_of, key_words, keyed
from lockstep.jax_engine.shards.normalizers import Moments
from lockstep.jax_engine.shards.rows import ShardRows
from lockstep.jax_engine.state import EnvCarry, TrainState

NORMALIZERS = {"observations": "observation_normalizer", "returns": "return_normalizer"}
"""Maps fields of a user's state to fields of the engine's."""


def user_rng(seed: int, updates: int) -> np.ndarray:
    """Returns the words of a key for a user's own draws after ``updates`` updates, uint32 ``[2]``."""
    return np.asarray(jax.random.key_data(keyed(key_of(key_words(seed, "user")), updates)))


# --- from the engine ------------------------------------------------------------------------------------------------


def of_engine(state: TrainState, layout: ParameterLayout, net: PolicyNet, updates: int, mesh: Any) -> PPOTrainState:
    """Converts the engine's agent into a library user's; arrays stay where they are."""
    optimizer = state.optimizer
    params, mu, nu = (layout.placed(held) for held in (state.parameters, optimizer.mu, optimizer.nu))
    return PPOTrainState(
        params,
        optax.ScaleByAdamState(jnp.copy(optimizer.count), mu, nu),
        replicate_on_mesh(np.int32(updates), mesh),  # pyright: ignore[reportArgumentType]
        _normalizer(state.observation_normalizer, mesh),
        _normalizer(state.return_normalizer, mesh),
        net,
    )


def with_environments(
    agent: PPOTrainState, state: TrainState, seed: int, mesh: Any, shard_rows: ShardRows
) -> PPOTrainState:
    """Adds what training needs to go on; copies the environments, because the engine consumes its own arrays."""
    assert state.envs is not None
    held = {name: getattr(state, attribute) for name, attribute in NORMALIZERS.items()}
    moments = {
        f"{name}.{part}": np.atleast_1d(fetch(x)).view(np.uint32)
        for name, found in held.items()
        if found is not None
        for part, x in found._asdict().items()
    }
    return agent.replace(
        envs=_copied(state.envs) if shard_rows.tree.even else _shards_alone(state.envs, shard_rows, mesh),
        moments=replicate_on_mesh(moments, mesh) or None,
        rng=replicate_on_mesh(user_rng(seed, int(agent.step)), mesh),
        num_devices=mesh.size,
    )


def template_of(agent: PPOTrainState, shapes: EnvCarry) -> PPOTrainState:
    """Returns a template for checkpoints of a training with such environments: an agent, and shapes."""

    def words(size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((2 * size,), np.uint32)

    moments = {
        f"{name}.{part}": words(1 if part == "count" else np.size(seen.mean))
        for name in NORMALIZERS
        if (seen := getattr(agent, name)) is not None
        for part in Moments._fields
    }
    return agent.replace(envs=shapes, moments=moments or None, rng=words(1))


@jax.jit
def _copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def _shards_alone(envs: EnvCarry, shard_rows: ShardRows, mesh: Any) -> Any:
    """Takes the shards out of rows, whole on every device, because uneven shards can't be cut over devices."""
    return _taking_shards(shard_rows, mesh)(envs)


@functools.lru_cache(maxsize=8)
def _taking_shards(shard_rows: ShardRows, mesh: Any) -> Callable[[EnvCarry], EnvCarry]:
    places = shard_rows.of_shards
    return jax.jit(lambda tree: jax.tree.map(lambda x: x[places], tree), out_shardings=replicate_sharding(mesh))


def _normalizer(moments: Moments | None, mesh: Any) -> Normalizer | None:
    if moments is None:
        return None
    return replicate_on_mesh(_rounded(Moments(*(fetch(x) for x in moments))), mesh)  # pyright: ignore[reportArgumentType]


def _rounded(moments: Moments) -> Normalizer:
    count, mean, m2 = moments
    parts = (np.asarray(x, np.float32) for x in (count, mean, m2 / max(float(count), 1.0)))
    return Normalizer(*parts)  # pyright: ignore[reportArgumentType]


# --- to the engine --------------------------------------------------------------------------------------------------


def to_engine(given: PPOTrainState, state: TrainState, layout: ParameterLayout, net: PolicyNet) -> TrainState:
    """Puts a user's parameters, moments and normalisers into the engine's state of host arrays.

    Raises:
        ValueError: they don't fit the networks or the normalisation; one line.
    """
    shapes = {name: tuple(np.shape(x)) for name, x in given.params.items()}
    for name in [*layout.shapes, *shapes]:
        if shapes.get(name) != layout.shapes.get(name):
            raise ValueError(
                f"train_state: params[{name!r}] is {shapes.get(name, 'missing')} and the networks' is "
                f"{layout.shapes.get(name, 'missing')}"
            )
    theirs, mine = given.net.activation, net.activation
    if net.custom is None and theirs != mine:
        raise ValueError(
            f"train_state: activation is {theirs!r} in its networks and {mine!r} in the settings; give "
            f"activation={theirs!r}"
        )
    for name, attribute in NORMALIZERS.items():
        seen = getattr(given, name)
        if (seen is None) != (getattr(state, attribute) is None):
            has = "no statistics" if seen is None else "statistics"
            raise ValueError(f"train_state: it has {has} of {name}, unlike what ppo_config normalises")

    def held(named: Any) -> Any:
        return layout.of_arrays({name: gathered(x) for name, x in named.items()})

    count = np.asarray(gathered(given.opt_state.count), np.int32)
    return state._replace(
        parameters=held(given.params),
        optimizer=optax.ScaleByAdamState(count, held(given.opt_state.mu), held(given.opt_state.nu)),
        observation_normalizer=_moments(given, "observations"),
        return_normalizer=_moments(given, "returns"),
    )


def _moments(given: PPOTrainState, name: str) -> Moments | None:
    """Returns a normaliser's moments: the exact ones, if the state has them and its statistics are still theirs."""
    seen = getattr(given, name)
    if seen is None:
        return None
    rounded = Normalizer(*(np.asarray(gathered(x)) for x in seen))  # pyright: ignore[reportArgumentType]
    if given.moments is not None and f"{name}.count" in given.moments:
        words = (np.asarray(gathered(given.moments[f"{name}.{part}"])) for part in Moments._fields)
        count, mean, m2 = (x.view(np.float64) for x in words)
        exact = Moments(count.reshape(()), mean, m2)  # pyright: ignore[reportArgumentType]
        if all(np.array_equal(x, y) for x, y in zip(_rounded(exact), rounded, strict=True)):
            return exact
    count, mean, var = (np.asarray(x, np.float64) for x in rounded)
    return Moments(count, mean, var * count)  # pyright: ignore[reportArgumentType]


def environments_of(given: PPOTrainState, shapes: EnvCarry) -> tuple[EnvCarry | None, str | None]:
    """Returns a state's environments on the host, cut into the shards of a run.

    Args:
        given: a state of a training, or one without environments.
        shapes: shapes of the run's environments, ``[num_shards, environments of each, …]``.

    Returns:
        The environments, or None and why they can't go on; both are None if the state has none.
    """
    if given.envs is None:
        return None, None
    mine, theirs = jax.tree.leaves(shapes), jax.tree.leaves(given.envs)
    if jax.tree.structure(given.envs) != jax.tree.structure(shapes) or any(
        x.shape[2:] != y.shape[2:] or x.dtype != y.dtype for x, y in zip(mine, theirs, strict=True)
    ):
        return None, "its environments' states are of another structure than this environment's"
    have, want = (int(np.prod(x.shape[:2])) for x in (theirs[0], mine[0]))
    if have != want:
        return None, f"it has {have} environments and this run {want}"
    envs: Any = jax.tree.map(lambda x, shape: gathered(x).reshape(shape.shape), given.envs, shapes)
    return envs, None


def replaced_environments(shapes: EnvCarry, observation_rows: Array, state: Any) -> EnvCarry:
    """Returns first episodes that begin with a user's own states and observation rows, both ``[num_envs, …]``.

    Raises:
        ValueError: they don't have the structure and shapes of the environment's own; one line.
    """
    given = shapes._replace(state=state, rows=observation_rows)
    if jax.tree.structure(given) != jax.tree.structure(shapes):
        raise ValueError("get_initial_env_state: the states are of another structure than those of env.reset")
    count = int(np.prod(shapes.rows.shape[:2]))
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not np.shape(leaf) or np.shape(leaf)[0] != count:
            name = jax.tree_util.keystr(path, simple=True, separator="/") or "the state"
            raise ValueError(
                f"get_initial_env_state: {name} is of shape {np.shape(leaf)} and must begin with num_envs {count}"
            )

    def of(path: Any, x: Any, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        if isinstance(x, jax.ShapeDtypeStruct):
            return np.zeros(shape.shape, shape.dtype)
        plain = jax.random.key_data(x) if is_key(x) else x
        found, wanted = np.asarray(plain), shape.shape[2:]
        if found.shape != (count, *wanted) or _kind(found.dtype) > _kind(shape.dtype):
            name = jax.tree_util.keystr(path[1:], simple=True, separator="/")
            name = name or ("the observations" if path[0].name == "rows" else "the state")
            raise ValueError(
                f"get_initial_env_state: {name}, {found.dtype}{list(found.shape)}, doesn't fit {shape.dtype}"
                f"{list(wanted)} of each of {count} environments"
            )
        return found.astype(shape.dtype).reshape(shape.shape)

    return jax.tree_util.tree_map_with_path(of, given, shapes)


def _kind(dtype: Any) -> int:
    """Numbers the kinds of dtypes, so that each kind holds those before it."""
    return [jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating, jnp.generic)].index(True)
