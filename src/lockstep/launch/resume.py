"""Resumes a run: checks which of its settings may change, and opens its directory, or makes a new one."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from lockstep.config.checks import envs_and_shards, in_steps_and_minibatches
from lockstep.config.files import merge
from lockstep.config.keys import validate
from lockstep.config.redact import shown_url, shown_value
from lockstep.config.run import Config, RunOptions
from lockstep.core.files import check_writable, quoted
from lockstep.core.process import say
from lockstep.envs.batched.twins import with_array_twin
from lockstep.runs.checkpoint import check_none_newer, checkpoints_in, find_training_state
from lockstep.runs.directory import CHECKPOINTS, CONFIG, OWN_NAMES, SUMMARY, RunDirectory, open_run
from lockstep.runs.finding import seeds_in, with_name
from lockstep.runs.groups import remember_seeds
from lockstep.runs.listing import object_if_any
from lockstep.runs.making import create_run
from lockstep.runs.stored import differences, edit_in_words, stored_config, written_config
from lockstep.runs.trackers import METRICS_CSV, METRICS_JSONL
from lockstep.runs.trackers.csv import table_differs
from lockstep.runs.trackers.jsonl import last_global_step_of, records_differ
from lockstep.runs.trust import check_trusted
from lockstep.training.own_loss.fingerprint import KEY as OWN_LOSS
from lockstep.training.own_loss.recorded import facts_of_loss
from lockstep.training.reference_policy import same_reference
from lockstep.training.run_history import ORDER
from lockstep.training.schedules import follows_length

# Settings that a resumed run may change: with reduction exact none of them decides the agent's bytes up to total_steps.
# With fast, collectives and fsdp decide the order of sums; see changes_of_order.
CHANGEABLE = (
    "total_steps",
    "checkpoint.",
    "eval.",
    "log.",
    "proof.",
    "env.workers",
    "env.timeout",
    "collectives",
    "collective_timeout",
    "cuda_graphs",
    "fsdp",
)
SETTLED = ("num_envs", "num_shards")
"""Settings whose None asks for a number that the run's beginning chose: the run keeps it."""


def resumed_config(
    path: Path, overrides: dict[str, Any], trust: bool = False, warn: bool = True, named: Collection[str] = ()
) -> Config:
    """Reads a run's config, with overrides applied.

    Args:
        path: the run's directory.
        overrides: nested settings.
        trust: whether the user accepts everything that the config names.
        warn: whether to warn if the config comes from a checkpoint.
        named: names that the user has just given by hand, beside those that the user has trained with.

    Raises:
        ValueError: an override would change what decides the agent, or the config names something that isn't trusted;
            one line.
    """
    stored = stored_config(path, warn)
    config = _under(overrides, stored)
    check_trusted(config, path / CONFIG, trust, named=named)
    check_unchanged(path, stored)
    for key, old, new in decisive_differences(stored, config, path):
        old, new = shown_value(old, key), shown_value(new, key)
        if key == "num_envs_per_rank":
            raise ValueError(f"{key}: {new}, but run {path} has num_envs {stored.num_envs} on any ranks; leave it out")
        raise ValueError(f"{key}: run {path} was started with {old} and can't be resumed with {new}; start a new run")
    return config


def _under(overrides: dict[str, Any], stored: Config) -> Config:
    given = {name: value for name, value in overrides.items() if value is not None or name not in SETTLED}
    if not given:
        return stored
    changed: Config = validate(Config, merge(stored.model_dump(mode="json"), given), "command line")
    changed = in_steps_and_minibatches(changed, *envs_and_shards(stored, 1))  # an edited config.json may lack them
    if changed.env.id == stored.env.id:
        return changed
    asked, _ = with_array_twin(stored.model_copy(update={"env": stored.env.model_copy(update={"id": changed.env.id})}))
    if asked.env.id != stored.env.id:
        return with_array_twin(changed)[0]
    # It is the id with which the run was asked for, whatever else has changed.
    changed = changed.model_copy(update={"env": changed.env.model_copy(update={"id": stored.env.id})})
    return changed


def check_unchanged(path: Path, stored: Config) -> None:
    """Raises a ``ValueError`` if a setting that a resumed run may not change was edited in ``config.json``."""
    for key, old, new, words in edited_settings(path, stored):
        if not is_respelt(key, old, new, path):
            raise ValueError(f"{words}, or start a new run")


def edited_settings(path: Path, stored: Config) -> Iterator[tuple[str, Any, Any, str]]:
    """Yields settings that a resumed run may not change, and that differ between ``config.json`` and newest manifest.

    Yields:
        The key, the manifest's value, the value of ``config.json``, and both in words. Values may be two spellings of
        one thing, see :func:`is_respelt`.
    """
    written = written_config(path)
    if written is None:  # no checkpoint yet, or an older version's without a config
        return
    config, step = written
    for key, old, new in differences(config.model_dump(mode="json"), stored.model_dump(mode="json")):
        if not may_change(key):
            yield key, old, new, edit_in_words(path, key, old, new, step)


def decisive_differences(old: Config, new: Config, run: Path) -> Iterator[tuple[str, Any, Any]]:
    """Yields the settings by which two configs may train different agents: those that a resumed run may not change.

    Two spellings of one thing don't count, see :func:`is_respelt`.

    Args:
        old: the config that ``run`` was trained with, or one that claims to be.
        new: the other.
        run: the run's directory.

    Yields:
        The key, and both values as JSON.
    """
    for key, before, after in differences(old.model_dump(mode="json"), new.model_dump(mode="json")):
        if not may_change(key) and not is_respelt(key, before, after, run):
            yield key, before, after


def may_change(key: str) -> bool:
    """Tells whether a run may be resumed with another value of a setting."""
    return key.startswith(CHANGEABLE)


def is_respelt(key: str, old: Any, new: Any, run: Path) -> bool:
    """Tells whether a setting names the same thing in other words."""
    return key == "grpo.reference" and same_reference(old, new, run)


def facts_of_own_loss(config: Config, path: Path | None, which: str | None) -> dict[str, Any] | None:
    """Reads a checkpoint's facts about the user's own loss that it was trained with; None if there are none.

    For a seed that begins, the facts are those of another seed of its group. ``path`` and ``which`` are as in
    :func:`open_directory`.
    """
    if config.ppo.loss is None or path is None:
        return None
    if checkpoints_in(path / CHECKPOINTS):
        state = find_training_state(path / CHECKPOINTS, which or "latest", warn=False).state
        return {name: state[name] for name in (OWN_LOSS, "global_step") if name in state}
    group = seeds_in(path.parent)
    others = [each for each in group if path in group and each != path]
    found = ((each, facts_of_loss(each)) for each in others)
    return next((facts | {"of_run": each.name} for each, facts in found if facts and OWN_LOSS in facts), None)


def open_directory(
    config: Config, options: RunOptions, path: Path | None, which: str | None, writer: bool
) -> tuple[RunDirectory, str | None]:
    """Makes a run's directory, or opens it again; returns it, and the checkpoint to resume from.

    A resumed run's ``config.json`` is left as it is until the session begins, so that a refused resume changes nothing.

    Args:
        config: resolved.
        options: of the run.
        path: the run to resume; None for a new one.
        which: the checkpoint asked for.
        writer: whether this process writes the run; then it locks it.

    Raises:
        LostCheckpointsError: the run has trained, and its checkpoints are gone.
        ValueError: the run can't be made, or can't be resumed with this config; one line.
    """
    if path is None:
        if not writer:
            return RunDirectory(Path(options.runs_dir), is_writer=False), None
        _check_place(config.log.jsonl, None if options.name is None else Path(options.runs_dir) / options.name)
        _check_second_log(None, config.log.jsonl)
        run = create_run(options.runs_dir, options.name, config, seeds := options.seeds_from(config.seed))
        if options.is_group:
            remember_seeds(run, seeds)
        return run, None
    stored = stored_config(path, warn=False)
    length = stored.total_steps
    if begins := not checkpoints_in(path / CHECKPOINTS):
        _check_none_lost(path, config, says=writer and not options.quiet)
        which = None
    else:
        found = find_training_state(path / CHECKPOINTS, which or "latest", warn=False)
        if which in (None, "latest") and found.path is not None:
            check_none_newer(path / CHECKPOINTS, found.path)
        done = found.state["global_step"]
        if path not in seeds_in(path.parent):  # for a seed, its group has said it
            length = found.state.get("total_steps") or length  # config.json may have been edited since
        _check_more(path, done, stored.total_steps, config.total_steps)
        if writer and not options.quiet and done >= config.total_steps:
            goes_on = "--total-steps N trains it further"
            say(f"run {path} has done {done:,} of {config.total_steps:,} steps; {goes_on}", sys.stdout)
        if found.state.get("cloned"):
            raise ValueError(
                f"resume: {path} is a cloned policy, which has no environments to go on with; eval, play, compare and "
                "record read it"
            )
    _check_place(config.log.jsonl, path, writer)
    _check_second_log(stored.log.jsonl, config.log.jsonl, path)
    if writer:
        for line in changes_of_order(stored, config):
            say(f"lockstep: {line}")
    if writer and length != config.total_steps:
        say(f"lockstep: {change_of_length(length, config)}")
    run = open_run(path, config, options.trust, later=True) if writer else RunDirectory(path, is_writer=False)
    if begins and writer and not options.quiet:  # once it is locked: another process may be writing its first one
        say(f"run {path} has no checkpoint yet; it begins again", sys.stdout)
    return run, which


class FinishedError(Exception):
    """Raised if a run that can't go on has nothing left to do, which ``resume: auto`` doesn't call an error."""


class LostCheckpointsError(ValueError):
    """Raised if a run has trained, and its checkpoints were removed; it would begin again, and cut all its records."""


def _check_none_lost(run: Path, config: Config, says: bool) -> None:
    """Raises a :class:`LostCheckpointsError` if a run without checkpoints has had some: a session that ends saves one.

    ``says``: whether to say before that the run has done all steps of ``config``.
    """
    if (done := _steps_by_summary(run)) <= 0:
        return
    if says and done >= config.total_steps:
        say(f"run {run} has done {done:,} of {config.total_steps:,} steps; its checkpoints are gone", sys.stdout)
    mirror, advice = config.checkpoint.mirror, "put them back, or give another --name for a new run"
    if mirror is not None:
        place = quoted(f"{shown_url(mirror.rstrip('/'))}/{with_name(run).name}")
        advice = f"--resume {place} brings what its mirror has of them, another --name starts a new run"
    raise LostCheckpointsError(f"resume: {run} has done {done:,} steps and its checkpoints are gone; {advice}")


def _steps_by_summary(run: Path) -> int:
    """Returns the steps that a run had done at the end of its last session; 0 if it has no summary."""
    done = object_if_any(run / SUMMARY).get("global_step")
    return done if isinstance(done, int) else 0


def is_finished(path: Path, config: Config) -> bool:
    """Tells whether a run has done all steps of ``config`` and has its summary: a resume would change nothing."""
    if not (path / SUMMARY).is_file():
        return False
    if not checkpoints_in(path / CHECKPOINTS):
        return _steps_by_summary(path) >= config.total_steps
    found = find_training_state(path / CHECKPOINTS, "latest", warn=False)
    return bool(found.state["global_step"] >= config.total_steps)


def change_of_length(before: int, config: Config) -> str:
    """Says that ``total_steps`` was another one; a warning if schedules follow it."""
    change = f"total_steps was {before} and is {config.total_steps} from here on"
    note = "schedules follow it, so a new run of this config.json is another run"
    return f"warning: {change}; {note}" if follows_length(config) else change


def changes_of_order(stored: Config, config: Config) -> Iterator[str]:
    """Yields warnings of changes to the order of sums, and so to the agent, which only ``fast`` is sensitive to."""
    if config.reduction != "fast":
        return
    for name in ORDER:
        before, now = (str(getattr(each, name)).lower() for each in (stored, config))
        if before != now:
            change = f"{name} was {before} and is {now} from here on"
            yield f"warning: {change}; with reduction fast the order of sums follows it"


def _check_more(path: Path, done: int, stored: int, asked: int) -> None:
    """Raises a ``ValueError`` if a run gets another length, but has done that many steps with the old one already."""
    if asked != stored and asked <= done:
        raise ValueError(
            f"total_steps: {asked}, but {path} has done {done:,} steps of {stored:,}; give more, or leave it out"
        )


def _check_place(second: str | None, run: Path | None, writer: bool = True) -> None:
    """Raises a ``ValueError`` if the second metrics.jsonl is one of the run's own files, or can't be written."""
    if second is None or not writer:
        return
    place = os.path.realpath(second)
    if run is not None and os.path.basename(place) in OWN_NAMES and os.path.dirname(place) == os.path.realpath(run):
        raise ValueError(f"log.jsonl: {second} is the name of one of the run's own files; name another file")
    if not os.path.exists(place):
        check_writable(Path(second), "log.jsonl")
    elif os.path.isdir(place) or not os.access(place, os.W_OK):
        why = "it is a directory" if os.path.isdir(place) else "it doesn't let you write"
        raise ValueError(f"log.jsonl: {second} can't be written: {why}")


def _check_second_log(stored: str | None, second: str | None, run: Path | None = None) -> None:
    """Raises a ``ValueError`` if the second metrics.jsonl has others' records, since it is cut and appended to.

    A run that has lost its own records is known by its table; one that has lost both, by its config's name of the file.
    One that has no checkpoint either was killed before its first record, and has none there.
    """
    if second is None or not Path(second).is_file() or not Path(second).stat().st_size:
        return
    if second != stored or (run is not None and _differs(Path(second), run)):
        raise ValueError(f"log.jsonl: {second} already holds another run's records; give another path or remove it")


def _differs(second: Path, run: Path) -> bool:
    if last_global_step_of(run / METRICS_JSONL) is not None:
        return records_differ(second, run / METRICS_JSONL)
    if not checkpoints_in(run / CHECKPOINTS) and not _has_lines(run / METRICS_CSV):
        return True
    return table_differs(run / METRICS_CSV, second)


def _has_lines(table: Path) -> bool:
    return table.is_file() and table.stat().st_size > 0
