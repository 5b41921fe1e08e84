"""Holds PyTorch's store, in which ranks find one another, in a process that is none of them."""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import TCPStore


def serve_store(host: str, port: int, listener: int) -> Any:
    """Serve the store on a socket that listens already; it lives as long as the object that is returned.

    Args:
        host: address of the socket.
        port: its number.
        listener: its descriptor, which the store takes over.
    """
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
