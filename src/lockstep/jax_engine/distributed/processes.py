"""Sets JAX up in each process of a run, joins the processes, and exchanges data on the host between them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from lockstep import __version__
from lockstep.config.run import MOST_SILENCE
from lockstep.core.errors import PeerFailureError, RankMismatchError
from lockstep.core.host.network import own_address, reason_in_words, wait_for_rank_0
from lockstep.core.life import life
from lockstep.core.machine import check_facts_alike
from lockstep.core.process import ended_by_signals, flush_output
from lockstep.core.rank_variables import apply, machine_class, settings_of_xla
from lockstep.core.silence import SIGNS, Watch, ended_after, watch
from lockstep.core.topology import LOOPBACK_ADDRESS, Topology
from lockstep.jax_engine.distributed.numbering import check_number, check_order
from lockstep.jax_engine.distributed.programs import keep_programs
from lockstep.jax_engine.setup.accelerators import gpus_of_this_host, take_gpus
from lockstep.jax_engine.setup.set_up import check_device, configure, has_started, machine_facts

SHUTDOWN_TIMEOUT_SECONDS = 30
_NO_PROXY = "no_grpc_proxy"
"""Variable with the hosts that gRPC reaches without a proxy; without it, gRPC reads ``no_proxy``."""

LONGER, HEARTBEAT_SECONDS = 1.5, 30
WITHOUT_LIMIT_SECONDS = 20 * 86400.0
"""A limit that is never reached; in milliseconds it still fits into 32 bits."""

LEAST_WIDTH = 8
"""Exponent of the least width in bytes: messages are padded to a power of two, at least this one."""
MOST_WIDTH = 1 << 30
"""Larger messages travel in pieces of this many bytes, because a collective's sizes have 31 bits."""

LOST = re.compile(r"gloo|nccl|connection|coordination service|heartbeat|barrier", re.IGNORECASE)
"""Matches XLA's errors that mean that another process is gone."""

_joined: Topology | None = None
_watch: Watch | None = None


def set_up_jax(
    threads: int,
    platform: str,
    simulate_devices: int | None,
    topology: Topology,
    pool: int | None = None,
    accelerators: int | None = None,
    silence: float = MOST_SILENCE,
) -> None:
    """Sets JAX up before anything uses a device, and joins the processes of the run; each of these happens only once.

    If ``threads`` is 1, XLA's own operations are single-threaded. ``accelerators`` is the number of GPUs that each
    process holds, by default an equal share of its host's. If no process makes progress for ``silence`` seconds, each
    of them ends. The other arguments are those of :func:`~lockstep.jax_engine.setup.set_up.configure`.

    Raises:
        ValueError: if the machine has no such device or too few, or JAX has started with other settings in this process
            or numbers the processes otherwise.
        RankMismatchError: if the processes can't meet.
    """
    configure(threads, platform, simulate_devices, pool)
    gpus = None
    if platform == "cuda" and not has_started():
        apply(settings_of_xla(platform, topology, machine_class(topology)))
        gpus = _own_gpus(topology, accelerators)
        if gpus is not None:
            take_gpus(gpus)
    if topology.world_size > 1 and not jax.distributed.is_initialized():
        _join_processes(topology, gpus, silence)
        keep_programs(platform, topology, _client(), silence)
    check_device(platform)
    if platform == "tpu":
        check_number(topology)
        if topology.world_size > 1:
            check_order(gather_json(topology.rank))  # at each call, so that none passes what another has refused


def _own_gpus(topology: Topology, each: int | None) -> list[int] | None:
    """Returns the host's GPUs that this process takes, the ``local_rank``-th ``each`` of them; None for all.

    Raises:
        ValueError: if there are too few; the message is one line.
    """
    here = topology.local_world_size
    if here == 1 and each is None:
        return None
    present = gpus_of_this_host()
    most = len(present) // here
    if not most:
        raise ValueError(
            f"devices: {here} processes share this machine and each sees {len(present)} of its GPUs; start at most "
            f"{len(present)}, or let every process see all of them"
        )
    if each is not None and each > most:
        wanted = f"{each} for each of {here} processes" if here > 1 else f"{each}"
        raise ValueError(f"devices: {wanted} asked for and this machine has {len(present)} GPUs; use at most {most}")
    each = each or most
    return present[topology.local_rank * each : (topology.local_rank + 1) * each]


def processes_here() -> int:
    """Counts the processes on this machine that :func:`set_up_jax` joined; 1 if it joined none."""
    return 1 if _joined is None else _joined.local_world_size


def _join_processes(topology: Topology, gpus: list[int] | None, silence: float) -> None:
    """Joins the other processes at rank 0's coordinator; ``gpus`` are those that this process holds (None: all)."""
    global _joined, _watch
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM, at which a run saves and stops
    with contextlib.suppress(AttributeError):  # in versions of JAX without this setting
        jax.config.update("jax_check_proxy_envs", False)  # :func:`_without_proxy` handles what it warns of
    address = topology.coordinator
    failed = f"rank {topology.rank} can't meet the others at {address}"
    late = f"{failed}: not all of {topology.world_size} processes have come within {silence:g} s"
    late += "" if topology.holds_coordinator else ", or another program listens there"
    try:
        ended = ended_by_signals() if topology.starts_again else contextlib.nullcontext()
        with ended, _without_proxy(topology.master_addr):
            if not topology.holds_coordinator:  # else JAX aborts this process, with a dump of its threads
                wait_for_rank_0(address, silence)
            with ended_after(silence, late):
                jax.distributed.initialize(
                    address,
                    topology.world_size,
                    topology.rank,
                    local_device_ids=gpus,
                    cluster_detection_method="deactivate",
                    coordinator_bind_address=address if topology.loopback else None,
                    initialization_timeout=int(silence) + HEARTBEAT_SECONDS,  # later than our own limit
                    heartbeat_timeout_seconds=int(LONGER * silence) + HEARTBEAT_SECONDS,
                    shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_SECONDS,
                )
    except (RuntimeError, OSError) as error:
        _forget_meeting()
        raise RankMismatchError(f"{failed}: {reason_in_words(error)}") from None
    _joined = topology
    _watch = _watch_processes(topology, silence)
    address = LOOPBACK_ADDRESS if topology.loopback else own_address(topology.master_addr)
    if address is not None:
        _keep_gloo_on(address)


def _forget_meeting() -> None:
    """Lets JAX join again after a failed attempt: it keeps the client that it made before connecting."""
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import distributed

        distributed.global_state.client = distributed.global_state.service = None


@contextlib.contextmanager
def _without_proxy(host: str) -> Iterator[None]:
    """Lets gRPC, by which processes meet, connect to a host directly inside the block.

    By default it uses ``http_proxy`` and the like, even for loopback, and no proxy leads to the other ranks.
    """
    given = os.environ.get(_NO_PROXY)
    others = given or os.environ.get("no_proxy")
    os.environ[_NO_PROXY] = f"{others},{host}" if others else host
    try:
        yield
    finally:
        if given is None:
            del os.environ[_NO_PROXY]
        else:
            os.environ[_NO_PROXY] = given


def wait_for_all(what: str) -> None:
    """Waits until every process has called this with the same ``what``, which may be used only once.

    There is no time limit as long as the processes make progress. XLA's collectives on CPUs would give up after half an
    hour.
    """
    client = _client()
    if jax.process_count() > 1 and client is not None:
        with life.waiting():
            client.wait_at_barrier(f"lockstep/{what}", int(WITHOUT_LIMIT_SECONDS * 1000))


def _client() -> Any:
    """Returns the client of the coordinator's store, for which JAX has no public API; None in versions without it."""
    from jax._src import distributed

    return getattr(distributed.global_state, "client", None)


def _watch_processes(topology: Topology, silence: float) -> Watch | None:
    """Watches the other processes, through shared memory or else through the coordinator's store."""
    client = _client()
    if client is None or not hasattr(client, "key_value_dir_get"):
        return None

    def get() -> dict[int, str]:
        return {int(name.rpartition("/")[2]): text for name, text in client.key_value_dir_get(SIGNS)}

    return watch(topology, silence, lambda name, text: client.key_value_set(name, text, True), get)


def _keep_gloo_on(address: str) -> None:
    """Makes gloo listen on an address of this host; by default it resolves the host's name, which may lead nowhere.

    JAX has no public setting for it. In versions without these internals, gloo keeps its default.
    """
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        from jax._src import distributed, xla_bridge
        from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

        collectives = _jax.make_gloo_tcp_collectives(
            distributed_client=distributed.global_state.client, hostname=address
        )
        make_client = functools.partial(xla_bridge.make_cpu_client, collectives=collectives)
        xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


@contextlib.contextmanager
def peers_needed(topology: Topology) -> Iterator[None]:
    """Turns the two kinds of error that JAX raises when another process is gone into a ``PeerFailureError``."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        if topology.world_size == 1 or not re.match("[A-Z_]+: ", first) or not LOST.search(first):
            raise
        raise PeerFailureError(f"rank {topology.rank} lost its peers: {first}") from error


@contextlib.contextmanager
def leaving_together(topology: Topology) -> Iterator[None]:
    """Runs the block, then leaves the other processes once all of them are done with it, however slow one is.

    JAX's own shutdown waits for half a minute and then ends every process. After an error that all processes raise,
    they leave together as well. After an error of this process alone, it doesn't wait, and the others notice.
    """
    try:
        with peers_needed(topology):
            yield
            wait_for_all("done")
    except Exception as error:
        if getattr(error, "everywhere", False):
            with contextlib.suppress(Exception):  # the error below must be raised
                wait_for_all("failed")
            leave_processes()
        raise
    leave_processes()


@contextlib.contextmanager
def quiet_connections() -> Iterator[None]:
    """Silences standard output while processes connect: gloo prints a line for each connection."""
    if jax.process_count() == 1:
        yield
        return
    flush_output()
    kept = os.dup(1)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def leave_processes() -> None:
    """Leaves the other processes of the run, if there are any."""
    if _watch is not None:
        _watch.close()
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def this_process() -> Topology:
    """Returns this process's place among those that ``jax.distributed`` joined."""
    return Topology(rank=jax.process_index(), world_size=jax.process_count())


def gather_bytes(payload: bytes) -> list[bytes]:
    """Gathers a byte string from every process, in order; every process must call it."""
    if jax.process_count() == 1:
        return [payload]
    words = np.frombuffer(payload, np.uint8)
    with life.waiting():
        parts = multihost_utils.process_allgather(np.array(divmod(words.size, MOST_WIDTH), np.int32)).reshape(-1, 2)
        sizes = [int(whole) * MOST_WIDTH + int(rest) for whole, rest in parts]
        pieces = {
            start: _gather_rows(words[start : start + MOST_WIDTH], min(MOST_WIDTH, max(sizes) - start))
            for start in range(0, max(1, *sizes), MOST_WIDTH)
        }
    return [
        b"".join(bytes(rows[rank][: max(0, size - start)]) for start, rows in pieces.items())
        for rank, size in enumerate(sizes)
    ]


def _gather_rows(words: np.ndarray, most: int) -> np.ndarray:
    """Gathers at most ``most`` bytes from every process, as rows of one width."""
    width = 1 << max(LEAST_WIDTH, (most - 1).bit_length())  # few widths, because each compiles a program
    return multihost_utils.process_allgather(np.pad(words, (0, width - words.size)))


def gather_json(value: Any) -> list[Any]:
    """Gathers a JSON value from every process, in order; every process must call it."""
    return [json.loads(content) for content in gather_bytes(json.dumps(value).encode())]


def broadcast_bytes(payload: bytes) -> bytes:
    """Returns the first process's byte string, whatever the others pass; every process must call it."""
    words = np.zeros(gather_json(len(payload))[0], np.uint8)
    if len(payload) == len(words):
        words[:] = np.frombuffer(payload, np.uint8)
    with life.waiting():
        for start in range(0, len(words), MOST_WIDTH):
            piece = words[start : start + MOST_WIDTH]
            piece[:] = multihost_utils.broadcast_one_to_all(piece)
    return words.tobytes()


def check_ranks_alike(config: Mapping[str, str]) -> None:
    """Raises a ``RankMismatchError`` in every process if devices, machines, versions or facts of configs differ."""
    held = [sum(d.process_index == process for d in jax.devices()) for process in range(jax.process_count())]
    if max(held) > min(held):  # gathers need equally many devices in each process
        least, most = held.index(min(held)), held.index(max(held))
        raise RankMismatchError(
            f"rank {least} holds {held[least]} devices and rank {most} {held[most]}; every process needs as many: use "
            f"--devices {held[least]}"
        )
    check_facts_alike(gather_json({"lockstep": __version__, **machine_facts(), **config}))
