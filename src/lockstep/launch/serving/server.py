"""Starts the ranks of a run on this machine, for a launcher that imports no framework: ``python -m … FD SETTINGS``.

The launcher talks to this process by lines of JSON over a socket. Ranks are forked from it if that is safe (it has then
imported their engine and computed nothing); otherwise they are fresh processes. It ends when the launcher does, and
ends every process that its ranks have started.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.core.errors import RunError, one_line
from lockstep.core.process import (
    adopt_orphans,
    end_with_parent,
    flush_output,
    kill_children,
    kill_session,
    name_process,
    open_closed_streams,
    signal_name,
    stop_signals,
)
from lockstep.core.topology import LAUNCHER_VARIABLE, LOOPBACK_ADDRESS, MEMORY_VARIABLE, STORE_VARIABLE
from lockstep.core.user_code.search_path import search_working_directory_last
from lockstep.launch import native_errors
from lockstep.launch.native_errors import HOLD_SECONDS, NativeErrors
from lockstep.launch.serving.channel import ONE_THREAD, STORE, Channel, ServerSettings, readable
from lockstep.launch.serving.fork import fork, one_thread, spawn
from lockstep.launch.serving.meeting import Meeting

LOOK_SECONDS = 1.0
ASSIGNMENT = "assignment.json"


class Server:
    """Serves a launcher's requests: ``check``, ``start``, ``signal``, ``end`` (ranks only) and ``kill`` (all)."""

    def __init__(self, channel: Channel, settings: ServerSettings) -> None:
        self._channel, self._settings = channel, settings
        self._ranks: dict[int, int] = {}
        self._errors = NativeErrors()
        self._kept: list[Any] = []
        self._meetings: list[Meeting] = []
        self._failure: str | None = None
        self._awake, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._awake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Serves until the launcher asks for the end, or is gone; then ends the ranks."""
        try:
            while os.getppid() == self._settings.parent:
                watched = [self._channel, self._awake, *self._errors.descriptors]
                seconds = HOLD_SECONDS / 2 if self._errors.waits else LOOK_SECONDS
                ready = readable(watched, seconds)
                if self._awake in ready:
                    os.read(self._awake, 1 << 12)
                self._errors.read(ready)
                self._collect()
                self._errors.pass_on()
                if self._failure is not None:
                    self._channel.send({"failed": self._failure})
                    return
                if self._channel in ready and not self._answer_all():
                    return
        except EOFError:
            return
        finally:
            self._end_ranks()

    def _end_ranks(self) -> None:
        """Ends the ranks and all that they have started, and closes what they met by."""
        for pid in self._ranks:
            kill_session(pid)
        self._ranks.clear()
        kill_children()
        self._errors.close()
        self._errors = NativeErrors()
        for meeting in self._meetings:
            meeting.close()
        self._meetings.clear()

    def _answer_all(self) -> bool:
        going_on = self._answer(self._channel.receive())
        while going_on and self._channel.pending:
            going_on = self._answer(self._channel.receive())
        return going_on

    def _answer(self, message: Mapping[str, Any]) -> bool:
        if "check" in message:
            self._channel.send({"checked": self._in_child(message["check"]) if one_thread() else None})
        elif "start" in message:
            try:
                self._start(**message["start"])
            except OSError as error:
                self._channel.send({"failed": f"ranks can't be started: {error.strerror or error}"})
                return False
        elif "signal" in message:
            for pid in self._ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, message["signal"])
        elif "end" in message:
            self._end_ranks()
            self._channel.send({"over": True})
        elif "kill" in message:
            return False
        return True

    # --- checks -------------------------------------------------------------------------------------------------

    def _in_child(self, check: Mapping[str, Any]) -> dict[str, str]:
        """Runs ``module.function(**arguments)`` in a child; returns what it raised as ``{kind: message}``."""
        reading, writing = os.pipe()

        def body() -> int:
            self._close_own()
            os.write(writing, json.dumps(_failure_of(check)).encode())
            return 0

        pid = fork(body)
        os.close(writing)
        said = self._hear(reading, pid)
        os.close(reading)
        kill_session(pid)
        _, status = os.waitpid(pid, 0)
        if said:
            return json.loads(said)
        code = os.waitstatus_to_exitcode(status)
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return {"RunError": f"a process that made the environment to look at it {how}"}

    def _hear(self, reading: int, pid: int) -> bytes:
        """Reads what a child writes until the child has ended, because processes that it leaves may keep the pipe open.

        Raises:
            EOFError: the launcher is gone, or has sent another message instead of waiting.
        """
        said = b""
        while True:
            over = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            ready = readable([reading, self._channel], 0 if over else LOOK_SECONDS / 20)
            if self._channel in ready or os.getppid() != self._settings.parent:
                raise EOFError
            if reading in ready:
                chunk = os.read(reading, 1 << 16)
                if not chunk:
                    return said
                said += chunk
            elif over:
                return said

    # --- ranks --------------------------------------------------------------------------------------------------

    def _start(
        self,
        nproc: int,
        arguments: Sequence[str] | None,
        assignment: str | None,
        log_dir: str,
        environment: Mapping[str, str],
    ) -> None:
        """Starts ranks that run ``python ARGUMENTS`` or train ``assignment``; sends the launcher their process ids."""
        meeting = Meeting.of(self._settings.meeting, nproc, Path(log_dir), shared=arguments is None)
        common = self._environment(nproc) | meeting.environment | dict(environment)
        file = Path(log_dir) / ASSIGNMENT  # a command line would be readable for all users of the machine
        if assignment is not None:
            file.write_text(assignment, encoding="utf-8")
        for rank in range(nproc):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            own["TORCHELASTIC_ERROR_FILE"] = str(Path(log_dir) / f"rank_{rank}.json")
            if arguments is not None:
                pid = spawn(arguments, common | own, None)
            elif self._settings.forks and one_thread():
                pid = self._fork_rank(common | own, str(assignment), meeting)
            else:
                pid = self._spawn_rank(common | own, rank, file, meeting)
            self._ranks[pid] = rank
        self._channel.send({"started": {str(rank): pid for pid, rank in self._ranks.items()}, "port": meeting.number})
        if self._settings.meeting == STORE:  # after the forks, because it starts threads and may import PyTorch
            assert meeting.port is not None
            listener = meeting.port.detach()
            threading.Thread(target=self._serve_store, args=(meeting.number, listener), daemon=True).start()
        self._meetings.append(meeting)

    def _spawn_rank(self, environment: Mapping[str, str], rank: int, assignment: Path, meeting: Meeting) -> int:
        errors = self._errors.pipe(rank)
        own = {native_errors.VARIABLE: str(errors)}
        words = ["-P", "-m", "lockstep.launch.rank", str(assignment)]
        pid = spawn(words, {**environment, **own}, subprocess.DEVNULL, [*meeting.passed, errors])
        os.close(errors)
        return pid

    def _serve_store(self, port: int, listener: int) -> None:
        """Serves PyTorch's store; a failure ends the run, because the ranks would wait forever."""
        try:
            engine = importlib.import_module("lockstep.torch_engine.engine")
            self._kept.append(engine.serve_store(LOOPBACK_ADDRESS, port, listener))
        except Exception as error:
            self._failure = f"the store in which ranks meet can't be opened: {_in_one_line(error)}"
            os.write(self._wake, b".")

    def _environment(self, nproc: int) -> dict[str, str]:
        given = {name: value for name, value in self._settings.environment.items() if value is not None}
        foreign = {*ONE_THREAD, MEMORY_VARIABLE, STORE_VARIABLE}
        rest = {k: v for k, v in os.environ.items() if k not in foreign and not k.startswith("TORCHELASTIC_")}
        return rest | given | {"WORLD_SIZE": str(nproc), "LOCAL_WORLD_SIZE": str(nproc), LAUNCHER_VARIABLE: "1"}

    def _fork_rank(self, environment: Mapping[str, str], assignment: str, meeting: Meeting) -> int:
        def body() -> int:
            self._close_own()
            meeting.leave_port()
            os.environ.clear()
            os.environ.update(environment)
            name_process(f"lockstep rank {environment['RANK']}")
            from lockstep.core.topology import from_environment
            from lockstep.launch.rank import Assignment, run_rank

            return run_rank(Assignment.from_json(assignment), from_environment())

        return fork(body)

    def _close_own(self) -> None:
        self._channel.close()
        os.close(self._awake)
        os.close(self._wake)

    def _collect(self) -> None:
        """Tells the launcher which ranks have ended, kills what they left behind, and reaps adopted orphans."""
        while (ended := _next_ended()) is not None:
            pid, status = ended
            if pid in self._ranks:
                rank, code = self._ranks.pop(pid), os.waitstatus_to_exitcode(status)
                self._errors.ended(rank, code)
                self._channel.send({"ended": rank, "code": code})


def _next_ended() -> tuple[int, int] | None:
    """Kills the session of a child that has ended, and reaps the child; returns its process id and status, or None."""
    with contextlib.suppress(ChildProcessError):
        if hasattr(os, "waitid"):
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                return None
            kill_session(found.si_pid)  # before its id can be reused
            return os.waitpid(found.si_pid, 0)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            kill_session(pid)
            return pid, status
    return None


def _failure_of(check: Mapping[str, Any]) -> dict[str, str]:
    """Calls ``module.function(**arguments)``; returns what it raises as ``{kind: message}``, or ``{}``.

    The message is the error's own for errors meant for the user, and a traceback for all others.
    """
    try:
        getattr(importlib.import_module(check["module"]), check["function"])(**check["arguments"])
    except (ValueError, OSError, RunError) as error:
        return {next(k.__name__ for k in (ValueError, OSError, RunError) if isinstance(error, k)): str(error)}
    except Exception:
        return {"Traceback": traceback.format_exc()}
    return {}


def _in_one_line(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}")


def main() -> None:
    """Serves the launcher on the other end of the socket ``sys.argv[1]``."""
    open_closed_streams()
    settings = ServerSettings(**json.loads(sys.argv[2]))
    end_with_parent(settings.parent, signal.SIGTERM)
    name_process("lockstep server")
    search_working_directory_last()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    os.set_inheritable(channel.fileno(), False)
    adopt_orphans()
    if settings.engine is not None:
        try:
            importlib.import_module(f"lockstep.{settings.engine}_engine.train")
        except Exception as error:
            channel.send({"failed": f"engine: {settings.engine} can't be loaded: {_in_one_line(error)}"})
            return
        gc.freeze()  # so that garbage collection in a rank copies none of the shared pages
    server = Server(channel, replace(settings, forks=settings.forks and one_thread()))
    for number in stop_signals():  # getppid shows the launcher's death; children get the default
        signal.signal(number, lambda *_: None)  # back, as they wouldn't if the signals were ignored
    server.serve()
    flush_output()
    os._exit(0)  # the store's thread may be importing


if __name__ == "__main__":
    main()
