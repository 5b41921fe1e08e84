"""Starting the processes of a JAX run on this machine; they meet through ``jax.distributed``. Imports no JAX."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lockstep.launch.spawn import SpawnedRanks


def start_ranks(arguments: Sequence[str], nproc: int, threads: int, log_dir: Path) -> SpawnedRanks:
    """Start ``nproc`` processes of ``python ARGUMENTS``, each with its own devices; see :class:`SpawnedRanks`.

    They are not pinned to cores: processes that exchange tensors are several times slower then.

    Args:
        arguments: of ``python``, the same for every process.
        nproc: number of processes.
        threads: CPU threads of each, for what is no work of XLA (NumPy).
        log_dir: where failing processes leave their messages.
    """
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    return SpawnedRanks(arguments, nproc, log_dir, environment)
