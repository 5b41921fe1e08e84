"""Watches one rank from inside; a thread of its own writes, and the script's threads never wait for it."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
import time
import traceback
from typing import Any

from lockstep.doctor.watch.schedule import Schedule
from lockstep.doctor.watch.side_store import SideWriter
from lockstep.doctor.watch.stacks import (
    BACKWARD,
    StillnessClock,
    own_lines,
    stack_lines,
    stands_in,
    stands_in_collective,
)

TICK_SECONDS = 0.25


class Watcher:
    """Watches this process while its script runs."""

    def __init__(self, writer: SideWriter, schedule: Schedule) -> None:
        self._writer, self._schedule = writer, schedule
        self._pid = os.getpid()
        self._began = time.perf_counter()
        self._torch: Any = None  # a TorchWatch; its module is loaded after the script has loaded PyTorch
        self._stillness = StillnessClock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write_until_over, name="lockstep-doctor", daemon=True)
        self._exit = os._exit
        self._thread_seconds = 0.0

    def start(self) -> None:
        """Starts the writing thread, and patches ``os._exit`` so that a script that ends by it is recorded too."""
        self._writer.add({"kind": "hello", "host": socket.gethostname(), "pid": self._pid})
        os._exit = self._leave
        os.register_at_fork(after_in_child=self._forget)
        self._thread.start()

    def watch_torch(self) -> None:
        """Registers the doctor's hooks of PyTorch; called once PyTorch is imported."""
        if os.getpid() != self._pid:
            return
        began = time.perf_counter()
        hooks = importlib.import_module("lockstep.doctor.watch.torch.hooks")
        self._torch = hooks.TorchWatch(self._writer, self._schedule)
        self._torch.seconds += time.perf_counter() - began

    def end(self, error: BaseException | None) -> None:
        """Writes the last events, when the script has ended or raised ``error``."""
        if self._over.is_set():
            return
        self._over.set()
        event: dict[str, Any] = {"kind": "end", "seconds": self._elapsed(), "torch": "torch" in sys.modules}
        if error is not None:
            event |= described(error) | {"raised_at": time.time()}
        if self._torch is not None:
            self._torch.finish()
            event |= self._torch.tally()
        event["own_seconds"] = self._own_seconds()
        self._writer.add(event)
        self._writer.flush()
        self._writer.state({"over": True})

    def _elapsed(self) -> float:
        return time.perf_counter() - self._began

    def _own_seconds(self) -> float:
        return self._thread_seconds + (self._torch.own_seconds() if self._torch is not None else 0.0)

    def _leave(self, status: int) -> None:
        """Replaces ``os._exit``: first writes the last events, unless this is a forked child."""
        if os.getpid() == self._pid:
            self.end(None)
        self._exit(status)

    def _forget(self) -> None:
        """Stops watching in a forked child (a worker of an environment or a data loader), which is no rank."""
        os._exit = self._exit
        self._over.set()
        if self._torch is not None:
            self._torch.remove()

    def _write_until_over(self) -> None:
        while not self._over.wait(TICK_SECONDS):
            began = time.thread_time()
            watch = self._torch
            if watch is not None:
                watch.look_at_process_group()
            state: dict[str, Any] = {"seconds": self._elapsed(), "own_seconds": self._own_seconds()}
            state |= {"torch": "torch" in sys.modules} | (watch.tally() if watch is not None else {})
            signs = {} if watch is None else {"on_gpu": watch.on_gpu, "joined": watch.joined}
            waiting = self._stillness.look(watch.signs_of_life if watch else 0, **signs)
            if waiting is not None:
                state |= {"waiting": waiting, "certain": self._stillness.certain, "stack": self._stillness.lines}
            self._writer.flush()
            self._writer.state(state)
            self._thread_seconds += time.thread_time() - began


MOST_LETTERS = 2000
"""The most characters kept of an error's line, which may hold a whole array."""


def described(error: BaseException) -> dict[str, Any]:
    """Returns an exception as entries of an event: its message's line, and its stack, innermost first."""
    line = traceback.format_exception_only(error)[-1].strip()
    lines = stack_lines(traceback.extract_tb(error.__traceback__))
    where = own_lines(lines)
    said = line.splitlines()[0] if line else type(error).__name__
    parted = getattr(error, "ranks_parted", None)  # set by lockstep.attach
    return ({} if parted is None else {"ranks_parted": parted}) | {
        "error": said if len(said) <= MOST_LETTERS else f"{said[:MOST_LETTERS]} …",
        "error_at": where[0] if where else "",
        "error_in_collective": stands_in_collective(lines) or stands_in(lines, BACKWARD),
        "stack": lines,
    }
