"""Computes a trained policy as a function of NumPy arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import Array
from jax import numpy as jnp

from lockstep.config.run import Config
from lockstep.core.spaces import layouts_from_json
from lockstep.jax_engine.distributed.active_mesh import without_callers_context
from lockstep.jax_engine.nets import distributions, nets
from lockstep.jax_engine.setup.set_up import COMPILER_OPTIONS
from lockstep.jax_engine.state import make_net
from lockstep.networks.checks import stored_parameters
from lockstep.runs.checkpoint import POLICY

_SETTINGS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "jax_enable_x64": (False, jax.enable_x64),
    "jax_numpy_rank_promotion": ("allow", jax.numpy_rank_promotion),
    "jax_numpy_dtype_promotion": ("standard", jax.numpy_dtype_promotion),
    "jax_default_matmul_precision": (None, jax.default_matmul_precision),
    "jax_disable_jit": (False, jax.disable_jit),
}
"""JAX's settings that decide a policy's numbers, as a run has them on a CPU, and what sets each for a block."""


@contextlib.contextmanager
def as_in_training(device: Any) -> Iterator[None]:
    """Makes JAX compute on ``device`` with a run's settings of numbers; then restores the caller's, meshes too.

    Of the settings only those are set that differ, because it happens at every step of an evaluation.
    """
    with without_callers_context(), jax.default_device(device), contextlib.ExitStack() as stack:
        for name, (value, context) in _SETTINGS.items():
            if getattr(jax.config, name) != value:
                stack.enter_context(context(value))
        yield


class PolicyFunction:
    """Computes a checkpoint's policy on the CPU; compiles it for each number of rows that it is called with.

    Args:
        config: the run's.
        environment: the description that the checkpoint holds.
        arrays: ``policy/…`` by name.
        custom_class: class of a custom network if the caller has it; None: it is imported by name.

    Raises:
        ValueError: the arrays have other shapes than the config's networks; one line.

    Attributes:
        observation: layout of observations in rows; ``action`` is that of actions.
        state_size: length of a recurrent policy's state, else 0.
    """

    def __init__(
        self,
        config: Config,
        environment: dict[str, Any],
        arrays: dict[str, np.ndarray],
        custom_class: type | None = None,
    ) -> None:
        self.observation, self.action = layouts_from_json(environment["observation"], environment["action"])
        self._device = _cpu()
        with as_in_training(self._device):
            self._net = make_net(config, self.observation, self.action, custom_class)
            parameters = stored_parameters(arrays, POLICY, self._net.shapes())
            self._weights = jax.device_put(parameters, self._device)
        self.state_size = self._net.state_size if self._net.core else 0
        self._compile()

    def _compile(self) -> None:
        self._act = jax.jit(self._actions, compiler_options=COMPILER_OPTIONS)
        self._evaluate = jax.jit(self._outputs, compiler_options=COMPILER_OPTIONS)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes to pickle, without the device and the compiled functions."""
        kept = {name: x for name, x in vars(self).items() if name not in ("_device", "_act", "_evaluate")}
        return kept | {"_weights": {name: np.asarray(x) for name, x in self._weights.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._device = _cpu()
        with as_in_training(self._device):
            self._weights = jax.device_put(self._weights, self._device)
        self._compile()

    def __call__(
        self, observations: np.ndarray, noise: np.ndarray | None, recurrent_state: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns actions for normalised observation rows ``[rows, width]``, and the recurrent state after them.

        ``noise`` is float32 ``[rows, action outputs]``, Gumbel or normal; None: the most likely actions. The
        recurrent state is float32 ``[rows, state_size]``. Actions are rows as
        :class:`lockstep.envs.host_envs.Buffers` takes them.
        """
        with as_in_training(self._device):
            actions, after = self._act(self._weights, observations, noise, recurrent_state)
            return np.array(actions, self.action.row_dtype), np.array(after)

    def outputs(
        self, observations: np.ndarray, recurrent_state: np.ndarray, actions: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Computes what actor and critic output for normalised rows ``[rows, width]``.

        ``recurrent_state`` is the state before them ``[rows, size]``.

        Returns:
            ``logits`` ``[rows, choices]`` or ``mean`` and ``std`` ``[rows, components]``; ``value`` ``[rows]`` if there
            is a critic; ``next_state`` ``[rows, size]`` of a recurrent policy; ``log_prob`` ``[rows]`` of ``actions``
            if they are given, those of a squashed Gaussian before the tanh.
        """
        with as_in_training(self._device):
            out = self._evaluate(self._weights, observations, recurrent_state, actions)
            return {name: np.array(x) for name, x in out.items()}

    def _outputs(
        self, weights: dict[str, Array], observations: Array, recurrent_state: Array, actions: Array | None
    ) -> dict[str, Array]:
        net, out = self._net, {}
        if net.core is None:
            output, values = nets.actor_critic(net, weights, observations)
        else:
            none = jnp.zeros((1, len(observations)))
            unrolled, unrolled_values, carries = nets.unroll(net, weights, observations[None], recurrent_state, none)
            output, values = unrolled[0], None if unrolled_values is None else unrolled_values[0]
            out["next_state"] = carries[0]
        if net.discrete:
            out["logits"] = output
        else:
            mean, log_std = distributions.mean_and_log_std(net, weights, output)
            out["mean"], out["std"] = mean, jnp.broadcast_to(jnp.exp(log_std), mean.shape)
        if values is not None:
            out["value"] = values
        if actions is not None:
            out["log_prob"] = distributions.log_prob_and_entropy(net, weights, output, actions)[0]
        return out

    def _actions(
        self, weights: dict[str, Array], observations: Array, noise: Array | None, recurrent_state: Array
    ) -> tuple[Array, Array]:
        net = self._net
        if net.core is None:
            output = nets.actor(net, weights, observations)
        else:
            none = jnp.zeros((1, len(observations)))
            unrolled, _, carries = nets.unroll(net, weights, observations[None], recurrent_state, none, actor_only=True)
            output, recurrent_state = unrolled[0], carries[0]
        if noise is None:
            actions = distributions.mode(net, output)
        else:
            actions = distributions.sample(net, weights, output, noise)
        return distributions.squash(net, actions), recurrent_state


def _cpu() -> Any:
    """Returns JAX's CPU device; raises a one-line ``ValueError`` if JAX was told to do without it."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except (RuntimeError, AssertionError):  # the latter if none of the platforms it was told to use is there
        given = jax.config.values["jax_platforms"]
        raise ValueError(
            f"engine: jax computes a policy on the CPU, which JAX doesn't have with JAX_PLATFORMS={given}; "
            f"set JAX_PLATFORMS={given},cpu"
        ) from None
