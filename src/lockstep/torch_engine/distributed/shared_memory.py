"""Collectives between the ranks of one host: slots in memory that all of them map, and flags that they watch.

The memory has no name (``memfd_create``): ranks inherit it from our launcher, or open it through ``/proc`` of the rank
that offers it. So nothing can be left behind, however the ranks end. A rank copies its tensor into its slot and then
stores the collective's number in its flag; a rank that reads the number finds the tensor. This order needs no fence on
x86-64, where stores become visible in program order. Other processors would need one that Python can't give, so they
use the backend's collectives.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import secrets
import select
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.core.errors import PeerFailureError, RunError
from lockstep.core.life import LINE_BYTES, life, shared_pid, shared_signs
from lockstep.core.machine import BOOT
from lockstep.core.silence import SETTING, Silence

SLOT_BYTES = 1 << 20  # longer messages go in pieces of this size, whose copies cost more than their flags
SPINS = 4000  # looks at a flag before sleeping on it; fewer while that doesn't help
FEWEST_SPINS = 200
BEGIN_SECONDS = 0.001
SLEEP = 0.005  # seconds to sleep at most, if the peer doesn't wake this rank, before looking whether it lives
LEFT, SIZES, AWAITED = 1, 2, 4  # words after the flag in a rank's line: whether it has left; bytes of its even and its
# odd collective; the number of the collective for which a peer sleeps
SYSCALL_FUTEX, FUTEX_WAIT, FUTEX_WAKE, ALL = 202, 0, 1, 2**31 - 1
NAMESPACES = ("ipc", "net", "pid")

GatherJson = Callable[[Any], list[Any]]


def obstacle() -> str | None:
    """Returns why this machine can't share memory between ranks, or None."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "it needs Linux"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"it needs x86-64, not {platform.machine()}"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:  # in a sandbox; all processes of the host get it
        return f"processes can't be watched here ({error.strerror or error})"
    return None


def host_identity() -> dict[str, str]:
    """Returns what two ranks have in common if they run on one host: boot, host name, namespaces."""
    identity = {name: os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}
    identity["boot"] = BOOT.read_text().strip()
    return identity | {"host": socket.gethostname()}


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_LIBC = ctypes.CDLL(None)


class SharedSlots:
    """Gathers tensors through one slot for each rank, double-buffered.

    Collective ``n`` uses buffer ``n % 2``. A rank writes there again in collective ``n + 2``, which it enters after it
    has seen every flag at ``n + 1``; a rank raises its flag to ``n + 1`` when it is done with the results of ``n``.

    At least 2 ranks have all mapped the memory, :meth:`bytes_needed` long. ``processes`` are their pidfds, ``timeout``
    the seconds to wait for one, ``slot_bytes`` the longest message that goes in one piece, a multiple of 64.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        memory: mmap.mmap,
        processes: list[int],
        timeout: float,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        self.rank, self._world_size, self._timeout, self._slot_bytes = rank, world_size, timeout, slot_bytes
        self._memory = memory
        words = LINE_BYTES // 8
        self._words, self._bytes = memoryview(memory).cast("B").cast("q"), memoryview(memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._sleep = _Timespec(0, int(SLEEP * 1e9))
        self._line = (world_size + 1 + rank) * words
        self._peers = [(r, (world_size + 1 + r) * words) for r in range(world_size) if r != rank]
        self._spins = SPINS
        self._processes, self._watch = processes, select.poll()
        for r, _ in self._peers:
            self._watch.register(processes[r], select.POLLIN)
        self._collective = 0
        first = (1 + 2 * world_size) * LINE_BYTES
        everything = torch.frombuffer(memory, dtype=torch.uint8)[first:].view(2, world_size, slot_bytes)
        self._buffers: list[dict[torch.dtype, Tensor]] = [{torch.uint8: everything[0]}, {torch.uint8: everything[1]}]
        self._mine = [first + (parity * world_size + rank) * slot_bytes for parity in range(2)]

    @staticmethod
    def bytes_needed(world_size: int, slot_bytes: int = SLOT_BYTES) -> int:
        """Returns the length of the memory.

        It begins with a line for each rank's signs of life, one for a token, and each rank's flags; two slots a rank
        follow.
        """
        return LINE_BYTES + 2 * world_size * (LINE_BYTES + slot_bytes)

    def gather(self, x: Tensor) -> Tensor:
        """Gathers contiguous tensors ``[…]`` on the CPU from every rank: ``[world_size, …]`` in new memory.

        Raises:
            PeerFailureError: if a peer ended, left, or didn't come in time, or brought a tensor of another size.
        """
        pieces = self.pieces(x)
        if len(pieces) == 1:
            return self.view(x).clone(memory_format=torch.contiguous_format)
        out = x.new_empty((self._world_size, x.numel()))
        for part, piece in zip(self.pieces(out, dim=1), pieces, strict=True):
            part.copy_(self.view(piece))
        return out.view(self._world_size, *x.shape)

    def first(self, x: Tensor) -> Tensor:
        """Returns the first rank's tensor, in new memory; every rank gives a contiguous one of the same shape."""
        out = torch.empty_like(x)
        for part, piece in zip(self.pieces(out), self.pieces(x), strict=True):
            part.copy_(self.view(piece)[0])  # before the next collective, which may write where the view is
        return out

    def pieces(self, x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        """Cuts a contiguous tensor, flat from ``dim`` on, into parts that each fit into a slot."""
        return x.flatten(dim).split(self._slot_bytes // x.element_size(), dim)

    def view(self, x: Tensor) -> Tensor:
        """Gathers a tensor that fits into a slot, as :meth:`gather`; the result is valid until the next collective."""
        rows = self.exchange(x.detach().reshape(1, -1), x.numel())
        return rows.as_strided((self._world_size, *x.shape), (rows.stride(0), *x.contiguous().stride()))

    def capacity(self, dtype: torch.dtype) -> int:
        """Returns how many elements a slot holds."""
        return self._slot_bytes // dtype.itemsize

    def exchange(self, rows: Tensor, size: int, behind: Tensor | None = None) -> Tensor:
        """Copies rows ``[k, n]``, and a vector behind them, into this rank's slot; waits for all ranks to do so.

        ``size`` is a number of elements, which must be the same on all ranks. Returns the slots, flat,
        ``[world_size, …]``: valid until the next collective.

        Raises:
            PeerFailureError: if a peer ended, left, or didn't come in time, or gave another size.
        """
        self._collective += 1
        number, parity = self._collective, self._collective & 1
        start = self._mine[parity]
        for row in (*rows, behind):
            if row is not None and (count := row.numel() * row.element_size()):
                self._bytes[start : start + count] = row.detach().contiguous().view(torch.uint8).numpy().data
                start += count
        line, words, named = self._line, self._words, size * rows.element_size()
        words[line + SIZES + parity] = named
        words[line] = number
        if words[line + AWAITED] == number:
            self._futex(line, FUTEX_WAKE, ALL)
        self._wait(number)
        for peer, line in self._peers:
            theirs = words[line + SIZES + parity]
            if theirs != named:
                raise PeerFailureError(
                    f"rank {self.rank} brought {named} bytes to a collective and rank {peer} brought {theirs}"
                )
        typed = self._buffers[parity]
        found = typed.get(rows.dtype)
        if found is None:
            found = typed[rows.dtype] = typed[torch.uint8].view(rows.dtype)
        return found

    def _wait(self, number: int) -> None:
        """Waits until every flag has reached a collective's number."""
        words = self._words
        for peer, line in self._peers:
            spins = self._spins
            while words[line] < number:
                spins -= 1
                if not spins:  # in vain: spins less next time, because the peer may need this core
                    self._wait_long(peer, line, number)
                    self._spins = max(FEWEST_SPINS, self._spins // 2)
                    break
            else:
                self._spins = min(SPINS, self._spins + FEWEST_SPINS)

    def _wait_long(self, peer: int, line: int, number: int) -> None:
        words, silence = self._words, Silence(self.rank, self._timeout)
        with life.waiting():
            while True:
                gone = self._gone()  # before the flag: a peer may end as soon as it has raised it
                reached = words[line]
                if reached >= number:
                    return
                if gone is not None:
                    raise PeerFailureError(f"rank {self.rank} lost its peers: {gone}")
                signs = shared_signs(self._memory, self._world_size)
                signs[self.rank] = signs[self.rank]._replace(waits=True)  # even if it counts in other memory
                if (said := silence.listen(signs)) is not None:
                    if not signs[peer].count:  # a script's, which counts nothing
                        said = f"rank {peer} didn't come to a collective in {self._timeout:g} s"
                        said = f"rank {self.rank} lost its peers: {said}"
                    raise PeerFailureError(said)
                words[line + AWAITED] = number
                self._futex(line, FUTEX_WAIT, reached, ctypes.byref(self._sleep))

    def _futex(self, line: int, operation: int, value: int, limit: Any = None) -> None:
        """Sleeps while a flag's lower half is ``value``, or wakes sleepers; sleeps are short: a wake may be missed."""
        address = ctypes.c_void_p(self._address + 8 * line)
        _LIBC.syscall(SYSCALL_FUTEX, address, operation, ctypes.c_uint32(value), limit, None, 0)

    def _gone(self) -> str | None:
        """Returns how a peer that this rank still waits for ended or left, or None."""
        ended = {fd for fd, _ in self._watch.poll(0)}
        for peer, line in self._peers:
            left = self._words[line + LEFT]
            if (left or self._processes[peer] in ended) and self._words[line] < self._collective:
                return f"rank {peer} has {'left the run' if left else 'ended'}"
        return None

    def close(self) -> None:
        """Tells the peers that this rank comes to no further collective; the memory they still read stays."""
        self._words[self._line + LEFT] = 1
        life.leave(self._memory)
        for process in self._processes:
            with contextlib.suppress(OSError):
                os.close(process)
        self._processes = []


def inherited_slots(rank: int, world_size: int, memory: int, timeout: float) -> SharedSlots | str:
    """Maps memory whose descriptor all ranks, at least 2, inherited from the launcher that started them on this host.

    Returns the slots, or a short reason why there are none, the same on every rank.

    Raises:
        PeerFailureError: if a rank didn't come in time, or has ended.
        RunError: if the memory can't be mapped.
    """
    problem = obstacle()
    if problem is not None:
        return problem
    size = SharedSlots.bytes_needed(world_size)
    try:
        os.ftruncate(memory, size)
        mapped = mmap.mmap(memory, size)
    except OSError as error:
        why = error.strerror or error
        raise RunError(
            f"rank {rank} can't map {size:,} bytes of shared memory ({why}); use --collectives backend"
        ) from None
    life.share(mapped, rank)
    deadline, processes = time.monotonic() + timeout, []
    for peer in range(world_size):
        while not (pid := shared_pid(mapped, peer)):
            if time.monotonic() > deadline:
                raise PeerFailureError(
                    f"rank {rank} lost its peers: rank {peer} didn't begin in {timeout:g} s ({SETTING})"
                )
            time.sleep(BEGIN_SECONDS)
        try:
            processes.append(os.pidfd_open(pid))
        except ProcessLookupError:
            raise PeerFailureError(f"rank {rank} lost its peers: rank {peer} has ended") from None
    return SharedSlots(rank, world_size, mapped, processes, timeout)


def open_shared_slots(
    rank: int, world_size: int, gather_json: GatherJson, timeout: float, slot_bytes: int = SLOT_BYTES
) -> SharedSlots | str:
    """Maps memory that all ranks, at least 2, share, if they can; every rank comes to the same conclusion.

    ``gather_json`` gathers a JSON value of every rank by other means; see :class:`SharedSlots`. Returns the slots, or a
    short reason why there are none.
    """
    problem, identity = obstacle(), {}
    try:
        identity = host_identity() if problem is None else {}
    except OSError as error:
        problem = f"this host has no identity ({error.strerror or error})"
    said = gather_json({"problem": problem, "identity": identity})
    for problem in (one["problem"] for one in said):
        if problem is not None:
            return str(problem)
    for name, value in said[0]["identity"].items():
        if any(one["identity"][name] != value for one in said):
            return f"ranks run on several hosts (they differ in {name})"
    return _attach(rank, world_size, gather_json, timeout, slot_bytes)


def _attach(rank: int, world_size: int, gather_json: GatherJson, timeout: float, slot_bytes: int) -> SharedSlots | str:
    """Offers memory, maps the first rank's, and tells the other ranks whether that worked."""
    token, size = secrets.token_bytes(16), SharedSlots.bytes_needed(world_size, slot_bytes)
    where = world_size * LINE_BYTES
    offered, problem = -1, None
    processes: list[int] = []
    memory: mmap.mmap | None = None
    try:
        try:
            offered = os.memfd_create("lockstep", os.MFD_CLOEXEC)
            os.ftruncate(offered, size)
            os.pwrite(offered, token, where)
        except OSError as error:
            problem = f"no memory to share ({error.strerror or error})"
        offers = gather_json({"pid": os.getpid(), "fd": offered, "token": token.hex()})
        if problem is None:
            try:
                memory = _map(offers[0], size, where)
                processes += [os.pidfd_open(offer["pid"]) for offer in offers]
            except OSError as error:
                problem = f"rank {rank} can't map another rank's memory ({error.strerror or error})"
        problems = [said for said in gather_json(problem) if said is not None]
    finally:
        if offered >= 0:
            os.close(offered)
    if problems:
        for process in processes:
            os.close(process)
        return str(problems[0])
    assert memory is not None
    life.share(memory, rank)
    return SharedSlots(rank, world_size, memory, processes, timeout, slot_bytes)


def _map(offer: dict[str, Any], size: int, where: int) -> mmap.mmap:
    """Maps the memory that a rank offers, and checks by its token that it is that rank's."""
    fd = os.open(f"/proc/{offer['pid']}/fd/{offer['fd']}", os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(fd, size)
    finally:
        os.close(fd)
    if memory[where : where + 16].hex() != offer["token"]:
        raise OSError("it holds something else")
    return memory
