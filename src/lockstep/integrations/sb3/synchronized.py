"""Trains one agent on all ranks by an on-policy algorithm of Stable-Baselines3, with its own code where possible."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import stable_baselines3
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.type_aliases import MaybeCallback
from stable_baselines3.common.vec_env import VecEnv

from lockstep.config.on_off import switch
from lockstep.integrations.attach.attach import attach
from lockstep.integrations.attach.process_group import communicator, is_writer, join, place
from lockstep.integrations.sb3.agreement import agree
from lockstep.integrations.sb3.callbacks import SynchronizedCallback, of_this_rank
from lockstep.integrations.sb3.exchange import RolloutExchange
from lockstep.integrations.sb3.files import TIMEOUT, count_anew, learning, save_on_one_rank
from lockstep.integrations.sb3.normalize import MergedStatistics
from lockstep.integrations.sb3.update import UpdateGuard, merge_metrics, of_all_ranks
from lockstep.torch_engine.distributed.scripts import use_own_gpu

OWN = ("_place", "_attached", "_guard", "_outermost", "_exchange", "_statistics", "_started")
"""Attributes that a saved model leaves out."""


class Synchronized(OnPolicyAlgorithm):
    """A mixin, placed before an on-policy algorithm among a class's bases; with one rank it changes nothing.

    Ranks meet in :meth:`learn` only: at its start, at the end of each rollout, and in the updates. One rank alone can
    make or load a model and predict with it.
    """

    normalize_advantage_locally = False
    _statistics: MergedStatistics
    _outermost: SynchronizedCallback
    _exchange: RolloutExchange
    _started: float

    def __init__(self, *args: Any, normalize_advantage_locally: bool = False, **kwargs: Any) -> None:
        self._place = place()
        self._attached: Any = None
        self._guard: UpdateGuard | None = None
        locally = switch("normalize_advantage_locally", normalize_advantage_locally)
        if locally:  # saved models leave out the class's default
            self.normalize_advantage_locally = True
        use_own_gpu()
        if not is_writer() and "verbose" in kwargs:
            kwargs["verbose"] = 0
        super().__init__(*args, **kwargs)

    @property
    def world_size(self) -> int:
        """The number of ranks; 1 without a launcher."""
        return self._place[1]

    def _setup_model(self) -> None:
        if not is_writer():
            self.verbose = 0
        super()._setup_model()

    def set_random_seed(self, seed: int | None = None) -> None:
        """Seeds generators and network alike on every rank, and each environment by ``seed`` + its global id."""
        super().set_random_seed(seed)
        if self.world_size > 1 and seed is not None and self.env is not None:
            self.env.seed(seed + self._place[0] * self.env.num_envs)

    def set_logger(self, logger: Logger) -> None:
        """Sets the logger; it writes on one rank only."""
        super().set_logger(logger if is_writer() else Logger(logger.get_dir(), []))

    def learn(self, *args: Any, **kwargs: Any) -> Any:
        """Learns as Stable-Baselines3 does; ``total_timesteps`` counts the steps of all ranks together."""
        if self.world_size == 1:
            return super().learn(*args, **kwargs)
        try:
            with learning():
                return super().learn(*args, **kwargs)
        finally:
            self._detach()

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        arguments = (total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar)
        if self.world_size == 1:
            return super()._setup_learn(*arguments)
        join(TIMEOUT)
        others = {"total_timesteps": total_timesteps, "reset_num_timesteps": reset_num_timesteps}
        agree(self, others, self._place[0], communicator().gather_json)
        count_anew()
        self._detach()
        self._attached = attach(self.policy, self.policy.optimizer, check_phases=False)
        if getattr(self.train, "__func__", None) is not Synchronized.train:
            self._guard = UpdateGuard(self.policy, type(self).__name__)
        self._start_statistics()
        self._started = time.perf_counter()
        if is_writer() or self._custom_logger:
            return super()._setup_learn(*arguments)
        self.set_logger(Logger(None, []))
        try:
            return super()._setup_learn(*arguments)
        finally:
            self._custom_logger = False

    def _start_statistics(self) -> None:
        """Makes normaliser statistics the same on every rank: merges known ones, takes rank 0's if they are new."""
        assert self.env is not None
        fresh = getattr(self, "_statistics", None) is None or self._statistics.env is not self.env
        if fresh:
            self._statistics = MergedStatistics(self.env, communicator().gather_ranks)
        self._statistics.go_on(fresh)

    def _detach(self) -> None:
        if self._attached is not None:
            self._attached.detach()
            self._attached = None
        if self._guard is not None:
            self._guard.remove()
            self._guard = None

    def _init_callback(self, callback: MaybeCallback, progress_bar: bool = False) -> BaseCallback:
        if self.world_size == 1:
            return super()._init_callback(callback, progress_bar)
        mine = of_this_rank(callback, progress_bar, is_writer(), self.world_size)
        self._outermost = SynchronizedCallback(mine, self.world_size)
        return super()._init_callback(self._outermost)

    def collect_rollouts(
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
    ) -> bool:
        """Fills the buffer from this rank's environments; returns False on all ranks if any rank's callback says stop.

        Raises:
            PeerFailureError: another rank failed during the rollout.
        """
        if self.world_size == 1:
            return super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps)
        if self._guard is not None:
            self._guard.close()
        exchange = RolloutExchange(self, self._outermost, communicator(), self._statistics)
        self._exchange = self._outermost.exchange = exchange
        try:
            finished = super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps)
        except Exception as error:
            exchange.fail(error)
            raise
        exchange.meet(stop=not finished)
        self._record_speed()
        return not exchange.stopped

    def _record_speed(self) -> None:
        """Logs environment steps per second of all ranks together."""
        steps = self.num_timesteps - self._num_timesteps_at_start
        self.logger.record("time/global_fps", int(steps / max(time.perf_counter() - self._started, 1e-9)))

    def _update_info_buffer(self, infos: list[dict[str, Any]], dones: np.ndarray | None = None) -> None:
        super()._update_info_buffer(infos, dones)
        if self.world_size > 1:
            self._exchange.record(infos, np.zeros(len(infos), bool) if dones is None else dones)

    def train(self) -> None:
        """Updates the policy on all ranks' samples, with the same optimiser steps on every rank."""
        if self.world_size == 1:
            super().train()
            return
        if self._guard is not None:
            self._guard.open()
        with of_all_ranks(self):
            super().train()
        merge_metrics(self, communicator())

    def save(self, path: Any, exclude: Iterable[str] | None = None, include: Iterable[str] | None = None) -> None:
        """Saves Stable-Baselines3's zip file on one rank; the others return when the file is there.

        During ``learn``, or before the first one, they return at once.
        """
        save_on_one_rank(path, lambda: super(Synchronized, self).save(path, exclude, include))

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), *OWN]


class A2C(Synchronized, stable_baselines3.A2C):
    """``stable_baselines3.A2C`` (Mnih et al. 2016) on many ranks, which train one agent on their own environments.

    Takes the same arguments. ``n_envs`` and ``n_steps`` are per rank: an update learns from ``world_size`` times as
    many samples.

    Args:
        normalize_advantage_locally: if advantages are normalised, use the mean and standard deviation of this rank's
            samples instead of all ranks'.
    """


class PPO(Synchronized, stable_baselines3.PPO):
    """``stable_baselines3.PPO`` (Schulman et al. 2017) on many ranks, which train one agent on their own environments.

    Takes the same arguments. ``n_envs``, ``n_steps`` and ``batch_size`` are per rank: an update learns from
    ``world_size`` times as many samples, in equally many minibatches, each ``world_size`` times as large.

    Args:
        normalize_advantage_locally: if advantages are normalised, use the mean and standard deviation of this rank's
            part of a minibatch instead of the whole minibatch's.
    """
