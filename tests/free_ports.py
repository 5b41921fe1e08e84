"""Ports for processes that bind them a while later: none of those that the kernel hands out meanwhile."""

import itertools
import os
import socket
from pathlib import Path

KERNELS = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST, END = 20_000, 28_000
"""Ray's processes listen below them, PyTorch's above."""

_asked = itertools.count()


def free_port() -> int:
    """A port that nobody listens on, nor on the next one, which JAX may need beside PyTorch.

    Sockets that are bound without a number, and connections, have ports of the kernel's own range, which is elsewhere.
    Each process of tests looks in its own place, and never gives the same port twice.
    """
    end = min(END, int(KERNELS.read_text().split()[0])) if KERNELS.exists() else END
    while end - LOWEST >= 1000:
        port = LOWEST + (os.getpid() * 210 + 2 * next(_asked)) % (end - LOWEST)
        try:
            for each in (port, port + 1):
                with socket.socket() as probe:
                    probe.bind(("", each))
        except OSError:
            continue
        return port
    with socket.socket() as probe:  # the kernel's own range begins so low that there is no other
        probe.bind(("", 0))
        return probe.getsockname()[1]
