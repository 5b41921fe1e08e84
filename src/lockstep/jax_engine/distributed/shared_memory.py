"""Collectives between the CPU devices of one process, through the memory that they share: ``shared_memory.c``.

In XLA's own collectives every device sleeps twice, which takes longer than the gradient of a small minibatch. The C
file is compiled at first use and kept in the user's cache directory beside compiled programs. Where that fails, XLA's
collectives give the same bits.
"""

from __future__ import annotations

import contextlib
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

from lockstep.config.run import Config
from lockstep.core.errors import one_line
from lockstep.core.files import sync_path
from lockstep.core.private import only_we_write
from lockstep.core.tree import Tree
from lockstep.jax_engine.setup.kept_programs import cache_directory

SOURCE = Path(__file__).with_name("shared_memory.c")
FUNCTIONS = ("lockstep_tree_sum", "lockstep_gather")
MOST_DEVICES, MOST_SHARDS = 64, 4096
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O3", "-shared", "-fPIC", "-pthread", "-fno-fast-math")
TIMEOUT = 60.0


def tree_sum(rows: Array, index: Array, tree: Tree, call: int, by_slices: bool) -> Array:
    """Sums the shards of all devices: rows ``[n, m]``, of which the first are a device's own, to float32 ``[m]``.

    Inside a mapped program whose devices all belong to this process, and only if :func:`missing` returns None. The
    program ends with an error if devices are in different calls at the same time, or one device is in two.

    ``index`` is this device's, int32; ``call`` is the number of the call within the program; with ``by_slices`` each
    device finishes a part of the columns.
    """
    shape = jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype)
    more = {"shards": tree.num_shards, "sliced": int(by_slices)}
    return _call(FUNCTIONS[0], shape, rows, index, call=call, devices=len(tree.owned), **more)


def gather(rows: Array, index: Array, devices: int, call: int) -> Array:
    """Gathers rows ``[n, m]`` of all devices in device order, ``[devices * n, m]``; see :func:`tree_sum`."""
    shape = jax.ShapeDtypeStruct((devices * rows.shape[0], *rows.shape[1:]), rows.dtype)
    return _call(FUNCTIONS[1], shape, rows, index, call=call, devices=devices)


def _call(name: str, shape: jax.ShapeDtypeStruct, rows: Array, index: Array, **numbers: int) -> Array:
    function = jax.ffi.ffi_call(name, shape, vmap_method="broadcast_all")
    return function(rows, index, **{key: np.int64(value) for key, value in numbers.items()})


def unavailable(config: Config, devices: Sequence[Any]) -> str | None:
    """Returns why the devices of a mesh can't exchange data in memory; None if they can."""
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
    if config.shards > MOST_SHARDS:
        return f"{config.shards} shards are more than {MOST_SHARDS}"
    return missing()


@cache
def missing() -> str | None:
    """Returns why these collectives can't be used here; None if they can, and registers them with XLA then."""
    if sys.platform == "win32":
        return "Windows has no pthreads"
    try:
        library = _library()
        functions = [(name, jax.ffi.pycapsule(getattr(library, name))) for name in FUNCTIONS]
    except (OSError, ValueError, RuntimeError, AttributeError, subprocess.SubprocessError) as error:
        return one_line(error) or type(error).__name__
    for name, function in functions:
        jax.ffi.register_ffi_target(name, function, platform="cpu")
    return None


def _library() -> ctypes.CDLL:
    """Loads the library that an earlier run kept in the user's cache directory, or compiles it now."""
    said = f"{jaxlib.version.__version__} {sys.platform} {' '.join(FLAGS)}"
    name = f"collectives-{hashlib.sha256(SOURCE.read_bytes() + said.encode()).hexdigest()[:16]}"
    cache = cache_directory()
    for kept in () if cache is None else sorted(cache.glob(f"{name}-*.so")):
        with contextlib.suppress(OSError):  # from another machine: compiled again
            if only_we_write(kept) and kept.name == _name_by_content(
                name, kept
            ):  # loading half a file ends the process
                return ctypes.CDLL(str(kept))
    from lockstep.core.temporary import temporary_directory  # it locks as Windows can't

    with temporary_directory() as work:  # a loaded library needs no file
        made = work / f"{name}.so"
        _compile(made)
        if cache is not None:
            with contextlib.suppress(OSError):  # can't be stored, or not executed from there
                kept = cache / _name_by_content(name, made)
                _keep(made, kept)
                return ctypes.CDLL(str(kept))
        return ctypes.CDLL(str(made))


def _name_by_content(name: str, file: Path) -> str:
    """Returns what a library is called in the cache, by which a damaged one is known."""
    return f"{name}-{hashlib.sha256(file.read_bytes()).hexdigest()[:16]}.so"


def _keep(made: Path, kept: Path) -> None:
    """Copies a file into the cache atomically, even if other processes do the same or the power fails."""
    with tempfile.TemporaryDirectory(prefix=".collectives-", dir=kept.parent) as work:
        copy = Path(work) / kept.name
        shutil.copy(made, copy)
        copy.chmod(0o700)
        sync_path(copy)
        copy.replace(kept)


def _compiler() -> list[str]:
    given = shlex.split(os.environ.get("CC", ""))
    if given:
        return given
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        raise OSError(f"there is no C compiler ({', '.join(COMPILERS)}; CC isn't set)")
    return [found]


def _compile(target: Path) -> None:
    command = [*_compiler(), *FLAGS, f"-I{jax.ffi.include_dir()}", str(SOURCE), "-o", str(target)]
    result = subprocess.run(
        command,
        env=os.environ | {"LC_ALL": "C"},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT,
        check=False,
    )
    if result.returncode != 0 or not target.exists():
        lines = [line for line in result.stderr.splitlines() if "error" in line] or ["no reason given"]
        raise OSError(f"{command[0]} can't compile {SOURCE.name}: {lines[0]}")
