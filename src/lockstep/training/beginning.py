"""Where all ranks begin: rank 0's checkpoint is everybody's, those on hosts that don't have it get it from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.core.errors import RankMismatchError
from lockstep.core.process import say
from lockstep.runs.checkpoint import Checkpoint, checkpoint_of, pack, to_files, unpack

ANEW = -1
"""Step of a run that isn't resumed."""


def step_at(checkpoint: Checkpoint | None) -> int:
    """Returns the global step of a checkpoint, :data:`ANEW` without one."""
    return ANEW if checkpoint is None else int(checkpoint.state["global_step"])


def agreed_beginning(
    checkpoint: Checkpoint | None,
    rank: int,
    gather_json: Callable[[Any], list[Any]],
    broadcast_bytes: Callable[[bytes], bytes],
) -> Checkpoint | None:
    """Returns what all ranks go on from, which is what rank 0 found; collective.

    Args:
        checkpoint: what this rank found on its host.
        rank: of this process.
        gather_json: gathers a value of every rank, in rank order.
        broadcast_bytes: returns what rank 0 gives.

    Raises:
        RankMismatchError: on every rank, if rank 0 would begin anew while another has a checkpoint.
    """
    steps = gather_json(step_at(checkpoint))
    if len(set(steps)) == 1:
        return checkpoint
    if steps[0] == ANEW:
        newest = int(np.argmax(steps))
        raise RankMismatchError(
            f"rank {newest} has a checkpoint of step {steps[newest]:,} on its host, and rank 0 has none on its own; "
            "give all hosts one run directory, or --checkpoint.mirror, or make the host with the run rank 0's"
        )
    if checkpoint is not None and steps[rank] == steps[0]:
        broadcast_bytes(to_bytes(checkpoint))
        return checkpoint
    sent = broadcast_bytes(b"")
    if steps[rank] > steps[0]:
        say(
            f"lockstep: warning: rank {rank} goes on from step {steps[0]:,} with rank 0, not from step "
            f"{steps[rank]:,}, the newest on its own host"
        )
    return from_bytes(sent)


def to_bytes(checkpoint: Checkpoint) -> bytes:
    """Packs a checkpoint: its files, in one byte string."""
    shards = {shard: pack(arrays) for shard, arrays in checkpoint.env_shards.items()}
    files = to_files(checkpoint.arrays, shards, checkpoint.state)
    return pack({name: np.frombuffer(content, np.uint8) for name, content in files.items()})


def from_bytes(packed: bytes) -> Checkpoint:
    """Unpacks a checkpoint: the reverse of :func:`to_bytes`."""
    return checkpoint_of({name: content.tobytes() for name, content in unpack(packed).items()}, "rank 0's checkpoint")
