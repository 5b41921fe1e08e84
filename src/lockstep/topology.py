"""Who am I: rank, world size and launcher. The only reader of the launchers' environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LAUNCHER_VARIABLE = "LOCKSTEP_LAUNCHER"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Topology:
    """This process's place in the run.

    Attributes:
        rank: global rank, ``0 … world_size-1``.
        world_size: number of ranks.
        local_rank: index among the ranks of this host; picks the GPU ``cuda:{local_rank}``.
        local_world_size: ranks on this host.
        launched: whether a launcher (torchrun, ``lockstep train --nproc``) started this process as one of its ranks.
        master_addr: host of rank 0's store, loopback unless a launcher says otherwise.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launched: bool = False
    master_addr: str = "127.0.0.1"

    @property
    def on_one_host(self) -> bool:
        """Whether every rank runs on this host."""
        return self.local_world_size == self.world_size

    @property
    def loopback(self) -> bool:
        """Whether the ranks meet over the loopback interface."""
        return self.on_one_host and self.master_addr in LOOPBACK


def from_environment(environ: Mapping[str, str] = os.environ) -> Topology:
    """Read torchrun's variables (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, …); a single rank when there are none.

    Raises:
        ValueError: the variables are incomplete or contradict one another.
    """
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return Topology()
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in environ]
    if missing:
        raise ValueError(
            f"launcher variables: {missing[0]} is not set but the other of RANK and WORLD_SIZE is; unset it"
        )
    try:
        rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        local_rank = int(environ.get("LOCAL_RANK", rank))
        local_world_size = int(environ.get("LOCAL_WORLD_SIZE", world_size))
    except ValueError as error:
        raise ValueError(
            f"launcher variables: RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers ({error})"
        ) from None
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
        raise ValueError(
            f"launcher variables: RANK {rank} of WORLD_SIZE {world_size}, LOCAL_RANK {local_rank} of "
            f"LOCAL_WORLD_SIZE {local_world_size} don't fit together; unset them or start through torchrun"
        )
    master = environ.get("MASTER_ADDR", "127.0.0.1")
    return Topology(rank, world_size, local_rank, local_world_size, launched=True, master_addr=master)


def error_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where the launcher wants a failing rank's message, or None."""
    path = environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path) if path else None


def started_by_lockstep(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ``lockstep train --nproc`` started this rank; it shows a failing rank's message itself."""
    return LAUNCHER_VARIABLE in environ


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
