"""Training: the loop, from the first iteration to the last checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from lockstep import __version__
from lockstep.config.run import Config, RunOptions
from lockstep.core.episodes import SUCCESS_RATE
from lockstep.core.errors import RunError
from lockstep.core.fingerprint import array_digest, sha256_of
from lockstep.core.topology import Topology
from lockstep.jax.report import peak_memory
from lockstep.jax_engine.announcement import announcement, notes
from lockstep.jax_engine.distributed.fingerprints import Copies
from lockstep.jax_engine.distributed.processes import leave_processes
from lockstep.jax_engine.evaluation import evaluate_policy
from lockstep.jax_engine.program.iterations import Iteration, numbers_of
from lockstep.jax_engine.program.schedule import Schedule
from lockstep.jax_engine.session import (
    Session,
    check_ranks_in_sync,
    checkpoint_files,
    current_policy,
    device_copies,
    open_session,
)
from lockstep.jax_engine.setup.devices import check_device, device_memory, name_ranks, visible_gpus
from lockstep.jax_engine.setup.set_up import machine_facts
from lockstep.jax_engine.state import POLICY, check_networks
from lockstep.policies.evaluation import summarize
from lockstep.policies.videos import EvaluationVideos
from lockstep.runs.checkpoint import Checkpoint
from lockstep.runs.directory import RunDirectory
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

# Stop codes, agreed as the highest of any process; signals are their own numbers' negative exit convention (128 + n).
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
    """One process's training run: a session, the run directory's writers, and the loop."""

    def __init__(
        self, session: Session, run: RunDirectory, options: RunOptions, request: StopRequest, started: float
    ) -> None:
        self.session, self.run, self.options, self.request, self.started = session, run, options, request, started
        self.config = session.config
        self.trackers = run.open_trackers(self.config)
        self.fingerprints = run.open_fingerprints() if self.config.proof.trace else None
        self.checkpoints = run.open_checkpoints(self.config.checkpoint)
        self.progress = run.open_progress(self.config.total_steps)
        self.score: float | None = None
        self.saved_iteration: int | None = None
        self.steps_before = session.global_step
        self.timing = run.open_timing() if self.config.log.timing else None
        self.videos = EvaluationVideos(run, self.trackers, self.config.eval.record_video)
        self.dispatched = session.iteration
        self.pending: deque[Any] = deque()
        self.copies: dict[int, Copies] = {}
        self.schedule = Schedule(
            self.config,
            session.iteration,
            options.stop_at_step,
            session.program.mesh.size,
            session.topology.world_size,
            self.fingerprints is not None,
        )
        self.asked = RUNNING

    def loop(self) -> int:
        """Iterate until the end, a limit, or a signal; returns the stop code.

        A call of the program is always under way while the host logs the one before; both meet where something is due
        that needs the state. For a comparison of the devices' copies these are set aside before the next call takes
        the state over.
        """
        while True:
            stop = self.asked or self.reached()
            if stop == RUNNING:
                self.dispatch([self])
            due = stop != RUNNING or self.schedule.due(self.dispatched)
            while len(self.pending) > (0 if due else 1):
                self.take(last=due and len(self.pending) == 1)
            if due:
                self.save_checkpoint()
                if stop != RUNNING:
                    return stop

    def set_aside(self, iteration: int) -> None:
        """Copy what the devices hold after this iteration, before a call takes it over, if it is to be compared."""
        if self.schedule.compares(iteration):
            self.copies[iteration] = device_copies(self.session, keep=True)

    def dispatch(self, trainers: Sequence[Trainer]) -> None:
        """Start iterations: as many as the program takes at once, up to the next one where something is due.

        Args:
            trainers: this one, or those of all seeds, which set aside what the call takes over.
        """
        done, waiting, count = self.dispatched, bool(self.pending), 1

        def before() -> None:
            for trainer in trainers if waiting else ():
                trainer.set_aside(done)

        while count < self.session.run.capacity and not self.schedule.ends(done + count):
            count += 1
        self.pending.append(self.session.run.dispatch(done, count, self.stop_code(), before))
        self.dispatched += count

    def take(self, last: bool) -> None:
        """Wait for the oldest call, and log its iterations; ``last``: nothing else is under way."""
        iterations = self.session.run.fetch(self.pending.popleft())
        for number, iteration in enumerate(iterations, 1):
            record = self.record(iteration)
            if number == len(iterations):
                if last:
                    record |= self.evaluate()
                self.prove(last)
            self.log(record)

    def record(self, iteration: Iteration) -> dict[str, Any]:
        """The metrics record of an iteration, which is counted as done."""
        session, config = self.session, self.config
        numbers = numbers_of(iteration, config)
        session.iteration, session.global_step = iteration.number + 1, session.global_step + config.steps_per_iteration
        session.optimizer_steps += iteration.numbers["steps"]
        session.learning_rate = iteration.numbers["learning_rate"]
        session.recent.extend_newest(iteration.episodes.newest, iteration.episodes.count)
        self.asked = max(self.asked, iteration.numbers["stop"])
        episodes = session.recent.metrics()
        if not config.eval.interval:
            self.score = episodes["rollout/episode_return_mean"]
        record = {"iteration": session.iteration, "global_step": session.global_step}
        return record | episodes | numbers | self.times(iteration)

    def times(self, iteration: Iteration) -> dict[str, float]:
        """``time/…``: what of an iteration can be told apart from outside a compiled program."""
        seconds, rollout = iteration.seconds, iteration.parts.get("rollout")
        parts = {} if rollout is None else {"time/t_rollout": rollout, "time/t_learn": max(0.0, seconds - rollout)}
        if self.timing is not None:
            row = {"iteration": iteration.number + 1, "steps": self.config.steps_per_iteration, "t_iter": [seconds]}
            row |= {name.removeprefix("time/"): [value] for name, value in parts.items()} | peak_memory()
            self.timing.log(row | {"ended": time.monotonic()})
        fps = self.config.steps_per_iteration / seconds if seconds else 0.0
        return parts | {"time/t_iter": seconds, "time/global_fps": fps}

    def reached(self) -> int:
        """Whether the steps asked for are under way or done."""
        if self.dispatched >= self.config.num_iterations:
            return FINISHED
        return STEP_LIMIT if self.dispatched >= self.schedule.last else RUNNING

    def stop_code(self) -> int:
        """What this process would stop for: a signal's number, the time limit, or nothing."""
        if self.request.signal is not None:
            return 128 + self.request.signal
        limit = self.options.max_hours
        return TIME_LIMIT if limit is not None and time.monotonic() - self.started > 3600 * limit else RUNNING

    def evaluate(self) -> dict[str, Any]:
        """An evaluation if one is due; sets the score by which the best checkpoint is kept."""
        interval, iteration = self.config.eval.interval, self.session.iteration
        if not interval or (iteration % interval and iteration < self.config.num_iterations):
            return {}
        summary = summarize(evaluate_policy(self.session))
        if self.config.eval.record_video:
            policy = current_policy(self.session)  # with FSDP a collective
            self.videos.record(lambda: policy, self.session.global_step)
        self.score = summary["return_mean"]
        return {f"eval/{name}": value for name, value in summary.items()}

    def log(self, record: dict[str, Any]) -> None:
        """Hand a record to trackers and progress."""
        try:
            self.trackers.log(record)
        except OSError as error:
            raise RunError(f"{error.filename} can't be written: {error.strerror or error}") from error
        self.progress.update(record)

    def prove(self, last: bool) -> None:
        """Compare the devices' copies if that is due, and write this iteration's fingerprints if they are traced."""
        iteration = self.session.iteration
        copies = self.copies.pop(iteration, None)
        if copies is not None or (last and self.schedule.compares(iteration)):
            check_ranks_in_sync(self.session, f"after iteration {iteration}", copies)
        if last and self.fingerprints is not None:
            digests = {name: array_digest(a).hex() for name, a in self.session.arrays().items()}
            self.fingerprints.log({"iteration": iteration, **digests})

    def wall_time(self) -> float:
        """Seconds of training so far, earlier sessions included."""
        return self.session.wall_time_before + time.monotonic() - self.started

    def save_checkpoint(self, force: bool = False) -> None:
        """Save a checkpoint if one is due; it is written in the background."""
        interval, iteration = self.config.checkpoint.interval, self.session.iteration
        if self.saved_iteration == iteration or not (force or (interval and iteration % interval == 0)):
            return
        files = checkpoint_files(self.session, self.wall_time(), self.score)
        self.checkpoints.save(self.session.global_step, files, self.score)
        self.saved_iteration = iteration

    def summarize(self, status: str) -> dict[str, Any]:
        """``summary.json``."""
        s = self.session
        arrays, episodes = s.arrays(), s.recent.metrics()
        seconds = time.monotonic() - self.started
        return {
            "status": status,
            "environment": self.config.env.id,
            "seed": self.config.seed,
            "iteration": s.iteration,
            "global_step": s.global_step,
            "final_return": episodes["rollout/episode_return_mean"],
            **({"final_success_rate": episodes[SUCCESS_RATE]} if SUCCESS_RATE in episodes else {}),
            "episodes": s.recent.total,
            "params_sha256": sha256_of({k: v for k, v in arrays.items() if k.startswith(POLICY)}),
            "state_sha256": sha256_of(arrays),
            "wall_time": self.wall_time(),
            "steps_per_second": (s.global_step - self.steps_before) / seconds,
            "world_size": s.program.mesh.size,
            "processes": s.topology.world_size,
            "num_shards": self.config.shards,
            "reduction": self.config.reduction,
            "shards_on_a_rank": s.mode,
            "collectives": s.program.transport,
            "restarted_environments": s.restarted_before + s.restarted,
            "lockstep": __version__,
            "engine": "jax",
            **machine_facts(),
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
    """Train one process's part of a run, from its beginning or from a checkpoint.

    Args:
        config: resolved.
        run: its directory, as this process sees it.
        topology: this process's place.
        options: limits of this session, and its devices.
        checkpoint: what to resume from.

    Raises:
        ValueError: what the config asks for can't be had here; one line.
        EnvironmentFailureError: an environment raised, died or hung.
        NonFiniteError: the loss is not finite; in all processes at the same step.
        DesyncError: devices hold different bytes; in all processes.
        PeerFailureError: another process is gone.
    """
    started = time.monotonic()
    run.remove_summary()
    with stop_requests() as request:
        try:
            if options.num_seeds > 1:
                from lockstep.jax_engine.program.train_seeds import train_seeds  # stands on this module

                return train_seeds(config, run, topology, options, request, started)
            session = open_session(config, topology, options, checkpoint)
            try:
                return _train(session, run, options, request, started, checkpoint)
            finally:
                session.close()
        finally:
            leave_processes()


def _train(
    session: Session,
    run: RunDirectory,
    options: RunOptions,
    request: StopRequest,
    started: float,
    checkpoint: Checkpoint | None,
) -> TrainResult:
    line = announcement(session)
    run.cut_after(session.iteration, session.global_step, session.config.log)
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
        jax.block_until_ready(session.state)
        trainer.close()
