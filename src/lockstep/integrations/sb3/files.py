"""Keeps one set of files: what Stable-Baselines3 writes by itself, or a script saves, is written by one rank.

Environments are made before any model, in the script's processes and in those of ``SubprocVecEnv``; so this works at
import, on ranks other than the first.
"""

from __future__ import annotations

import functools
import inspect
import io
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stable_baselines3.common import logger, monitor
from stable_baselines3.common.vec_env import SubprocVecEnv, VecNormalize, VecVideoRecorder

from lockstep.core.errors import RunError
from lockstep.integrations.attach.process_group import is_writer, joined, place
from lockstep.torch_engine.distributed.scripts import count_up, counted

TIMEOUT = 7200.0
"""Seconds that ranks wait for one that evaluates in a callback; one that ended is noticed at once."""
WAIT = 600.0
"""Seconds that a rank waits for the file that another one saves."""
POLL = 0.01

_saved: Counter[str] = Counter()
_learning: list[Any] = []


class NoOutput(logger.KVWriter, logger.SeqWriter):
    """An output of a logger, and a ``ResultsWriter`` of ``Monitor`` and ``VecMonitor``, that writes nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def write_row(self, epinfo: dict[str, Any]) -> None:
        """Take an episode and forget it."""

    def write(self, key_values: dict, key_excluded: dict, step: int = 0) -> None:
        """Take metrics and forget them."""

    def write_sequence(self, sequence: list[str]) -> None:
        """Take a text and forget it."""

    def close(self) -> None:
        """There is nothing to close."""


class QuietEnvironment:
    """Makes an environment in a process of ``SubprocVecEnv``: to load this there makes that process write nothing."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __call__(self) -> Any:
        """Make it."""
        return self._make()


def leave_files_to_the_writer() -> None:
    """On every rank but one, let Stable-Baselines3 write nothing; what is saved outside of ``learn`` is waited for."""
    if place()[1] == 1:
        return
    VecNormalize.save = _saved_by_the_writer(VecNormalize.save)
    if is_writer():
        return
    monitor.ResultsWriter = logger.make_output_format = NoOutput
    _change_init(VecVideoRecorder, "record_video_trigger", lambda trigger: _never)
    _change_init(SubprocVecEnv, "env_fns", lambda makers: [QuietEnvironment(make) for make in makers])


def _never(step: int) -> bool:
    return False


def _change_init(cls: type, name: str, change: Callable[[Any], Any]) -> None:
    """Change one argument of a class's constructor, however it is given."""
    original = cls.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def changed(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.arguments[name] = change(bound.arguments[name])
        original(*bound.args, **bound.kwargs)

    cls.__init__ = changed


def _saved_by_the_writer(save: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(save)
    def saved(self: Any, save_path: Any) -> None:
        save_on_one_rank(save_path, lambda: save(self, save_path))

    return saved


@contextmanager
def learning() -> Iterator[None]:
    """Within this, ranks are at different places of the script: nobody waits for what another one saves."""
    _learning.append(None)
    try:
        yield
    finally:
        _learning.pop()


def save_on_one_rank(path: Any, save: Callable[[], None]) -> None:
    """Save to a path on the writing rank; on the others return when it is there. No collective.

    A rank waits for as many files of that name as it was told to save. Before the first ``learn`` it doesn't, for the
    ranks haven't met and need not; during ``learn`` neither, since callbacks may decide otherwise on another rank.
    Memory (``io.BytesIO``) every rank fills for itself.

    Raises:
        RunError: the writing rank doesn't save.
    """
    if place()[1] == 1 or isinstance(path, io.BytesIO):
        save()
        return
    writer, waits = is_writer(), isinstance(path, (str, Path)) and not _learning
    if writer:
        save()
    if not waits or not joined():
        return
    key = f"lockstep sb3 saved {path}"
    if writer:
        count_up(key)
    else:
        _saved[key] += 1
        _wait_for(key, _saved[key], path)


def _wait_for(key: str, number: int, path: Any) -> None:
    deadline = time.monotonic() + WAIT
    while counted(key) < number:
        if time.monotonic() > deadline:
            raise RunError(
                f"rank {place()[0]} waited {WAIT:g} s for rank 0 to save {path}; call save on every rank, or on rank 0 "
                "only (lockstep.is_writer())"
            )
        time.sleep(POLL)
