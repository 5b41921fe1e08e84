"""What a run remembers across sessions besides the training state: its beginning, evaluations and restarts."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.config.run import Config
from lockstep.core.machine import MACHINE_FACTS
from lockstep.runs.directory import SUMMARY, RunDirectory
from lockstep.runs.listing import object_if_any
from lockstep.training.reference_policy import reference_digest
from lockstep.training.schedules import follows_length

Evaluated = dict[str, Any]
"""An evaluation's ``step`` and ``return_mean``."""
OF_A_SESSION = ("command", "commit", "wall_time", "steps_per_second", "restarted_environments", "lockstep")
"""Entries of a summary that describe the session that wrote it, besides the engine, devices and machine."""
PLACE = ("iteration", "global_step")
ORDER = ("collectives", "fsdp")
"""Settings that a resume may change, and that decide the order of sums if ``reduction`` is fast."""


@dataclass
class RunHistory:
    """Facts that checkpoints carry on; training reads none of them.

    Attributes:
        started: when the run's first session began, ISO 8601 in UTC; None if a version that didn't record it began it.
        order: the settings that decide in which order ``reduction: fast`` adds; ``orders`` lists their changes with it:
            the ``global_step`` of the change, the ``setting``, what it ``was``, and what it ``is`` since.
        score: mean return of the last evaluation, or of the last episodes in a run without evaluations.
        total_steps: length over which schedules fall; ``lengths`` lists its changes, if a schedule depends on it: the
            ``global_step`` of the change, what it ``was``, and what it ``is`` since.
        best_evaluation: the newest evaluation with the highest mean return; ``last_evaluation`` is the newest one.
        reference_sha256: digest of GRPO's reference policy; None without one.
        restarts: one row for each time a launcher restarted the ranks.
        first_machine: the facts of hardware and software with which the run began; None if an older version began it.
        first_machine_until: the ``global_step`` at which it first went on with others; None if it hasn't yet.
    """

    started: str | None = None
    total_steps: int | None = None
    lengths: list[dict[str, int]] = field(default_factory=list)
    score: float | None = None
    best_evaluation: Evaluated | None = None
    last_evaluation: Evaluated | None = None
    reference_sha256: str | None = None
    restarts: list[dict[str, Any]] = field(default_factory=list)
    first_machine: dict[str, Any] | None = None
    first_machine_until: int | None = None
    order: dict[str, Any] = field(default_factory=dict)
    orders: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, state: Mapping[str, Any] | None, started: str) -> RunHistory:
        """Reads the facts from a checkpoint's ``state.json``; without one the run begins at ``started``."""
        if state is None:
            return cls(started)
        evaluations = ("best_evaluation", "last_evaluation")
        date = state.get("started")
        best, last = (found if _is_evaluation(found := state.get(name)) else None for name in evaluations)
        steps, lengths = state.get("total_steps"), state.get("lengths")
        machine, until = state.get("first_machine"), state.get("first_machine_until")
        order, orders = state.get("order"), state.get("orders")
        return cls(
            date if isinstance(date, str) else None,
            steps if isinstance(steps, int) else None,
            lengths if isinstance(lengths, list) else [],
            state.get("score"),
            best,
            last,
            state.get("reference_sha256"),
            rows_of(state),
            machine if isinstance(machine, dict) else None,
            until if isinstance(until, int) else None,
            order if isinstance(order, dict) else {},
            orders if isinstance(orders, list) else [],
        )

    def record_settings(self, config: Config, step: int) -> None:
        """Records from this step on what a resume may change and the agent may depend on."""
        self.record_length(config, step)
        before, self.order = self.order, {name: getattr(config, name) for name in ORDER}
        if step and config.reduction == "fast":
            changed = [name for name in ORDER if name in before and before[name] != self.order[name]]
            rows = [{"global_step": step, "setting": n, "was": before[n], "is": self.order[n]} for n in changed]
            self.orders = [*self.orders, *rows]

    def record_length(self, config: Config, step: int) -> None:
        """Records the run's length from this step on, because with another length its schedules fall differently."""
        was, self.total_steps = self.total_steps, config.total_steps
        if step and was not in (None, config.total_steps) and follows_length(config):
            self.lengths = [*self.lengths, {"global_step": step, "was": was, "is": config.total_steps}]

    def record_machine(self, facts: Mapping[str, Any], step: int) -> None:
        """Records with which machine and versions the run began, and the first step from which they are others.

        They stay unknown of a run that an older version began. ``facts`` are of a session that begins at ``step``.
        """
        here = {name: facts[name] for name in MACHINE_FACTS if name in facts}
        if self.first_machine is None:
            self.first_machine = None if step else here
        elif self.first_machine_until is None and self.first_machine != here:
            self.first_machine_until = step

    def record_reference(self, config: Config) -> None:
        """Records the digest of GRPO's reference policy, since its path alone doesn't identify it."""
        self.reference_sha256 = reference_digest(config)

    def departures(self) -> dict[str, Any]:
        """Returns the part of ``summary.json`` that tells what changed on the way: settings, machine and versions."""
        names = ("lengths", "orders", "first_machine", "first_machine_until")
        return {name: getattr(self, name) for name in names}

    def add_restarts(self, restarts: Sequence[dict[str, Any]]) -> None:
        """Adds rows of restarts, in order; rows that are here already aren't added again."""
        self.restarts = with_rows(self.restarts, restarts)

    def evaluated(self, step: int, return_mean: float) -> None:
        """Records an evaluation; its mean return is the score. NaN is the best only until there is a number."""
        self.score = return_mean
        self.last_evaluation = {"step": step, "return_mean": return_mean}
        best = None if self.best_evaluation is None else self.best_evaluation["return_mean"]
        if best is None or return_mean >= (-math.inf if math.isnan(best) else best):
            self.best_evaluation = self.last_evaluation

    def score_at(self, step: int, evaluates: bool) -> float | None:
        """Returns the score of a checkpoint at this step; None if the run evaluates, but not at this step."""
        return self.score if self.was_evaluated_at(step) or not evaluates else None

    def was_evaluated_at(self, step: int) -> bool:
        """Returns whether the last evaluation was at this step."""
        return self.last_evaluation is not None and self.last_evaluation["step"] == step

    def is_best_at(self, step: int) -> bool:
        """Returns whether the best evaluation so far was at this step."""
        return self.best_evaluation is not None and self.best_evaluation["step"] == step

    def to_json(self) -> dict[str, Any]:
        """Returns what ``state.json`` stores and :meth:`of` reads."""
        return asdict(self)


def _is_evaluation(found: Any) -> bool:
    return isinstance(found, dict) and isinstance(found.get("return_mean"), int | float)


def rows_of(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the restarts listed in a ``state.json`` or a ``summary.json``."""
    rows = facts.get("restarts")
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def with_first_machine(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a ``summary.json`` with the machine and versions of the run's first steps, as far as it names them.

    Otherwise it has those of the last session.
    """
    first = summary.get("first_machine")
    if not isinstance(first, dict):
        return dict(summary)
    return {name: value for name, value in summary.items() if name not in MACHINE_FACTS} | first


def with_rows(known: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Appends those of ``rows`` that aren't in ``known``; equal rows stay as often as the list with more has them."""
    left, new = list(known), []
    for row in rows:
        if row in left:
            left.remove(row)
        else:
            new.append(row)
    return [*known, *new]


def with_restarts(state: bytes, rows: Sequence[dict[str, Any]]) -> bytes:
    """Adds rows of restarts to the content of a ``state.json`` that was written before them."""
    facts = json.loads(state)
    return (json.dumps({**facts, "restarts": with_rows(rows_of(facts), rows)}) + "\n").encode()


def summary_before(run: RunDirectory) -> dict[str, Any]:
    """Reads the summary of an earlier session, on the writing rank; empty if it is missing or damaged."""
    return object_if_any(run.path / SUMMARY) if run.is_writer else {}


def with_facts_before(summary: Mapping[str, Any], before: Mapping[str, Any], facts: Iterable[str]) -> dict[str, Any]:
    """Completes the summary of a session that took no step with the facts of the last session that took some.

    It does so only if both summaries are of the run at the same place. The status stays the session's own.

    Args:
        summary: the session's own summary.
        before: the summary that the session found.
        facts: names of the facts about engine, devices and machine.
    """
    if any(before.get(name) != summary[name] for name in PLACE):
        return dict(summary)
    return {**summary, **{name: before[name] for name in (*OF_A_SESSION, *facts) if name in before}}


def utc_date(seconds_ago: float = 0.0) -> str:
    """Returns the current time, or that of ``seconds_ago``, as ISO 8601 in UTC to the second."""
    then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=seconds_ago)
    return then.isoformat(timespec="seconds")
