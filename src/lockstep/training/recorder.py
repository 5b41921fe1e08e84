"""Records a run: metrics, fingerprints, checkpoints, videos, progress and the summary."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from lockstep import __version__
from lockstep.config.redact import shown_value
from lockstep.core.episodes import SUCCESS_RATE
from lockstep.core.errors import RunError
from lockstep.core.files import as_json, why_unwritten
from lockstep.core.fingerprint import array_digest, sha256_of
from lockstep.core.life import Part, life
from lockstep.policies.evaluation import summarize
from lockstep.policies.policy import Policy
from lockstep.policies.videos import EvaluationVideos
from lockstep.runs.checkpoint import POLICY, Checkpoint, CheckpointError, best_of, step_of
from lockstep.runs.directory import FINGERPRINTS, TIMING, RunDirectory
from lockstep.runs.progress import evaluation_line, full_lines
from lockstep.runs.trackers.service import Ending
from lockstep.training.announcement import unread_in
from lockstep.training.audience import Audience
from lockstep.training.due import Keeper, comes_due, evaluation_due
from lockstep.training.metrics import WORLD_SIZE, Record
from lockstep.training.run_history import RunHistory, rows_of, summary_before, utc_date, with_facts_before
from lockstep.training.session import TrainingSession
from lockstep.training.stop import KEEP, RUNNING, SAVE, TrainResult, status_of


class Recorder:
    """Writes a run's directory, as one rank sees it; a rank that isn't the writer only takes part in collectives.

    ``started`` is the session's start by the monotonic clock. ``checkpoint`` is what this rank found on its own host,
    or None; anything that decides what all ranks do comes from the session instead, which is the same on all.
    ``before`` is the summary that an earlier session left.

    Attributes:
        history: what the run remembers across sessions, with the score by which the best checkpoint is kept.
        saved_iteration: iteration of this session's last checkpoint.
    """

    def __init__(
        self,
        session: TrainingSession,
        run: RunDirectory,
        started: float,
        checkpoint: Checkpoint | None = None,
        before: Mapping[str, Any] | None = None,
    ) -> None:
        config = session.config
        self.session = session
        self.counted = session.counted
        self.config = config
        self.run = run
        self.started = started
        facts = session.facts()
        self.world_size: int = facts["world_size"]
        self.is_new = checkpoint is None
        self.steps_before = session.counted.global_step
        self.history = RunHistory.of(session.remembered, run.facts.started or utc_date(time.monotonic() - started))
        self.history.record_settings(config, session.counted.global_step)
        self.history.record_reference(config)
        self.history.record_machine({"lockstep": __version__, **facts}, session.counted.global_step)
        self.before = before or {}
        if self.before.get("global_step") == self.steps_before:  # otherwise it covers steps that are cut off
            self.history.add_restarts(rows_of(self.before))
        self.history.add_restarts(run.facts.restarts)
        self.saved_iteration: int | None = None
        self._compared: int | None = None
        self.missing_rows = [] if checkpoint is None else run.missing_rows(session.counted.iteration)
        self.trackers = run.open_trackers(config, self.is_new)
        self.fingerprints = run.open_records(FINGERPRINTS) if config.proof.trace else None
        self.checkpoints, self.memory = run.open_checkpoints(config.checkpoint), run.open_memory()
        self.keeper = Keeper(config.checkpoint.seconds, self.memory is not None)
        self.progress = run.open_progress(config.total_steps, states=config.log.console == "short")
        self.timing = run.open_records(TIMING) if config.log.timing else None
        self.audience = Audience(run.facts.audience, run.is_writer)
        self.videos = EvaluationVideos(run, self.trackers, config.eval.record_video)

    def begin(self, lines: Iterable[str]) -> None:
        """Begins the record: shows lines and trackers' places, and warns of restarted environments and missing rows.

        It also sends a new run's config to the trackers, and marks that training has begun.
        """
        for line in [*lines, *self.trackers.places()]:
            self.progress.message(line)
        restarted = self.session.restarted
        if restarted:
            self.run.warn(
                f"environments {restarted} couldn't be restored exactly and began a new episode: from here on the "
                "agent isn't that of an uninterrupted run (docs/environments.md, Resuming exactly)"
            )
        if self.missing_rows:
            self.run.warn(missing_in_words(self.missing_rows, self.counted.iteration))
        if self.is_new:
            shown = as_json(shown_value(self.config.model_dump(mode="json")), indent=2)
            self.trackers.text("config", f"```json\n{shown}\n```")
        life.trains = True

    def warn_of_unread(self) -> None:
        """Warns of settings that have no effect."""
        for said in unread_in(self.config, self.session.description):
            self.run.warn(said)

    def log(self, *records: Record) -> None:
        """Passes records, with the number of ranks and what listeners add, to trackers and progress.

        Raises:
            RunError: the run's own record can't be written; one line.
        """
        life.begin(Part.LOGGING)
        for together in [[record] for record in records] if self.audience.listens else [records]:
            self._log(together)

    def _log(self, records: Sequence[Record]) -> None:
        told = [self._told({**record, WORLD_SIZE: self.world_size}) for record in records]
        if not self.config.eval.interval:
            self.history.score = told[-1]["rollout/episode_return_mean"]
        try:
            self.trackers.log_all(told)
        except OSError as error:
            raise RunError(f"{error.filename} can't be written: {why_unwritten(error)}") from error
        for record in told:
            self.show(record)

    def _told(self, record: Record) -> Record:
        """Sends a record to listeners; returns it with what they add, which can't replace our entries."""
        added = self.audience.tell(record).metrics
        return {**record, **{name: value for name, value in added.items() if name not in record}} if added else record

    def show(self, record: Record) -> None:
        """Shows an iteration on the console: the state, or everything with ``log.console full``; and any evaluation."""
        if self.config.log.console == "full":
            self.progress.message(full_lines(record))
        evaluated = evaluation_line(record)
        if evaluated is not None:
            self.progress.message(evaluated)
        self.progress.update(record)

    def evaluation_due(self) -> bool:
        """Returns whether the policy is to be evaluated now."""
        return evaluation_due(self.config, self.counted.iteration)

    def needs_state(self) -> bool:
        """Returns whether something after this iteration needs its state, or waits for its record."""
        config, iteration = self.config, self.counted.iteration
        intervals = (config.checkpoint.interval, config.proof.interval)
        due = any(comes_due(interval, iteration) for interval in intervals) or self.evaluation_due()
        return due or self.audience.waits or self.fingerprints is not None

    def evaluated(self, episodes: np.ndarray, policy: Callable[[], Policy]) -> Record:
        """Records an evaluation: sets the score, films a video if one is wanted, and returns ``eval/…`` for the record.

        ``episodes`` is the table of :func:`lockstep.policies.evaluation.run_episodes`; ``policy`` is called for a video
        only.
        """
        summary = summarize(episodes)
        life.begin(Part.VIDEO)
        self.videos.record(policy, self.counted.global_step)
        self.history.evaluated(self.counted.global_step, summary["return_mean"])
        return {f"eval/{name}": value for name, value in summary.items()}

    def trace(self) -> None:
        """Writes the fingerprints of all arrays, if ``proof.trace`` is on."""
        if self.fingerprints is not None:
            digests = {name: array_digest(array).hex() for name, array in self.session.arrays().items()}
            self.fingerprints.log({"iteration": self.counted.iteration, **digests})

    def asks(self) -> int:
        """Returns the code by which the writer asks for the state to be saved, by the clock; elsewhere ``RUNNING``.

        No state is kept in memory while a checkpoint is being written: a run that resumed from the state would never
        get the checkpoint.
        """
        asked = self.keeper.asks() if self.run.is_writer else RUNNING
        return RUNNING if asked == KEEP and self.checkpoints.is_writing else asked

    def compare(self, when: str) -> None:
        """Compares the state of all ranks, at most once per iteration.

        Raises:
            DesyncError: on every rank; a state that differs isn't saved.
        """
        if self._compared != self.counted.iteration:
            self.session.check_in_sync(when)
            self._compared = self.counted.iteration

    def save_checkpoint(self, force: bool = False, asked: int = RUNNING) -> None:
        """Saves the state, at most once per iteration, if that is due, forced, or agreed on; a thread writes it.

        It is due at every interval and, if the best is kept, after an evaluation that is the best so far. ``asked`` is
        what ranks agreed on: ``SAVE``, a checkpoint, or ``KEEP``, in memory. The same on every rank. The ranks' states
        are compared first, because a state that differs would become every rank's after a resume.
        """
        iteration, step, config = self.counted.iteration, self.counted.global_step, self.config
        best = config.checkpoint.keep_best and self.evaluation_due() and self.history.is_best_at(step)
        due = force or best or comes_due(config.checkpoint.interval, iteration) or asked == SAVE
        if self.saved_iteration == iteration or not (due or asked == KEEP):
            return
        started = time.monotonic()
        self.compare(f"after iteration {iteration}")
        life.begin(Part.CHECKPOINT)
        files = self.session.checkpoint_files({"wall_time": self.wall_time(), **self.history.to_json()})
        facts = {"rows": iteration, "config": config.model_dump(mode="json")}
        if due:
            score = self.history.score_at(step, config.eval.interval > 0)
            evaluated = self.history.was_evaluated_at(step)
            planned = best or comes_due(config.checkpoint.interval, iteration) or iteration >= config.num_iterations
            self.checkpoints.save(step, files, score, {**facts, "planned": planned, "evaluated": evaluated})
            self.saved_iteration = iteration
            self.keeper.saved()
        else:
            self._keep(files, {**facts, "planned": False}, started)

    def _keep(self, files: dict[str, bytes], facts: dict[str, Any], started: float) -> None:
        """Keeps a state in memory; if there is no room for it, the launcher has only the checkpoints."""
        if self.memory is None:
            return
        before, size = self.memory.seconds, sum(map(len, files.values()))
        try:
            self.memory.check_room(size)
            self.memory.save(self.counted.global_step, files, None, facts)
        except (CheckpointError, OSError) as error:  # the directory may be gone after the user logged out
            self.run.warn(f"no more states are kept in memory, and restarts go on from checkpoints ({error})")
            self.keeper.stop_keeping()
        self.keeper.kept(time.monotonic() - started + before)

    def wall_time(self) -> float:
        """Returns the seconds of training so far, including earlier sessions."""
        return self.session.wall_time_before + time.monotonic() - self.started

    def summarize(self, status: str) -> dict[str, Any]:
        """Returns ``summary.json``; a session without a step keeps some facts, see :func:`with_facts_before`."""
        session, counted, config = self.session, self.counted, self.config
        arrays, episodes = session.arrays(), counted.recent.metrics()
        seconds = time.monotonic() - self.started
        best = best_of(self.run.checkpoints) if self.run.is_writer else None
        facts, steps = session.facts(), counted.global_step - self.steps_before
        summary = {
            "status": status,
            "started": self.history.started,
            "command": None if self.run.facts.command is None else list(self.run.facts.command),
            "commit": self.run.facts.commit,
            "environment": config.env.id,
            "seed": config.seed,
            "iteration": counted.iteration,
            "global_step": counted.global_step,
            "final_return": episodes["rollout/episode_return_mean"],
            **({"final_success_rate": episodes[SUCCESS_RATE]} if SUCCESS_RATE in episodes else {}),
            "episodes": counted.recent.total,
            "best_evaluation": self.history.best_evaluation,
            "last_evaluation": self.history.last_evaluation,
            "best_checkpoint": None if best is None else step_of(best),
            "params_sha256": sha256_of({k: v for k, v in arrays.items() if k.startswith(POLICY)}),
            "state_sha256": sha256_of(arrays),
            "wall_time": self.wall_time(),
            "steps_per_second": steps / seconds,
            "num_shards": config.shards,
            "reduction": config.reduction,
            "restarted_environments": session.restarted_before + session.restarted,
            "missing_rows": self.missing_rows,
            "restarts": self.history.restarts,
            **self.history.departures(),
            "lockstep": __version__,
            **facts,
        }
        return summary if steps else with_facts_before(summary, self.before, facts)

    def finish(self, stop: int) -> TrainResult:
        """Compares the ranks a last time, waits for the last checkpoint and writes ``summary.json``."""
        self.compare("at the end")
        self.save_checkpoint(force=True)
        self.checkpoints.wait()
        status, signal = status_of(stop)
        summary = self.summarize(status)
        self.run.write_summary(summary)
        self.trackers.ending = Ending.FINISHED if signal is None else Ending.STOPPED
        return TrainResult(status, signal, summary)

    def close(self) -> None:
        """Closes everything that is open; suppresses errors that would hide the run's own failure."""
        self.audience.close()
        with contextlib.suppress(Exception):  # a checkpoint under way is finished even if the run failed
            self.checkpoints.wait()
        with contextlib.suppress(Exception):
            if self.memory is not None:
                self.memory.wait()
        for writer in (self.trackers, self.fingerprints, self.timing):
            if writer is not None:
                with contextlib.suppress(OSError):  # lines are written when they are logged
                    writer.close()
        with contextlib.suppress(Exception):
            self.progress.close()  # last, as a terminal may be stopped


def missing_in_words(stretches: Sequence[tuple[int, int]], iterations: int) -> str:
    """Says which rows of ``metrics.jsonl`` a resumed run has lost."""
    missing = sum(last - first + 1 for first, last in stretches)
    shown = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in stretches[:5])
    more = "" if len(stretches) <= 5 else f" and {len(stretches) - 5} more stretches"
    return f"metrics.jsonl misses {missing:,} of {iterations:,} rows, of iterations {shown}{more}; they stay lost"


Session = TypeVar("Session", bound=TrainingSession)


def record_training(
    run: RunDirectory,
    started: float,
    checkpoint: Checkpoint | None,
    open_session: Callable[[], Session],
    start_lines: Callable[[Session], Iterable[str]],
    loop: Callable[[Session, Recorder], int],
) -> TrainResult:
    """Trains a run and records it, from the first line that is shown to the summary.

    Files of the run directory from after the session's starting point, and the earlier summary, are removed once
    nothing known can keep this session from starting. ``start_lines`` returns the lines shown first; ``loop`` trains
    and returns the stop code. The session is closed at the end, whatever happens.
    """
    session = open_session()
    try:
        lines = start_lines(session)
        run.start_services(session.config, session.counted.iteration)
        before = summary_before(run)
        if before.get("global_step") != session.counted.global_step:  # it covers steps that are cut off
            run.remove_summary()
        try:
            run.cut_after(session.counted.iteration, session.counted.global_step, session.config.log)
        except OSError as error:
            raise RunError(f"{error.filename or run.path} can't be written: {why_unwritten(error)}") from error
        run.remove_summary()
        run.write_config(session.config)
        recorder = Recorder(session, run, started, checkpoint, before)
        try:
            recorder.begin(lines)
            recorder.warn_of_unread()
            return recorder.finish(loop(session, recorder))
        finally:
            recorder.close()
    finally:
        run.close_services()
        session.close()
