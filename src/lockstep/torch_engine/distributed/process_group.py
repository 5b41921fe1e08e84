"""Opens and leaves PyTorch's process group: how ranks find one another, and which backends they use."""

from __future__ import annotations

import contextlib
import datetime
import gc
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from lockstep.config.run import Config
from lockstep.core.errors import RankMismatchError, UnavailableError
from lockstep.core.host.network import reason_in_words, wait_for_rank_0
from lockstep.core.process import ended_by_signals
from lockstep.core.rank_variables import apply, interface_settings, machine_class
from lockstep.core.silence import sign_name
from lockstep.core.topology import Topology

WITHOUT_LIMIT = datetime.timedelta(days=20)
"""The backends' own time limit if ranks watch one another; in milliseconds it still fits into 32 bits."""

ANSWER_SECONDS = 5.0
"""How long a store may take to answer in addition to the time limit, whose own error says more."""
LEAVE_SECONDS = 2.0
ASK_SECONDS, MOST_ASK_SECONDS = 0.02, 0.05
ASKED_TOGETHER = 64
"""Names of ranks that a question to the store has."""
MOST_NAMED = 8
"""How many missing ranks an error names."""

DEVICE_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}
"""By PyTorch's type of an accelerator: the backend that sends its tensors without the host."""


def device_backend(kind: str) -> str | None:
    """Returns the name of the backend for a type of accelerator; None if this PyTorch doesn't have it."""
    name = DEVICE_BACKENDS.get(kind)
    return name if name is not None and dist.is_backend_available(name) else None


def backends_of(own: str | None) -> str:
    """Returns PyTorch's setting by which the host's tensors travel by gloo, and an accelerator's by ``own``."""
    kinds = {backend: kind for kind, backend in DEVICE_BACKENDS.items()}
    return "gloo" if own is None else f"cpu:gloo,{kinds[own]}:{own}"


def join_process_group(
    topology: Topology, own: str | None, timeout: datetime.timedelta, store: Store | None = None
) -> None:
    """Joins the ranks, over loopback if they all run on this host.

    ``timeout`` is how long a rank waits for the others in a collective; ``own`` is the accelerators' backend, or None.
    """
    apply(interface_settings(topology, machine_class(topology)))
    store = store or meet(topology, timeout)
    place: dict[str, Any] = {"world_size": topology.world_size, "rank": topology.rank}
    dist.init_process_group(backends_of(own), store=store, timeout=timeout, **place)


def meet(topology: Topology, timeout: datetime.timedelta) -> Store:
    """Returns the store in which all ranks have said that they are there: our launcher's file, or over TCP.

    Raises:
        RankMismatchError: if they don't come in time; the message is one line.
    """
    rank, world_size = topology.rank, topology.world_size
    try:
        if topology.store_file is not None and not topology.agent_store:
            store: Store = FileStore(topology.store_file, world_size)
        else:
            store = _tcp_store(topology, timeout)
        with ended_by_signals() if topology.starts_again else contextlib.nullcontext():
            if topology.agent_store and topology.starts_again:
                store = store_of_round(store, topology, timeout)
            store.set(sign_name(rank), "")
            _wait_for_all(store, world_size, timeout)
    except (RuntimeError, OSError) as error:
        where = topology.store_file or topology.master
        raise RankMismatchError(f"rank {rank} can't meet the others at {where}: {reason_in_words(error)}") from None
    return store


def _wait_for_all(store: Store, world_size: int, timeout: datetime.timedelta) -> None:
    """Waits until all ranks are there; raises a one-line ``RuntimeError`` that names those that don't come in time."""
    names, deadline = [sign_name(rank) for rank in range(world_size)], time.monotonic() + timeout.total_seconds()
    together = [names[first : first + ASKED_TOGETHER] for first in range(0, world_size, ASKED_TOGETHER)]
    if all(_come(store, some, deadline) for some in together):
        return
    missing = [str(rank) for rank, name in enumerate(names) if not store.check([name])]
    named = ", ".join(missing[:MOST_NAMED]) + (", …" if missing[MOST_NAMED:] else "")
    ranks = f"rank {named} hasn't" if len(missing) == 1 else f"ranks {named} haven't"
    raise RuntimeError(f"{ranks} come within {timeout.total_seconds():g} s")


def _come(store: Store, names: list[str], deadline: float) -> bool:
    """Waits for names in a store until ``deadline``, of :func:`time.monotonic`; its own wait would print stacks."""
    pause = ASK_SECONDS
    while not store.check(names):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, MOST_ASK_SECONDS)
    return True


def _tcp_store(topology: Topology, timeout: datetime.timedelta) -> Store:
    """Opens the store over TCP; raises a one-line error if that takes longer than ``timeout`` and a little more.

    The store's own limit ends when something listens at the address. If it isn't a store and never answers, the
    constructor waits forever, so it is called in a thread that may stay behind.
    """
    opened: Future[Store] = Future()
    if not topology.holds_store:  # else PyTorch prints stacks while nobody listens
        wait_for_rank_0(topology.master, timeout.total_seconds())

    def open_store() -> None:
        try:
            store = TCPStore(
                topology.master_addr,
                topology.master_port,
                world_size=topology.world_size,
                is_master=topology.holds_store,
                timeout=timeout,
                wait_for_workers=False,
            )
        except Exception as error:
            opened.set_exception(error)
        else:
            opened.set_result(store)

    threading.Thread(target=open_store, daemon=True).start()
    try:
        return opened.result(timeout.total_seconds() + ANSWER_SECONDS)
    except TimeoutError:
        raise RuntimeError(
            f"what listens there hasn't answered as rank 0 within {timeout.total_seconds():g} s; if it is another "
            "program, set another MASTER_PORT on every rank"
        ) from None


def store_of_round(store: Store, topology: Topology, timeout: datetime.timedelta) -> Store:
    """Returns a part of torchrun's store that is only for the ranks which were started together.

    The store outlives them, and the next ranks must not read what killed ranks left in it. torchrun doesn't tell its
    ranks a number of the round: agents count their own restarts, which differ. So each other rank asks rank 0 for the
    round's name, under a name of its own, and rank 0 answers until all ranks of this round have it. It also answers
    what earlier ranks asked.
    """
    own, place, world_size = uuid.uuid4().hex, "lockstep/asks/{}", topology.world_size
    if not topology.names_round:
        store.set(place.format(topology.rank), own)
        answer = f"lockstep/answers/{own}"
        if not _come(store, [answer], time.monotonic() + timeout.total_seconds()):
            raise RuntimeError(f"rank 0 hasn't come within {timeout.total_seconds():g} s")
        return PrefixStore(f"lockstep/{store.get(answer).decode()}", store)
    mine, answered = PrefixStore(f"lockstep/{own}", store), set[str]()
    deadline = time.monotonic() + timeout.total_seconds()
    while not mine.check([sign_name(r) for r in range(1, world_size)]):
        for asks in (place.format(r) for r in range(1, world_size)):
            if store.check([asks]) and (name := store.get(asks).decode()) not in answered:
                store.set(f"lockstep/answers/{name}", own)
                answered.add(name)
        if time.monotonic() > deadline:
            break  # the caller's own wait raises
        time.sleep(ASK_SECONDS)
    return mine


def own_backend(config: Config) -> str | None:
    """Returns the backend by which tensors on an accelerator travel; None: they go through the host, by gloo.

    Raises:
        ValueError: if this PyTorch doesn't have the backend that the config names; the message is one line.
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
    """Leaves the process group, if there is one, at the end of the block; see :func:`close_process_group`."""
    try:
        yield
    except BaseException:
        close_process_group(failed=True)
        raise
    close_process_group()


def close_process_group(failed: bool = False) -> None:
    """Leaves the process group, if there is one.

    All ranks leave an accelerator's backend together, and each waits for what it has launched. If this rank has
    ``failed``, the others don't know it, so it doesn't leave: the group ends with the process.
    """
    if not dist.is_initialized():
        return
    if not failed or not any(backend in dist.get_backend_config() for backend in DEVICE_BACKENDS.values()):
        gc.collect()  # FSDP's modules hold groups in cycles; their threads must end before the process does
        dist.destroy_process_group()


def needs_backend(config: Config) -> bool:
    """Returns whether a run needs PyTorch's process group even if its ranks share memory: for DDP, FSDP or a GPU."""
    return config.device != "cpu" or config.reduction == "fast"


def leave(store: Store | None, topology: Topology) -> None:
    """Says that this rank leaves the store; the rank that holds it waits briefly until all others have left."""
    with contextlib.suppress(RuntimeError):
        assert store is not None
        store.set(f"left/{topology.rank}", "")
        names, deadline = [f"left/{r}" for r in range(topology.world_size)], time.monotonic() + LEAVE_SECONDS
        while topology.holds_store and not store.check(names) and time.monotonic() < deadline:
            time.sleep(LEAVE_SECONDS / 100)
