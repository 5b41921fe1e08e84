"""Which of this host's addresses and interfaces leads to the other ranks."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
import time

from lockstep.core.errors import RankMismatchError
from lockstep.core.topology import Topology

ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses of documentation (RFC 5737, RFC 3849): which way a packet to anywhere would leave. None is sent."""
_SIOCGIFADDR = 0x8915
_PORT = 9
NAME_SECONDS = 60.0
"""How long a name may take to appear: that of a container which starts at the same time does."""
_RETRY_SECONDS = 1.0
_KNOCK_SECONDS = 0.1
"""From one try to connect to the next."""


def wait_for_master(topology: Topology) -> None:
    """Waits until the name of rank 0's host leads to an address; errors as :func:`wait_for_name` has them."""
    if topology.launched and not topology.loopback:
        wait_for_name(topology.master_addr)


def wait_for_name(host: str, seconds: float = NAME_SECONDS) -> None:
    """Waits until a host's name leads to an address; a one-line ``RankMismatchError`` if it doesn't in time.

    Other failures of the look-up are left to those who connect.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(host, _PORT, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno == socket.EAI_NONAME and time.monotonic() < deadline:
                time.sleep(min(_RETRY_SECONDS, seconds))
                continue
            if error.errno == socket.EAI_NONAME:
                raise RankMismatchError(
                    f"launcher variables: ranks are to meet on {host}, which is no host's name here; set MASTER_ADDR "
                    "to the address of rank 0's host"
                ) from None
        return


def wait_for_listener(address: str, seconds: float) -> None:
    """Waits until somebody listens at ``host:port``; the last ``OSError`` of connecting if nobody does in time."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + seconds
    while True:
        left = max(_KNOCK_SECONDS, deadline - time.monotonic())
        try:
            socket.create_connection((host.strip("[]"), int(port)), left).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_KNOCK_SECONDS)
            continue
        return


def own_address(host: str) -> str | None:
    """Finds the address by which this host is reached by those that reach ``host``; None if there is none but loopback.

    It is the source address of a datagram that isn't sent, so the name of this host may lead anywhere, 127.0.1.1 too.
    """
    for target in (host, *ELSEWHERE):
        with contextlib.suppress(OSError):
            for family, kind, _, _, address in socket.getaddrinfo(target, _PORT, type=socket.SOCK_DGRAM):
                with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
                    probe.connect(address)
                    found = probe.getsockname()[0]
                    if not ipaddress.ip_address(found.partition("%")[0]).is_loopback:
                        return found
    return next((address for address in _addresses().values() if not ipaddress.ip_address(address).is_loopback), None)


def interface_of(address: str) -> str | None:
    """Names the network interface that has an IPv4 address; None where that can't be found out."""
    return next((name for name, found in _addresses().items() if found == address), None)


def _addresses() -> dict[str, str]:
    """The first IPv4 address of each interface that has one (Linux)."""
    if sys.platform != "linux":
        return {}
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(reply[20:24])
    return found
