"""Lets more processes than the first write to JAX's cache of compiled programs; by default only the first one does."""

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
    """Lets this process cache its compiled programs too, if no other process caches them where it looks.

    On CPUs a program's key includes the process, so without this the others would compile theirs at every start. On
    accelerators all processes share one key, and the first process writes for all that see its cache; on a host with a
    cache of its own, that host's first process writes. Two processes that write one file at the same time could leave
    it broken.

    Args:
        platform: ``cpu``, ``cuda`` or ``tpu``.
        topology: this process's place.
        client: of the coordinator's store; None in versions of JAX without it.
        seconds: how long to wait for the first process to name its cache.
    """
    if platform == "cpu" or (not topology.on_one_host and _has_own_cache(topology, client, seconds)):
        _write_as_the_first()


def _has_own_cache(topology: Topology, client: Any, seconds: float) -> bool:
    """Returns whether this is the first process of a host whose cache isn't that of the run's first process."""
    if topology.local_rank or client is None:
        return False
    own = name_of_cache()
    if topology.rank == 0:
        client.key_value_set(FIRST, own or "")
        return False
    try:
        return own is not None and client.blocking_key_value_get(FIRST, max(1, int(seconds * 1000))) != own
    except jax.errors.JaxRuntimeError:  # no answer: the next collective reports the loss
        return False


def name_of_cache() -> str | None:
    """Returns the name stored in the cache directory, which is the same by whichever path the directory is seen.

    Stores a new name if there is none. Returns None if there is no directory, or it can't be written to.
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
                    os.link(made, file)  # atomic, and only one process succeeds
            finally:
                made.unlink()
        return file.read_text()
    return None


def _write_as_the_first() -> None:
    """Makes JAX treat this process as the first while it writes to the cache; does nothing in unknown versions."""
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
