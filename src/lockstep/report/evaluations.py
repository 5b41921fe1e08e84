"""Finds the evaluations of a run: those of training, and files of ``lockstep eval`` in its directory."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.fingerprint import sha256_of
from lockstep.policies.baselines import BASELINES
from lockstep.policies.results import read_json
from lockstep.report.charts import EVALUATION
from lockstep.report.reading import RunFiles
from lockstep.runs.checkpoint import POLICY, CheckpointError, read_checkpoint
from lockstep.runs.directory import CHECKPOINTS, OWN_NAMES
from lockstep.runs.finding import checkpoints_of
from lockstep.runs.listing import MOST_BYTES, number, printable

MOST_FILES = 4
FACTS = {
    "episodes": "episodes",
    "return_mean": "mean return",
    "return_std": "standard deviation",
    "return_min": "lowest",
    "return_max": "highest",
    "length_mean": "mean length",
    "success_rate": "success rate",
    "score_mean": "mean score",
}
RETURNS = [words for key, words in FACTS.items() if key == "episodes" or key.startswith("return_")]
QUARTILES = ((25, "lower quartile"), (50, "median"), (75, "upper quartile"))


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a run.

    Attributes:
        where: which evaluation it is, in words.
        step: the policy's global step; None if unknown.
        facts: pairs of words and their numbers.
        returns: returns of the episodes, ``[episodes]``; None unless they come from a file.
        how: how actions were chosen; empty if unknown.
        policy: whose policy it is; empty for the run's own.
    """

    where: str
    step: float | None
    facts: list[tuple[str, float]]
    returns: np.ndarray | None = None
    how: str = ""
    policy: str = ""

    @property
    def shows_the_runs_episodes(self) -> bool:
        """Whether it has the return of each episode, and the policy is the run's own."""
        return self.returns is not None and not self.policy


def evaluations_of(run: RunFiles) -> list[Evaluation]:
    """Returns the last and the best evaluation of training, and those of files in the run's directory.

    Of several seeds, returns each one's last of training and the first of its files.
    """
    if not run.seeds:
        return _of_training(run) + _of_files(run)
    each = [(seed.name, _of_training(seed)[:1] + _of_files(seed)[:1]) for seed in run.seeds]
    return [replace(one, where=f"{name}: {one.where}") for name, found in each for one in found]


def _of_training(run: RunFiles) -> list[Evaluation]:
    """Returns the last evaluation of training, and the best if that is another one."""
    rows = [row for records in run.records for row in records if number(row, EVALUATION) is not None]
    if not rows:
        return []
    best = max(reversed(rows), key=lambda row: row[EVALUATION])
    if best is rows[-1]:
        return [_of_row("last and best of training", best)]
    return [_of_row("last of training", rows[-1]), _of_row("best of training", best)]


def _of_row(where: str, row: dict[str, Any]) -> Evaluation:
    facts = [(words, value) for key, words in FACTS.items() if (value := number(row, f"eval/{key}")) is not None]
    return Evaluation(where, number(row, "global_step"), facts)


def _of_files(run: RunFiles) -> list[Evaluation]:
    """Reads what ``lockstep eval --json FILE`` wrote into the directory; skips other files and environments.

    Evaluations of the run's own policy come first.
    """
    out = []
    for file in sorted(run.path.glob("*.json")):
        if file.name in OWN_NAMES or file.is_symlink() or not file.is_file() or file.stat().st_size > MOST_BYTES:
            continue
        try:
            facts, table = read_json(file)
        except ValueError:
            continue
        if not np.isfinite(table[:, 0]).all() or run.row.environment not in (None, printable(facts["environment"])):
            continue
        returns, step = table[:, 0], number(facts, "global_step")
        named = [(words, value) for key, words in FACTS.items() if (value := number(facts, key)) is not None]
        after = sum(words in RETURNS for words, _ in named)  # beside the other facts of returns
        named[after:after] = [(words, float(np.percentile(returns, share))) for share, words in QUARTILES]
        sampled, policy = facts.get("stochastic"), _other_policy(facts, run)
        how = ("sampled actions" if sampled else "the most likely actions") if isinstance(sampled, bool) else ""
        where = printable(f"{file.name}: policy {policy}" if policy else file.name)
        step = None if policy in BASELINES else step
        out.append(Evaluation(where, step, named, returns, how, policy))
    return sorted(out, key=lambda one: one.policy != "")[:MOST_FILES]


def _other_policy(facts: dict[str, Any], run: RunFiles) -> str:
    """Returns whose policy was evaluated: a baseline's name, or another run's as it was typed; empty for the run's.

    Names count only if the parameters can't be compared: the run may have been renamed, and others' are alike.
    """
    policy = facts.get("policy")
    if not isinstance(policy, str) or policy in BASELINES:
        return policy if isinstance(policy, str) else ""
    is_own = _has_parameters(run, facts)
    if is_own is None:
        places = [part for part in Path(policy).parts if part not in ("..", "/")]
        is_own = not places or run.path.resolve().name in places
    return "" if is_own else policy


def _has_parameters(run: RunFiles, facts: dict[str, Any]) -> bool | None:
    """Tells whether a run had an evaluation's parameters at its step; None if the file or the run doesn't say."""
    evaluated, step = facts.get("params_sha256"), number(facts, "global_step")
    if not isinstance(evaluated, str) or step is None:
        return None
    if run.summary.get("params_sha256") == evaluated:
        return True
    if run.summary.get("global_step") == step:
        return False
    checkpoint = run.path / CHECKPOINTS / f"step_{int(step)}"
    if checkpoint in checkpoints_of(run.path):
        with contextlib.suppress(CheckpointError, OSError):
            arrays = read_checkpoint(checkpoint).arrays
            return evaluated == sha256_of({name: array for name, array in arrays.items() if name.startswith(POLICY)})
    return None
