"""Programs of JAX are compiled quickly in tests: making them fast takes XLA longer than they run.

``LOCKSTEP_TESTS_OPTIMIZED=1``, of ``make test-all``, compiles all as users' are. Otherwise those of modules are whose
``pytestmark`` is ``optimized``: what they compare depends on how products are added up, and the compiler decides that.
"""

import os
from collections.abc import Iterator

import pytest
from command_server import OPTIMIZATIONS, compile_as

QUICK = {OPTIMIZATIONS: "1", "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false"}
QUICKLY = not os.environ.get("LOCKSTEP_TESTS_OPTIMIZED")


def compile_quickly() -> None:
    """Sets the variables for this process and those that it starts, before JAX is there to see them."""
    if QUICKLY:
        os.environ.update(QUICK)


@pytest.fixture(scope="module", autouse=True)
def compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """Lets a module that asks for it compile as users do, here and in the commands that it starts."""
    if not QUICKLY or request.node.get_closest_marker("optimized") is None:
        yield
        return
    kept = {name: os.environ.pop(name) for name in QUICK}
    compile_as({})
    yield
    os.environ.update(kept)
    compile_as(kept)
