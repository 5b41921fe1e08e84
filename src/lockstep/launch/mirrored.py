"""Ties a run to its mirror: fetches it before it is resumed, keeps it to one writer, copies it while it trains."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.config.redact import shown_value
from lockstep.config.run import AUTO, Config, RunOptions
from lockstep.config.sections import is_url
from lockstep.core.files import quoted, sync_path
from lockstep.core.process import at_failure, say
from lockstep.core.temporary import temporary_directory
from lockstep.launch.resume import decisive_differences
from lockstep.runs.checkpoint import checkpoints_in, problem_with, step_of
from lockstep.runs.directory import CHECKPOINTS, CONFIG, RunDirectory
from lockstep.runs.finding import with_name
from lockstep.runs.links import odd_entry
from lockstep.runs.making import has_begun
from lockstep.runs.mirror.copier import Mirror
from lockstep.runs.mirror.fetch import check_none_newer_there, fetch_config, fetch_run, has_run, manifests_on, steps_on
from lockstep.runs.mirror.lease import Lease
from lockstep.runs.mirror.place import MirrorError, Place, split_url
from lockstep.runs.stored import stored_config


@dataclass
class Mirrors:
    """The places on mirrors that this process holds until it ends: at most one run's.

    Attributes:
        stack: gives them back.
        named: mirrors that the user has named.
    """

    stack: contextlib.ExitStack
    named: set[str] = field(default_factory=set)
    _held: dict[str, tuple[Place, Lease]] = field(default_factory=dict)
    _left: dict[str, dict[str, bytes]] = field(default_factory=dict)
    _brought: set[str] = field(default_factory=set)

    def hold(self, url: str, run: Path) -> tuple[Place, Lease]:
        """Makes this process the writer of a run's place, unless it is already, and returns the place and its lease.

        Args:
            url: of the run's place.
            run: the run's directory.

        Raises:
            MirrorError: another process is its writer, the mirror can't be reached, or the place is ``run`` itself.
        """
        if url not in self._held:
            place = Place(url)
            if place.is_directory(run):
                raise MirrorError(
                    f"checkpoint.mirror: {place.url} is the run's own directory, and no copy of it; give a place "
                    "elsewhere, or null, and resume a run that is here by its directory"
                )
            lease = Lease(place)
            lease.take()
            lease.keep()
            at_failure.append(lease.give_back)
            self.stack.callback(lease.give_back)
            self._held[url], self._left[url] = (place, lease), manifests_on(place)
        return self._held[url]

    def resolved(self, options: RunOptions, mirror: str | None, writer: bool) -> RunOptions:
        """Fetches the run to resume from its mirror if need be, and replaces ``resume`` by its directory here.

        That is done for a URL, and for ``auto`` if the mirror has more of the run than this host. Ranks that don't
        write fetch only the config, and get the rest from rank 0.

        Args:
            options: of the run.
            mirror: the one that the config names, for ``auto``.
            writer: whether this rank writes the run.

        Raises:
            MirrorError: there is no such run, another process writes it, or it can't be read.
        """
        url, name = options.resume, options.name
        if url is not None and is_url(url):
            mirror, name = split_url(url)
        if mirror is not None:
            mirror = mirror.rstrip("/")
            self.named.add(mirror)
        if url is None or name is None or mirror is None or not (url == AUTO or is_url(url)):
            return options
        if not writer:
            return self._config_alone(options, url.rstrip("/")) if url != AUTO else options
        path = Path(options.runs_dir) / name
        asked = _place_of(path, mirror, not has_begun(path)) if url == AUTO else url.rstrip("/")
        place, _ = self.hold(asked, path)
        names = place.names()
        if not has_run(names):
            if url == AUTO:
                return options
            raise MirrorError(f"resume: there is no run at {place.url}")
        there, here = max(steps_on(names), default=-1), newest_here(path)
        if not has_begun(path) or not (path / CONFIG).is_file() or there > here:
            bring(place, path, options.quiet, options.trust)
            self._brought.add(asked)
        elif url != AUTO:  # what is here may name another mirror, or none, and be compared with nothing later
            _compare(path, stored_config(path, warn=False), place)
        return options if url == AUTO else options.model_copy(update={"resume": str(path), "name": None})

    def _config_alone(self, options: RunOptions, url: str) -> RunOptions:
        directory = self.stack.enter_context(temporary_directory())
        fetch_config(Place(url), directory / split_url(url)[1])
        return options.model_copy(update={"resume": str(directory / split_url(url)[1]), "name": None})

    def open(self, config: Config, run: RunDirectory, which: str | None, is_new: bool) -> Mirror | None:
        """Starts to mirror a run that is about to train; returns None if it has no mirror, or another rank writes it.

        Args:
            config: of the run.
            run: its directory.
            which: the checkpoint that it resumes from.
            is_new: whether it begins.

        Raises:
            MirrorError: another process writes it there, or the mirror has another run or more of this one.
        """
        mirror = config.checkpoint.mirror
        if mirror is None or not run.is_writer:
            return None
        try:
            made = self._made(config, mirror, run, which, is_new)
        except MirrorError:
            if is_new:
                run.discard()
            raise
        made.start()
        return made

    def _made(self, config: Config, mirror: str, run: RunDirectory, which: str | None, is_new: bool) -> Mirror:
        url = _place_of(run.path, mirror, is_new)
        place, lease = self.hold(url, run.path)
        names = place.names()
        there, here = max(steps_on(names), default=-1), newest_here(run.path)
        if is_new and has_run(names):
            goes_on = f"--resume {quoted(place.url)} continues it"
            raise MirrorError(f"name: {place.url} exists already; {goes_on}, another --name starts a new one")
        if has_run(names) and url not in self._brought:
            _compare(run.path, config, place)
        if there > here and which in (None, "latest") and url not in self._brought:
            has = f"has step {here:,}" if here >= 0 else "has no checkpoint"
            newest = quoted(run.path / CHECKPOINTS / f"step_{here}")
            from_here = f"--resume {newest} from here" if here >= 0 else "or give another name"
            raise MirrorError(
                f"resume: {run.path} {has} and {place.url} has {there:,}; --resume {quoted(place.url)} goes on from "
                f"there, {from_here}"
            )
        return Mirror(run.path.absolute(), place, lease, self._left[url])


def newest_here(run: Path) -> int:
    """Returns the step of a run's newest valid checkpoint; -1 if there is none."""
    return next((step_of(p) or 0 for p in checkpoints_in(run / CHECKPOINTS) if problem_with(p) is None), -1)


def bring(place: Place, path: Path, quiet: bool, trust: bool = False) -> None:
    """Fetches a run to ``path``, over what is here of it; follows links only with ``trust``.

    Raises:
        MirrorError: ``path`` holds another run, or links without ``trust``; a newer version wrote the mirror's copy; or
            it can't be fetched.
        ValueError: another process is writing ``path``; one line.
    """
    if not trust and (odd := odd_entry(path)) is not None:
        raise MirrorError(f"run {path}: {odd}; if that is yours, give --trust")
    check_none_newer_there(place)
    if has_begun(path):
        _compare(path, stored_config(path, warn=False), place)
    path.mkdir(parents=True, exist_ok=True)
    run = RunDirectory(path)
    run.lock()
    try:
        step = fetch_run(place, path)
        sync_path(path)
    finally:
        run.unlock()
    if not quiet:
        what = "its beginning" if step is None else f"step {step:,}"
        say(f"brought {place.url} here, at {what}: {path}")


def _place_of(run: Path, mirror: str, is_new: bool) -> str:
    """Returns the URL of a run's place: by its name, even if that is a link, because other hosts have only the name.

    A run that exists may be named by a link to it. It keeps the place by the name of its directory if ``mirror`` has it
    there, and nothing by the link's name.
    """
    given, own = (f"{mirror.rstrip('/')}/{name}" for name in (with_name(run).name, run.resolve().name))
    if is_new or given == own or has_run(Place(given).names()) or not has_run(Place(own).names()):
        return given
    return own


def _compare(path: Path, here: Config, place: Place) -> None:
    """Raises a ``MirrorError`` if the run at ``path``, with the config ``here``, isn't the one at ``place``."""
    with temporary_directory() as look:
        fetch_config(place, look)
        _check_same(path, here, stored_config(look), place.url)


def _check_same(path: Path, here: Config, there: Config, url: str) -> None:
    for key, theirs, ours in decisive_differences(there, here, path):
        ours, theirs = shown_value(ours, key), shown_value(theirs, key)
        raise MirrorError(
            f"resume: {path} is another run than {url}: {key} is {ours} here and {theirs} there; give another "
            "--runs-dir, --name or --checkpoint.mirror"
        )


@contextlib.contextmanager
def mirrors() -> Iterator[Mirrors]:
    """Holds places on mirrors while the block runs."""
    with contextlib.ExitStack() as stack:
        yield Mirrors(stack)
