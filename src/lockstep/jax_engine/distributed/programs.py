"""Which processes of a run keep the programs that they compile for later ones; JAX lets the first process alone."""

from __future__ import annotations

import contextlib
import functools
import os
import uuid
from pathlib import Path
from typing import Any

import jax

from lockstep.core.topology import Topology

FIRST = "lockstep/programs"
"""Key in the coordinator's store: the name of the first process's cache."""
NAME = "lockstep-name"


def keep_programs(platform: str, topology: Topology, client: Any, seconds: float) -> None:
    """Lets this process keep programs, too, if nobody else keeps them where it looks for them.

    On CPUs a program is kept under a key of its process, so that the others would compile theirs at every start. On
    accelerators all have one key, and the first process keeps it for those that see its cache; a host that has a cache
    of its own has its own first process keep it there. Two that wrote one file at a time could leave neither's.

    Args:
        platform: ``cpu``, ``cuda`` or ``tpu``.
        topology: this process's place.
        client: of the coordinator's store; None in a version of JAX without it.
        seconds: how long the first process may take to say which cache is its own.
    """
    if platform == "cpu" or (not topology.on_one_host and _has_own_cache(topology, client, seconds)):
        _write_as_the_first()


def _has_own_cache(topology: Topology, client: Any, seconds: float) -> bool:
    """Says whether this is the first process of a host whose cache isn't that of the run's first process."""
    if topology.local_rank or client is None:
        return False
    own = name_of_cache()
    if topology.rank == 0:
        client.key_value_set(FIRST, own or "")
        return False
    try:
        return own is not None and client.blocking_key_value_get(FIRST, max(1, int(seconds * 1000))) != own
    except jax.errors.JaxRuntimeError:  # nobody said: the next collective has it
        return False


def name_of_cache() -> str | None:
    """Reads what the directory of compiled programs is called, by whichever path it is seen; makes a name up at first.

    None where there is no directory, or it can't be written to.
    """
    path = jax.config.values["jax_compilation_cache_dir"]
    if path is None or "://" in path:
        return None
    file = Path(path) / NAME
    with contextlib.suppress(OSError):
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            made = file.with_name(f"{NAME}-{uuid.uuid4().hex}")
            made.write_text(made.name)
            try:
                with contextlib.suppress(FileExistsError):
                    os.link(made, file)  # whole, and once, whoever else does it
            finally:
                made.unlink()
        return file.read_text()
    return None


def _write_as_the_first() -> None:
    """Has JAX take this process for the first one while it keeps a program; an unknown version keeps none."""
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import compiler, distributed

        state, write = distributed.global_state, compiler._cache_write  # pyright: ignore[reportPrivateUsage]

        @functools.wraps(write)
        def written(*args: Any, **kwargs: Any) -> None:
            own, state.process_id = state.process_id, 0
            try:
                write(*args, **kwargs)
            finally:
                state.process_id = own

        compiler._cache_write = written  # pyright: ignore[reportPrivateUsage]
