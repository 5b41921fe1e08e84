"""PyTorch's process group: how ranks find one another, by what they talk, and how they leave."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import sys
import time
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from lockstep.config.run import Config
from lockstep.core.errors import RankMismatchError
from lockstep.core.network import interface_of, own_address
from lockstep.core.silence import sign_name
from lockstep.core.topology import Topology

WITHOUT_LIMIT = datetime.timedelta(days=20)
"""The backends' own limit where ranks watch one another; in milliseconds it still fits into 32 bits."""

LEAVE_SECONDS = 2.0

BACKENDS = {True: "cpu:gloo,cuda:nccl", False: "gloo"}
"""By whether tensors on a GPU travel by NCCL."""


def join_process_group(topology: Topology, nccl: bool, timeout: datetime.timedelta, store: Store | None = None) -> None:
    """Joins the ranks, over loopback when they all run on this host.

    ``timeout`` is how long a rank waits for the others in a collective; with ``nccl`` tensors on a GPU travel by it.
    """
    if topology.loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    elif (interface := interface_of(own_address(topology.master_addr) or "")) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    store = store or meet(topology, timeout)
    place: dict[str, Any] = {"world_size": topology.world_size, "rank": topology.rank}
    dist.init_process_group(BACKENDS[nccl], store=store, timeout=timeout, **place)


def meet(topology: Topology, timeout: datetime.timedelta) -> Store:
    """Finds the store in which all ranks have said that they are there: our launcher's file, or over TCP.

    Raises:
        RankMismatchError: they didn't come in time; one line.
    """
    rank, world_size = topology.rank, topology.world_size
    try:
        if topology.store_file is not None and not topology.agent_store:
            store: Store = FileStore(topology.store_file, world_size)
        else:
            address = (topology.master_addr, topology.master_port)
            store = TCPStore(
                *address, world_size=world_size, is_master=topology.holds_store, timeout=timeout, wait_for_workers=False
            )
        # of all attempts that torchrun makes: what a killed one left in it is not for the next
        store = PrefixStore(f"lockstep/attempt_{topology.attempt}", store)
        store.set(sign_name(rank), "")
        store.wait([sign_name(r) for r in range(world_size)], timeout)
    except RuntimeError as error:
        reason, where = str(error).splitlines()[0], topology.store_file or topology.master
        raise RankMismatchError(f"rank {rank} can't meet the others at {where}: {reason}") from None
    return store


def uses_nccl(config: Config) -> bool:
    """Tells whether tensors on a GPU travel by NCCL; with gloo they go through the host."""
    return config.device == "cuda" and config.backend in ("auto", "nccl")


def close_process_group() -> None:
    """Leaves the process group, if there is one."""
    if dist.is_initialized():
        gc.collect()  # FSDP's modules hold groups in cycles; their threads must end before the process does
        dist.destroy_process_group()


def needs_backend(config: Config) -> bool:
    """Tells whether a run needs PyTorch's process group though its ranks share memory: for DDP, FSDP or a GPU."""
    return config.device != "cpu" or config.reduction == "fast"


def leave(store: Store | None, topology: Topology) -> None:
    """Waits, briefly, in the rank that holds the store until the others have left it."""
    with contextlib.suppress(RuntimeError):
        assert store is not None
        store.set(f"left/{topology.rank}", "")
        names, deadline = [f"left/{r}" for r in range(topology.world_size)], time.monotonic() + LEAVE_SECONDS
        while topology.holds_store and not store.check(names) and time.monotonic() < deadline:
            time.sleep(LEAVE_SECONDS / 100)
