"""Trains a library user's environment with the engine: ``train_ppo_multigpu``."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax import numpy as jnp

from lockstep.config.run import Config
from lockstep.core.rank_variables import NO_SWITCH_SUMS, apply
from lockstep.core.shards import keyed_seed
from lockstep.core.user_code.errors import users_error
from lockstep.envs.description import described
from lockstep.jax.between_updates import Duties
from lockstep.jax.config import PPOConfig, RunnerConfig, in_users_names, run_config
from lockstep.jax.customs import Customs
from lockstep.jax.engine_state import (
    environments_of,
    of_engine,
    replaced_environments,
    to_engine,
    user_rng,
    with_environments,
)
from lockstep.jax.environments import check_environment
from lockstep.jax.history import PPOMetricsHistory
from lockstep.jax.metrics import Metrics, history_of, metrics_of, say
from lockstep.jax.ppo import PPOTrainState, check_spaces, check_state
from lockstep.jax.settings import SettingError, in_one_line, names_of
from lockstep.jax.wrappers.single import innermost
from lockstep.jax_engine.distributed.active_mesh import without_callers_context
from lockstep.jax_engine.distributed.mesh import check_divisible, check_one_kind, get_num_devices, make_mesh
from lockstep.jax_engine.distributed.placement import gathered, num_local_devices
from lockstep.jax_engine.envs.adapter import FunctionalAdapter
from lockstep.jax_engine.envs.default_params import default_params
from lockstep.jax_engine.nets.custom import CustomNet, custom_net
from lockstep.jax_engine.nets.custom_trial import check_function, check_made_alike
from lockstep.jax_engine.nets.encoders import encode_rows
from lockstep.jax_engine.nets.nets import PolicyNet
from lockstep.jax_engine.program.calls import Pending
from lockstep.jax_engine.program.fingerprints import Copies, check_copies
from lockstep.jax_engine.program.iterations import Iteration
from lockstep.jax_engine.program.program import Program
from lockstep.jax_engine.program.runner import DeviceRunner
from lockstep.jax_engine.session import parameter_layout
from lockstep.jax_engine.setup.set_up import check_not_traced, check_numbers, prepare_jax
from lockstep.jax_engine.state import check_networks, init_state, place_state, state_specs
from lockstep.jax_engine.statistics import check_first_statistics
from lockstep.training.announcement import APART, FAST


class Training:
    """An environment and settings with everything that is compiled for them; it can train any number of times.

    Arguments are those of :func:`train_ppo_multigpu`, and what a task customises.

    Raises:
        ValueError: settings, environment or devices don't fit; one line.
    """

    @without_callers_context()
    def __init__(
        self, env: Any, env_params: Any, ppo: PPOConfig, runner: RunnerConfig, customs: Customs | None = None
    ) -> None:
        customs = customs or Customs()
        name = type(env).__name__
        if getattr(env, "batched", False):
            raise ValueError(
                f"env: {name} is a whole batch of environments, and each device makes its own; give the one "
                "inside, and PPOConfig's normalize_observations and normalize_rewards instead of wrappers"
            )
        check_numbers()
        prepared = prepare_jax()
        check_not_traced()
        devices, fsdp = devices_of(runner)
        if jax.default_backend() == "gpu":
            apply((NO_SWITCH_SUMS,))  # NCCL reads it when devices meet
        config = run_config(ppo, runner, name, devices, jax.default_backend(), customs.synchronize is not None)
        if not prepared and (devices > 1 or jax.default_backend() == "gpu"):
            say(UNPREPARED)
        self.runner, self.env = runner, env
        self.env_params = default_params(env) if env_params is None else env_params
        mesh = make_mesh(fsdp, devices, customs.axis_name)
        if config.reduction == "exact":
            check_one_kind(mesh)
        else:
            apart = config.sync_period > 1
            say((APART if apart else FAST).format(unit="devices", period=config.sync_period))
        adapter = FunctionalAdapter(env, env_params, name=type(innermost(env)).__name__)
        if adapter.limit_note is not None:
            say(adapter.limit_note)
        description = described(config.env, adapter.observation_space, adapter.action_space, adapter.max_episode_steps)
        net = _with_policy(check_networks(config, description), customs.policy, config)
        layout = parameter_layout(config, net, mesh, customs.synchronize)
        everywhere = jax.process_count() > 1
        self.program = Program(config, description, net, layout, mesh, adapter, everywhere, collect=customs.collect)
        self._first_envs = customs.first_envs
        self.device_runner = DeviceRunner(self.program, init_state(config, net, layout), num_local_devices(mesh))

    @property
    def config(self) -> Config:
        """The engine's config."""
        return self.program.config

    @without_callers_context()
    def begin(self, given: PPOTrainState | None = None, done: int = 0) -> None:
        """Begins with a given state and its environments; else with the config's parameters and first episodes.

        ``done`` of the given state's updates belong to this training: random numbers and schedules go on after them.
        """
        program, runner = self.program, self.device_runner
        check_state(given)
        runner.before = 0 if given is None else int(given.step) - done
        state = init_state(program.config, program.net, program.layout)
        if given is not None:
            state = to_engine(given, state, program.layout, program.net)
            envs, why = environments_of(given, runner.env_shapes)
            if envs is not None:
                self._check_seed(given)
                runner.begin_with(state._replace(envs=envs))
                return
            if why is not None:
                say(f"train_state: {why}, so that episodes begin anew")
        specs = state_specs(state, program.layout.specs)
        runner.state = place_state(state, specs, program.mesh)
        with self.rounding():
            runner.begin()
        if given is None:
            check_first_statistics(runner.state)
        first = None if self._first_envs is None else self._first_envs()
        if first is not None:
            observation, states = first
            rows = encode_rows(program.net.observation, observation)
            runner.replace_environments(replaced_environments(runner.env_shapes, rows, states))
        if given is not None:  # keep its normalisers, without the random policy's samples
            kept = place_state(state, specs, program.mesh)
            if given.observations is not None and float(given.observations.count):
                runner.state = runner.state._replace(observation_normalizer=kept.observation_normalizer)
            if given.returns is not None and float(given.returns.count):
                runner.state = runner.state._replace(return_normalizer=kept.return_normalizer)

    def _check_seed(self, given: PPOTrainState) -> None:
        expected = user_rng(self.config.seed, int(given.step))
        if given.rng is not None and not np.array_equal(gathered(given.rng), expected):
            say(f"train_state: it is of another seed; random numbers are those of seed {self.config.seed} from here on")

    def iterations(self, done: int = 0, marks: Collection[int] = ()) -> Iterator[tuple[Iteration, Pending]]:
        """Yields every update after ``done`` in order, with the call that it was part of, while the next call runs.

        No call runs at a mark, which is a number of updates: :meth:`state` is then the state after that many. All
        devices' copies of the state are compared after the first call and at the end.

        Raises:
            NonFiniteError: a loss or gradient was not finite.
            DesyncError: devices hold different bytes.
        """
        runner, dispatched, total, pending = self.device_runner, done, self.config.num_iterations, deque[Pending]()
        ends = sorted({mark for mark in marks if done < mark < total} | {total})
        while pending or dispatched < total:
            end = next(mark for mark in [*ends, total] if mark > (pending[0].first if pending else dispatched))
            while dispatched < end and len(pending) < (2 if dispatched > done + 1 else 1):
                count = min(1 if dispatched == done else runner.capacity, end - dispatched)  # the first one compiles
                with self.rounding(), without_callers_context():
                    pending.append(runner.dispatch(dispatched, count, 0))
                dispatched += count
            call = pending.popleft()
            with without_callers_context():
                iterations = runner.fetch(call)
                if call.first == done or not (pending or dispatched < total):
                    held = Copies.of(runner.state, self.program.layout)
                    check_copies(held, f"after update {call.first + call.count}")
            yield from ((iteration, call) for iteration in iterations)

    @without_callers_context()
    def fresh(self) -> PPOTrainState:
        """Returns the state before training."""
        program = self.program
        state = init_state(program.config, program.net, program.layout)
        placed = place_state(state, state_specs(state, program.layout.specs), program.mesh)
        return of_engine(placed, program.layout, program.net, 0, program.mesh)

    @without_callers_context()
    def state(self, updates: int) -> PPOTrainState:
        """Returns the current state, after ``updates`` updates, with its environments."""
        program, state = self.program, self.device_runner.state
        return with_environments(self.agent(updates), state, self.config.seed, program.mesh, program.rows)

    @without_callers_context()
    def agent(self, updates: int) -> PPOTrainState:
        """Returns the current state, after ``updates`` updates, without environments."""
        program = self.program
        return of_engine(self.device_runner.state, program.layout, program.net, updates, program.mesh)

    def train(
        self, given: PPOTrainState | None = None, look: Callable[[Iteration, Pending, Metrics], None] | None = None
    ) -> tuple[PPOTrainState, PPOMetricsHistory]:
        """Trains from the beginning or from a checkpoint; ``look`` sees every update as it is fetched."""
        check_state(given)
        duties = Duties(self, self.runner)
        try:
            found = duties.found()
            done = 0 if found is None else found.updates
            rows: list[Metrics] = [] if found is None else found.rows
            self.begin(given if found is None else found.state, done)
            for iteration, call in self.iterations(done, duties.marks):
                rows.append(metrics_of(iteration, self.config))
                duties.after(rows, iteration.seconds)
                if look is not None:
                    look(iteration, call, rows[-1])
            history = history_of(rows)
            duties.end(history)
        finally:
            duties.close()
        return self.state(self.device_runner.before + len(rows)), history

    def rounding(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which accelerators multiply matrices in float32 (no TF32, no bfloat16)."""
        if jax.default_backend() == "cpu":
            return contextlib.nullcontext()
        return jax.default_matmul_precision("highest")


def devices_of(runner: RunnerConfig) -> tuple[int, int]:
    """Returns the number of devices of a run and of its fsdp axis; prints a line if the default is a single device.

    Raises:
        ValueError: there are fewer than were asked for, or ``fsdp_devices`` doesn't divide them.
    """
    devices = get_num_devices(runner.num_devices)
    check_divisible("fsdp_devices", runner.fsdp_devices, devices)
    if devices == 1 and runner.num_devices is None:
        say(f"training runs on a single device [{jax.devices()[0].device_kind}]: JAX sees no other")
    return devices, runner.fsdp_devices


UNPREPARED = (
    "JAX had started before Lockstep could settle threads and rounding: other numbers of devices may differ in last "
    "bits, on a GPU the same training again too, and many CPU devices may wait for one another; call "
    "lockstep.jax.prepare_jax() first"
)


class _NoNetworkError(Exception):
    """A hook ``policy_network`` returned None: networks are those of the settings."""


def _with_policy(net: PolicyNet, policy: Callable[..., Any] | None, config: Config) -> PolicyNet:
    if policy is None:
        return net

    def trained(*given: Any, key: Any) -> Any:
        module = policy(*given, key=key)
        if module is None:
            raise _NoNetworkError
        if not any(eqx.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(module)):
            raise ValueError(
                f"policy_network: {type(module).__name__} was returned, in which JAX finds no floating-point array to "
                "train; return an equinox.Module that holds its parameters"
            )
        return module

    def made() -> CustomNet:
        return custom_net("policy_network", trained, net, keyed_seed(config.seed, "init/custom"))

    try:
        custom = made()
    except ValueError as error:
        if isinstance(error.__cause__, _NoNetworkError):
            return net
        raise
    check_function("policy_network", custom, net)
    check_made_alike("policy_network", custom, made(), net)
    return dataclasses.replace(net, custom=custom, core=None, shared=False)


ELSEWHERE = {
    **{name: f"it is PPOConfig's; give PPOConfig({name}=…) as ppo_config" for name in names_of(PPOConfig)},
    **{name: f"it is RunnerConfig's; give RunnerConfig({name}=…) as runner_config" for name in names_of(RunnerConfig)},
    **dict.fromkeys(
        ("key", "rng", "rng_key"),
        "random numbers are of RunnerConfig's seed; give RunnerConfig(seed=…), a whole number",
    ),
    **dict.fromkeys(
        ("network", "policy", "policy_network", "model"),
        "networks are PPOConfig's hidden_sizes and activation; for a module of your own write a Task with "
        "policy_network",
    ),
}
"""Says where to give arguments that aren't :func:`train_ppo_multigpu`'s, by name."""


@in_one_line(ELSEWHERE)
def train_ppo_multigpu(
    env: Any,
    env_params: Any,
    *,
    ppo_config: PPOConfig,
    runner_config: RunnerConfig,
    obs_shape: Any = None,
    n_actions: int | None = None,
    train_state: PPOTrainState | None = None,
) -> tuple[PPOTrainState, PPOMetricsHistory]:
    """Trains one agent with PPO on all devices of a mesh; without ``checkpoint_dir`` nothing is written to disk.

    Args:
        env: one environment of the functional API: of :func:`lockstep.jax.make`, of gymnax, in our wrappers, or any
            class with ``reset``, ``step`` and spaces (:class:`lockstep.jax.Environment`).
        env_params: its parameters; None: its ``default_params``.
        ppo_config: settings of the algorithm.
        runner_config: length and devices of the run.
        obs_shape: shape of one observation, checked if given.
        n_actions: number of discrete actions (or components of continuous ones), checked if given.
        train_state: state to go on from, such as a loaded checkpoint; with the settings that it was made with, training
            goes on exactly. If it has no environments, or another number of them, episodes begin anew. Random numbers
            are those of the updates after its ``step``, so that nothing is drawn twice. A falling learning rate
            (``anneal_lr``) begins anew and is 0 at the end of this call.

    Returns:
        The state on the mesh, and a :class:`PPOMetricsHistory` of arrays ``[n_updates]``, where
        ``n_updates = total_timesteps // (num_devices * num_envs * n_steps)``: ``total_loss``, ``actor_loss``,
        ``critic_loss`` (``0.5 * (v - return)^2``), ``entropy``, ``approx_kl`` and others, means over an update's
        minibatches; ``episode_return`` and ``episode_length``, means over the episodes that ended in an update, NaN if
        none did; ``reward/<name>`` of named reward terms; ``eval_return`` and ``eval_length`` of evaluations.

    Raises:
        ValueError: there is no whole update, something doesn't divide or contradicts the environment; one line.
        TypeError: an argument is unknown or has the wrong type; one line that says where it belongs.
        NonFiniteError: a loss or gradient was not finite.
        DesyncError: devices hold different bytes.
    """
    for name, value, kind in (("ppo_config", ppo_config, PPOConfig), ("runner_config", runner_config, RunnerConfig)):
        if not isinstance(value, kind):
            raise SettingError(f"{name}: {type(value).__name__} was given; give a {kind.__name__}")
    check_environment(env)
    check_state(train_state)
    try:
        training = Training(env, env_params, ppo_config, runner_config)
        check_spaces(training.config, training.program.net, obs_shape, n_actions)
    except ValueError as error:
        raise ValueError(in_users_names(str(error))) from users_error(error)
    return training.train(train_state)
