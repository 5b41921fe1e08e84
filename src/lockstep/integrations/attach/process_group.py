"""Finds a process's rank, joins the other ranks, and checks that they are in step.

Without a launcher, or with one rank, there is no process group and no collective.
"""

from __future__ import annotations

import datetime
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.core.errors import OutOfStepError, PeerFailureError
from lockstep.torch_engine.distributed.communicator import Communicator
from lockstep.torch_engine.distributed.scripts import join_script, script_topology

DEFAULT_TIMEOUT = 1800.0
"""Seconds that a rank waits for others, which may be evaluating; it notices at once if one has ended."""

HEADER_NUMBERS = 8

_joined: list[Communicator] = []


def join(timeout: float = DEFAULT_TIMEOUT) -> tuple[int, int]:
    """Joins the ranks that a launcher (torchrun, ``lockstep run``, srun) started; a collective at its first call.

    Uses the script's process group if it has one. Otherwise opens gloo, and NCCL too if every rank has its own GPU,
    which then becomes the current device. The other functions call this themselves.

    Args:
        timeout: seconds to wait for a rank in a collective; only the first call's value counts.

    Returns:
        ``(rank, world_size)``; ``(0, 1)`` without a launcher.

    Raises:
        ValueError: the launcher's variables are incomplete or contradict one another.
    """
    topology = _joined[0].topology if _joined else script_topology()
    if topology.world_size > 1 and not _joined:
        _joined.append(join_script(topology, datetime.timedelta(seconds=timeout)))
    return topology.rank, topology.world_size


def joined() -> bool:
    """Returns whether :func:`join` has connected this process with other ranks."""
    return bool(_joined)


def place() -> tuple[int, int]:
    """Returns ``(rank, world_size)`` without joining the other ranks."""
    topology = _joined[0].topology if _joined else script_topology()
    return topology.rank, topology.world_size


def is_writer() -> bool:
    """Returns whether this rank writes logs, checkpoints and videos: true on rank 0 only, and without a launcher."""
    return place()[0] == 0


def communicator() -> Communicator:
    """Returns this process's collectives, and joins first if necessary; only for more than one rank."""
    if not _joined:
        join()
    return _joined[0]


@dataclass(frozen=True)
class Same:
    """A number that must be the same on every rank.

    Attributes:
        words: what a rank did this many times, for the error: ``"took {} steps"``.
        advice: what to do if ranks differ.
        parted: whether a difference proves that ranks are out of step; if False, one of them may rightly have done
            something that the others needn't.
    """

    words: str
    number: int
    advice: str
    parted: bool = True


def meet(where: str, said: Sequence[Same] = (), telling: int = 0) -> list[int]:
    """Raises unless all ranks are at the same place of the script; called before they exchange anything there.

    Args:
        where: names the place, for errors.
        said: at most 6 numbers that must be the same on every rank.
        telling: a number that may differ between ranks.

    Returns:
        ``telling`` of each rank, in rank order.

    Raises:
        OutOfStepError: on every rank, if ranks are at different places or numbers differ.
        PeerFailureError: a rank has ended or doesn't come in time.
    """
    numbers = [zlib.crc32(where.encode()), telling, *(same.number for same in said)]
    header = torch.from_numpy(np.array(numbers + [0] * (HEADER_NUMBERS - len(numbers))))  # torch.tensor is slower
    try:
        rows: list[list[int]] = communicator().gather_ranks(header).tolist()
    except PeerFailureError as error:
        raise PeerFailureError(
            f"{error}; this rank waited at {where}: every rank must come to every collective, equally often"
        ) from None
    communicator().take_durations()  # nobody reads them, and the list would grow
    told = [row.pop(1) for row in rows]
    elsewhere = next((rank for rank, row in enumerate(rows) if row[0] != rows[0][0]), None)
    if elsewhere is not None:
        places = communicator().gather_json(where)
        raise OutOfStepError(
            f"rank 0 came to {places[0]} while rank {elsewhere} came to {places[elsewhere]}: every rank must come to "
            "the same collectives in the same order; decide together, with lockstep.stop_if or from all_mean",
            ranks_parted=True,
        )
    for rank, row in enumerate(rows):
        for same, first, theirs in zip(said, rows[0][1:], row[1:], strict=False):
            if first != theirs:
                raise OutOfStepError(
                    f"at {where}, rank 0 {same.words.format(first)} and rank {rank} {theirs}: {same.advice}",
                    ranks_parted=same.parted,
                )
    return told
