"""Gives the ranks that another launcher started one new directory, even if an earlier run left files at the same place.

Some launchers give every run the same names (torchrun with a fixed address, on several hosts). Then the meeting place
has the same name too, and a run that was killed has left its files there. So every rank asks with a new random word,
and rank 0 answers it with the name of a store that it has just made.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lockstep.core.process import started_at
from lockstep.core.temporary import PREFIX, hold, of_this_host, sweep_temporary
from lockstep.core.topology import Topology
from lockstep.doctor.watch.side_store import rank_directory, read_json, write_json
from lockstep.runs.directory import is_writer

MEETING_SECONDS = 300.0
"""The longest that ranks of one run may be started apart."""
_POLL_SECONDS = 0.1
_NAMES = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE")
"""Environment variables by which launchers name a run."""


@contextmanager
def common_store(directory: Path | None, topology: Topology) -> Iterator[Path]:
    """Yields the same new store on every rank of this run; rank 0 removes it, and what an old run left beside it.

    Raises:
        ValueError: one line, if the directory belongs to another user or a rank doesn't come there.
    """
    place = _place(directory, topology)
    if not is_writer(topology):
        yield _join(place, topology.rank)
        return
    try:
        sweep_temporary(directory)
        _empty(place)
        with hold(place):
            yield _gather(place, topology.world_size)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _place(directory: Path | None, topology: Topology) -> Path:
    """Makes the meeting place, named by what launchers tell every rank of this run and few other runs."""
    run, host = [*(os.environ.get(name, "") for name in _NAMES), topology.master], ""
    if topology.on_one_host:
        run, host = [*run, str(os.getppid()), started_at(os.getppid())], of_this_host()
    name = hashlib.blake2b("|".join(run).encode(), digest_size=8).hexdigest()
    return _owned(Path(directory or tempfile.gettempdir(), f"{PREFIX}{host}doctor-{os.getuid()}-{name}"))


def _owned(place: Path) -> Path:
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if place.is_symlink() or place.stat().st_uid != os.getuid():
        raise ValueError(f"directory: {place} belongs to somebody else; give another --directory DIR")
    return place


def _empty(place: Path) -> None:
    """Removes what an old run left; a rank whose question is removed asks again."""
    for old in place.iterdir():
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.unlink(missing_ok=True)


def _gather(place: Path, world_size: int) -> Path:
    """Makes the store and answers the other ranks until all of them have come; rank 0's part."""
    store = Path(tempfile.mkdtemp(prefix="run-", dir=place))
    answered: dict[int, Any] = {}

    def missing() -> list[int]:
        for rank in range(1, world_size):
            asked = read_json(_question(place, rank))
            if asked is not None and asked != answered.get(rank):
                write_json(_answer(place, rank), asked | {"store": store.name})
                answered[rank] = asked
        return [rank for rank in range(1, world_size) if not rank_directory(store, rank).is_dir()]

    if late := _wait(missing):
        raise ValueError(
            f"directory: rank {late[0]} did not come to {place} within {MEETING_SECONDS:g} s; start every rank, with a "
            "--directory DIR that all hosts share"
        )
    return store


def _join(place: Path, rank: int) -> Path:
    """Asks rank 0 for the store until it answers; the other ranks' part."""
    question = {"word": uuid.uuid4().hex}
    answer: dict[str, Any] = {}

    def missing() -> bool:
        with suppress(OSError):  # rank 0 may be removing an old run's files
            if read_json(_question(_owned(place), rank)) != question:
                write_json(_question(place, rank), question)
            answer.update(read_json(_answer(place, rank)) or {})
            if answer.get("word") == question["word"]:
                rank_directory(place / answer["store"], rank).mkdir(
                    exist_ok=True
                )  # NFS may report a directory that we made ourselves
                return False
        return True

    if _wait(missing):
        raise ValueError(
            f"directory: rank 0 did not come to {place} within {MEETING_SECONDS:g} s; start every rank, with a "
            "--directory DIR that all hosts share"
        )
    return place / answer["store"]


def _question(place: Path, rank: int) -> Path:
    return place / f"asks_{rank}.json"


def _answer(place: Path, rank: int) -> Path:
    return place / f"told_{rank}.json"


def _wait(missing: Callable[[], Any]) -> Any:
    """Calls ``missing`` until it returns something false or time is up; returns its last result."""
    deadline = time.monotonic() + MEETING_SECONDS
    while (found := missing()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return found
