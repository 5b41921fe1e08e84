"""Trains a group of seeds side by side or in turn, each as a separate run in its own process."""

from __future__ import annotations

import functools
import json
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.engines import check_engine_options
from lockstep.config.redact import without_secrets
from lockstep.config.run import Config, RunOptions
from lockstep.core.errors import RunError
from lockstep.core.files import quoted
from lockstep.core.process import EXIT_USER_ERROR, adopt_orphans, kill_children, say
from lockstep.core.temporary import temporary_directory
from lockstep.core.topology import available_cores
from lockstep.envs.describe import describe
from lockstep.launch.checks import check_limits, check_writer_needs
from lockstep.launch.jax_start import look_with_cpu
from lockstep.launch.request import RunRequest
from lockstep.launch.restart import LEAST_HOURS
from lockstep.launch.resume import resumed_config
from lockstep.launch.seeds.making import config_of_seed, has_trained, make_seeds, remove_if_empty, take_back
from lockstep.launch.seeds.places import keep_places
from lockstep.launch.seeds.resuming import Change, changed_seeds, put_back, write_changes
from lockstep.launch.seeds.seed_run import POLL_SECONDS, SeedRun, interrupt
from lockstep.launch.seeds.words import words_of_seed
from lockstep.launch.sizing import resolved_here
from lockstep.launch.world import World
from lockstep.runs.directory import CONFIG, SEED, RunDirectory, open_run
from lockstep.runs.groups import begin_group, finish_group, seeds_of, together_in_turn
from lockstep.runs.listing import UnreadableError, config_of, last_record
from lockstep.runs.making import create_run
from lockstep.runs.progress import Progress, make_progress
from lockstep.runs.session_facts import SessionFacts
from lockstep.runs.stored import stored_config
from lockstep.runs.trackers import METRICS_JSONL
from lockstep.runs.trust import names_in, remember_names
from lockstep.training.own_loss.recorded import told_apart
from lockstep.training.reference_policy import with_reference
from lockstep.training.stop import StopRequest, stop_requests

SHOW_SECONDS = 0.5
PASSED = (
    "nproc",
    "max_restarts",
    "launcher",
    "devices",
    "simulate_devices",
    "fsdp_devices",
    "stop_at_step",
    "max_hours",
)
"""Options of the group that each of its runs gets; of ``max_hours``, what is left when it starts."""


@dataclass(frozen=True)
class GroupStart:
    """A group to start, whose seeds are separate runs.

    Attributes:
        path: the group to resume; None for a new one.
        world: of each run.
        why: the reason why the seeds can't be agents of one program.
    """

    path: Path | None
    world: World
    why: str


def start_group(request: RunRequest, group: GroupStart, command: Sequence[str] | None) -> tuple[Path, int]:
    """Trains the seeds that a request asks for, or resumes a group.

    Args:
        request: with a complete config.
        group: what to start.
        command: the words after ``lockstep`` on the command line; None if there was none.

    Returns:
        The group's directory, and the exit code: 0, or 128 + n if signal ``n`` stopped the group or one of its seeds.

    Raises:
        ValueError: the group can't be trained as asked; one line, and nothing was made.
        RunError: some seeds failed; one line, and the others are done.
    """
    options, path, world, is_new = request.options, group.path, group.world, group.path is None
    named = names_in(request.config)
    config = request.config if path is None else resumed_config(path, request.overrides, options.trust, named=named)
    check_engine_options(options, config)
    look_with_cpu(config)
    changed, stored, lines = dict[Path, Change](), None, list[str]()
    if path is None:
        description = functools.cache(lambda: request.description or describe(config.env))
        config, lines = resolved_here(config, world, description)
        lines += [] if request.note is None else [request.note]
    check_limits(options, config, is_group=True)
    check_writer_needs(config, path)
    config = with_reference(config, options.runs_dir, path)
    if path is not None:
        changed, stored = changed_seeds(path, config, request.overrides, options), stored_config(path)
    directory, seeds = _opened(request, path, config)
    before = {entry.name for entry in directory.path.iterdir()} - ({CONFIG} if is_new else set())
    directory.facts = SessionFacts(command=None if command is None else without_secrets(["lockstep", *command]))
    try:
        if not is_new:
            keep_places(directory, config)
        write_changes(changed, options.trust)
        paths = make_seeds(directory, config, seeds, options.trust)
        at_once = min(len(paths), side_by_side(options, config, world))
        own = {each: stored_config(each, warn=False) for each in paths}  # a seed may have been made longer
        lengths = {each: seed.num_iterations * seed.steps_per_iteration for each, seed in own.items()}
        progress = make_progress(sum(lengths.values()), options.quiet)
        for each in [*lines, f"{_in_words(config, paths, at_once)} ({group.why})"]:
            progress.message(each)
        words = None if command is None else functools.partial(words_of_seed, command, options)
        named = {*names_in(config), *names_in(config_of_seed(directory.path, config, config.seed))}
        runs = Group(directory, paths, settings_of(options), words, at_once, progress, named, lengths)
        return directory.path, runs.train()
    except ValueError:
        if stored is not None:
            directory.write_config(stored)
            put_back(changed)
        if take_back(directory, before) and is_new:
            remove_if_empty(directory)
        raise
    finally:
        directory.unlock()


def _opened(request: RunRequest, path: Path | None, config: Config) -> tuple[RunDirectory, Sequence[int]]:
    """Makes the directory of a new group, or opens that of the group at ``path``; returns it and the group's seeds."""
    options = request.options
    if path is not None:
        seeds = seeds_of(path) or sorted(options.seeds_from(request.config.seed))
        return open_run(path, config, options.trust), seeds
    if not options.trust:
        remember_names(config)
    seeds = options.seeds_from(config.seed)
    return create_run(options.runs_dir, options.name, config, seeds), seeds


def _in_words(config: Config, paths: Sequence[Path], at_once: int) -> str:
    """Says which seeds are trained, and how many at a time."""
    how = "in turn" if at_once == 1 else f"{at_once} side by side"
    first, last = (path.name.removeprefix(SEED) for path in (paths[0], paths[-1]))
    return f"{config.env.id} · {config.engine} · {len(paths)} seeds, {first} … {last}, {how}"


def side_by_side(options: RunOptions, config: Config, world: World) -> int:
    """Returns how many seeds train at a time: the number asked for, else what cores allow, and one on accelerators."""
    if options.seeds_at_once is not None:
        return options.seeds_at_once
    return max(1, available_cores() // (world.ranks_here * config.threads)) if config.device == "cpu" else 1


@dataclass
class Speed:
    """Measures the speed of all seeds of a group together; the time in which one starts up counts too."""

    _first: tuple[int, float] | None = None
    _last: int = 0

    def of(self, steps: int, now: float) -> float | None:
        """Returns the mean speed since the first call, in steps a second; None if no steps were taken since.

        It starts again if steps are fewer than before, because a resumed seed has cut the rows after its checkpoint.

        Args:
            steps: that all seeds have taken so far, including earlier sessions.
            now: seconds of a monotonic clock.
        """
        if self._first is None or steps < self._last:
            self._first = steps, now
        self._last = steps
        taken, seconds = steps - self._first[0], now - self._first[1]
        return taken / seconds if taken and seconds > 0 else None


class Group:
    """Trains the runs of a group.

    Args:
        directory: the group's, locked.
        paths: of its runs.
        settings: options for each of them.
        words: returns the words after ``lockstep`` that train one run alone; None if there was no command line.
        at_once: how many train at a time.
        progress: shows how far all of them are.
        named: the names in the group's config, which each run may use.
        lengths: global steps that runs are trained for, by path.
    """

    def __init__(
        self,
        directory: RunDirectory,
        paths: Sequence[Path],
        settings: Mapping[str, Any],
        words: Callable[[Path], Sequence[str]] | None,
        at_once: int,
        progress: Progress,
        named: Collection[str] = (),
        lengths: Mapping[Path, int] | None = None,
    ) -> None:
        given = lengths or {}
        self.directory, self.runs = directory, [SeedRun(path, named=named, length=given.get(path)) for path in paths]
        self._settings, self._words, self._at_once = dict(settings), words, at_once
        self._progress, self._shown, self._began = progress, 0, time.monotonic()
        self._speed = Speed()

    def train(self) -> int:
        """Trains all runs; returns 0, or 128 + n if signal ``n`` stopped them all or one of them.

        Raises:
            ValueError: every run that was started refused its input; the line of the first.
            RunError: some failed; the line of the first, once the others are done.
        """
        before = begin_group(self.directory, [run.path for run in self.runs])
        with stop_requests() as request, closing(self._progress):
            try:
                signalled = self._loop(request)
            except KeyboardInterrupt:  # the second Ctrl-C
                interrupt(self.runs)
                raise
            failed = [run for run in self.runs if run.failed(signalled)]
            refused = bool(failed) and all(run.code in (None, EXIT_USER_ERROR) for run in self.runs)
            others = [run for run in self.runs if run not in failed]  # failed ones may have an older summary
            ended = {run.path: summary for run in others if (summary := run.summary()) is not None}
            if refused and before.summary:
                self.directory.write_summary(dict(before.summary))  # nothing was trained
            elif ended:
                self._compare_losses()
                seconds, show = time.monotonic() - self._began, self._progress.message
                finish_group(self.directory, ended, len(self.runs), seconds, show, before)
            signalled = request.signal or 0
        if not failed:
            if signalled and not ended:
                say(f"lockstep: error: interrupted (--resume {quoted(self.directory.path)} goes on)")
            return 128 + signalled if signalled else next((run.code for run in self.runs if run.code), 0)
        first = failed[0]
        if refused:
            raise ValueError(first.error)
        more = f"; {len(failed) - 1} more failed" if failed[1:] else ""
        raise RunError(f"{first.path.name}: {first.error}{more} (--resume {quoted(self.directory.path)} goes on)")

    def _compare_losses(self) -> None:
        """Warns if seeds were trained with different losses of one name, which was edited while they started."""
        try:
            config = config_of(self.directory.path)
        except (OSError, UnreadableError):
            return
        found = told_apart([(config, run.path) for run in self.runs])
        if len(set(found)) > 1:
            each = "; ".join(f"{run.path.name}: {loss}" for run, loss in zip(self.runs, found, strict=True))
            self._progress.message(f"ppo.loss: it was edited while seeds began, and they aren't of one config: {each}")

    def _loop(self, request: StopRequest) -> int:
        """Trains the runs, ``at_once`` at a time; returns the number of the signal that stopped them, or 0."""
        waiting, running, shown, passed_on = deque(self.runs), list[SeedRun](), 0.0, False
        adopt_orphans()
        with ExitStack() as stack:
            while waiting or running:
                if request.signal is not None and not passed_on:
                    passed_on = True
                    waiting.clear()
                    for run in running:
                        assert run.process is not None
                        run.process.send_signal(request.signal)
                if self._hours_left() == LEAST_HOURS and len(waiting) < len(self.runs):
                    waiting.clear()
                doubtful = self._is_doubtful()
                if doubtful and not running:
                    waiting.clear()  # the others would refuse as well
                while waiting and len(running) < self._at_once and not doubtful:
                    run = waiting.popleft()
                    if self._start(run, stack):
                        running.append(run)
                    else:
                        waiting.clear()  # the system would refuse the others too; those that train go on
                ended = [run for run in running if run.has_ended()]
                running = [run for run in running if run not in ended]
                if ended and not running:
                    kill_children()  # left by seeds, or by an environment that was made here
                if time.monotonic() - shown > SHOW_SECONDS or ended:
                    shown = time.monotonic()
                    self._show()
                time.sleep(POLL_SECONDS)
            return request.signal or 0

    def _is_doubtful(self) -> bool:
        """Tells whether to start no other seed, because earlier ones refused their input for a common reason.

        That is so if two gave the same message, or if nothing of the group has been trained and one gave a message that
        doesn't name its own directory.
        """
        refused = [run for run in self.runs if run.code == EXIT_USER_ERROR]
        said = [run.error for run in refused if run.path.name not in run.error]
        return len(set(said)) < len(said) or (bool(said) and not has_trained(self.directory.path))

    def _start(self, run: SeedRun, stack: ExitStack) -> bool:
        """Starts a run, whose temporary files ``stack`` removes; if the system refuses, says so and returns False."""
        left = self._hours_left()
        own = {"resume": str(run.path), "quiet": True, **({} if left is None else {"max_hours": left})}
        try:
            folder = stack.enter_context(temporary_directory())  # a cleanup may have removed an earlier one
            file = folder / f"{run.path.name}.json"
            file.write_text(json.dumps({**self._settings, **own}))
            run.start(file, None if self._words is None else self._words(run.path))
        except (OSError, RuntimeError) as error:  # a full disk, no descriptors, no processes or threads
            run.not_started(error)
            self._progress.message(f"{run.path.name}: {run.error}; no other seed is started")
            return False
        return True

    def _hours_left(self) -> float | None:
        """Returns what is left of ``max_hours``, which all runs share; None without a limit."""
        limit = self._settings.get("max_hours")
        return None if limit is None else max(LEAST_HOURS, limit - (time.monotonic() - self._began) / 3600)

    def _show(self) -> None:
        running, ended, others = [], [], []
        for run in self.runs:
            with suppress(OSError):  # descriptors may be used up
                if record := last_record(run.path / METRICS_JSONL):
                    done = run.is_done or run.has_come(record["global_step"])
                    (ended if done else running if run.is_training else others).append(record)
        steps = sum(record["global_step"] for record in (*running, *ended, *others))
        if steps != self._shown:
            self._shown = steps
            self._progress.update(together_in_turn(running, ended, others, self._speed.of(steps, time.monotonic())))


def settings_of(options: RunOptions) -> dict[str, Any]:
    """Returns the options that each run of a group gets, as in a config file; its own config has its settings."""
    given = {name: getattr(options, name) for name in PASSED if name in options.model_fields_set}
    return {**given, **({"trust": True} if options.trust else {})}
