"""Defines a training task by hooks: environment, reward terms, networks, initial state, gradient synchronisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from lockstep.config.on_off import switch
from lockstep.core.fingerprint import compare_ranks
from lockstep.core.user_code.errors import users_error
from lockstep.jax.config import PPOConfig, RunnerConfig, in_users_names, minibatches, whole_number
from lockstep.jax.customs import Customs
from lockstep.jax.environments import check_environment
from lockstep.jax.history import PPOMetricsHistory
from lockstep.jax.metrics import Metrics
from lockstep.jax.ppo import PPOTrainState
from lockstep.jax.report import DeviceMetrics, DistributedSetup, device_metrics, distributed_setup
from lockstep.jax.reward_terms import RewardTermsWrapper, Terms
from lockstep.jax.training import Training
from lockstep.jax_engine.distributed.active_mesh import without_callers_context
from lockstep.jax_engine.distributed.mesh import REPLICATED, over_mesh
from lockstep.jax_engine.distributed.placement import fetch
from lockstep.jax_engine.distributed.reductions import FSDP_AXIS, device_index
from lockstep.jax_engine.program.calls import Pending
from lockstep.jax_engine.program.fingerprints import Copies
from lockstep.jax_engine.program.iterations import Iteration

Gradients = dict[str, Array]
MADE = ("_training", "_environment", "_model")
"""What a task makes when it is first needed: the compiled program, and in pmap style its environment and its model."""


class Task:
    """A training task; subclasses override its hooks, of which only :meth:`environment` is required.

    The engine trains it in the same way as everything else: one compiled program over a mesh.

    Args:
        ppo_config: settings of the algorithm; ``batch_size`` or ``num_batches``, if given, replace ``n_minibatches``.
        runner_config: length and devices of the run.
        axis_name: name of the mesh's axis of devices, for collectives in :meth:`sync_gradients`.
        sync_period: optimiser steps that a device takes alone before parameters *and moments* are averaged; 1:
            gradients are reduced at every step (default: the runner's).
        batch_size: size of a device's minibatch in environments: minibatches are drawn from all samples of the device,
            ``batch_size * n_steps`` each.
        num_batches: minibatches of a device; ``batch_size * num_batches`` is the runner's ``num_envs``.
        log_devices_every: updates between lines about every device: environments, steps/s, memory, return; 0: no lines.
            ``device_log`` keeps what they say.

    Attributes:
        device_log: see ``log_devices_every``.

    Raises:
        ValueError: settings contradict one another; one line.
    """

    def __init__(
        self,
        ppo_config: PPOConfig,
        runner_config: RunnerConfig,
        *,
        axis_name: str = "devices",
        sync_period: int | None = None,
        batch_size: int | None = None,
        num_batches: int | None = None,
        log_devices_every: int = 0,
    ) -> None:
        if not axis_name.isidentifier() or axis_name == FSDP_AXIS:
            raise ValueError(f"axis_name: {axis_name!r} must be an identifier, and {FSDP_AXIS!r} is taken")
        log_devices_every = whole_number("log_devices_every", log_devices_every, 0)
        batches = minibatches(batch_size, num_batches, runner_config.num_envs, "a device")
        self.ppo_config = ppo_config if batches is None else replace(ppo_config, n_minibatches=batches)
        self.runner_config = runner_config if sync_period is None else replace(runner_config, sync_period=sync_period)
        self.axis_name, self.log_devices_every = axis_name, log_devices_every
        self.device_log: list[DeviceMetrics] = []
        if self._synchronizes:
            _check_synchronization(self.runner_config)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what is made when it is needed, for pickle and copies; a compiled program belongs to a process."""
        return {name: value for name, value in self.__dict__.items() if name not in MADE}

    # --- hooks ------------------------------------------------------------------------------------------------------

    def environment(self) -> tuple[Any, Any]:
        """Returns the environment and its parameters (or None), see :func:`lockstep.jax.train_ppo_multigpu`."""
        raise TypeError(f"{type(self).__name__} has no environment() -> (env, env_params)")

    def reward_terms(self) -> Terms:
        """Returns weights and functions of a :class:`~lockstep.jax.reward_terms.Transition` by name.

        The reward is their weighted sum. It replaces the environment's own reward, which a term may use. Each weighted
        term is logged as ``reward/<name>``, a mean over steps, so that they add up. Empty: the environment's own
        reward.
        """
        return {}

    def policy_network(self, observations: Any, num_outputs: int, key: Array) -> Any:
        """Returns an ``equinox.Module``, as ``network.custom`` takes it; None: the networks of ``ppo_config``.

        Args:
            observations: a batch of two, for shapes.
            num_outputs: number of logits, or of components of a continuous action.
            key: random key for the module's parameters.

        Returns:
            A module that is called with observations ``[n, …]`` and a keyword ``key`` (for dropout, or None), and
            returns the actor's output ``[n, num_outputs]`` and values ``[n]``.
        """
        return None

    def initial_state(self, state: PPOTrainState) -> PPOTrainState:
        """Returns the state that training begins with: the fresh ``state``, or one with other parameters."""
        return state

    def sync_gradients(self, grads: Gradients, axis_name: str) -> Gradients:
        """Returns the gradients of all devices' samples from those of this device's, inside the compiled program.

        If it isn't overridden, it isn't called: the engine reduces gradients itself, exactly. An override is called at
        every optimiser step, on every device, and needs ``reduction`` fast, which is then the default. It must return
        the same on every device; the end of the first call raises an error if it doesn't.

        Args:
            grads: gradients, by name, of the mean loss over this device's samples of the minibatch: ``lax.pmean`` over
                devices is the gradient of the global minibatch. (Devices own equally many samples, unless a given
                ``num_shards`` isn't a multiple of the devices; a device with more shards has a larger gradient then.)
            axis_name: name of the axis of devices.

        Returns:
            Arrays of the same names, shapes and dtypes; clipping by norm and Adam follow.
        """
        return lax.pmean(grads, axis_name)

    def on_update(self, update: int, metrics: Metrics) -> None:
        """Receives an update's metrics (a row of the history) on the host; ``update`` counts from 1."""

    # --- what it does -----------------------------------------------------------------------------------------------

    def train(self) -> tuple[PPOTrainState, PPOMetricsHistory]:
        """Trains the task; returns and raises the same as :func:`lockstep.jax.train_ppo_multigpu`."""
        self.device_log = []
        return self._training.train(self._first_state(), self._look)

    @without_callers_context()
    def verify_distributed_setup(self, verbose: bool = True) -> DistributedSetup:
        """Takes one update, and reports (prints, if ``verbose``) the devices and whether their copies are equal.

        Raises:
            DesyncError: copies of the training state differ between devices.
            ValueError: settings or hooks don't fit; one line.
        """
        prints, training = switch("verbose", verbose), self._training
        training.begin(self._first_state())
        with training.rounding():
            training.device_runner.fetch(training.device_runner.dispatch(0, 1, 0))
        names, rows = Copies.of(training.device_runner.state, training.program.layout).fingerprints()
        report = distributed_setup(training.program, rows, self._gradient_error())
        if prints:
            print(report)
        compare_ranks(names, rows, "after an update")
        return report

    # --- how ----------------------------------------------------------------------------------------------------------

    def _customs(self) -> Customs:
        """Returns what a task customises beside networks and gradients."""
        return Customs(axis_name=self.axis_name)

    def _in_users_names(self, message: str) -> str:
        """Translates a message about a config into names of the settings that were given."""
        return in_users_names(message)

    def _overrides(self, hook: str) -> bool:
        own = getattr(self, hook)
        return getattr(own, "__func__", own) is not getattr(Task, hook)

    @property
    def _synchronizes(self) -> bool:
        return self._overrides("sync_gradients")

    @cached_property
    def _training(self) -> Training:
        given = self.environment()
        if not (isinstance(given, tuple) and len(given) == 2):
            raise ValueError(f"environment: {type(given).__name__} was returned; return (env, env_params)")
        env, params = given
        check_environment(env, "environment", "returned")
        terms = self.reward_terms()
        wrapped = RewardTermsWrapper(env, terms) if terms else env
        policy = self.policy_network if self._overrides("policy_network") else None
        customs = replace(
            self._customs(), policy=policy, synchronize=self._synchronized if self._synchronizes else None
        )
        try:
            return Training(wrapped, params, self.ppo_config, self.runner_config, customs)
        except ValueError as error:
            raise ValueError(self._in_users_names(str(error))) from users_error(error)

    def _first_state(self) -> PPOTrainState | None:
        """Returns what :meth:`initial_state` makes of a fresh state; None if it isn't overridden."""
        return self.initial_state(self._training.fresh()) if self._overrides("initial_state") else None

    def _synchronized(self, local: Mapping[str, Array]) -> Gradients:
        """Calls the hook on the engine's sum over samples, scaled to a mean over this device's samples."""
        devices = lax.axis_size(self.axis_name)
        found = self.sync_gradients({name: g * devices for name, g in local.items()}, self.axis_name)
        theirs = {name: jnp.shape(x) for name, x in found.items()} if isinstance(found, Mapping) else type(found)
        mine = {name: g.shape for name, g in local.items()}
        if theirs != mine:
            raise ValueError("sync_gradients: it must return arrays of the names and shapes that it was given")
        return dict(found)

    def _gradient_error(self) -> float:
        if not self._synchronizes:
            return 0.0
        program = self._training.program
        shapes, devices = program.layout.shapes, program.mesh.size

        def known(index: Any) -> Gradients:
            return {
                name: jnp.sin(jnp.arange(int(np.prod(shape)), dtype=jnp.float32).reshape(shape) + 7.0 * index)
                for name, shape in shapes.items()
            }

        def of_a_device() -> Gradients:
            return self.sync_gradients(known(device_index()), self.axis_name)

        found = jax.jit(over_mesh(of_a_device, program.mesh, (), REPLICATED))()
        means = jax.tree.map(lambda *each: np.mean([np.asarray(x) for x in each], 0), *map(known, range(devices)))
        worst = max(float(np.abs(fetch(found[name]) - means[name]).max()) for name in shapes)
        return worst / max(float(np.abs(x).max()) for x in means.values())

    def _say_devices(self, found: Sequence[DeviceMetrics]) -> None:
        for line in found:
            print(line, flush=True)

    def _look(self, iteration: Iteration, call: Pending, metrics: Metrics) -> None:
        every = self.log_devices_every
        if every and (iteration.number + 1) % every == 0:
            found = device_metrics(self._training.program, iteration, call)
            self.device_log += found
            self._say_devices(found)
        self.on_update(iteration.number + 1, metrics)


def _check_synchronization(runner: RunnerConfig) -> None:
    if runner.reduction == "exact":
        raise ValueError("sync_gradients: an override is possible with reduction fast only; leave reduction exact out")
    if runner.sync_period > 1:
        raise ValueError(
            f"sync_period: {runner.sync_period} averages parameters and moments and never calls sync_gradients; leave "
            "one of them out"
        )
    if runner.fsdp_devices > 1:
        raise ValueError(
            f"fsdp_devices: {runner.fsdp_devices} cuts gradients over devices, which sync_gradients would get whole; "
            "leave one of them out"
        )
