"""Hosts that aren't there: network namespaces of this machine, joined by a switch, with cables that can be slow or cut.

They need root and iproute2.
"""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PLACES = Path("/etc/netns")


class NoHostsError(RuntimeError):
    """This machine gives no network namespaces."""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@dataclass(frozen=True)
class Host:
    """A namespace, its address, its interface there, and the other end of its cable, in the switch."""

    namespace: str
    address: str
    interface: str
    switch: str
    port: str

    def command(self, *words: str) -> list[str]:
        """A command line that runs on this host."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def slow_down(self, rate: str, latency: str = "400ms", burst: str = "32kb") -> None:
        """Let no more than this leave the host, and as much come in: ``20mbit``.

        ``burst`` goes at any rate after a pause; with little of it a fast cable doesn't reach its rate.
        """
        for namespace, device in ((self.namespace, self.interface), (self.switch, self.port)):
            words = ["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf"]
            words += ["rate", rate, "burst", burst, "latency", latency]
            subprocess.run(words, check=True, capture_output=True, timeout=20)

    def cut(self) -> None:
        """Cut the cable: nothing arrives any more, and nobody is told."""
        _ip("-n", self.switch, "link", "set", self.port, "down")

    def mend(self) -> None:
        """Put the cable back."""
        _ip("-n", self.switch, "link", "set", self.port, "up")


@contextmanager
def joined_hosts(number: int) -> Iterator[list[Host]]:
    """Hosts that a switch joins; on leaving they are gone.

    Raises:
        NoHostsError: they can't be had here; why.
    """
    if not all(map(shutil.which, ("ip", "tc"))):
        raise NoHostsError("needs ip and tc of iproute2")
    tag = os.getpid() % 100_000
    switch = f"lockstep{tag}s"
    hosts = [
        Host(f"lockstep{tag}h{n}", f"10.77.0.{n + 1}", f"ls{tag}h{n}", switch, f"ls{tag}p{n}") for n in range(number)
    ]
    namespaces = [switch, *(host.namespace for host in hosts)]
    try:
        try:
            for namespace in namespaces:
                _ip("netns", "add", namespace)
            _ip("-n", switch, "link", "add", "switch", "type", "bridge")
            _ip("-n", switch, "link", "set", "switch", "up")
        except subprocess.CalledProcessError as error:
            raise NoHostsError(f"network namespaces are not permitted here: {error.stderr!r}") from None
        for host in hosts:
            _plug_in(host)
        yield hosts
    finally:
        for namespace in namespaces:
            shutil.rmtree(PLACES / namespace, ignore_errors=True)
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True, timeout=20)


def _plug_in(host: Host) -> None:
    ends = (host.interface, "netns", host.namespace), (host.port, "netns", host.switch)
    _ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
    _ip("-n", host.switch, "link", "set", host.port, "master", "switch")
    _ip("-n", host.switch, "link", "set", host.port, "up")
    _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
    _ip("-n", host.namespace, "link", "set", "lo", "up")
    _ip("-n", host.namespace, "link", "set", host.interface, "up")
    # the host's own name leads to 127.0.1.1 there, as Debian has it
    (PLACES / host.namespace).mkdir(parents=True)
    (PLACES / host.namespace / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
