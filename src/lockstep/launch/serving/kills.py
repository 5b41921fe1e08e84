"""Counts processes that the kernel killed for memory; replaces a server that is killed before any rank is started."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lockstep.core.errors import KilledError, RunError
from lockstep.core.process import say

OOM_KILLS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
"""Files in which the kernel counts the processes that it killed for memory."""


class CheckingServer(Protocol):
    """A server of ranks, as far as checks need it."""

    def check(self, module: str, function: str, **arguments: Any) -> bool:
        """Calls a function; see :meth:`lockstep.launch.spawn.RankServer.check`."""
        ...

    def close(self) -> None:
        """Ends the server."""
        ...


AnyServer = TypeVar("AnyServer", bound=CheckingServer)


def killed_for_memory() -> int:
    """Returns how many processes the kernel has killed for memory, in this cgroup or machine; 0 if it doesn't count."""
    for path in OOM_KILLS:
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        found = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
        if found:
            return found[0]
    return 0


def after_restarts(message: str, most: int) -> str:
    """Says that no restart is left after a failure."""
    return f"{message} (after {most} restart{'' if most == 1 else 's'}, as many as were allowed)"


def time_now() -> str:
    """Returns the time of a restart, as its row has it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass
class EarlyKills:
    """The servers of a run that were killed before its ranks were started.

    Attributes:
        most: how many restarts are allowed, in all; these are the first.
        found: when each server was killed, and what was said.
    """

    most: int
    found: list[tuple[str, str]] = field(default_factory=list)
    _counted: int = field(default_factory=killed_for_memory)
    _for_memory: int = 0

    def check(
        self, server: AnyServer, another: Callable[[], AnyServer], module: str, function: str, **arguments: Any
    ) -> tuple[AnyServer, bool]:
        """Calls a server's ``check``, and that of another one each time that one is killed.

        Args:
            server: the first one.
            another: makes a server.
            module: of the function.
            function: to call in a child of the server.
            arguments: of the function.

        Returns:
            The server that lives, and what its ``check`` returned.

        Raises:
            RunError: no other server may be started; one line. Errors of ``check`` are raised, too.
        """
        while True:
            try:
                return server, server.check(module, function, **arguments)
            except KilledError as error:
                if not self.most:
                    raise
                server.close()
                self._note(str(error))
            server = another()

    def _note(self, why: str) -> None:
        """Notes a kill and prints a line; raises a ``RunError`` if no other server may be started."""
        before, self._counted = self._counted, killed_for_memory()
        self._for_memory += self._counted > before
        if self._for_memory > 1:
            raise RunError(f"{why} (twice before any rank was started, so it isn't started again)")
        if len(self.found) == self.most:
            raise RunError(after_restarts(why, self.most))
        self.found.append((time_now(), why))
        say(f"lockstep: restart {len(self.found)} of {self.most}: {why}; another takes its place, before any rank")
