"""Trains one rank's part of a run: the loop, from the first iteration to the last checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from torch import Tensor

from lockstep.config.run import Config, RunOptions
from lockstep.core.life import Part, life
from lockstep.core.topology import Topology
from lockstep.runs.checkpoint import Checkpoint
from lockstep.runs.directory import RunDirectory
from lockstep.torch_engine.accelerated.update import AwaitedUpdate
from lockstep.torch_engine.batch import Batch, make_batch
from lockstep.torch_engine.distributed.process_group import left_at_the_end
from lockstep.torch_engine.evaluation import evaluate_policy
from lockstep.torch_engine.groups import begin_groups, finished_episodes
from lockstep.torch_engine.minibatches import (
    MinibatchStatistics,
    advantage_moments,
    minibatch_indices,
    minibatch_statistics,
)
from lockstep.torch_engine.periodic import update_periodically
from lockstep.torch_engine.rollout import record_replay
from lockstep.torch_engine.session import Session, current_policy, open_session
from lockstep.torch_engine.setup.accelerator import upload
from lockstep.torch_engine.setup.clock import Clock, RankTimes
from lockstep.torch_engine.start.announcement import start_lines
from lockstep.torch_engine.state import gather_parameters, release_parameters
from lockstep.torch_engine.statistics import (
    SharedStatistics,
    explained_variance,
    merge_normalizers,
    share,
    share_env_metrics,
    share_metrics,
)
from lockstep.torch_engine.update import UpdateResult, update
from lockstep.training.due import comes_due
from lockstep.training.metrics import Record, episode_metrics
from lockstep.training.recorder import Recorder, record_training
from lockstep.training.stop import RUNNING, StopRequest, TrainResult, reached, stop_code, stop_requests, stops


class Trainer:
    """Runs the loop over one rank's iterations."""

    def __init__(self, session: Session, recorder: Recorder, options: RunOptions, request: StopRequest) -> None:
        self.session = session
        self.recorder = recorder
        self.options = options
        self.request = request
        self.config = session.config
        self.state = session.state
        self.plan = session.plan
        self.communicator = session.communicator
        self.clock = Clock(session.communicator, thorough=session.config.log.timing)
        self.pending_record: Callable[[], Record] | None = None
        self.index_thread = None if session.update is None else ThreadPoolExecutor(1, "minibatches")

    def loop(self) -> int:
        """Iterates until the end, a limit, or a signal; returns the stop code."""
        self.request.take_signals()
        stop = self.limit_reached()
        self.clock.begin()
        try:
            while stop == RUNNING:
                asked = self.iterate()
                if self.session.update is None or self.needs_record_now(asked):
                    stop = self.log_and_save(asked)
                self.clock.lap("other")
        finally:
            if self.index_thread is not None:
                self.index_thread.shutdown(wait=False)
        return stop

    def log_and_save(self, asked: int) -> int:
        """Logs the iteration, and does what is due after it; returns the stop code."""
        record = self.finish_record()
        record |= self.evaluate()
        self.check_in_sync()
        self.recorder.log(record)
        stop = self.limit_reached() or stops(asked) or self.listeners_code()
        self.recorder.save_checkpoint(asked=asked)
        return stop

    def needs_record_now(self, asked: int) -> bool:
        """Returns whether something waits for this iteration; if not, the next one starts before it is read."""
        return self.limit_reached() != RUNNING or asked != RUNNING or self.recorder.needs_state()

    def finish_record(self) -> Record:
        """Returns the metrics record of the iteration that has not been logged yet.

        Raises:
            NonFiniteError: on all ranks, if its loss or gradient was not finite.
        """
        assert self.pending_record is not None
        finish, self.pending_record = self.pending_record, None
        return finish()

    def limit_reached(self) -> int:
        """Returns the code of the step limit that is reached, or ``RUNNING``."""
        return reached(self.config, self.options, self.state.iteration, self.state.global_step)

    def listeners_code(self) -> int:
        """Returns the stop code that listeners gave for this iteration; a collective if they are waited for."""
        audience = self.recorder.audience
        return max(self.communicator.gather_json(audience.answer.code)) if audience.waits else RUNNING

    def iterate(self) -> int:
        """Trains for one iteration and holds its record; returns the highest stop code that any rank asks for."""
        drawn = self.draw_indices()
        finished = self.collect()
        if self.pending_record is not None:  # the last iteration's, which the accelerator has finished by now
            self.recorder.log(self.finish_record())
        batch = self.make_batch()
        indices = drawn()
        shared, statistics = self.share(batch, indices, finished)
        result = self.update(batch, indices, statistics, shared)
        self.advance(shared)
        times = self.gather_episodes(finished, shared)
        self.pending_record = self.metrics(result, shared, times)
        return shared.stop

    def draw_indices(self) -> Callable[[], np.ndarray | Tensor]:
        """Returns a function that gives the indices of the minibatches; see :func:`.minibatches.minibatch_indices`.

        For an update on an accelerator they are drawn while the rollout is collected, and returned as a tensor there.
        """
        draw = partial(minibatch_indices, self.config, self.plan, self.state.iteration)
        if self.index_thread is None:
            return draw
        drawing, device = self.index_thread.submit(draw), self.state.parameters.flat.device
        return lambda: upload(np.ascontiguousarray(drawing.result()), device)

    def collect(self) -> np.ndarray:
        """Fills the session's rollout; returns this rank's ended episodes, see :func:`.groups.finished_episodes`."""
        session, state = self.session, self.state
        life.begin(Part.ROLLOUT)
        if self.config.algorithm == "grpo":
            begin_groups(state, session.envs)
        gather_parameters(state)
        session.collect()
        if session.envs.replayed and self.config.algorithm == "ppo":  # GRPO's episodes end with the iteration
            record_replay(session.replay, session.envs, session.rollout)
        return finished_episodes(state, session.rollout, self.config, self.plan)

    def make_batch(self) -> Batch:
        """Computes values, advantages and returns of the rollout; with FSDP it then frees the whole parameters."""
        batch = make_batch(self.state, self.session.rollout, self.plan, self.config, self.session.mode)
        release_parameters(self.state)
        self.clock.lap("rollout")
        return batch

    def share(
        self, batch: Batch, indices: np.ndarray | Tensor, finished: np.ndarray
    ) -> tuple[SharedStatistics, MinibatchStatistics]:
        """Gathers every shard's statistics and stop code; a collective."""
        local = advantage_moments(batch, indices)
        asked = max(stop_code(self.request, self.options, self.recorder.started), self.recorder.asks())
        shared = share(self.state, self.session.rollout, batch, local, finished, asked, self.plan, self.communicator)
        return shared, minibatch_statistics(self.config, local, shared.advantage_moments)

    def update(
        self, batch: Batch, indices: np.ndarray | Tensor, statistics: MinibatchStatistics, shared: SharedStatistics
    ) -> UpdateResult | AwaitedUpdate:
        """Takes the optimiser steps, which combine the ranks at each step or only at every ``sync_period``-th."""
        state, config, plan, source = self.state, self.config, self.plan, self.session.source
        life.begin(Part.UPDATE)
        if self.session.update is not None:
            assert isinstance(indices, Tensor)
            return self.session.update(batch, indices, statistics, shared)
        assert isinstance(indices, np.ndarray)
        if config.sync_period == 1:
            return update(state, batch, indices, statistics, config, plan, source)
        return update_periodically(state, batch, indices, statistics, config, plan, source, self.communicator)

    def advance(self, shared: SharedStatistics) -> None:
        """Merges the iteration's moments into the normalisers, and advances the counters."""
        merge_normalizers(self.state, shared.observations, shared.returns, shared.samples, self.state.iteration + 1)
        self.state.iteration += 1
        self.state.global_step += self.config.steps_per_iteration
        self.clock.lap("learn")

    def gather_episodes(self, finished: np.ndarray, shared: SharedStatistics) -> RankTimes:
        """Adds the episodes of all ranks to the last hundred; returns the times of all ranks. A collective."""
        laps, durations = self.clock.finish()
        episodes, times = share_metrics(finished, shared.episodes, laps, durations, self.plan, self.communicator)
        own = self.session.rollout.env_metrics
        env_metrics = share_env_metrics(own, self.communicator) if shared.has_env_metrics else None
        self.state.recent.extend(episodes, env_metrics)
        if self.recorder.timing is not None:
            self.recorder.timing.log(times.by_rank(self.state.iteration, self.config.steps_per_iteration))
        return times

    def metrics(
        self, result: UpdateResult | AwaitedUpdate, shared: SharedStatistics, times: RankTimes
    ) -> Callable[[], Record]:
        """Returns a function that makes the metrics record of the iteration; it waits until the update is over."""
        state = self.state
        episodes = episode_metrics(state.iteration, state.global_step, state.recent)

        def record() -> Record:
            out = episodes | result.result().metrics(self.config, state.learning_rate)
            if state.net.critic:
                out["train/explained_variance"] = explained_variance(shared.value_moments, shared.samples)
            return out | times.metrics(self.config.steps_per_iteration)

        return record

    def evaluate(self) -> Record:
        """Evaluates the policy if that is due; returns the ``eval/…`` part of the record."""
        if not self.recorder.evaluation_due():
            return {}
        life.begin(Part.EVALUATION)
        gather_parameters(self.state)
        record = self.recorder.evaluated(evaluate_policy(self.session), lambda: current_policy(self.session))
        release_parameters(self.state)
        return record

    def check_in_sync(self) -> None:
        """Compares the ranks' fingerprints if that is due, and writes this iteration's if they are traced."""
        if comes_due(self.config.proof.interval, self.state.iteration):
            self.recorder.compare(f"after iteration {self.state.iteration}")
        self.recorder.trace()


def train(
    config: Config, run: RunDirectory, topology: Topology, options: RunOptions, checkpoint: Checkpoint | None = None
) -> TrainResult:
    """Trains one rank's part of a run, from its beginning or from a checkpoint.

    Raises:
        ValueError: if the config asks for what can't be had here; the message is one line.
        EnvironmentFailureError: if an environment raised, died or hung.
        NonFiniteError: if the loss is not finite; on all ranks at the same step.
        DesyncError: if ranks hold different bytes; on all ranks.
        PeerFailureError: if another rank is gone.
    """
    started = time.monotonic()
    # the session must be gone before the group is left, because with FSDP it holds process groups
    with stop_requests() as request, left_at_the_end():
        return record_training(
            run,
            started,
            checkpoint,
            lambda: open_session(config, topology, checkpoint),
            lambda session: start_lines(session, options),
            lambda session, recorder: Trainer(session, recorder, options, request).loop(),
        )
