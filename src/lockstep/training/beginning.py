"""Makes all ranks start from rank 0's checkpoint; hosts without it receive it from rank 0."""

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
    """Returns the global step of a checkpoint, or :data:`ANEW` without one."""
    return ANEW if checkpoint is None else int(checkpoint.state["global_step"])


def agreed_beginning(
    checkpoint: Checkpoint | None,
    rank: int,
    gather_json: Callable[[Any], list[Any]],
    broadcast_bytes: Callable[[bytes], bytes],
) -> Checkpoint | None:
    """Returns the checkpoint that all ranks start from, which is the one that rank 0 found; a collective.

    Args:
        checkpoint: what this rank found on its host.
        rank: this rank.
        gather_json: gathers a value of every rank, in rank order.
        broadcast_bytes: returns the bytes that rank 0 passes.

    Raises:
        RankMismatchError: rank 0 has no checkpoint while another rank has one; raised on every rank.
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
    """Packs the files of a checkpoint into one byte string."""
    shards = {shard: pack(arrays) for shard, arrays in checkpoint.env_shards.items()}
    files = to_files(checkpoint.arrays, shards, checkpoint.state)
    return pack({name: np.frombuffer(content, np.uint8) for name, content in files.items()})


def from_bytes(packed: bytes) -> Checkpoint:
    """Unpacks a checkpoint that :func:`to_bytes` packed."""
    return checkpoint_of({name: content.tobytes() for name, content in unpack(packed).items()}, "rank 0's checkpoint")
