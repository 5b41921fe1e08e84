"""Serves PyTorch's store, in which ranks find one another, from a process that isn't a rank."""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import TCPStore


def serve_store(host: str, port: int, listener: int) -> Any:
    """Serves the store on a listening socket, whose descriptor it takes over, as long as the returned object lives."""
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
