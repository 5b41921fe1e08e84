"""PyTorch's process group: how ranks find one another, by what they talk, and how they leave."""

from __future__ import annotations

import contextlib
import datetime
import gc
import time
import uuid
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from lockstep.config.run import Config
from lockstep.core.errors import RankMismatchError, UnavailableError
from lockstep.core.process import ended_by_signals
from lockstep.core.silence import sign_name
from lockstep.core.topology import Topology
from lockstep.training.rank_environment import apply, interface_settings, machine_class

WITHOUT_LIMIT = datetime.timedelta(days=20)
"""The backends' own limit where ranks watch one another; in milliseconds it still fits into 32 bits."""

LEAVE_SECONDS = 2.0
ASK_SECONDS = 0.02

DEVICE_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}
"""By PyTorch's type of an accelerator: the backend by which its tensors travel without the host."""


def device_backend(kind: str) -> str | None:
    """Names the backend of a type of accelerator, if this PyTorch has it."""
    name = DEVICE_BACKENDS.get(kind)
    return name if name is not None and dist.is_backend_available(name) else None


def backends_of(own: str | None) -> str:
    """Says to PyTorch that the host's tensors travel by gloo, and an accelerator's by ``own``, if it has one."""
    kinds = {backend: kind for kind, backend in DEVICE_BACKENDS.items()}
    return "gloo" if own is None else f"cpu:gloo,{kinds[own]}:{own}"


def join_process_group(
    topology: Topology, own: str | None, timeout: datetime.timedelta, store: Store | None = None
) -> None:
    """Joins the ranks, over loopback when they all run on this host.

    ``timeout`` is how long a rank waits for the others in a collective; ``own`` is the accelerators' backend, or None.
    """
    apply(interface_settings(topology, machine_class(topology)))
    store = store or meet(topology, timeout)
    place: dict[str, Any] = {"world_size": topology.world_size, "rank": topology.rank}
    dist.init_process_group(backends_of(own), store=store, timeout=timeout, **place)


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
        with ended_by_signals() if topology.starts_again else contextlib.nullcontext():
            if topology.agent_store and topology.starts_again:
                store = store_of_round(store, topology, timeout)
            store.set(sign_name(rank), "")
            store.wait([sign_name(r) for r in range(world_size)], timeout)
    except RuntimeError as error:
        reason, where = str(error).splitlines()[0], topology.store_file or topology.master
        raise RankMismatchError(f"rank {rank} can't meet the others at {where}: {reason}") from None
    return store


def store_of_round(store: Store, topology: Topology, timeout: datetime.timedelta) -> Store:
    """Finds a part of torchrun's store that is for the ranks which were started together, and returns it.

    The store outlives them, and what ranks that were killed left in it is not for the next. torchrun numbers its rounds
    for itself alone: agents count their own restarts, which differ. So rank 0 makes a name, and answers whoever asks
    for it under a name of its own, until all of this round have; what was asked before them is answered too.
    """
    own, place, world_size = uuid.uuid4().hex, "lockstep/asks/{}", topology.world_size
    if not topology.names_round:
        store.set(place.format(topology.rank), own)
        answer = f"lockstep/answers/{own}"
        store.wait([answer], timeout)
        return PrefixStore(f"lockstep/{store.get(answer).decode()}", store)
    mine, answered = PrefixStore(f"lockstep/{own}", store), set[str]()
    deadline = time.monotonic() + timeout.total_seconds()
    while not mine.check([sign_name(r) for r in range(1, world_size)]):
        for asks in (place.format(r) for r in range(1, world_size)):
            if store.check([asks]) and (name := store.get(asks).decode()) not in answered:
                store.set(f"lockstep/answers/{name}", own)
                answered.add(name)
        if time.monotonic() > deadline:
            break  # the caller's own wait says so
        time.sleep(ASK_SECONDS)
    return mine


def own_backend(config: Config) -> str | None:
    """Names the backend by which tensors on an accelerator travel; None: they go through the host, by gloo.

    Raises:
        ValueError: this PyTorch doesn't have the one that the config names; one line.
    """
    if config.device == "cpu" or config.backend == "gloo":
        return None
    if config.backend == "auto":
        return device_backend(config.device)
    if not dist.is_backend_available(config.backend):
        raise UnavailableError(f"backend: {config.backend} isn't in PyTorch {torch.__version__}; use auto or gloo")
    return config.backend


@contextlib.contextmanager
def left_at_the_end() -> Iterator[None]:
    """Leaves the process group, if there is one, when the block is over; see :func:`close_process_group`."""
    try:
        yield
    except BaseException:
        close_process_group(failed=True)
        raise
    close_process_group()


def close_process_group(failed: bool = False) -> None:
    """Leaves the process group, if there is one.

    An accelerator's backend is left by all ranks together, each of which waits for what it has launched. So where this
    rank has ``failed``, of which the others don't know, it isn't left: the process ends with it.
    """
    if not dist.is_initialized():
        return
    if not failed or not any(backend in dist.get_backend_config() for backend in DEVICE_BACKENDS.values()):
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
