"""Training: the loop, from the first iteration to the last checkpoint."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

from lockstep import __version__
from lockstep.config.run import Config, RunOptions
from lockstep.core.episodes import SUCCESS_RATE
from lockstep.core.errors import RunError
from lockstep.core.fingerprint import array_digest, sha256_of
from lockstep.core.topology import Topology
from lockstep.policies.evaluation import summarize
from lockstep.policies.videos import EvaluationVideos
from lockstep.runs.checkpoint import Checkpoint
from lockstep.runs.directory import RunDirectory
from lockstep.torch_engine.announcement import announcement, notes
from lockstep.torch_engine.batch import make_batch
from lockstep.torch_engine.distributed.communicator import close_process_group
from lockstep.torch_engine.evaluation import evaluate_policy
from lockstep.torch_engine.groups import begin_groups, finished_episodes
from lockstep.torch_engine.minibatches import advantage_moments, minibatch_indices, minibatch_statistics
from lockstep.torch_engine.periodic import update_periodically
from lockstep.torch_engine.rollout import record_replay
from lockstep.torch_engine.session import (
    Session,
    check_ranks_in_sync,
    checkpoint_files,
    current_policy,
    open_session,
)
from lockstep.torch_engine.setup.clock import Clock
from lockstep.torch_engine.setup.devices import check_device, device_memory, machine_facts, name_ranks, visible_gpus
from lockstep.torch_engine.state import POLICY, check_networks, gather_parameters, release_parameters, state_arrays
from lockstep.torch_engine.statistics import explained_variance, merge_normalizers, share, share_metrics
from lockstep.torch_engine.update import update
from lockstep.training.stop import StopRequest, stop_requests

__all__ = [
    "TrainResult",
    "check_device",
    "check_networks",
    "device_memory",
    "name_ranks",
    "train",
    "visible_gpus",
]

# Stop codes, agreed as the highest of any rank; signals are their own numbers' negative exit convention (128 + n).
RUNNING, TIME_LIMIT, STEP_LIMIT, FINISHED = 0, 1, -1, -2
STATUS = {FINISHED: "finished", STEP_LIMIT: "stopped at step", TIME_LIMIT: "stopped at time limit"}


@dataclass(frozen=True)
class TrainResult:
    """How a training run ended.

    Attributes:
        status: ``finished``, ``stopped at step``, ``stopped at time limit`` or ``stopped by signal N``.
        signal: the signal that stopped it, or None.
        summary: what ``summary.json`` holds.
    """

    status: str
    signal: int | None
    summary: dict[str, Any]


class Trainer:
    """One rank's training run: a session, the run directory's writers, and the loop."""

    def __init__(
        self, session: Session, run: RunDirectory, options: RunOptions, request: StopRequest, started: float
    ) -> None:
        self.session, self.run, self.options, self.request, self.started = session, run, options, request, started
        self.config, self.state = session.config, session.state
        self.trackers = run.open_trackers(self.config)
        self.fingerprints = run.open_fingerprints() if self.config.proof.trace else None
        self.checkpoints = run.open_checkpoints(self.config.checkpoint)
        self.progress = run.open_progress(self.config.total_steps)
        self.score: float | None = None
        self.saved_iteration: int | None = None
        self.steps_before = self.state.global_step
        self.timing = run.open_timing() if self.config.log.timing else None
        self.clock = Clock(session.communicator, watch_memory=self.config.log.timing)
        self.videos = EvaluationVideos(run, self.trackers, self.config.eval.record_video)

    def loop(self) -> int:
        """Iterate until the end, a limit, or a signal; returns the stop code."""
        stop = self.reached()
        self.clock.begin()
        while stop == RUNNING:
            record, asked = self.iterate()
            record |= self.evaluate()
            self.log(record)
            self.prove()
            stop = self.reached() or asked
            self.save_checkpoint()
            self.clock.lap("other")
        return stop

    def iterate(self) -> tuple[dict[str, Any], int]:
        """One iteration: collect, estimate, share, update, share; the metrics record and any rank's stop code."""
        s, state, config, plan, comm = (
            self.session, self.state, self.config, self.session.plan, self.session.communicator
        )  # fmt: skip
        if config.algorithm == "grpo":
            begin_groups(state, s.envs)
        gather_parameters(state)
        s.collect()
        if s.envs.replayed and config.algorithm == "ppo":  # GRPO's episodes end with the iteration
            record_replay(s.replay, s.envs, s.rollout)
        finished = finished_episodes(state, s.rollout, config, plan)
        batch = make_batch(state, s.rollout, plan, config, s.mode)
        release_parameters(state)
        self.clock.lap("rollout")

        indices = minibatch_indices(config, plan, state.iteration)
        local = advantage_moments(batch, indices)
        shared = share(state, s.rollout, batch, local, finished, self.stop_code(), plan, comm)
        statistics = minibatch_statistics(config, local, shared.advantages)
        result = (
            update(state, batch, indices, statistics, config, plan, s.source)
            if config.sync_period == 1
            else update_periodically(state, batch, indices, statistics, config, plan, s.source, comm)
        )
        merge_normalizers(state, shared.observations, shared.returns, shared.samples)
        state.iteration += 1
        state.global_step += config.steps_per_iteration
        self.clock.lap("learn")

        episodes, times = share_metrics(finished, shared.episodes, *self.clock.finish(), plan, comm)
        if self.timing is not None:
            self.timing.log(times.by_rank(state.iteration, config.steps_per_iteration))
        state.recent.extend(episodes)
        record = {"iteration": state.iteration, "global_step": state.global_step}
        record |= state.recent.metrics() | result.metrics(config, state.learning_rate)
        if state.net.critic:
            record["train/explained_variance"] = explained_variance(shared.fit, shared.samples)
        return record | times.metrics(config.steps_per_iteration), shared.stop

    def stop_code(self) -> int:
        """What this rank would stop for: a signal's number, the time limit, or nothing."""
        if self.request.signal is not None:
            return 128 + self.request.signal
        limit = self.options.max_hours
        return TIME_LIMIT if limit is not None and time.monotonic() - self.started > 3600 * limit else RUNNING

    def reached(self) -> int:
        """Whether the steps asked for are done."""
        if self.state.iteration >= self.config.num_iterations:
            return FINISHED
        stop_at = self.options.stop_at_step
        return STEP_LIMIT if stop_at is not None and self.state.global_step >= stop_at else RUNNING

    def evaluate(self) -> dict[str, Any]:
        """An evaluation if one is due; sets the score by which the best checkpoint is kept."""
        interval = self.config.eval.interval
        if not interval:
            self.score = self.state.recent.metrics()["rollout/episode_return_mean"]
            return {}
        if self.state.iteration % interval and self.state.iteration < self.config.num_iterations:
            return {}
        gather_parameters(self.state)
        summary = summarize(evaluate_policy(self.session))
        self.videos.record(lambda: current_policy(self.session), self.state.global_step)
        release_parameters(self.state)
        self.score = summary["return_mean"]
        return {f"eval/{name}": value for name, value in summary.items()}

    def log(self, record: dict[str, Any]) -> None:
        """Hand a record to trackers and progress."""
        try:
            self.trackers.log(record)
        except OSError as error:
            raise RunError(f"{error.filename} can't be written: {error.strerror or error}") from error
        self.progress.update(record)

    def prove(self) -> None:
        """Compare the ranks' fingerprints if that is due, and write this iteration's if they are traced."""
        interval = self.config.proof.interval
        if interval and self.state.iteration % interval == 0:
            check_ranks_in_sync(self.session, f"after iteration {self.state.iteration}")
        if self.fingerprints is not None:
            digests = {name: array_digest(a).hex() for name, a in state_arrays(self.state).items()}
            self.fingerprints.log({"iteration": self.state.iteration, **digests})

    def wall_time(self) -> float:
        """Seconds of training so far, earlier sessions included."""
        return self.session.wall_time_before + time.monotonic() - self.started

    def save_checkpoint(self, force: bool = False) -> None:
        """Save a checkpoint if one is due; it is written in the background."""
        interval, iteration = self.config.checkpoint.interval, self.state.iteration
        if self.saved_iteration == iteration or not (force or (interval and iteration % interval == 0)):
            return
        files = checkpoint_files(self.session, self.wall_time(), self.score)
        self.checkpoints.save(self.state.global_step, files, self.score)
        self.saved_iteration = iteration

    def summarize(self, status: str) -> dict[str, Any]:
        """``summary.json``."""
        state, s = self.state, self.session
        arrays, episodes = state_arrays(state), state.recent.metrics()
        seconds = time.monotonic() - self.started
        return {
            "status": status,
            "environment": self.config.env.id,
            "seed": self.config.seed,
            "iteration": state.iteration,
            "global_step": state.global_step,
            "final_return": episodes["rollout/episode_return_mean"],
            **({"final_success_rate": episodes[SUCCESS_RATE]} if SUCCESS_RATE in episodes else {}),
            "episodes": state.recent.total,
            "params_sha256": sha256_of({k: v for k, v in arrays.items() if k.startswith(POLICY)}),
            "state_sha256": sha256_of(arrays),
            "wall_time": self.wall_time(),
            "steps_per_second": (state.global_step - self.steps_before) / seconds,
            "world_size": s.topology.world_size,
            "num_shards": self.config.shards,
            "reduction": self.config.reduction,
            "collectives": s.communicator.transport,
            "shards_on_a_rank": s.mode,
            "restarted_environments": s.restarted_before + s.restarted,
            "lockstep": __version__,
            "engine": "torch",
            **machine_facts(state.parameters.flat.device),
        }

    def finish(self, stop: int) -> TrainResult:
        """Last proof, checkpoint on disk, ``summary.json``."""
        check_ranks_in_sync(self.session, "at the end")
        self.save_checkpoint(force=True)
        self.checkpoints.wait()
        signal = stop - 128 if stop > 128 else None
        status = STATUS.get(stop, f"stopped by signal {signal}")
        summary = self.summarize(status)
        self.run.write_summary(summary)
        return TrainResult(status, signal, summary)

    def close(self) -> None:
        """Close what is open, whatever happened."""
        self.progress.close()
        with contextlib.suppress(Exception):  # a checkpoint under way is finished even if the run failed
            self.checkpoints.wait()
        with contextlib.suppress(OSError):  # every line was written when it was logged
            self.trackers.close()
        if self.fingerprints is not None:
            self.fingerprints.close()
        if self.timing is not None:
            self.timing.close()


def train(
    config: Config, run: RunDirectory, topology: Topology, options: RunOptions, checkpoint: Checkpoint | None = None
) -> TrainResult:
    """Train one rank's part of a run, from its beginning or from a checkpoint.

    Args:
        config: resolved.
        run: its directory, as this rank sees it.
        topology: this rank's place.
        options: limits of this session.
        checkpoint: what to resume from.

    Raises:
        ValueError: what the config asks for can't be had here; one line.
        EnvironmentFailureError: an environment raised, died or hung.
        NonFiniteError: the loss is not finite; on all ranks at the same step.
        DesyncError: ranks hold different bytes; on all ranks.
        PeerFailureError: another rank is gone.
    """
    started = time.monotonic()
    run.remove_summary()
    with stop_requests() as request:
        try:
            session = open_session(config, topology, checkpoint)
            try:
                return _train(session, run, options, request, started, checkpoint)
            finally:
                session.close()
                del session  # with FSDP it holds process groups
        finally:
            close_process_group()


def _train(
    session: Session,
    run: RunDirectory,
    options: RunOptions,
    request: StopRequest,
    started: float,
    checkpoint: Checkpoint | None,
) -> TrainResult:
    line = announcement(session)
    run.cut_after(session.state.iteration, session.state.global_step, session.config.log)
    trainer = Trainer(session, run, options, request, started)
    trainer.score = None if checkpoint is None else checkpoint.state.get("score")
    try:
        trainer.progress.message(line)
        for note in [*notes(session, options), *trainer.trackers.places()]:
            trainer.progress.message(note)
        if session.restarted:
            run.warn(f"environments {session.restarted} couldn't be restored exactly and began a new episode")
        if checkpoint is None:
            trainer.trackers.text("config", f"```json\n{session.config.model_dump_json(indent=2)}\n```")
        return trainer.finish(trainer.loop())
    finally:
        trainer.close()
