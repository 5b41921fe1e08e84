"""Callbacks run in the process that called ``train``; the rank that writes tells them what happened, and waits."""

from __future__ import annotations

import contextlib
import difflib
import json
import select
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.python.command import POLL_SECONDS
from lockstep.training.audience import ADDRESS_VARIABLE, OBSERVERS, lines_of

if TYPE_CHECKING:
    from lockstep.python.run import Run

MOST_ANSWERS = 1000
"""Iterations whose answers are kept, for ranks that were started again and do them once more."""


END: dict[str, Any] = {"go_on": False, "metrics": {}}
METHODS = ("on_start", "on_iteration", "on_evaluation", "on_checkpoint", "on_end")
OTHER_WORDS = {
    "rollout/ep_rew_mean": "rollout/episode_return_mean",
    "rollout/ep_len_mean": "rollout/episode_length_mean",
}
"""What Stable-Baselines3 calls metrics that have another name here."""


class BaseCallback:
    """A callback that does nothing, to derive from; any object with some of these methods is one as well.

    The order of a call: ``on_iteration`` once an iteration, ``on_evaluation`` after it where the policy was evaluated.
    Records are rows of ``metrics.jsonl``: metrics by name, with ``iteration`` and ``global_step``.
    """

    def on_start(self, run: Run) -> None:
        """The first iteration is done, and the run's directory is there."""

    def on_iteration(self, record: dict[str, Any]) -> bool | dict[str, float] | None:
        """An iteration is done.

        Returns:
            False ends the run with the state of this iteration; a dict of numbers is logged with its record; None and
            True let it go on.
        """

    def on_evaluation(self, record: dict[str, Any]) -> bool | dict[str, float] | None:
        """An evaluation is done, whose ``eval/…`` are in the record; returns as :meth:`on_iteration`."""

    def on_checkpoint(self, path: Path) -> None:
        """A checkpoint is on the disk."""

    def on_end(self, run: Run) -> None:
        """Training is over, unless it failed."""


def checked_callbacks(given: Any) -> list[Any]:
    """Lists the callbacks that were given: several, one, or None.

    Raises:
        ValueError: one of them would never be called; one line that names it.
    """
    if given is None:
        return []
    several = isinstance(given, Iterable) and not callable(given) and not _own_methods(given)
    found = list(given) if several else [given]
    for callback in found:
        name = getattr(callback, "__name__", type(callback).__name__)
        if isinstance(callback, type):
            raise ValueError(f"callbacks: {name} is a class; give an object of it, {name}()")
        if not _own_methods(callback):
            theirs = any(hasattr(callback, word) for word in ("_on_step", "on_step", "_on_rollout_end"))
            hint = "; what Stable-Baselines3 calls after a step is called after an iteration here" if theirs else ""
            raise ValueError(f"callbacks: {name} has none of the methods that are called: {', '.join(METHODS)}{hint}")
    return found


def _own_methods(callback: Any) -> list[str]:
    """The methods that an object has beside those of :class:`BaseCallback`, which do nothing."""
    methods = {name: getattr(callback, name, None) for name in METHODS}
    return [
        name
        for name, method in methods.items()
        if callable(method) and getattr(method, "__func__", None) is not getattr(BaseCallback, name)
    ]


class Conversation:
    """Answers a run's records with what callbacks say, in the process and thread that called ``train``.

    Args:
        run: whose directory is being written.
        callbacks: asked in their order.
        observe_only: whether nobody waits for answers.
        directory: for this user alone.

    Attributes:
        variables: what tells the rank that writes where to find this.
    """

    def __init__(self, run: Run, callbacks: Sequence[Any], observe_only: bool, directory: Path) -> None:
        self._run, self._callbacks = run, list(callbacks)
        self._observes = observe_only
        self._failure: BaseException | None = None
        self._failed: list[Any] = []
        self._answers: dict[int, dict[str, Any]] = {}
        self._seen, self._begun = set[Path](), False
        self._listener: socket.socket | None = None
        self._reader: tuple[socket.socket, bytes] | None = None
        self.variables: dict[str, str] = {}
        if self._callbacks:
            address = directory / "callbacks"
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(str(address))
            self._listener.listen()
            self.variables[ADDRESS_VARIABLE] = f"{OBSERVERS if observe_only else ''}{address}"

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        stopped = self._begun and (kind is KeyboardInterrupt or error is self._failure)
        try:
            if self._callbacks and (error is None or stopped):
                self._end(error)
        finally:
            self._hang_up()

    def raise_failure(self) -> None:
        """Raises what a callback raised, with its own traceback."""
        if self._failure is not None:
            raise self._failure

    def listen(self) -> None:
        """Waits a moment for what the run says, and answers.

        Raises:
            Exception: what a callback raised, which ends a run that doesn't wait for answers.
        """
        self._listen()
        if self._observes and self._failure is not None:
            self._hang_up()  # or the run would wait until somebody hears it
            raise self._failure

    def _hang_up(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._reader is not None:
            self._reader[0].close()
        self._listener = self._reader = None

    def _listen(self) -> None:
        if self._listener is None:
            time.sleep(POLL_SECONDS)
            return
        while not (self._observes and self._failure is not None):
            ready = select.poll()  # select.select refuses the files of a caller who has opened many
            for each in [self._listener] + ([] if self._reader is None else [self._reader[0]]):
                ready.register(each, select.POLLIN)
            found = [number for number, _ in ready.poll(POLL_SECONDS * 1000)]
            if not found:
                return
            if self._listener.fileno() in found:
                if self._reader is not None:  # of a rank that was started again
                    self._reader[0].close()
                self._reader = self._listener.accept()[0], b""
            elif self._reader is not None:
                self._hear()

    def _hear(self) -> None:
        assert self._reader is not None
        connection, rest = self._reader
        with contextlib.suppress(OSError):
            chunk = connection.recv(1 << 16)
            if chunk:
                lines, rest = lines_of(rest + chunk)
                self._reader = connection, rest
                for line in lines:
                    answer = END
                    try:
                        answer = self._answer(json.loads(line))
                    finally:  # interrupted here, the run still gets to hear that it ends
                        if not self._observes:
                            connection.sendall(json.dumps(answer).encode() + b"\n")
                return
        connection.close()
        self._reader = None

    def _answer(self, record: dict[str, Any]) -> dict[str, Any]:
        """What the run is to do after an iteration; one that is done again gets the answer that it got."""
        iteration = int(record["iteration"])
        if iteration not in self._answers:
            self._answers[iteration] = self._ask(record)
            self._answers.pop(iteration - MOST_ANSWERS, None)
        return self._answers[iteration]

    def _ask(self, record: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = {"go_on": self._failure is None, "metrics": {}}
        self._begin()
        names = ["on_iteration"] + (["on_evaluation"] if any(key.startswith("eval/") for key in record) else [])
        for name in names:
            for callback in self._callbacks:
                if self._failure is not None:
                    break
                said = self._safely(callback, _said, getattr(callback, name, None), record)
                if said is False:
                    answer["go_on"] = False
                elif isinstance(said, dict):
                    answer["metrics"] |= said
        self._tell_checkpoints()
        answer["go_on"] &= self._failure is None
        return answer

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._seen = set(self._run.checkpoints)
            self._tell("on_start", self._run)

    def _end(self, error: BaseException | None) -> None:
        """Tells of the last checkpoints and the end; ``error`` is what is raised then, of Ctrl-C or a callback."""
        if self._listener is not None:
            self._listen()
        if error is not None:
            self._failure = error
        self._tell_checkpoints()
        self._tell("on_end", self._run)

    def _tell_checkpoints(self) -> None:
        for path in reversed(self._run.checkpoints):
            if path not in self._seen:
                self._seen.add(path)
                self._tell("on_checkpoint", path)

    def _tell(self, name: str, *arguments: Any) -> None:
        """Tells all callbacks, also once another one has failed: they may have to close what they have opened."""
        for callback in self._callbacks:
            said = getattr(callback, name, None)
            if said is not None and not any(callback is failed for failed in self._failed):
                self._safely(callback, said, *arguments)

    def _safely(self, callback: Any, action: Any, *arguments: Any) -> Any:
        """Calls a callback; its exception ends the run, and the first one is raised once that is over."""
        try:
            return action(*arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._failed.append(callback)
            if self._failure is None:
                self._failure = error
            else:
                self._failure.add_note(f"then {type(callback).__name__} raised {type(error).__name__}: {error}")
            return None


class _Record(dict[str, Any]):
    """A record that notes, on the error of a key that it lacks, what it has instead."""

    def __missing__(self, key: Any) -> Any:
        error = KeyError(key)
        close = difflib.get_close_matches(OTHER_WORDS.get(key, key), self, 1, 0.6) if isinstance(key, str) else []
        meant = f"did you mean {close[0]!r}? " if close else ""
        error.add_note(f"{key!r} is no key of a record; {meant}There are: {', '.join(self)}")
        raise error

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self),)


def _said(method: Any, record: dict[str, Any]) -> bool | dict[str, float]:
    """What a callback's method, if it has it, says to a record: whether to go on, or numbers to log.

    Raises:
        TypeError: what it says is neither.
        ValueError: a number has the name of one that the record has by itself.
    """
    try:
        said = None if method is None else method(_Record(record))
    except TypeError as error:
        unknown = [name for name, value in record.items() if value is None]
        if unknown:
            error.add_note(f"None until an episode has ended: {', '.join(unknown)}")
        raise
    if said is None or isinstance(said, bool | np.bool):
        return said is None or bool(said)
    if not isinstance(said, dict):
        raise TypeError(f"a callback said {said!r} to an iteration; it says False, True, None or a dict of numbers")
    for key, value in said.items():
        try:
            float(value)
        except (TypeError, ValueError):
            raise TypeError(f"a callback's metric {key!r} is {value!r}; a number is logged") from None
        if key in record:
            raise ValueError(f"a callback's metric {key!r} is one of the run's own; log yours by another name")
    return {str(key): float(value) for key, value in said.items()}
