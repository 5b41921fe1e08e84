"""Finds the addresses and interfaces of this host that lead to the other ranks."""

from __future__ import annotations

import array
import contextlib
import errno
import ipaddress
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lockstep.core.errors import RankMismatchError

ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Documentation addresses (RFC 5737, RFC 3849), which show by which way a packet would leave; none is sent."""
IPV6 = Path("/proc/net/if_inet6")
_SIOCGIFCONF = 0x8912
_IFREQ = 16 + 24 if struct.calcsize("P") == 8 else 16 + 16
"""Bytes of the kernel's ``struct ifreq``."""
_MOST_ADDRESSES = 1024
_PORT = 9
NAME_SECONDS = 60.0
"""How long a name may take to resolve; that of a container that starts at the same time takes a while."""
_RETRY_SECONDS = 1.0
_KNOCK_SECONDS = 0.1
"""Pause between tries to connect."""
_PORT_TAKEN, _NO_SERVER = "EADDRINUSE", "Failed to start RPC server"
"""What PyTorch's store says of a port that is taken, and JAX's coordinator of any at which it can't listen."""


def wait_for_name(host: str, tell: Callable[[str], object], seconds: float = NAME_SECONDS) -> None:
    """Waits until a host's name resolves; raises a one-line ``RankMismatchError`` if it doesn't in time.

    ``tell`` is called once, with a line for the user, if the first look-up fails. Other failures of the look-up are
    left to the connection that follows.
    """
    deadline, told = time.monotonic() + seconds, False
    while True:
        try:
            socket.getaddrinfo(host, _PORT, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno == socket.EAI_NONAME and time.monotonic() < deadline:
                if not told:
                    tell(f"MASTER_ADDR: {host} is no host's name here yet; waits up to {seconds:g} s for it")
                told = True
                time.sleep(min(_RETRY_SECONDS, seconds))
                continue
            if error.errno == socket.EAI_NONAME:
                raise RankMismatchError(
                    f"launcher variables: ranks are to meet on {host}, which is no host's name here; set MASTER_ADDR "
                    "to the address of rank 0's host"
                ) from None
        return


def wait_for_listener(address: str, seconds: float) -> None:
    """Waits until a process listens at ``host:port``; raises the last ``OSError`` if none does in time."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + seconds
    while True:
        left = max(_KNOCK_SECONDS, deadline - time.monotonic())
        try:
            with socket.create_connection((host.strip("[]"), int(port)), left) as knock:
                if knock.getsockname() == knock.getpeername():  # the kernel chose this very port for our own end
                    raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_KNOCK_SECONDS)
            continue
        return


def reason_in_words(error: Exception) -> str:
    """Returns why ranks can't meet, in one line: the library's own, except where rank 0 can't listen at its port."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    if _NO_SERVER in reason:
        return (
            "rank 0 can't listen there; another program may have this port: give all ranks another one (MASTER_PORT, "
            "or --coordinator)"
        )
    if _PORT_TAKEN in reason:
        return "another program has this port; give all ranks another one (MASTER_PORT, or --coordinator)"
    return reason


def wait_for_rank_0(address: str, seconds: float) -> None:
    """Waits until rank 0, or who else holds the place where ranks meet, listens at ``host:port``.

    Raises:
        TimeoutError: nobody does in time; the message is one line.
    """
    try:
        wait_for_listener(address, seconds)
    except OSError as error:
        raise TimeoutError(f"rank 0 hasn't listened there within {seconds:g} s ({error.strerror or error})") from None


def own_address(host: str) -> str | None:
    """Returns the address by which a host that reaches ``host`` reaches this one; None if there is only loopback.

    It is the source address of a datagram that isn't sent, so it doesn't depend on what this host's name resolves to
    (127.0.1.1 on some systems).
    """
    for target in (host, *ELSEWHERE):
        with contextlib.suppress(OSError):
            for family, kind, _, _, address in socket.getaddrinfo(target, _PORT, type=socket.SOCK_DGRAM):
                with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
                    probe.connect(address)
                    found = probe.getsockname()[0]
                    if not ipaddress.ip_address(found.partition("%")[0]).is_loopback:
                        return found
    return next((address for _, address in _addresses() if _reaches_out(ipaddress.ip_address(address))), None)


def _reaches_out(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether others can reach an address: not loopback, nor link-local IPv6, which needs its interface too."""
    return not address.is_loopback and not (address.version == 6 and address.is_link_local)


def interface_of(address: str) -> str | None:
    """Returns the first network interface that has an address; None if it can't be found."""
    if not address:
        return None
    wanted = ipaddress.ip_address(address.partition("%")[0])
    return next((name for name, found in _addresses() if ipaddress.ip_address(found) == wanted), None)


def _addresses() -> list[tuple[str, str]]:
    """Returns interfaces and their addresses, IPv4 before IPv6 (Linux)."""
    return [*_addresses_of_version_4(), *_addresses_of_version_6()] if sys.platform == "linux" else []


def _addresses_of_version_4() -> list[tuple[str, str]]:
    import fcntl

    room = array.array("B", bytes(_MOST_ADDRESSES * _IFREQ))
    asked = struct.pack("iP", len(room), room.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            (used,) = struct.unpack_from("i", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, asked))
        except OSError:
            return []
    entries = [bytes(room[start : start + _IFREQ]) for start in range(0, used, _IFREQ)]
    return [(_interface(entry[:16]), socket.inet_ntoa(entry[20:24])) for entry in entries]


def _interface(label: bytes) -> str:
    """Returns the interface of an address by its label, which may be an alias: ``eth0:1``."""
    return label.partition(b"\0")[0].decode().partition(":")[0]


def _addresses_of_version_6() -> list[tuple[str, str]]:
    try:
        rows = [line.split() for line in IPV6.read_text().splitlines()]
    except OSError:  # a kernel without it
        return []
    return [(row[-1], str(ipaddress.IPv6Address(int(row[0], 16)))) for row in rows]
