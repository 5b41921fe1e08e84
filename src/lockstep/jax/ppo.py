"""Defines the train state of PPO as a pytree, and functions that make it and apply its policy."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import gymnasium
import jax
import numpy as np
import optax
from jax import Array
from jax import numpy as jnp

from lockstep.config.run import Config
from lockstep.config.sections import NormalizeConfig
from lockstep.core.normalizers import EPSILON
from lockstep.core.spaces import descend
from lockstep.envs.description import described
from lockstep.jax.config import PPOConfig, engine_config
from lockstep.jax.settings import SettingError
from lockstep.jax_engine.envs.functional_checks import space_of
from lockstep.jax_engine.nets import distributions, nets
from lockstep.jax_engine.nets.encoders import decode_rows, encode_rows
from lockstep.jax_engine.nets.nets import PolicyNet
from lockstep.jax_engine.rollout import native_actions
from lockstep.jax_engine.shards.keys import is_key
from lockstep.jax_engine.shards.normalizers import Scale, normalized
from lockstep.jax_engine.state import EnvCarry, check_networks
from lockstep.networks.initial import initial_parameters

CLIP_OBSERVATIONS = NormalizeConfig().clip_observations


class Normalizer(NamedTuple):
    """Running statistics, float32: ``count`` ``[]``, ``mean`` and ``var`` ``[size]``."""

    count: Array
    mean: Array
    var: Array


CARRIED = ("envs", "moments", "rng")
"""Parts of a train state that :meth:`PPO.init` leaves out: what training needs to go on, beside the agent."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "opt_state", "step", "observations", "returns", *CARRIED],
    meta_fields=["net", "num_devices"],
)
@dataclass(frozen=True)
class PPOTrainState:
    """The state of training: a pytree for ``jax.jit``, ``save_checkpoint``, ``replicate``.

    The state of a training also holds its environments, as :class:`~lockstep.jax_engine.state.EnvCarry`, so that
    training goes on exactly. ``agent_state`` is the state without them, such as :meth:`PPO.init` makes.

    Attributes:
        params: float32 arrays by name, such as ``actor.0.weight`` ``[out, in]``.
        opt_state: state of optax's Adam: ``count``, ``mu`` and ``nu`` (by name).
        step: number of updates done, int32 ``[]``.
        observations: statistics of observations, or None.
        returns: statistics of discounted returns, or None.
        net: shapes of the networks; no array.
        envs: what environments carry from step to step, arrays ``[num_shards, environments of each, …]``, or None.
        moments: the normalisers' float64 moments as words, uint32, by name; or None.
        rng: uint32 ``[2]``: a key made of the run's seed and ``step`` for your own draws, or None. Lockstep's own draws
            don't use it: they are keyed by the seed and their purpose.
        num_devices: number of devices for which :attr:`env_obs` and :attr:`env_state` are laid out; no array.
    """

    left_out_of_checkpoints: ClassVar[tuple[str, ...]] = CARRIED
    """A template without these takes a checkpoint that has them, and the reverse."""

    params: dict[str, Array]
    opt_state: optax.ScaleByAdamState
    step: Array
    observations: Normalizer | None
    returns: Normalizer | None
    net: PolicyNet
    envs: EnvCarry | None = None
    moments: dict[str, Array] | None = None
    rng: Array | None = None
    num_devices: int = 1

    @property
    def agent_state(self) -> PPOTrainState:
        """The state with parameters, optimiser, step and statistics alone."""
        return replace(self, envs=None, moments=None, rng=None, num_devices=1)

    @property
    def env_obs(self) -> Any:
        """The last observation of each environment, as it returns it, ``[num_devices, num_envs, *obs_shape]``; or None.

        A Tuple becomes a dict with keys ``"0"``, ``"1"`` and so on, which :meth:`PPO.apply` takes as well.

        Environments are in the order of their ids. If a run's ``num_shards`` isn't a multiple of ``num_devices``, some
        devices step more of them than others, and a row here isn't what one device steps.
        """
        if self.envs is None:
            return None
        return self._by_device(decode_rows(self.net.observation, _joined(self.envs.rows)))

    @property
    def env_state(self) -> Any:
        """The environments' states, each leaf ``[num_devices, num_envs, …]`` as in :attr:`env_obs`; or None."""
        if self.envs is None:
            return None
        return self._by_device(jax.tree.map(_joined, self.envs.state))

    def _by_device(self, tree: Any) -> Any:
        devices = self.num_devices
        return jax.tree.map(lambda x: x.reshape(devices, x.shape[0] // devices, *x.shape[1:]), tree)

    def replace(self, **changes: Any) -> PPOTrainState:
        """Returns a copy with some parts changed; ``agent_state`` changes all of the agent's.

        Raises:
            ValueError: there is no such part; one line.
        """
        agent = changes.pop("agent_state", None)
        if agent is not None:
            own = ("params", "opt_state", "step", "observations", "returns", "net")
            changes = {name: getattr(agent, name) for name in own} | changes
        names = [field.name for field in fields(self)]
        unknown = [name for name in changes if name not in names]
        if unknown:
            raise ValueError(
                f"train_state: {unknown[0]!r} is no part that can be replaced; give agent_state, {', '.join(names)}"
            )
        return replace(self, **changes)

    _replace = replace


def _joined(x: Any) -> Any:
    """Joins the first two axes, also of an array without elements."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


class PPO:
    """Functions of a :class:`PPOTrainState`; all except :meth:`init` may be called inside ``jax.jit``."""

    @staticmethod
    @jax.transfer_guard("allow")
    def init(key: Array, obs_shape: Any, n_actions: Any, config: PPOConfig | None = None) -> PPOTrainState:
        """Makes a state before training; ``jax.random.key(s)`` gives the state that a run with seed ``s`` begins with.

        Args:
            key: typed or raw key of ``jax.random``.
            obs_shape: shape of one observation (numbers), a tuple or a whole number; for anything else its space.
            n_actions: number of discrete actions; for anything else the space of actions.
            config: settings of networks and normalisation; by default those of ``PPOConfig()``.

        Raises:
            ValueError: the key is being traced, or spaces aren't supported; one line.
        """
        settings = {"env.id": "PPO.init", "env.backend": "jax", "seed": _seed_of(key)}
        settings = engine_config(config or PPOConfig(), settings)
        description = described(settings.env, _observations(obs_shape), _actions(n_actions), None)
        net = check_networks(settings, description)
        params = {
            name: jnp.asarray(x.reshape(net.shapes()[name])) for name, x in initial_parameters(settings, net).items()
        }
        zeros = jax.tree.map(jnp.zeros_like, params)
        return PPOTrainState(
            params,
            optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.copy, zeros)),
            jnp.zeros((), jnp.int32),
            nothing_seen(net.observation.vector_size) if settings.normalize.observations else None,
            nothing_seen(1) if settings.normalize.returns else None,
            net,
        )

    @staticmethod
    def apply(state: PPOTrainState, observations: Any) -> tuple[Array, Array]:
        """Applies the networks to observations as the environment returns them: one, or ``[…, *obs_shape]``.

        Returns:
            Logits or means, float32 ``[…, outputs]``, and values ``[…]``.
        """
        rows, lead = _rows(state, observations)
        output, values = nets.actor_critic(state.net, state.params, rows)
        assert values is not None
        return output.reshape(*lead, -1), values.reshape(lead)

    @staticmethod
    def act(state: PPOTrainState, observations: Any, key: Array | None = None) -> Array:
        """Returns actions ``[…]`` or ``[…, *shape]`` for the environment: sampled, or the likeliest without ``key``."""
        if key is not None and not hasattr(key, "dtype"):
            raise SettingError(
                f"key: {type(key).__name__} was given; give one of jax.random.key, or none for the likeliest actions"
            )
        rows, lead = _rows(state, observations)
        net = state.net
        output = nets.actor(net, state.params, rows)
        if key is None:
            actions = distributions.mode(net, output)
        else:
            noise = distributions.action_noise(net, key, (len(rows), net.action.outputs))
            actions = distributions.sample(net, state.params, output, noise)
        actions = native_actions(net, distributions.squash(net, actions))
        return actions.reshape(*lead, *actions.shape[1:])


def _seed_of(key: Array) -> int:
    """Returns the seed that ``jax.random.key`` made a key from; for a key that was split off, all its words."""
    if not hasattr(key, "dtype"):
        raise SettingError(f"PPO.init: key: {type(key).__name__} was given; give one of jax.random.key")
    words = jax.random.key_data(key) if is_key(key) else key
    try:
        known = np.asarray(words)
    except jax.errors.TracerArrayConversionError:
        raise ValueError("PPO.init: key is traced; call it outside of jax.jit") from None
    return sum(int(word) << (32 * place) for place, word in enumerate(reversed(known.ravel())))


def _observations(shape: Any) -> gymnasium.Space:
    if isinstance(shape, int | np.integer | tuple | list):
        return gymnasium.spaces.Box(-np.inf, np.inf, _shape(shape), np.float32)
    return space_of(shape)


def _shape(given: Any) -> tuple[int, ...]:
    """Returns an observation's shape, given as a tuple or a whole number."""
    try:
        return (int(given),) if isinstance(given, int | np.integer) else tuple(int(n) for n in given)
    except (TypeError, ValueError):
        raise ValueError(f"obs_shape: {given!r} must be a whole number or a tuple of them, such as (4,)") from None


def _actions(count: Any) -> gymnasium.Space:
    return gymnasium.spaces.Discrete(int(count)) if isinstance(count, int | np.integer) else space_of(count)


def _rows(state: PPOTrainState, observations: Any) -> tuple[Array, tuple[int, ...]]:
    """Returns rows ``[n, width]`` as the networks see them, and the axes before an observation's own."""
    if not isinstance(state, PPOTrainState):
        raise SettingError(f"state: {type(state).__name__} was given; give a PPOTrainState")
    layout = state.net.observation
    first = next(leaf for leaf in layout.leaves if not leaf.apart)
    shape = np.shape(descend(observations, first.name))
    lead = shape[: len(shape) - len(first.shape)]
    if shape[len(lead) :] != first.shape:
        what = f"{first.name}: " if first.name else ""
        raise ValueError(f"observations: {what}shape {shape} doesn't end in {first.shape}, the shape of one")
    count = math.prod(lead)
    flat = jax.tree.map(lambda x: jnp.asarray(x).reshape(count, *np.shape(x)[len(lead) :]), observations)
    rows = encode_rows(layout, flat)
    if state.observations is None:
        return rows, lead
    seen = state.observations
    scale = Scale(seen.mean, 1.0 / jnp.sqrt(jnp.where(seen.count > 0, seen.var, 1.0) + EPSILON))
    return normalized(layout, rows, scale, CLIP_OBSERVATIONS), lead


def check_state(given: Any) -> None:
    """Raises a one-line ``ValueError`` unless ``given`` is a train state to go on from, or None."""
    if given is None:
        return
    if not isinstance(given, PPOTrainState):
        raise ValueError(
            f"train_state: {type(given).__name__} was given; give the PPOTrainState of PPO.init, of a training or of "
            "load_checkpoint"
        )
    if np.shape(given.step):
        raise ValueError(
            f"train_state: its step is of shape {np.shape(given.step)}, as replicate makes it; give "
            "lockstep.jax.unreplicate(train_state)"
        )


def nothing_seen(size: int) -> Normalizer:
    """Returns the statistics of no samples."""
    return Normalizer(jnp.zeros(()), jnp.zeros(size), jnp.zeros(size))


def check_spaces(config: Config, net: PolicyNet, obs_shape: Any, n_actions: int | None) -> None:
    """Compares the shape and number of actions that a user gave with the environment's.

    Raises:
        ValueError: they contradict one another; one line with both.
    """
    name, leaves = config.env.id, net.observation.leaves
    if obs_shape is not None:
        said = _shape(obs_shape)
        shapes = [leaf.shape for leaf in leaves]
        if shapes != [said]:
            found = shapes[0] if len(shapes) == 1 else f"a structure of {', '.join(map(str, shapes))}"
            raise ValueError(f"obs_shape: {said} was given and an observation of {name} is {found}; leave it out")
    if n_actions is not None and n_actions != net.action.outputs:
        what = "actions" if net.action.kind == "discrete" else f"{net.action.kind.replace('_', '-')} action outputs"
        raise ValueError(f"n_actions: {n_actions!r} was given and {name} has {net.action.outputs} {what}; leave it out")
