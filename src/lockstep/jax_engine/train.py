"""The training loop, from the first iteration to the last checkpoint."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from lockstep.config.run import Config, RunOptions
from lockstep.core.life import Part, life
from lockstep.core.machine import restore_gc
from lockstep.core.topology import Topology
from lockstep.jax_engine.distributed.processes import gather_json, leaving_together, wait_for_all
from lockstep.jax_engine.evaluation import evaluate_policy
from lockstep.jax_engine.program.fingerprints import Copies
from lockstep.jax_engine.program.iterations import Iteration, numbers_of
from lockstep.jax_engine.program.schedule import Schedule
from lockstep.jax_engine.session import Session, current_policy, open_session
from lockstep.jax_engine.setup.accelerators import peak_memory
from lockstep.jax_engine.start.announcement import start_lines
from lockstep.runs.checkpoint import Checkpoint
from lockstep.runs.directory import RunDirectory
from lockstep.training.metrics import Record, episode_metrics
from lockstep.training.recorder import Recorder, record_training
from lockstep.training.stop import RUNNING, StopRequest, TrainResult, reached, stop_code, stop_requests, stops


class Trainer:
    """Runs the loop over one process's iterations.

    Args:
        session: the program, environments and state; the loop changes the state.
        recorder: records metrics, checkpoints and evaluations.
        options: limits of this session.
        request: the signals that this process has received.

    Attributes:
        began: iterations done before this session.
        dispatched: iterations done or under way.
        pending: calls of the program that are under way, the oldest first.
        copies: by iteration, the devices' copies of the state that were compared before a call took it over; None if
            they were all the same.
        schedule: says when the host needs the state.
        stop_code: the highest stop code of any process.
        save_code: the stop code by which processes have agreed to save a checkpoint, or ``RUNNING``.
    """

    def __init__(self, session: Session, recorder: Recorder, options: RunOptions, request: StopRequest) -> None:
        self.session = session
        self.recorder = recorder
        self.options = options
        self.request = request
        self.config = session.config
        self.began = self.dispatched = session.iteration
        self.pending: deque[Any] = deque()
        self.copies: dict[int, Copies | None] = {}
        self.schedule = Schedule(
            session.config,
            session.iteration,
            options.stop_at_step,
            session.program.mesh.size,
            session.topology.world_size,
            recorder.fingerprints is not None,
        )
        self.stop_code = self.save_code = RUNNING

    def loop(self) -> int:
        """Iterates until the end, a limit, or a signal; returns the stop code.

        While the host logs one call of the program, the next is under way. The loop waits for all calls when something
        that needs the state is due. The devices' copies are compared before the next call takes the state over; copies
        that differ are kept, and reported after the earlier iterations are logged.
        """
        self.request.take_signals()
        while True:
            stop = self.limit_reached() or self.stop_code
            if stop == RUNNING:
                self.dispatch([self])
            due = stop != RUNNING or self.save_code != RUNNING or self.waits or self.schedule.due(self.dispatched)
            while len(self.pending) > (0 if due else 1):
                self.log_oldest_call(last=due and len(self.pending) == 1)
            if due:
                self.stop_code = max(self.stop_code, self.listeners_code())
                self.recorder.save_checkpoint(asked=self.save_code)
                self.save_code = RUNNING
                if stop != RUNNING:
                    return stop

    @property
    def waits(self) -> bool:
        """Whether listeners answer after each iteration; then each iteration is a call of its own."""
        return self.recorder.audience.waits

    def listeners_code(self) -> int:
        """Returns the highest code that listeners answered to this iteration; a collective if they are waited for."""
        return max(gather_json(self.recorder.audience.answer.code)) if self.waits else RUNNING

    def limit_reached(self) -> int:
        """Returns the code of the step limit that is reached, counting iterations under way, or ``RUNNING``."""
        return reached(self.config, self.options, self.dispatched, self.dispatched * self.config.steps_per_iteration)

    def keep_differing_copies(self, iteration: int) -> None:
        """Compares the devices' copies after this iteration, before a call takes them over; keeps any that differ."""
        if self.schedule.compares(iteration):
            state, layout = self.session.state, self.session.program.layout
            self.copies[iteration] = None if Copies.of(state, layout).alike() else Copies.of(state, layout, keep=True)

    def dispatch(self, trainers: Sequence[Trainer]) -> None:
        """Starts as many iterations as the program takes at once, but none beyond the next one where something is due.

        Args:
            trainers: this one, or those of all seeds; each of them compares its copies, and keeps any that differ,
                before the call takes them over.
        """
        done, waiting, count = self.dispatched, bool(self.pending), 1

        def before() -> None:
            for trainer in trainers if waiting else ():
                trainer.keep_differing_copies(done)

        compiled = done > self.began  # the first call compiles; only one iteration's time should include that
        while (
            compiled
            and not self.waits
            and count < self.session.runner.capacity
            and not self.schedule.ends(done + count)
        ):
            count += 1
        asked = max(stop_code(self.request, self.options, self.recorder.started), self.recorder.asks())
        self.pending.append(self.session.runner.dispatch(done, count, asked, before))
        self.dispatched += count

    def log_oldest_call(self, last: bool) -> None:
        """Waits for the oldest call and logs its iterations; ``last`` says that nothing else is under way."""
        *earlier, newest = self.session.runner.fetch(self.pending.popleft())
        self.log(earlier)
        record = self.record(newest)
        if last:
            record |= self.evaluate()
        self.check_in_sync(last)
        self.recorder.log(record)

    def log(self, iterations: Sequence[Iteration]) -> None:
        """Logs iterations together; if one of them fails, logs those before it."""
        records: list[Record] = []
        try:
            for iteration in iterations:
                records.append(self.record(iteration))
        finally:
            if records:
                self.recorder.log(*records)

    def record(self, iteration: Iteration) -> Record:
        """Counts an iteration as done and returns its metrics record.

        Raises:
            NonFiniteError: if a loss or gradient was not finite.
        """
        restore_gc()
        session, numbers = self.session, numbers_of(iteration, self.config)
        session.iteration = iteration.number + 1
        session.global_step += self.config.steps_per_iteration
        session.optimizer_steps += iteration.numbers["steps"]
        session.learning_rate = iteration.numbers["learning_rate"]
        episodes = iteration.episodes
        session.recent.extend_newest(episodes.newest, episodes.count, episodes.env_metrics)
        self.stop_code = max(self.stop_code, stops(iteration.numbers["stop"]))
        self.save_code = max(self.save_code, iteration.numbers["stop"])
        record = episode_metrics(session.iteration, session.global_step, session.recent)
        return record | numbers | self.times(iteration)

    def times(self, iteration: Iteration) -> Record:
        """Returns ``time/…`` of the record, and logs the iteration's times if the run logs timing."""
        steps, seconds = self.config.steps_per_iteration, iteration.seconds
        parts: Record = {f"time/t_{part}": took for part, took in iteration.parts.items()}
        if self.recorder.timing is not None:
            row = {"iteration": iteration.number + 1, "steps": steps, "t_iter": [seconds]}
            row |= {name.removeprefix("time/"): [value] for name, value in parts.items()} | peak_memory()
            self.recorder.timing.log(row | {"ended": iteration.ended})
        return parts | {"time/t_iter": seconds, "time/global_fps": steps / seconds if seconds else 0.0}

    def evaluate(self) -> Record:
        """Evaluates the policy if that is due; returns ``eval/…`` of the record."""
        if not self.recorder.evaluation_due():
            return {}
        life.begin(Part.EVALUATION)
        episodes = evaluate_policy(self.session)
        policy: Any = current_policy(self.session) if self.config.eval.record_video else None  # with FSDP a collective
        record = self.recorder.evaluated(episodes, lambda: policy)
        wait_for_all(f"recorded {self.session.iteration}")
        return record

    def check_in_sync(self, last: bool) -> None:
        """Compares the devices' copies if that is due, and writes the state's fingerprints if the run traces them."""
        iteration = self.session.iteration
        compared, copies = iteration in self.copies, self.copies.pop(iteration, None)
        if copies is not None:
            self.session.check_in_sync(f"after iteration {iteration}", copies)
        elif last and not compared and self.schedule.compares(iteration):
            self.recorder.compare(f"after iteration {iteration}")
        if last:
            self.recorder.trace()


def train(
    config: Config, run: RunDirectory, topology: Topology, options: RunOptions, checkpoint: Checkpoint | None = None
) -> TrainResult:
    """Trains one process's part of a run, from its beginning or from a checkpoint.

    Args:
        config: resolved.
        run: its directory, as this process sees it.
        topology: this process's place.
        options: limits of this session, and its devices.
        checkpoint: the one to resume from, or None.

    Raises:
        ValueError: if this machine or environment can't do what the config asks for; the message is one line.
        EnvironmentFailureError: if an environment raised, died or hung.
        NonFiniteError: if the loss is not finite; in all processes at the same step.
        DesyncError: if devices hold different bytes; in all processes.
        PeerFailureError: if another process is gone.
    """
    started = time.monotonic()
    with stop_requests() as request, leaving_together(topology):
        return record_training(
            run,
            started,
            checkpoint,
            lambda: open_session(config, topology, options, checkpoint),
            lambda session: start_lines(session, options),
            lambda session, recorder: Trainer(session, recorder, options, request).loop(),
        )
