"""Ends a run of which no rank makes progress any more, with a line that says who was silent, and in what."""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from lockstep.core.life import Part, Sign, life, shared_signs
from lockstep.core.process import fail_now
from lockstep.core.topology import Topology

SETTING = "collective_timeout"
_LOOKS = 20
"""Looks in the time that ranks may be silent, but at least one a second."""
_NAMED = 3
CLOSE_SECONDS = 2.0
SIGNS = "lockstep/sign/"
RANKS_A_SECOND = 64
"""Ranks that may ask a store for all others' signs in the time between two looks; more ask less often."""

Put = Callable[[str, str], None]
Get = Callable[[], Mapping[int, str]]


class Stillness:
    """Counts the seconds for which a sign of life has been the same, but for those in which this process was stopped.

    Of the time between two looks that is what passes beyond ``most`` seconds, and beyond what the process computed
    meanwhile (in all of its threads): whoever computes without letting others look isn't stopped.
    """

    def __init__(self, most: float) -> None:
        self._most, self._sign, self._seconds = most, object(), 0.0
        self._looked, self._computed = time.monotonic(), time.process_time()

    def look(self, sign: object) -> float:
        """Returns how long it has been; 0 of one that has changed."""
        now, computed = time.monotonic(), time.process_time()
        passed = min(now - self._looked, self._most + computed - self._computed)
        self._looked, self._computed = now, computed
        self._seconds = self._seconds + passed if sign == self._sign else 0.0
        self._sign = sign
        return self._seconds


class Silence:
    """Says when nobody among the ranks has made progress for longer than ``limit`` seconds, and some of them wait.

    Where waits aren't ``marked``, because ranks launch collectives and meet them wherever they next look at a device,
    some of them are taken to. Time in which this process was itself stopped, or its machine asleep, doesn't count.
    """

    def __init__(self, rank: int, limit: float, marked: bool = True) -> None:
        self._rank, self._limit, self._most, self._marked = rank, limit, 2 * look_seconds(limit), marked
        self._seen: list[int] = []
        self._looked, self._silent = time.monotonic(), 0.0

    def listen(self, signs: Sequence[Sign]) -> str | None:
        """Takes what every rank has shown, in rank order; returns one line if all have been silent for too long."""
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
    """Names the ranks that others wait for, or those of which this one can't know."""
    others = [(r, sign) for r, sign in enumerate(signs) if r != rank]
    silent = [(r, sign) for r, sign in others if not sign.waits] or others
    said = [f"rank {r} was last heard of {'waiting in' if sign.waits else 'in'} {sign.part}" for r, sign in silent]
    more = f", and {len(said) - _NAMED} more" if len(said) > _NAMED else ""
    return ", ".join(said[:_NAMED]) + more


class Watch:
    """Ends this process, from a thread, when nobody has made progress for longer than ``limit`` seconds.

    For ranks that wait where nothing can be looked at: in a library's collective, in a compiled program. ``signs``
    tells what every rank has shown, in rank order; ``marked`` as for :class:`Silence`.
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
        """Tells whether the store hasn't answered: its connection is cut."""
        return self._relay is not None and self._relay.hangs

    def close(self) -> None:
        """Stops looking, and telling other hosts."""
        self._closed.set()
        if self._relay is not None:
            self._relay.close()


class Relay:
    """Tells the ranks of other hosts what this one has done, and hears it of them, through a store, from a thread.

    ``put`` keeps a text under a name, ``get`` finds those of all ranks, by rank, "" where there is none yet; both may
    raise, or hang where a connection is cut. What is told is what the rank has done, not that the relay is there.
    """

    def __init__(self, topology: Topology, seconds: float, put: Put, get: Get) -> None:
        self._rank, self._put, self._get = topology.rank, put, get
        self._seconds = seconds * max(1.0, topology.world_size / RANKS_A_SECOND)  # one process answers all
        self._signs = [Sign(0, Part.START, False)] * topology.world_size
        self._told: Sign | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def signs(self) -> list[Sign]:
        """Returns what is known of every rank, in rank order."""
        return [*self._signs[: self._rank], life.sign(), *self._signs[self._rank + 1 :]]

    def _run(self) -> None:
        while not self._closed.wait(self._seconds):
            with contextlib.suppress(Exception):  # whoever can't be heard is silent, and the limit is for that
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
        """Tells whether the thread goes on after it was closed."""
        return self._closed.is_set() and self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread, unless it hangs."""
        self._closed.set()
        self._thread.join(CLOSE_SECONDS)


def sign_name(rank: int) -> str:
    """Names what a rank tells the others in a store."""
    return f"{SIGNS}{rank}"


def look_seconds(limit: float) -> float:
    """Returns the pause between two looks."""
    return min(1.0, limit / _LOOKS)


def watch(topology: Topology, limit: float, put: Put, get: Get, marked: bool = True) -> Watch:
    """Watches the ranks: in the memory that those of a host share, else through a store, see :class:`Relay`."""
    memory = life.memory
    if memory is not None:
        return Watch(topology.rank, limit, lambda: shared_signs(memory, topology.world_size), marked=marked)
    relay = Relay(topology, look_seconds(limit), put, get)
    atexit.register(relay.close)  # a thread in a library's store must not meet the end of Python
    return Watch(topology.rank, limit, relay.signs, relay, marked)
