"""Ends a run if no rank makes progress any more, with a line that says which rank was silent, and where."""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

from lockstep.core.life import Part, Sign, life, shared_signs
from lockstep.core.process import EXIT_USER_ERROR, fail_now
from lockstep.core.topology import Topology

SETTING = "collective_timeout"
_LOOKS = 20
"""Number of looks in the time that ranks may be silent; at least one look a second."""
_NAMED = 3
CLOSE_SECONDS = 2.0
SIGNS = "lockstep/sign/"
RANKS_A_SECOND = 64
"""Most ranks that ask a store for all others' signs at every look; in larger runs each asks less often."""

Put = Callable[[str, str], None]
Get = Callable[[], Mapping[int, str]]


@contextlib.contextmanager
def called_after(seconds: float, call: Callable[[], object]) -> Iterator[None]:
    """Calls a function, in a thread of its own, if the block takes longer than ``seconds``; none is left behind it."""
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # ranks are forked from a process without other threads


def ended_after(seconds: float, message: str) -> AbstractContextManager[None]:
    """Ends this process with a line if the block, which may be stuck in a library, takes longer than ``seconds``."""
    return called_after(seconds, partial(fail_now, message, code=EXIT_USER_ERROR))


class Stillness:
    """Counts the seconds for which a sign of life hasn't changed, without those in which this process was stopped.

    Between two looks at most ``most`` seconds count, plus the CPU time that this process's threads used: a process that
    computes isn't stopped.
    """

    def __init__(self, most: float) -> None:
        self._most, self._sign, self._seconds = most, object(), 0.0
        self._looked, self._computed = time.monotonic(), time.process_time()

    def look(self, sign: object) -> float:
        """Returns for how many seconds ``sign`` has been the same; 0 if it has just changed."""
        now, computed = time.monotonic(), time.process_time()
        passed = min(now - self._looked, self._most + computed - self._computed)
        self._looked, self._computed = now, computed
        self._seconds = self._seconds + passed if sign == self._sign else 0.0
        self._sign = sign
        return self._seconds


class Silence:
    """Detects that no rank has made progress for longer than ``limit`` seconds while some rank waits.

    Without ``marked`` waits, some ranks are assumed to wait: ranks launch collectives and meet them wherever they next
    look at a device. Time in which this process was stopped, or its machine asleep, doesn't count.
    """

    def __init__(self, rank: int, limit: float, marked: bool = True) -> None:
        self._rank, self._limit, self._most, self._marked = rank, limit, 2 * look_seconds(limit), marked
        self._seen: list[int] = []
        self._looked, self._silent = time.monotonic(), 0.0

    def listen(self, signs: Sequence[Sign]) -> str | None:
        """Takes every rank's sign, in rank order; returns one line if all have been silent for too long, else None."""
        counts, now = [sign.count for sign in signs], time.monotonic()
        passed, self._looked = min(now - self._looked, self._most), now
        if counts != self._seen or (self._marked and not any(sign.waits for sign in signs)):
            self._seen, self._silent = counts, 0.0
            return None
        self._silent += passed
        if self._silent <= self._limit:
            return None
        own = signs[self._rank]
        if not self._marked:
            return (
                f"rank {self._rank} has made no progress for {self._limit:g} s, nor has any other ({SETTING}); it was "
                f"in {own.part}, {_who(signs, self._rank)}"
            )
        if not own.waits:
            return f"rank {self._rank} made no progress for {self._limit:g} s in {own.part} ({SETTING})"
        return (
            f"rank {self._rank} lost its peers: nobody has made progress for {self._limit:g} s ({SETTING}); "
            f"{_who(signs, self._rank)}"
        )


def _who(signs: Sequence[Sign], rank: int) -> str:
    """Names the ranks that aren't marked as waiting, or else all others."""
    others = [(r, sign) for r, sign in enumerate(signs) if r != rank]
    silent = [(r, sign) for r, sign in others if not sign.waits] or others
    said = [f"rank {r} was last heard of {'waiting in' if sign.waits else 'in'} {sign.part}" for r, sign in silent]
    more = f", and {len(said) - _NAMED} more" if len(said) > _NAMED else ""
    return ", ".join(said[:_NAMED]) + more


class Watch:
    """Ends this process, from a thread, if no rank has made progress for longer than ``limit`` seconds.

    It serves ranks that wait where they can't check themselves: in a library's collective or a compiled program.
    ``signs`` returns every rank's sign, in rank order; ``marked`` is as for :class:`Silence`.
    """

    def __init__(
        self,
        rank: int,
        limit: float,
        signs: Callable[[], Sequence[Sign]],
        relay: Relay | None = None,
        marked: bool = True,
    ) -> None:
        self._rank, self._limit, self._signs, self._relay, self._marked = rank, limit, signs, relay, marked
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="silence", daemon=True).start()

    def _look(self) -> None:
        silence, seconds = Silence(self._rank, self._limit, self._marked), look_seconds(self._limit)
        while (said := silence.listen(self._signs())) is None:
            if self._closed.wait(seconds):
                return
        fail_now(said, secondary=life.sign().waits)

    @property
    def hangs(self) -> bool:
        """Whether the relay's thread hangs because the store doesn't answer: its connection is cut."""
        return self._relay is not None and self._relay.hangs

    def close(self) -> None:
        """Stops watching, and the relay."""
        self._closed.set()
        if self._relay is not None:
            self._relay.close()


class Relay:
    """Exchanges signs with the ranks of other hosts through a store, from a thread.

    ``put`` stores a text under a name; ``get`` returns the texts of all ranks by rank, "" where there is none yet. Both
    may raise, or hang if a connection is cut. A sign says what the rank has done, not that the relay is alive.
    """

    def __init__(self, topology: Topology, seconds: float, put: Put, get: Get) -> None:
        self._rank, self._put, self._get = topology.rank, put, get
        self._seconds = seconds * max(1.0, topology.world_size / RANKS_A_SECOND)  # one process answers all ranks
        self._signs = [Sign(0, Part.START, False)] * topology.world_size
        self._told: Sign | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def signs(self) -> list[Sign]:
        """Returns the last known sign of every rank, in rank order."""
        return [*self._signs[: self._rank], life.sign(), *self._signs[self._rank + 1 :]]

    def _run(self) -> None:
        while not self._closed.wait(self._seconds):
            with contextlib.suppress(Exception):  # a rank that can't be heard is silent, which the limit covers
                self._exchange()

    def _exchange(self) -> None:
        own = life.sign()
        if own != self._told:
            self._put(sign_name(self._rank), json.dumps(own))
            self._told = own
        for rank, said in self._get().items():
            if rank != self._rank and said:
                count, part, waits = json.loads(said)
                self._signs[rank] = Sign(count, Part(part), waits)

    @property
    def hangs(self) -> bool:
        """Whether the thread still runs after it was closed."""
        return self._closed.is_set() and self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread, unless it hangs."""
        self._closed.set()
        self._thread.join(CLOSE_SECONDS)


def sign_name(rank: int) -> str:
    """Returns the name under which a rank's sign is in a store."""
    return f"{SIGNS}{rank}"


def look_seconds(limit: float) -> float:
    """Returns the pause between two looks, in seconds."""
    return min(1.0, limit / _LOOKS)


def watch(topology: Topology, limit: float, put: Put, get: Get, marked: bool = True) -> Watch:
    """Watches the ranks: through the memory that those of one host share, else through a store, see :class:`Relay`."""
    memory = life.memory
    if memory is not None:
        return Watch(topology.rank, limit, lambda: shared_signs(memory, topology.world_size), marked=marked)
    relay = Relay(topology, look_seconds(limit), put, get)
    atexit.register(relay.close)  # a thread in a library's store must not meet the end of Python
    return Watch(topology.rank, limit, relay.signs, relay, marked)
