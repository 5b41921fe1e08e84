"""Settings for all tests, and runs that several of them read."""

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Compiled programs of JAX are kept between runs of the suite, apart from the user's own; JAX reads this when it loads.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "jax-tests-threads"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

os.environ.setdefault("MKL_CBWR", "AUTO")  # as in ranks: engines are called in this process
os.environ.setdefault("PYTHONHASHSEED", "0")  # of the processes that tests start, as commands set it

if "PYTEST_XDIST_WORKER" not in os.environ:  # an account of the tests' own; workers are told of it
    ACCOUNT = tempfile.TemporaryDirectory(prefix="account-")
    os.environ["XDG_CONFIG_HOME"] = ACCOUNT.name
    os.environ["SB3_LOGDIR"] = os.path.join(ACCOUNT.name, "sb3")  # else it leaves a directory a model in /tmp

import hypothesis
import pytest
from command_line import remember_variables, trained
from command_server import from_the_beginning
from frameworks import installed, pytest_collect_directory, pytest_pycollect_makemodule
from quick_compiler import OPTIMIZED, compile_quickly, compiler
from s3_server import s3, s3_port

from lockstep.core.life import life

__all__ = ["compiler", "pytest_collect_directory", "pytest_pycollect_makemodule", "s3", "s3_port", "trained"]

for profile, examples in (("quick", 30), ("whole", 40)):
    hypothesis.settings.register_profile(profile, deadline=None, derandomize=True, max_examples=examples)
hypothesis.settings.load_profile("whole" if OPTIMIZED else "quick")


def _beginning() -> dict[str, str]:
    """The variables that decide it, but for the one that OpenCV sets where it is first imported."""
    return {name: value for name, value in from_the_beginning(os.environ).items() if name != "LD_LIBRARY_PATH"}


@pytest.fixture(autouse=True)
def variables_stay() -> Iterator[None]:
    """No test leaves variables by which later commands would be started from nothing, which takes seconds each."""
    before = _beginning()
    yield
    assert _beginning() == before, "the test leaves environment variables changed"


@pytest.fixture(autouse=True)
def graphics_stay() -> Iterator[None]:
    """A library that MuJoCo draws with, which a test chose, isn't asked for by later tests that draw nothing."""
    before = os.environ.get("MUJOCO_GL")
    yield
    if before is None:
        os.environ.pop("MUJOCO_GL", None)
    else:
        os.environ["MUJOCO_GL"] = before


@pytest.fixture(autouse=True)
def nothing_trains() -> None:
    """What an earlier test has trained in this process doesn't make an environment's failure one of training."""
    life.trains = False


def pytest_collection_finish() -> None:
    """Leaves what is loaded out of garbage collections, and has fewer: JAX and Hypothesis look at each of them."""
    remember_variables()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


if installed("jax"):
    # Every test process has eight CPU devices; what needs another number, or a JAX that has not started, is a command.
    from lockstep.jax_engine.setup import set_up

    compile_quickly()
    set_up.configure(threads=1, platform="cpu", devices=8)
