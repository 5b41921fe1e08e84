"""Saves the checkpoints of a training, removes old ones, and finds the one to resume from."""

from __future__ import annotations

import contextlib
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.core.life import life
from lockstep.jax.checkpoints.facts import check_facts
from lockstep.jax.checkpoints.pytrees import FILES, load_checkpoint, load_metadata, others_in, recover, save_checkpoint
from lockstep.jax.config import RunnerConfig
from lockstep.jax.history import PPOMetricsHistory
from lockstep.jax.metrics import say
from lockstep.jax.ppo import PPOTrainState
from lockstep.jax_engine.distributed.mesh import get_num_devices
from lockstep.jax_engine.distributed.processes import gather_json, this_process
from lockstep.runs.checkpoint import (
    MANIFEST,
    CheckpointError,
    checkpoints_in,
    problem_with,
    step_of,
    written_by_newer,
)
from lockstep.runs.checkpoint_writer import left_aside
from lockstep.runs.directory import LOCK, is_writer
from lockstep.runs.lock import WITHOUT_LOCKS, RunLock, holder_of
from lockstep.runs.pruning import remove_checkpoint, sweep


class Found(NamedTuple):
    """What a training resumes from: a state, the rows of its history, and the number of updates done."""

    state: PPOTrainState
    rows: list[dict[str, float]]
    updates: int


class CheckpointFolder:
    """Manages a runner's ``checkpoint_dir``.

    It is locked until :meth:`close`, so that no other training writes it. With ``overwrite`` the checkpoints that it
    holds are removed when the first new one is saved, not before.

    Args:
        runner: the runner's settings.
        facts: what a checkpoint to resume from must share, see :func:`lockstep.jax.checkpoints.facts.facts_of`.

    Raises:
        ValueError: it holds checkpoints, and neither ``resume`` nor ``overwrite`` was asked for; one line.
        CheckpointError: another training writes it, or what a crash has left aside can't be restored; one line.
    """

    def __init__(self, runner: RunnerConfig, facts: dict[str, Any]) -> None:
        assert runner.checkpoint_dir is not None
        self._runner, self._facts, self.path = runner, facts, Path(runner.checkpoint_dir)
        self._last = 0
        self._replaced: list[Path] = []
        self._lock: RunLock | None = None
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        runner, problem = self._runner, None
        try:
            if is_writer(this_process()):
                self._take()
                for final in left_aside(self.path):
                    recover(final)
        except CheckpointError as error:
            problem = str(error)
        except OSError as error:
            problem = f"{self.path}: what a crash has left aside can't be put back: {error.strerror or error}"
        if problem := next(filter(None, gather_json(problem)), None):  # no process looks into the folder before
            raise CheckpointError(problem)
        held = checkpoints_in(self.path) if self.path.is_dir() else []
        names = gather_json([path.name for path in held])[0]
        if runner.overwrite:
            self._replaced = held
        elif names and not runner.resume:
            raise ValueError(
                f"checkpoint_dir: {self.path} holds checkpoints ({names[0]}); give resume=True to go on from the "
                "newest, overwrite=True to remove them, or another directory"
            )
        if is_writer(this_process()):
            sweep(self.path)

    def _take(self) -> None:
        """Locks the folder, as far as its file system has locks and lets us write."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = RunLock(self.path / LOCK)
            taken = lock.acquire()
        except OSError as error:  # if it can't be written, the first checkpoint's error says so
            if error.errno in WITHOUT_LOCKS:
                with contextlib.suppress(OSError):
                    (self.path / LOCK).unlink()
            return
        if not taken:
            raise CheckpointError(
                f"checkpoint_dir: {self.path} is being written by {holder_of(self.path / LOCK)}; wait for its end, or "
                "give each training a directory of its own"
            )
        self._lock = lock

    def close(self) -> None:
        """Leaves the folder to other trainings."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def find(self, template: PPOTrainState) -> Found | None:
        """Loads the newest checkpoint, if ``resume`` was asked for and there is one; a collective.

        It skips damaged ones with a warning.

        Raises:
            ValueError: the checkpoint is of another training, a newer version of Lockstep wrote a newer one, or
                processes see different ones; one line.
        """
        if not self._runner.resume:
            return None
        path, damaged = self._newest()
        _check_seen_by_all(path)
        if newer := next(filter(None, gather_json(self._newer_than(path))), None):
            raise CheckpointError(f"resume: {newer}; resume with that lockstep, or give another checkpoint_dir")
        _warn_of(damaged, "passed over, and training begins anew" if path is None else f"passed over for {path.name}")
        if path is None:
            return None
        said = load_metadata(path) or {}
        self._check(path, said)
        self._last = int(said["timesteps"])
        history = said["history"]
        rows = [dict(zip(history, row, strict=True)) for row in zip(*history.values(), strict=True)]
        return Found(load_checkpoint(path, template), rows, int(said["update"]))

    def _newest(self) -> tuple[Path | None, list[str]]:
        """Returns the newest undamaged checkpoint that this process sees, and what is wrong with newer ones."""
        damaged: list[str] = []
        for path in checkpoints_in(self.path) if self.path.is_dir() else []:
            problem = problem_with(path, FILES)
            if problem is None:
                return path, damaged
            damaged.append(problem)
        return None, damaged

    def _newer_than(self, found: Path | None) -> str | None:
        """Returns a message if a newer version of Lockstep wrote a checkpoint after ``found``, else None."""
        held = checkpoints_in(self.path) if self.path.is_dir() else []
        after = -1 if found is None else step_of(found) or 0
        behind = (path for path in held if (step_of(path) or 0) > after)
        return next(filter(None, map(written_by_newer, behind)), None)

    def _check(self, path: Path, said: dict[str, Any]) -> None:
        theirs = said.get("settings")
        if not isinstance(theirs, dict):
            raise ValueError(
                f"resume: {path} is no checkpoint of a training with checkpoint_dir; name another directory"
            )
        devices = get_num_devices(self._runner.num_devices) if self._runner.num_shards is None else None
        check_facts(self._facts, theirs, path, devices)

    def save(self, state: PPOTrainState, history: PPOMetricsHistory, updates: int, timesteps: int) -> None:
        """Saves a state after some updates of this training, and removes old checkpoints; a collective.

        Raises:
            CheckpointError: it can't be written.
        """
        period = self._runner.keep_period
        said = {
            "settings": self._facts,
            "update": updates,
            "timesteps": timesteps,
            "keep": period is not None and timesteps // period > self._last // period,
            "history": {name: [float(x) for x in values] for name, values in history.items()},
        }
        saved = save_checkpoint(self.path, state, step=timesteps, metadata=said)
        self._last = timesteps
        life.progressed()
        if is_writer(this_process()):
            for path in self._replaced:
                if path != saved and (path / MANIFEST).is_file() and not others_in(path):  # damaged ones too
                    remove_checkpoint(path)
            self._prune(timesteps)
        self._replaced = []

    def _prune(self, newest: int) -> None:
        """Removes the oldest checkpoints; those after the ``newest`` are damaged, or they would have been resumed."""
        held = [path for path in checkpoints_in(self.path) if (step_of(path) or 0) <= newest]
        for path in held[self._runner.max_checkpoints :]:
            try:
                said = load_metadata(path) or {}
            except CheckpointError:
                continue  # damaged, or not ours
            if said.get("keep") is False:
                _remove(path)


def _check_seen_by_all(newest: Path | None) -> None:
    """Raises in every process if some see a different newest checkpoint: they would resume from two states."""
    mine = None if newest is None else [newest.name, sha256((newest / MANIFEST).read_bytes()).hexdigest()]
    seen = gather_json(mine)
    other = next((rank for rank, found in enumerate(seen) if found != seen[0]), None)
    if other is not None:
        first, second = ("none" if found is None else found[0] for found in (seen[0], seen[other]))
        another = "another " if first == second else ""
        raise ValueError(
            f"resume: the newest checkpoint that process 0 sees is {first}, and process {other}'s is {another}"
            f"{second}; give a checkpoint_dir that all processes see"
        )


def _warn_of(problems: list[str], what_for: str) -> None:
    for problem in problems:
        say(f"warning: {problem}; {what_for}")


def _remove(path: Path) -> None:
    """Removes a checkpoint of a training, unless something else is nested in it."""
    if step_of(path) is not None and problem_with(path, FILES) is None and not others_in(path):
        remove_checkpoint(path)
