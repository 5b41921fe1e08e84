"""The training state as one pytree on the mesh, and the names of its arrays in a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from lockstep.config.run import Config
from lockstep.core.shards import keyed_seed
from lockstep.core.spaces import ActionLayout, ObservationLayout
from lockstep.envs.description import EnvDescription
from lockstep.jax_engine.distributed.mesh import REPLICATED, SHARDED, Mesh, Pytree, Specs, named_sharding
from lockstep.jax_engine.distributed.placement import gathered, place
from lockstep.jax_engine.nets.custom import load_custom
from lockstep.jax_engine.nets.custom_trial import check_function, check_made_alike
from lockstep.jax_engine.nets.nets import PolicyNet
from lockstep.jax_engine.nets.parameters import Held, ParameterLayout
from lockstep.jax_engine.shards.normalizers import Moments, empty_moments
from lockstep.networks.checks import check_initial_std, check_normalizable
from lockstep.networks.initial import initial_parameters
from lockstep.networks.spec import net_options
from lockstep.runs.checkpoint import NORMALIZERS, OPTIMIZER, POLICY, below, check_names_and_shapes

LARGE_BETA = 0.9999
"""The largest decay rate of Adam whose bias corrections are optax's, which has them right to four digits."""
MOMENTS = {"exp_avg": "mu", "exp_avg_sq": "nu"}
"""Names of Adam's moments in a checkpoint (PyTorch's), and in optax."""


class EnvCarry(NamedTuple):
    """The state of the environments between steps, arrays ``[num_shards, rows, …]``.

    Attributes:
        state: the environment's own, a pytree.
        rows: observation rows ``[…, width]`` as the environment gives them.
        returns: undiscounted return so far, float32; ``lengths`` are the steps so far, int32.
        recurrent_state: of a recurrent policy, float32 ``[…, state_size]``.
        discounted: discounted return so far, float32.
    """

    state: Pytree
    rows: Array
    returns: Array
    lengths: Array
    recurrent_state: Array
    discounted: Array


class TrainState(NamedTuple):
    """The whole training state; all but ``envs`` is the same on every device (with FSDP, each holds slices).

    Attributes:
        parameters: as a :data:`~lockstep.jax_engine.nets.parameters.ParameterLayout` holds them.
        optimizer: Adam's step count, and its moments, which are held as parameters are.
        learning_rate: float32 ``[]``, as the adaptive schedule left it.
        observation_normalizer: moments of observations, or None.
        return_normalizer: moments of discounted returns, or None.
        reference: parameters of GRPO's reference policy, or None.
        envs: environments inside the program; None if they are stepped on the host.
    """

    parameters: Held
    optimizer: optax.ScaleByAdamState
    learning_rate: Array
    observation_normalizer: Moments | None = None
    return_normalizer: Moments | None = None
    reference: Held = None
    envs: EnvCarry | None = None


def adam(config: Config) -> optax.GradientTransformation:
    """Makes PyTorch's Adam without the step size (Kingma & Ba 2015; epsilon is added outside the root).

    optax corrects the bias by powers of float32. Those of betas beyond :data:`LARGE_BETA` are too near to 1, and are
    computed as PyTorch does, to float32's precision.
    """
    first, second = config.ppo.adam_betas
    rule = optax.scale_by_adam(first, second, config.ppo.adam_eps)
    if max(first, second) <= LARGE_BETA:
        return rule

    def update(gradient: Held, state: Any, params: Any = None) -> tuple[Held, Any]:
        after: Any = rule.update(gradient, state, params)[1]
        one, two = (_bias_correction(beta, after.count) for beta in (first, second))
        direction = jax.tree.map(lambda m, v: m / one / (jnp.sqrt(v / two) + config.ppo.adam_eps), after.mu, after.nu)
        return direction, after

    return optax.GradientTransformation(rule.init, update)  # pyright: ignore[reportArgumentType]


def _bias_correction(beta: float, count: Array) -> Array:
    """Computes ``1 - beta**count``, float32 ``[]``, with the logarithm in float64."""
    return -jnp.expm1(count.astype(jnp.float32) * math.log(beta)) if beta else jnp.ones((), jnp.float32)


def make_net(
    config: Config, observation: ObservationLayout, action: ActionLayout, custom_class: type | None = None
) -> PolicyNet:
    """Makes the networks that a config asks for.

    ``custom_class`` is the class of ``network.custom`` if the caller has it; None: it is imported by name.

    Raises:
        ValueError: if they don't fit the spaces; the message is one line.
    """
    network = config.network
    net = PolicyNet(**net_options(config, observation, action), remat=network.remat)
    if network.custom is None:
        return net
    seed = keyed_seed(config.seed, "init/custom")
    custom = load_custom(network.custom, network.custom_kwargs, net, seed, custom_class)
    return replace(net, custom=custom, core=None, shared=False)


def check_custom(config: Config, net: PolicyNet) -> None:
    """Checks that a user's own network, if the config has one, can be trained, and is the same each time it is made.

    Raises:
        ValueError: it can't, or it isn't; the message is one line.
    """
    if net.custom is not None:
        name = f"network.custom: {config.network.custom}"
        check_function(name, net.custom, net)
        check_made_alike(name, net.custom, make_net(config, net.observation, net.action).custom, net)


def check_networks(config: Config, description: EnvDescription) -> PolicyNet:
    """Makes the networks of a config, and checks them.

    Raises:
        ValueError: if they or the normalisers don't fit the spaces, or they can't be trained; the message is one line.
    """
    net = make_net(config, description.observation, description.action)
    check_custom(config, net)
    check_initial_std(config, net)
    check_normalizable(config, net, description.id)
    return net


def init_state(config: Config, net: PolicyNet, layout: ParameterLayout) -> TrainState:
    """Makes the state before the first iteration, on the host, without environments."""
    parameters = layout.of_arrays(initial_parameters(config, net))
    return state_of(config, net, parameters, jax.tree.map(np.zeros_like, parameters))


def state_of(config: Config, net: PolicyNet, parameters: Held, zeros: Held) -> TrainState:
    """Makes the state before the first iteration from parameters and zero moments, both as a layout holds them."""
    return TrainState(
        parameters=parameters,
        optimizer=optax.ScaleByAdamState(np.zeros((), np.int32), zeros, zeros),
        learning_rate=np.float32(config.ppo.learning_rate),  # pyright: ignore[reportArgumentType]
        observation_normalizer=empty_moments(net.observation.vector_size) if config.normalize.observations else None,
        return_normalizer=empty_moments(1) if config.normalize.returns else None,
    )


def state_specs(state: TrainState, parameters: Specs) -> TrainState:
    """Returns the partition spec of every leaf of a state; ``parameters`` are the specs of the parameters."""
    return TrainState(
        parameters=parameters,
        optimizer=optax.ScaleByAdamState(REPLICATED, parameters, parameters),  # pyright: ignore[reportArgumentType]
        learning_rate=REPLICATED,  # pyright: ignore[reportArgumentType]
        observation_normalizer=jax.tree.map(lambda _: REPLICATED, state.observation_normalizer),
        return_normalizer=jax.tree.map(lambda _: REPLICATED, state.return_normalizer),
        reference=None if state.reference is None else parameters,
        envs=jax.tree.map(lambda _: SHARDED, state.envs),
    )


def place_state(state: TrainState, specs: TrainState, mesh: Mesh) -> TrainState:
    """Places a state of host arrays, the same in every process, on the mesh."""
    with jax.enable_x64(True):
        return jax.tree.map(lambda x, spec: place(x, named_sharding(mesh, spec)), state, specs)


def state_arrays(state: TrainState, layout: ParameterLayout) -> dict[str, np.ndarray]:
    """Copies every array of the training state to the host, by name.

    Checkpoints, fingerprints and comparisons use these arrays. With FSDP this is a collective: every process must call
    it.
    """
    out = policy_arrays(state, layout)
    normalizers = {name: out.pop(name) for name in list(out) if name.startswith(NORMALIZERS)}
    for moment, attribute in MOMENTS.items():
        named = layout.on_host(getattr(state.optimizer, attribute))
        out |= {f"{OPTIMIZER}{moment}/{name}": array for name, array in named.items()}
    out[OPTIMIZER + "step"] = gathered(state.optimizer.count).astype(np.float32).reshape(1)
    return out | normalizers


def policy_arrays(state: TrainState, layout: ParameterLayout) -> dict[str, np.ndarray]:
    """Copies parameters and normalisers to the host, by their names in :func:`state_arrays`."""
    arrays = {POLICY + name: array for name, array in layout.on_host(state.parameters).items()}
    found = {name: gathered(x) for name, x in normalizer_moments(state).items()}
    return arrays | {name: x.reshape(1) if x.ndim == 0 else x for name, x in found.items()}


def normalizer_moments(state: TrainState) -> dict[str, Array]:
    """Returns the arrays of a state's normalisers by their names in a checkpoint."""
    normalizers = {"observations": state.observation_normalizer, "returns": state.return_normalizer}
    return {
        f"{NORMALIZERS}{name}.{part}": x
        for name, moments in normalizers.items()
        if moments is not None
        for part, x in moments._asdict().items()
    }


def load_state_arrays(
    state: TrainState, arrays: Mapping[str, np.ndarray], layout: ParameterLayout, optimizer_steps: int = 0
) -> TrainState:
    """Loads arrays by name into a state of host arrays; the reverse of :func:`state_arrays`.

    ``optimizer_steps`` are those that the checkpoint counts. Adam's step is float32 in the arrays, as in PyTorch, and
    doesn't count single steps from 2^24 on.

    Raises:
        ValueError: if names or shapes are not those of this config.
    """
    check_names_and_shapes(state_arrays(state, layout), arrays)
    step = _counted(arrays[OPTIMIZER + "step"][0], optimizer_steps)
    held = {ours: layout.of_arrays(below(arrays, f"{OPTIMIZER}{name}/")) for name, ours in MOMENTS.items()}
    return state._replace(
        parameters=layout.of_arrays(below(arrays, POLICY)),
        optimizer=optax.ScaleByAdamState(step, **held),
        observation_normalizer=_moments(arrays, "observations") if state.observation_normalizer is not None else None,
        return_normalizer=_moments(arrays, "returns") if state.return_normalizer is not None else None,
    )


def _counted(step: np.float32, optimizer_steps: int) -> np.ndarray:
    """Returns Adam's step, int32 ``[]``, at most the largest int32: ``optimizer_steps`` if it rounds to ``step``."""
    exact = optimizer_steps if np.float32(optimizer_steps) == step else int(step)
    return np.array(min(exact, np.iinfo(np.int32).max), np.int32)


def _moments(arrays: Mapping[str, np.ndarray], name: str) -> Moments:
    parts = below(arrays, f"{NORMALIZERS}{name}.")
    return Moments(parts["count"].reshape(()), parts["mean"], parts["m2"])  # pyright: ignore[reportArgumentType]
