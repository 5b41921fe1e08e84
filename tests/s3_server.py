"""An S3 server in a process of its own (moto's), behind a proxy that can refuse, slow down, cut and deny."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from command_line import wait_until
from free_ports import free_port

HOST = "127.0.0.1"
KEY, SECRET, REGION = "the-key", "the-secret", "us-east-1"
REFUSE, SLOW, CUT, DENY, HANG = "refuse", "slow", "cut", "deny", "hang"
FAULTS = (REFUSE, SLOW, CUT, DENY)
SLOW_SECONDS = 0.3
"""For each chunk that a client sends or gets, while the mirror is slow."""
CUT_AFTER = 40
"""Bytes of a request's body that arrive before the connection is cut."""
_CHUNK = 1 << 16
_ERROR = '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{0}</Code><Message>{1}</Message></Error>'
_DENIED = {
    DENY: ("AccessDenied", "Access Denied"),
    KEY: ("InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records."),
}
_SERVER = "from lockstep.core.process import end_with_parent; end_with_parent({0}); " + (
    "from moto.server import main; main(['-H', '{1}', '-p', '{2}'])"
)


class _Closed(Exception):  # noqa: N818
    """The connection is over."""


@dataclass
class Proxy:
    """Stands between clients and an S3 server, on a port of its own.

    Attributes:
        fault: what goes wrong now, None: nothing.
        requests: method and path of those that came, in order.
        hit: how many requests the fault has met.
    """

    target: int
    fault: str | None = None
    requests: list[str] = field(default_factory=list)
    hit: int = 0
    port: int = 0

    def __post_init__(self) -> None:
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = self._listen()
        self.port = self._listener.getsockname()[1]

    def set(self, fault: str | None) -> None:
        """Begins a fault, or ends it; connections that are open end in both cases."""
        before, self.fault, self.hit = self.fault, fault, 0
        if fault == REFUSE and before != REFUSE:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        if before == REFUSE and fault != REFUSE:
            self._listener = self._listen()
        self._close_connections()

    def close(self) -> None:
        """Ends it."""
        self.set(REFUSE)

    def _listen(self) -> socket.socket:
        listener = socket.create_server((HOST, self.port))
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client = listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _close_connections(self) -> None:
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError, _Closed), socket.create_connection((HOST, self.target)) as server:
            with self._lock:
                self._open |= {client, server}
            threading.Thread(target=self._answer, args=(server, client), daemon=True).start()
            try:
                buffer = b""
                while True:
                    buffer = self._request(client, server, buffer)
            finally:
                with self._lock:
                    self._open -= {client, server}
                for each in (client, server):
                    with contextlib.suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := server.recv(_CHUNK):
                if self.fault == SLOW:
                    time.sleep(SLOW_SECONDS)
                client.sendall(chunk)
            client.shutdown(socket.SHUT_RDWR)

    def _request(self, client: socket.socket, server: socket.socket, buffer: bytes) -> bytes:
        """Passes one request on, or doesn't; returns what came of the next one."""
        while b"\r\n\r\n" not in buffer:
            buffer += _received(client)
        head, _, rest = buffer.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        assert "chunked" not in headers.get("transfer-encoding", ""), head
        length, method = int(headers.get("content-length", 0)), first.split()[0]
        self.requests.append(" ".join(first.split()[:2]))
        fault = self.fault
        if f"Credential={KEY}/" not in headers.get("authorization", ""):
            fault = KEY
        if fault is not None and not (fault == CUT and not (method == "PUT" and length)):
            self.hit += 1
        if fault in _DENIED:
            _deny(client, method, *_DENIED[fault])
        if fault == HANG:
            time.sleep(600)
            raise _Closed
        server.sendall(head + b"\r\n\r\n")
        left = min(length, CUT_AFTER) if fault == CUT and method == "PUT" else length
        cut = left < length
        while left:
            rest = rest or _received(client)
            if fault == SLOW:
                time.sleep(SLOW_SECONDS)
            server.sendall(rest[:left])
            left, rest = left - len(rest[:left]), rest[left:]
        if cut:
            raise _Closed
        return rest


def _received(client: socket.socket) -> bytes:
    chunk = client.recv(_CHUNK)
    if not chunk:
        raise _Closed
    return chunk


def _deny(client: socket.socket, method: str, code: str, message: str) -> None:
    text = _ERROR.format(code, message)
    head = f"HTTP/1.1 403 Forbidden\r\nContent-Type: application/xml\r\nContent-Length: {len(text)}\r\n"
    client.sendall(f"{head}Connection: close\r\n\r\n{'' if method == 'HEAD' else text}".encode())
    client.settimeout(1.0)
    with contextlib.suppress(OSError):  # what it still sends is read, else it would see a reset and not the answer
        client.shutdown(socket.SHUT_WR)
        while client.recv(_CHUNK):
            pass
    raise _Closed


@dataclass
class S3:
    """A bucket on the server, behind a proxy of its own."""

    port: int
    proxy: Proxy
    bucket: str

    def __post_init__(self) -> None:
        import boto3  # takes a while, and few tests need it

        self._client = boto3.client(
            "s3",
            endpoint_url=f"http://{HOST}:{self.port}",
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name=REGION,
        )
        self._client.create_bucket(Bucket=self.bucket)

    @property
    def mirror(self) -> str:
        """What ``checkpoint.mirror`` is."""
        return f"s3://{self.bucket}/runs"

    def variables(self, key: str = KEY) -> dict[str, str]:
        """Environment variables of a client; nothing of this machine's own settings counts."""
        return {
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": f"http://{HOST}:{self.proxy.port}",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": HOST,
            "no_proxy": HOST,
        }

    def names(self, run: str = "run") -> list[str]:
        """Lists a run's files, past the proxy."""
        prefix = f"runs/{run}/"
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        return sorted(each["Key"].removeprefix(prefix) for page in pages for each in page.get("Contents", ()))

    def read(self, name: str, run: str = "run") -> bytes:
        """Reads a file, past the proxy."""
        return self._client.get_object(Bucket=self.bucket, Key=f"runs/{run}/{name}")["Body"].read()

    def write(self, name: str, content: bytes, run: str = "run") -> None:
        """Writes a file, past the proxy."""
        self._client.put_object(Bucket=self.bucket, Key=f"runs/{run}/{name}", Body=content)


@contextlib.contextmanager
def server() -> Iterator[int]:
    """Runs a server; gives its port."""
    port = free_port()
    code = _SERVER.format(os.getpid(), HOST, port)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: process.poll() is not None or _answers(port), "moto's server doesn't start")
        assert process.poll() is None, "moto's server has ended"
        yield port
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1.0):
        return True
    return False


@contextlib.contextmanager
def bucket(port: int) -> Iterator[S3]:
    """Makes a bucket on the server of a port, with a proxy."""
    proxy = Proxy(port)
    try:
        yield S3(port, proxy, f"bucket-{uuid.uuid4().hex[:12]}")
    finally:
        proxy.close()


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """A server for all tests of this process."""
    with server() as port:
        yield port


@pytest.fixture
def s3(s3_port: int) -> Iterator[S3]:
    """An empty bucket."""
    with bucket(s3_port) as made:
        yield made
