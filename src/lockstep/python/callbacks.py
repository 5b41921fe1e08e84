"""Runs callbacks in the process that called ``train``; the rank that writes sends records and waits for answers."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import select
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.python.answers import answer_of
from lockstep.python.command import POLL_SECONDS
from lockstep.runs.checkpoint import step_of
from lockstep.training.audience import ADDRESS_VARIABLE, OBSERVERS, lines_of

if TYPE_CHECKING:
    from lockstep.python.run import Run

MOST_ANSWERS = 1000
"""Number of the last iterations whose answers are kept, for ranks that are restarted and repeat them.

A restart that goes further back asks callbacks again.
"""

END: dict[str, Any] = {"go_on": False, "metrics": {}}
METHODS = ("on_start", "on_iteration", "on_evaluation", "on_checkpoint", "on_end")


class BaseCallback:
    """A base class for callbacks, whose methods do nothing; any object with some of these methods is a callback too.

    ``on_iteration`` is called once per iteration, and ``on_evaluation`` after it if the policy was evaluated. Records
    are rows of ``metrics.jsonl``: metrics by name, with ``iteration`` and ``global_step``.
    """

    def on_start(self, run: Run) -> None:
        """Called when the first iteration is done and the run's directory exists."""

    def on_iteration(self, record: dict[str, Any]) -> bool | dict[str, float] | None:
        """Called when an iteration is done.

        Returns:
            False to end the run with the state of this iteration; None or True to continue; or a dict of numbers to log
            with the iteration's record.
        """

    def on_evaluation(self, record: dict[str, Any]) -> bool | dict[str, float] | None:
        """Called when an evaluation is done, with its ``eval/…`` in the record; returns as :meth:`on_iteration`."""

    def on_checkpoint(self, path: Path) -> None:
        """Called with the next record after a checkpoint was written, unless it has been removed by then."""

    def on_end(self, run: Run) -> None:
        """Called when training has ended, unless it failed."""


def checked_callbacks(given: Any) -> list[Any]:
    """Returns the given callbacks as a list; ``given`` is several, one or None.

    Raises:
        ValueError: one of them would never be called, or would only make a coroutine or a generator, which nobody
            runs; one line that names it.
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
        for method in _own_methods(callback):
            if kind := _runs_later(getattr(callback, method)):
                raise ValueError(f"callbacks: {name}.{method} is {kind}, which would never run; make it a plain def")
    return found


def _runs_later(method: Any) -> str | None:
    """Says what a method is if a call of it doesn't run it, but makes a coroutine or a generator; else None."""
    for each in (method, getattr(method, "__call__", None)):  # noqa: B004 - of an object that can be called
        if inspect.iscoroutinefunction(each):
            return "async"
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            return "a generator (it yields)"
    return None


def _own_methods(callback: Any) -> list[str]:
    """Names the callback methods that an object has, except those inherited from :class:`BaseCallback`."""
    methods = {name: getattr(callback, name, None) for name in METHODS}
    return [
        name
        for name, method in methods.items()
        if callable(method) and getattr(method, "__func__", None) is not getattr(BaseCallback, name)
    ]


class Conversation:
    """Passes a run's records to callbacks and answers them, in the process and thread that called ``train``.

    Args:
        run: the run that is being trained.
        callbacks: called in this order.
        observe_only: whether the run doesn't wait for answers.
        directory: holds the socket; only this user can read it.

    Attributes:
        variables: environment variables that give the run the socket's address; empty without callbacks.
    """

    def __init__(self, run: Run, callbacks: Sequence[Any], observe_only: bool, directory: Path) -> None:
        self._run, self._callbacks = run, list(callbacks)
        self._observes = observe_only
        self._failure: BaseException | None = None
        self._failed: list[Any] = []
        self._breaks: list[BaseException] = []
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
        stopped = self._begun and (kind is KeyboardInterrupt or (error is not None and self.failed_by(error)))
        try:
            if self._callbacks and (error is None or stopped):
                self._end(error)
        finally:
            self._hang_up()

    def raise_failure(self) -> None:
        """Raises the exception of the callback that failed first, if any, with its own traceback."""
        if self._failure is not None:
            raise self._failure

    def failed_by(self, error: BaseException) -> bool:
        """Tells whether an exception is the one that :meth:`raise_failure` raises, or one of :meth:`break_off`."""
        return error is self._failure or any(error is each for each in self._breaks)

    def listen(self) -> None:
        """Answers the run's records for :data:`POLL_SECONDS`, so that a caller sees in time what else has happened.

        Raises:
            Exception: a callback's own, if the run doesn't wait for answers; raising it is what ends such a run.
        """
        self._listen(POLL_SECONDS)
        if self._observes and self._failure is not None:
            self._hang_up()  # otherwise the run blocks while nobody reads its records
            raise self._failure

    def break_off(self, error: BaseException) -> None:
        """Stops listening, because an exception, a signal handler's say, ends the run; no answer is waited for."""
        self._breaks.append(error)
        self._hang_up()

    def _hang_up(self) -> None:
        if self._listener is not None:
            self._listener.close()
        if self._reader is not None:
            self._reader[0].close()
        self._listener = self._reader = None

    def _listen(self, most: float = math.inf) -> None:
        """Answers records until none has come for :data:`POLL_SECONDS`, or for ``most`` seconds."""
        if self._listener is None:
            time.sleep(POLL_SECONDS)
            return
        end = time.monotonic() + most
        while not (self._observes and self._failure is not None):
            ready = select.poll()  # select.select refuses descriptors from 1024 on
            for each in [self._listener] + ([] if self._reader is None else [self._reader[0]]):
                ready.register(each, select.POLLIN)
            found = [number for number, _ in ready.poll(POLL_SECONDS * 1000)]
            if not found:
                return
            if self._listener.fileno() in found:
                self._hear_out()  # a restarted rank has connected
                self._reader = self._listener.accept()[0], b""
            elif self._reader is not None:
                self._hear()
            if time.monotonic() >= end:
                return

    def _hear_out(self) -> None:
        """Reads what a rank that has ended had sent, and closes its connection."""
        while self._reader is not None and not (self._observes and self._failure is not None):
            ready = select.poll()
            ready.register(self._reader[0], select.POLLIN)
            if not ready.poll(0):  # a child of the rank still holds the other end
                break
            self._hear()
        if self._reader is not None:
            self._reader[0].close()
            self._reader = None

    def _hear(self) -> None:
        assert self._reader is not None
        connection, rest = self._reader
        with contextlib.suppress(ConnectionError):  # not OSError, which a signal handler's TimeoutError is, too
            try:
                chunk = connection.recv(1 << 16)
                if chunk:
                    lines, rest = lines_of(rest + chunk)
                    self._reader = connection, rest
                    for line in lines:
                        self._say(connection, self._answer(json.loads(line)))
                    return
            except KeyboardInterrupt:  # what was read is lost; the run is still told to end
                with contextlib.suppress(OSError):
                    self._say(connection, END)
                raise
        connection.close()
        self._reader = None

    def _say(self, connection: socket.socket, answer: dict[str, Any]) -> None:
        if not self._observes:
            connection.sendall(json.dumps(answer).encode() + b"\n")

    def _answer(self, record: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to an iteration's record; one of the last :data:`MOST_ANSWERS` gets its answer again."""
        iteration = int(record["iteration"])
        if iteration not in self._answers:
            self._answers[iteration] = self._ask(record)
            self._answers.pop(iteration - MOST_ANSWERS, None)
        return self._answers[iteration]

    def _ask(self, record: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = {"go_on": self._failure is None, "metrics": {}}
        self._begin(record)
        names = ["on_iteration"] + (["on_evaluation"] if any(key.startswith("eval/") for key in record) else [])
        for name in names:
            for callback in self._callbacks:
                if self._failure is not None:
                    break
                said = self._safely(callback, answer_of, getattr(callback, name, None), record)
                if said is False:
                    answer["go_on"] = False
                elif isinstance(said, dict):
                    answer["metrics"] |= said
        self._tell_checkpoints()
        answer["go_on"] &= self._failure is None
        return answer

    def _begin(self, record: dict[str, Any]) -> None:
        if not self._begun:
            self._begun = True  # what is there already may be this session's, which an observer hears of late
            self._seen = {path for path in self._run.checkpoints if (step_of(path) or 0) < record["global_step"]}
            self._tell("on_start", self._run)

    def _end(self, error: BaseException | None) -> None:
        """Tells callbacks of the last checkpoints and the end; ``error`` is what Ctrl-C or a callback raised."""
        if self._listener is not None:
            self._listen()
        if error is not None:
            self._failure = error
        if self._begun:  # else a run that was done already is resumed, and all its checkpoints are old
            self._tell_checkpoints()
        self._tell("on_end", self._run)

    def _tell_checkpoints(self) -> None:
        for path in reversed(self._run.checkpoints):
            if path not in self._seen:
                self._seen.add(path)
                self._tell("on_checkpoint", path)

    def _tell(self, name: str, *arguments: Any) -> None:
        """Calls a method of all callbacks that haven't failed; even after a failure, they may have files to close."""
        for callback in self._callbacks:
            said = getattr(callback, name, None)
            if said is not None and not any(callback is failed for failed in self._failed):
                self._safely(callback, said, *arguments)

    def _safely(self, callback: Any, action: Any, *arguments: Any) -> Any:
        """Calls a callback's method; an exception ends the run, and the first one is raised after its end."""
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
