"""Programs of JAX are compiled quickly in tests: making them fast takes XLA longer than they run.

``LOCKSTEP_TESTS_OPTIMIZED=1``, of ``make test-all``, compiles all as users' are. Otherwise there are three levels:
``optimized`` is all that the compiler does for users, ``exact`` leaves out its optimisations, and ``quick`` has XLA's
older loops besides, which round by a number's place and so by the number of devices. A module's mark says which.
"""

import os
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from command_server import OPTIMIZATIONS, compile_as

OPTIMIZED = os.environ.get("LOCKSTEP_TESTS_OPTIMIZED", "0") != "0"
LEVELS = ("optimized", "exact", "quick")
"""From all that the compiler does to the least."""
QUICK = (
    *("commands", "envs", "faults", "jax_engine", "learning", "networks", "parity", "planning", "policies", "python"),
    "scaling",
)
"""Folders whose modules without a mark are compiled at the last level; it is the second one elsewhere."""
LOOPS = "xla_cpu_use_fusion_emitters"
OLDER_LOOPS = f"--{LOOPS}=false"
JAX_WITHOUT_OLDER_LOOPS = (0, 11)
"""From this version on XLA has the newer loops alone, and the last level is the second one."""


@cache
def has_older_loops() -> bool:
    """Whether the installed XLA knows the flag of its older loops; one that it doesn't know ends a process."""
    try:
        major, minor = version("jaxlib").split(".")[:2]
    except PackageNotFoundError:
        return False
    return (int(major), int(minor)) < JAX_WITHOUT_OLDER_LOOPS


def compile_as_said(level: str) -> None:
    """Has this process, and commands that it starts, compile at one of the levels, also what it has compiled before."""
    before = os.environ.get("XLA_FLAGS"), os.environ.get(OPTIMIZATIONS)
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag != OLDER_LOOPS]
    os.environ["XLA_FLAGS"] = " ".join([*flags, OLDER_LOOPS] if level == "quick" and has_older_loops() else flags)
    os.environ[OPTIMIZATIONS] = "0" if level == "optimized" else "1"
    compile_as(os.environ)
    if before != (os.environ["XLA_FLAGS"], os.environ[OPTIMIZATIONS]) and "jax" in sys.modules:
        sys.modules["jax"].clear_caches()


def compile_quickly() -> None:
    """Has this process compile quickly from now on.

    XLA looks at its flags once, where JAX starts: modules that ask for other loops have them by options of programs.
    """
    if OPTIMIZED:
        return
    from jax._src import compiler

    options_of: Any = compiler.get_compile_options

    def options(*args: Any, env_options_overrides: Any = None, **named: Any) -> Any:
        loops = {LOOPS: OLDER_LOOPS not in os.environ["XLA_FLAGS"].split()} if has_older_loops() else {}
        return options_of(*args, env_options_overrides=loops | (env_options_overrides or {}), **named)

    compiler.get_compile_options = options
    compile_as_said("quick")


@pytest.fixture(scope="module", autouse=True)
def compiler(request: pytest.FixtureRequest) -> None:
    """Lets a module compile as its mark or its folder says, here and in the commands that it starts."""
    if OPTIMIZED:
        return
    marked = [level for level in LEVELS if request.node.get_closest_marker(level)]
    folder = request.path.relative_to(Path(__file__).parent).parts[0]
    compile_as_said(marked[0] if marked else "quick" if folder in QUICK else "exact")
