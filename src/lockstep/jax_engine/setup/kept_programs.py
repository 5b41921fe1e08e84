"""Says where JAX keeps the programs that it has compiled, so that later runs needn't compile them."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from lockstep.core.machine import processor_key
from lockstep.core.private import user_cache
from lockstep.jax_engine.setup.whole_programs import keep_programs_whole

CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
SECONDS_VARIABLE = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
MIN_COMPILE_SECONDS, JAX_MIN_COMPILE_SECONDS = 0.2, 1.0  # the latter is JAX's default


def cache_is_the_users() -> bool:
    """Returns whether this program has told JAX where to keep compiled programs, or which."""
    defaults = {CACHE_VARIABLE: None, SECONDS_VARIABLE: JAX_MIN_COMPILE_SECONDS}
    return any(name in os.environ or jax.config.values[name.lower()] != value for name, value in defaults.items())


def cache_directory() -> Path | None:
    """Returns the directory of compiled programs in the user's cache, one for each set of processor features; makes it.

    Its name says ``threads`` because JAX's key doesn't include the number of threads that a program was compiled for.
    Earlier versions left programs for one thread, which have other bits, in another directory.

    Returns:
        None if it can't be made, or if others may write there, whose programs this user would then execute.
    """
    directory, usable = user_cache(f"jax/{processor_key()}-threads")
    return directory if usable else None


def use_compilation_cache() -> None:
    """Keeps compiled programs between runs, whole, in ``JAX_COMPILATION_CACHE_DIR`` or else in the user's cache."""
    keep_programs_whole()
    if CACHE_VARIABLE not in os.environ and jax.config.values[CACHE_VARIABLE.lower()] is None:
        directory = cache_directory()
        if directory is None:
            return
        jax.config.update(CACHE_VARIABLE.lower(), str(directory))
    if SECONDS_VARIABLE not in os.environ:
        jax.config.update(SECONDS_VARIABLE.lower(), MIN_COMPILE_SECONDS)
