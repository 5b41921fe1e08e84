"""Collectives between the CPU devices of one process, through the memory that they share: ``shared_memory.c``.

XLA's own collectives have every device go to sleep twice, which takes longer than the gradient of a small minibatch.
The C file is compiled when it is first needed, and kept in the user's cache directory beside compiled programs. Where
that can't be done, XLA's collectives give the same bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import numpy as np
from jax import Array

from lockstep.config import Config
from lockstep.jax_engine.set_up import default_cache_directory

SOURCE = Path(__file__).with_name("shared_memory.c")
FUNCTIONS = ("lockstep_tree_sum", "lockstep_gather")
MOST_DEVICES = 64
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O3", "-shared", "-fPIC", "-pthread")
TIMEOUT = 60.0


def tree_sum(rows: Array, index: Array, devices: int) -> Array:
    """Sum of the rows of all devices ``[n, m]``, float32 ``[m]``: by a binary tree of each one's, then of those sums.

    Inside a mapped program of which every device is this process's; see :func:`missing`.

    Args:
        rows: of this device.
        index: of this device, int32.
        devices: how many there are.
    """
    shape = jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype)
    return _call(FUNCTIONS[0], shape, rows, index, devices)


def gather(rows: Array, index: Array, devices: int) -> Array:
    """Rows of all devices ``[n, m]``, in the devices' order ``[devices * n, m]``; see :func:`tree_sum`."""
    shape = jax.ShapeDtypeStruct((devices * rows.shape[0], *rows.shape[1:]), rows.dtype)
    return _call(FUNCTIONS[1], shape, rows, index, devices)


def _call(name: str, shape: jax.ShapeDtypeStruct, rows: Array, index: Array, devices: int) -> Array:
    return jax.ffi.ffi_call(name, shape, vmap_method="broadcast_all")(rows, index, devices=np.int64(devices))


def unavailable(config: Config, devices: Sequence[Any]) -> str | None:
    """Why the devices of a mesh can't meet in memory; None: they can.

    Args:
        config: with ``collectives`` ``backend`` they are not to.
        devices: of any kind, of any processes.
    """
    if config.collectives == "backend":
        return "collectives backend"
    if devices[0].platform != "cpu":
        return f"they are devices of platform {devices[0].platform}"
    if len({device.process_index for device in devices}) > 1:
        return "they belong to several processes"
    if config.fsdp and len(devices) > 1:
        return "fsdp's collectives have no order among one another"
    if len(devices) > MOST_DEVICES:
        return f"{len(devices)} devices are more than {MOST_DEVICES}"
    return missing()


@cache
def missing() -> str | None:
    """Why there are no such collectives here; None: there are, and XLA knows them."""
    if sys.platform == "win32":
        return "Windows has no pthreads"
    try:
        with tempfile.TemporaryDirectory(prefix="lockstep-") as work:
            library = ctypes.CDLL(str(_built(Path(work))))  # once loaded, its file isn't needed any more
    except (OSError, subprocess.SubprocessError) as error:
        return " ".join(str(error).split())
    for name in FUNCTIONS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return None


def _compiler() -> list[str]:
    if given := os.environ.get("CC"):
        return shlex.split(given)
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        raise OSError(f"there is no C compiler ({', '.join(COMPILERS)}; CC isn't set)")
    return [found]


def _built(work: Path) -> Path:
    """The compiled file, in the user's cache directory or else in ``work``; made now, unless it was for this JAX.

    Raises:
        OSError: it can't be; one line.
    """
    said = f"{jaxlib.version.__version__} {sys.platform} {' '.join(FLAGS)}"
    digest = hashlib.sha256(SOURCE.read_bytes() + said.encode()).hexdigest()[:16]
    kept = default_cache_directory() / f"collectives-{digest}.so"
    if kept.exists():
        return kept
    made = work / kept.name
    _compile(made)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".collectives-", dir=kept.parent, delete=False) as copy:
            copy.write(made.read_bytes())
        Path(copy.name).replace(kept)  # whole or not at all, whoever else does the same
    except OSError:  # no place to keep it
        return made
    return kept


def _compile(target: Path) -> None:
    command = [*_compiler(), *FLAGS, f"-I{jax.ffi.include_dir()}", str(SOURCE), "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if "error" in line] or ["no reason given"]
        raise OSError(f"{command[0]} can't compile {SOURCE.name}: {lines[0]}")
