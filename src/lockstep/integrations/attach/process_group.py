"""Finds a process's place among its ranks, and exchanges tensors between them.

Without a launcher, or with one rank, nothing happens: no process group, no collective.
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
"""Seconds that a rank waits for the others, which may be evaluating; a rank that ended is noticed at once."""

HEADER_NUMBERS = 8

_joined: list[Communicator] = []


def join(timeout: float = DEFAULT_TIMEOUT) -> tuple[int, int]:
    """Join the ranks that a launcher (torchrun, ``lockstep run``, srun) started; a collective at its first call.

    A process group that the script has opened is used; else one is opened: gloo, and NCCL where every rank has a GPU
    of its own, which then becomes the current device. The other functions call this themselves.

    Args:
        timeout: seconds to wait for a rank in a collective; only the first call's counts.

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
    """Whether :func:`join` has brought this process together with others."""
    return bool(_joined)


def place() -> tuple[int, int]:
    """``(rank, world_size)`` without joining anybody."""
    topology = _joined[0].topology if _joined else script_topology()
    return topology.rank, topology.world_size


def is_writer() -> bool:
    """Whether this rank writes: logs, checkpoints, videos. True for exactly one rank, and without a launcher."""
    return place()[0] == 0


def communicator() -> Communicator:
    """The collectives of this process; of more than one rank."""
    if not _joined:
        join()
    return _joined[0]


@dataclass(frozen=True)
class Same:
    """A number that must be the same on every rank.

    ``words`` say what a rank did so often (``"took {} steps"``), and ``advice`` what to do where ranks differ; then
    they have ``parted`` for certain, or perhaps one of them did something that the others needn't.
    """

    words: str
    number: int
    advice: str
    parted: bool = True


def meet(where: str, said: Sequence[Same] = (), telling: int = 0) -> list[int]:
    """Make sure that all ranks are at the same place of the script, before they exchange anything there.

    ``where`` names the place for people, at most 6 numbers are ``said`` to be the same on every rank, and ``telling``
    is a number of this rank's own.

    Returns:
        What each rank told, in rank order.

    Raises:
        OutOfStepError: on every rank, if ranks are at different places or numbers differ.
        PeerFailureError: a rank has ended or doesn't come.
    """
    numbers = [zlib.crc32(where.encode()), telling, *(same.number for same in said)]
    header = torch.from_numpy(np.array(numbers + [0] * (HEADER_NUMBERS - len(numbers))))  # torch.tensor takes longer
    try:
        rows: list[list[int]] = communicator().gather_ranks(header).tolist()
    except PeerFailureError as error:
        raise PeerFailureError(
            f"{error}; this rank waited at {where}: every rank must come to every collective, equally often"
        ) from None
    communicator().take_durations()  # nobody reads them, and they would become many
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
