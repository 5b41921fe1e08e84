"""Lets one rank alone write what Stable-Baselines3 writes by itself or a script saves.

Environments are made before any model, in the script's processes and in those of ``SubprocVecEnv``. So the patches are
applied at import.
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
from lockstep.integrations.sb3.environments import answering
from lockstep.torch_engine.distributed.scripts import count_so_far, count_up

TIMEOUT = 7200.0
"""Seconds that ranks wait for one that evaluates in a callback; they notice at once if it has ended."""
WAIT = 600.0
"""Seconds that a rank waits for a file that the writing rank saves."""
POLL = 0.01

_saved: Counter[str] = Counter()
_meetings = 0
_learning: list[Any] = []


class NoOutput(logger.KVWriter, logger.SeqWriter):
    """Discards output: a logger's output format, and a ``ResultsWriter`` for ``Monitor`` and ``VecMonitor``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def write_row(self, epinfo: dict[str, Any]) -> None:
        """Discards an episode."""

    def write(self, key_values: dict, key_excluded: dict, step: int = 0) -> None:
        """Discards metrics."""

    def write_sequence(self, sequence: list[str]) -> None:
        """Discards a text."""

    def close(self) -> None:
        """Does nothing."""


class QuietEnvironment:
    """Makes an environment in a ``SubprocVecEnv`` process that says where its random numbers come from.

    Unpickling this there imports the patches of this module, so that the process is as quiet as its rank.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __call__(self) -> Any:
        """Makes the environment."""
        return answering(self._make())


def leave_files_to_the_writer() -> None:
    """Patches Stable-Baselines3 so that only one rank writes, and others wait for ``VecNormalize.save``.

    Environments in processes can be asked for their seeds on every rank.
    """
    if place()[1] == 1:
        return
    _change_init(SubprocVecEnv, "env_fns", lambda makers: [QuietEnvironment(make) for make in makers])
    VecNormalize.save = _saved_by_the_writer(VecNormalize.save)
    if is_writer():
        return
    monitor.ResultsWriter = logger.make_output_format = NoOutput
    _change_init(VecVideoRecorder, "record_video_trigger", lambda trigger: _never)


def _never(step: int) -> bool:
    return False


def _change_init(cls: type, name: str, change: Callable[[Any], Any]) -> None:
    """Patches a class's constructor so that ``change`` is applied to one argument, positional or by keyword."""
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
    """Marks that ``learn`` runs: ranks are at different places of the script, so none waits for another's save."""
    _learning.append(None)
    try:
        yield
    finally:
        _learning.pop()


def count_anew() -> None:
    """Forgets the saves so far; every rank calls it where all of them meet, when ``learn`` begins.

    Saves that a script guards are the writer's alone. Counted on, they would end the wait for a later file too early.
    """
    global _meetings
    _meetings += 1
    _saved.clear()


def save_on_one_rank(path: Any, save: Callable[[], None]) -> None:
    """Saves to a path on the writing rank; the other ranks return when the file is there. Not a collective.

    A rank's n-th save of a path since the last ``learn`` began waits for the writer's n-th. It doesn't wait before the
    first ``learn``, when ranks haven't met, nor during ``learn``, when callbacks may save on one rank alone. Every rank
    saves to memory (``io.BytesIO``) itself.

    Raises:
        RunError: the writing rank hasn't saved within :data:`WAIT` seconds.
    """
    if place()[1] == 1 or isinstance(path, io.BytesIO):
        save()
        return
    writer, waits = is_writer(), isinstance(path, (str, Path)) and not _learning
    if writer:
        save()
    if not waits or not joined():
        return
    key = f"lockstep sb3 saved {_meetings} {path}"
    if writer:
        count_up(key)
    else:
        _saved[key] += 1
        _wait_for(key, _saved[key], path)


def _wait_for(key: str, number: int, path: Any) -> None:
    deadline = time.monotonic() + WAIT
    while count_so_far(key) < number:
        if time.monotonic() > deadline:
            raise RunError(
                f"rank {place()[0]} waited {WAIT:g} s for rank 0 to save {path}; call save on every rank with the same "
                "path (one with the time in it differs), or on rank 0 only (lockstep.is_writer())"
            )
        time.sleep(POLL)
