"""Defines a task in the style of pmap task libraries: one config object, hooks, numbers of the whole run, a logger."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import logging
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
from jax import Array

from lockstep.config.on_off import switch
from lockstep.core.shards import keyed_seed
from lockstep.core.user_code.errors import users_error
from lockstep.jax.config import RunnerConfig
from lockstep.jax.customs import Customs
from lockstep.jax.environments import check_environment
from lockstep.jax.history import PPOMetricsHistory
from lockstep.jax.metrics import Metrics
from lockstep.jax.pmap.config import DistributedPPOConfig as DistributedPPOConfig
from lockstep.jax.pmap.config import in_configs_names, settings_of
from lockstep.jax.pmap.rewards import terms_of
from lockstep.jax.pmap.rollouts import RolloutModel, RolloutState, Trajectory, plain_rollout, users_rollout
from lockstep.jax.ppo import PPOTrainState
from lockstep.jax.report import DeviceMetrics, DistributedSetup
from lockstep.jax.reward_terms import Terms
from lockstep.jax.settings import SettingError
from lockstep.jax.task import Task
from lockstep.jax_engine.distributed.active_mesh import without_callers_context
from lockstep.jax_engine.distributed.mesh import get_num_devices
from lockstep.jax_engine.envs.default_params import default_params
from lockstep.jax_engine.setup.set_up import prepare_jax
from lockstep.jax_engine.shards.keys import seed_key

logger = logging.getLogger("lockstep.jax")

ConfigT = TypeVar("ConfigT", bound=DistributedPPOConfig)

HOOKS = {"policy_network": "get_initial_model", "initial_state": "get_initial_model"}
"""Maps hooks of :class:`Task` to the hooks that replace them here."""


class DistributedPPOTask(Task, Generic[ConfigT]):
    """A training task with one config; subclasses override its hooks, and must override :meth:`get_environment`.

    The engine trains it in the same way as everything else: hooks run inside one compiled program over a mesh whose
    axis of devices is ``config.pmap_axis_name``. :meth:`sync_gradients`, :meth:`on_update` and the rest are those of
    :class:`Task`.

    Attributes:
        config: the config as given; a user's subclass may add fields to it. Its settings are fixed when the task is
            made: if one has changed since, training raises an error.
        num_devices: number of devices of the run, with ``num_envs_per_device`` environments on each.

    Raises:
        ValueError: settings contradict one another; one line.
    """

    def __init__(self, config: ConfigT) -> None:
        self.config: ConfigT = config
        if not isinstance(config, DistributedPPOConfig):
            raise SettingError(f"config: {type(config).__name__} was given; give a DistributedPPOConfig")
        prepare_jax()
        self.num_devices = get_num_devices(config.num_devices)
        ppo, runner = settings_of(config, self.num_devices)
        self.num_envs_per_device = runner.num_envs
        every = config.log_devices_every
        try:
            super().__init__(ppo, runner, axis_name=config.pmap_axis_name, log_devices_every=every)
        except ValueError as error:
            raise ValueError(in_configs_names(str(error))) from None
        self._settled = _settings(config)
        self._tell(runner)

    def _tell(self, runner: RunnerConfig) -> None:
        ppo, period = self.ppo_config, runner.sync_period
        steps = ppo.n_epochs * ppo.n_minibatches
        if period > steps:
            logger.warning(
                "grad_sync_period: %d optimiser steps are longer than an update of %d, after each of which devices are "
                "averaged anyway", period, steps,
            )  # fmt: skip
        if self.num_devices == 1:
            logger.warning("only 1 device: training runs on it alone")
        logger.debug("ppo_config: %s", ppo)
        logger.debug("runner_config: %s", runner)
        for number in range(self.num_devices):
            first = number * runner.num_envs
            logger.debug("device %d: environments %d to %d", number, first, first + runner.num_envs - 1)

    # --- hooks --------------------------------------------------------------------------------------------------------

    def get_environment(self) -> Any:
        """Returns one environment of the functional API, or it and its parameters."""
        raise ValueError(f"{type(self).__name__} has no get_environment() -> env, or (env, env_params)")

    def get_rewards(self, env: Any) -> Any:
        """Returns rewards of one environment: a list, or a dict by name of rewards or ``(weight, function)``.

        A reward is a :class:`Reward`, a function, or an object with ``get_reward``. None, or an empty list: the
        environment's own reward. An override may leave out the argument.
        """
        return None

    def get_initial_model(self, rng: Array) -> Any:
        """Returns the model: an ``equinox.Module``, or a train state to begin with; None: the networks of the config.

        A module is called with observations ``[n, …]`` and a keyword ``key``, and returns outputs ``[n, k]`` and values
        ``[n]``. Or it has two parts, ``actor`` and ``critic``, called with one observation each.
        """
        return None

    def get_initial_env_state(self, rng: Array) -> Any:
        """Returns what first episodes begin with: ``(obs, state)`` of all ``num_envs``, as from a vmapped reset."""
        return None

    def rollout(self, model: RolloutModel, env_state: RolloutState, rng: Array) -> tuple[Trajectory, RolloutState]:
        """Steps ``n`` environments ``num_steps`` times, inside the compiled program, shard by shard.

        If it isn't overridden, the engine does this with draws of its own. An override may call this method, and change
        the trajectory that is learned from. If it takes four arguments ``(model, env_state, model_carry, rng)``, the
        third is None; a third result is dropped.
        """
        return plain_rollout(model, env_state, rng, self.num_steps)

    # --- what it does -------------------------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """Number of steps of a rollout."""
        return self.ppo_config.n_steps

    def run_distributed_training(self) -> tuple[PPOTrainState, PPOMetricsHistory]:
        """Trains from the beginning, or from a checkpoint with ``resume``; see :meth:`Task.train`."""
        logger.info(
            "training on %d device%s, %d environments on each", self.num_devices, "s"[: self.num_devices > 1],
            self.num_envs_per_device,
        )  # fmt: skip
        state, history = self.train()
        logger.info("trained %d updates", int(state.step))
        return state, history

    def train(self) -> tuple[PPOTrainState, PPOMetricsHistory]:
        """See :meth:`Task.train`."""
        self._check_config()
        try:
            return super().train()
        except ValueError as error:
            said = in_configs_names(str(error))
            if type(error) is not ValueError or said == str(error):
                raise
            raise ValueError(said) from users_error(error)

    def verify_distributed_setup(self, verbose: bool = True) -> DistributedSetup:
        """See :meth:`Task.verify_distributed_setup`; the report is logged, line by line."""
        prints = switch("verbose", verbose)
        self._check_config()
        report = super().verify_distributed_setup(verbose=False)
        for line in report.summary.splitlines() if prints else ():
            logger.info("%s", line)
        return report

    # --- how ----------------------------------------------------------------------------------------------------------

    def _check_config(self) -> None:
        now = _settings(self.config)
        for name, value in self._settled.items():
            if now[name] != value:
                raise ValueError(
                    f"config: {name} is {now[name]!r} and was {value!r} when the task was made, which settled it; make "
                    "a new task of the changed config"
                )

    def environment(self) -> tuple[Any, Any]:
        """See :meth:`Task.environment`."""
        given = self.get_environment()
        if isinstance(given, tuple) and len(given) != 2:
            raise ValueError(f"get_environment: {len(given)} values were returned; return env, or (env, env_params)")
        env = given[0] if isinstance(given, tuple) else given
        check_environment(env, "get_environment", "returned")
        return given if isinstance(given, tuple) else (env, default_params(env))

    def reward_terms(self) -> Terms:
        """See :meth:`Task.reward_terms`."""
        rewards = _called(self.get_rewards, (self._environment[0],))
        return {} if rewards is None else terms_of(rewards)

    def policy_network(self, observations: Any, num_outputs: int, key: Array) -> Any:
        """See :meth:`Task.policy_network`."""
        model = self._model
        if callable(model):
            return model
        if not (isinstance(model, eqx.Module) and all(callable(getattr(model, x, None)) for x in ("actor", "critic"))):
            raise ValueError(
                f"get_initial_model: {type(model).__name__} was returned; return an equinox.Module that is called, or "
                "has actor and critic"
            )
        return ActorCritic(model)

    def initial_state(self, state: PPOTrainState) -> PPOTrainState:
        """See :meth:`Task.initial_state`."""
        return self._model if isinstance(self._model, PPOTrainState) else state

    @cached_property
    def _environment(self) -> tuple[Any, Any]:
        return self.environment()

    @cached_property
    def _model(self) -> Any:
        with without_callers_context():
            return self.get_initial_model(seed_key(keyed_seed(self.runner_config.seed, "init/custom")))

    def _in_users_names(self, message: str) -> str:
        said = in_configs_names(super()._in_users_names(message))
        return re.sub(r"^policy_network(: ValueError: get_initial_model)?", HOOKS["policy_network"], said)

    def _overrides(self, hook: str) -> bool:
        if hook not in HOOKS:
            return super()._overrides(hook)
        return self._model is not None and isinstance(self._model, PPOTrainState) == (hook == "initial_state")

    def _has_own(self, hook: str) -> bool:
        own = getattr(self, hook)
        return getattr(own, "__func__", own) is not getattr(DistributedPPOTask, hook)

    def _customs(self) -> Customs:
        collect = users_rollout(self._rollout) if self._has_own("rollout") else None
        first = self._first_envs if self._has_own("get_initial_env_state") else None
        return Customs(axis_name=self.axis_name, collect=collect, first_envs=first)

    def _rollout(self, model: RolloutModel, env_state: RolloutState, rng: Array) -> tuple[Trajectory, RolloutState]:
        hook, count = self.rollout, _positional(self.rollout)
        found = hook(model, env_state, rng) if count < 4 else hook(model, env_state, None, rng)  # pyright: ignore[reportCallIssue]
        if not isinstance(found, tuple) or len(found) not in (2, 3):
            raise ValueError(f"rollout: {type(found).__name__} was returned; return (trajectory, env_state)")
        return found[0], found[1]

    def _first_envs(self) -> tuple[Any, Any] | None:
        with without_callers_context():
            found = self.get_initial_env_state(seed_key(keyed_seed(self.runner_config.seed, "env_state")))
        if found is not None and not (isinstance(found, tuple) and len(found) == 2):
            raise ValueError(
                f"get_initial_env_state: {type(found).__name__} was returned; return (obs, state) of all environments, "
                "as jax.vmap(env.reset, (0, None))(keys, params) gives them"
            )
        return found

    def _say_devices(self, found: Sequence[DeviceMetrics]) -> None:
        for line in found:
            logger.info("%s", line)

    def _look(self, iteration: Any, call: Any, metrics: Metrics) -> None:
        logger.debug("update %d: %s", iteration.number + 1, {name: round(x, 6) for name, x in metrics.items()})
        super()._look(iteration, call, metrics)


class ActorCritic(eqx.Module):
    """Turns a model of two parts, for one observation each, into a network for a batch."""

    model: Any

    def __call__(self, observations: Any, key: Array | None = None) -> tuple[Array, Array]:
        """Returns outputs ``[n, k]`` and values ``[n]``."""
        values = jax.vmap(self.model.critic)(observations)
        return jax.vmap(self.model.actor)(observations), values.reshape(len(values))


def _settings(config: DistributedPPOConfig) -> dict[str, Any]:
    """Copies the settings of a config, without fields that a user's subclass adds."""
    return {field.name: copy.copy(getattr(config, field.name)) for field in dataclasses.fields(DistributedPPOConfig)}


def _positional(hook: Callable[..., Any]) -> int:
    """Counts the arguments that a bound hook takes by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in kinds for parameter in inspect.signature(hook).parameters.values())


def _called(hook: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Calls a hook with as many of the arguments as it takes."""
    return hook(*arguments[: _positional(hook)])
