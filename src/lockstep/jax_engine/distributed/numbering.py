"""Checks that JAX numbers the processes as they were started; a TPU's runtime counts and numbers them by itself."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from lockstep.core.topology import Topology


def check_number(topology: Topology) -> None:
    """Raises a one-line ``ValueError`` unless JAX finds as many processes as were started."""
    found, own = jax.process_count(), jax.process_index()
    if found != topology.world_size:
        raise ValueError(
            f"num_processes: {topology.world_size}, but JAX finds {found}, as the TPU's runtime counts them; start "
            f"{found}, one on each of its hosts, this one with --coordinator HOST:PORT --num-processes {found} "
            f"--process-id {own}, where HOST is the one that JAX counts as 0"
        )


def check_order(ranks: Sequence[int]) -> None:
    """Raises a one-line ``ValueError``, in every process, unless the rank of JAX's n-th process is n.

    With another order, a process would collect rollouts for shards that its devices take for another process's.
    """
    apart = [(rank, index) for index, rank in enumerate(ranks) if rank != index]
    if apart:
        rank, index = apart[0]
        raise ValueError(
            f"process_id: JAX numbers {len(apart)} of {len(ranks)} processes otherwise, as the TPU's runtime does "
            f"(number {index} was started as {rank}); start each under JAX's number, which is {jax.process_index()} "
            "here, and --coordinator on the host of number 0"
        )
