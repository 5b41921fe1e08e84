"""What a run remembers through all its sessions beside the training state: when it began, and its evaluations."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.config.run import Config
from lockstep.training.limits import follows_length
from lockstep.training.reference_policy import reference_digest

Evaluated = dict[str, Any]
"""``step`` and ``return_mean`` of an evaluation."""


@dataclass
class Past:
    """Facts that a checkpoint carries on; none of them is read by training.

    Attributes:
        started: when the run's first session began, ISO 8601 in UTC; None: a version that didn't keep it began the run.
        score: mean return of the last evaluation, or in a run without any of the last episodes.
        total_steps: by which schedules fall; ``lengths`` are the changes of it, if there are any schedules that do: at
            which ``global_step`` it ``was`` and what it ``is`` since.
        best_evaluation: with the highest mean return, the newest among equals; ``last_evaluation`` the newest.
        reference_sha256: of GRPO's reference policy; None without one.
    """

    started: str | None = None
    total_steps: int | None = None
    lengths: list[dict[str, int]] = field(default_factory=list)
    score: float | None = None
    best_evaluation: Evaluated | None = None
    last_evaluation: Evaluated | None = None
    reference_sha256: str | None = None

    @classmethod
    def of(cls, state: Mapping[str, Any] | None, started: str) -> Past:
        """Takes over what a checkpoint's ``state.json`` carries; without one the run begins at ``started``."""
        if state is None:
            return cls(started)
        evaluations = ("best_evaluation", "last_evaluation")
        date = state.get("started")
        best, last = (found if _is_evaluation(found := state.get(name)) else None for name in evaluations)
        steps, lengths = state.get("total_steps"), state.get("lengths")
        return cls(
            date if isinstance(date, str) else None,
            steps if isinstance(steps, int) else None,
            lengths if isinstance(lengths, list) else [],
            state.get("score"),
            best,
            last,
            state.get("reference_sha256"),
        )

    def goes_on_for(self, config: Config, step: int) -> None:
        """Takes in how long the run is to be from this step on: another length is another fall of its schedules."""
        was, self.total_steps = self.total_steps, config.total_steps
        if step and was not in (None, config.total_steps) and follows_length(config):
            self.lengths = [*self.lengths, {"global_step": step, "was": was, "is": config.total_steps}]

    def keeps_to(self, config: Config) -> None:
        """Takes in which reference policy GRPO has: a path alone doesn't tell."""
        self.reference_sha256 = reference_digest(config)

    def evaluated(self, step: int, return_mean: float) -> None:
        """Takes in an evaluation, whose mean return is the score; NaN is the best only until there is a number."""
        self.score = return_mean
        self.last_evaluation = {"step": step, "return_mean": return_mean}
        best = None if self.best_evaluation is None else self.best_evaluation["return_mean"]
        if best is None or return_mean >= (-math.inf if math.isnan(best) else best):
            self.best_evaluation = self.last_evaluation

    def score_at(self, step: int, evaluates: bool) -> float | None:
        """Returns the score of a checkpoint of this step; where a run evaluates, of an evaluated one alone."""
        evaluated = self.last_evaluation is not None and self.last_evaluation["step"] == step
        return self.score if evaluated or not evaluates else None

    def is_best_at(self, step: int) -> bool:
        """Tells whether the best evaluation so far is the one at this step."""
        return self.best_evaluation is not None and self.best_evaluation["step"] == step

    def to_json(self) -> dict[str, Any]:
        """Returns what a checkpoint's ``state.json`` carries: the reverse of :meth:`of`."""
        return asdict(self)


def _is_evaluation(found: Any) -> bool:
    return isinstance(found, dict) and isinstance(found.get("return_mean"), int | float)


def utc_date(seconds_ago: float = 0.0) -> str:
    """Returns the present, or what was so many seconds ago, as ISO 8601 in UTC to the second."""
    then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=seconds_ago)
    return then.isoformat(timespec="seconds")
