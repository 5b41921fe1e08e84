"""Tests that need a framework, folders and single files, skipped with a reason where it isn't installed."""

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).parent
BOTH = ("torch", "jax")
NEEDS = {
    **dict.fromkeys(("commands", "distributed", "doctor", "faults", "golden", "launch", "parity"), BOTH),
    **dict.fromkeys(("planning", "policies", "proof", "python", "scaling"), BOTH),
    **dict.fromkeys(("learning", "torch_engine"), ("torch",)),
    **dict.fromkeys(("jax", "jax_engine"), ("jax",)),
    "integrations": ("torch", "stable_baselines3"),
    **{f"benchmarks/test_{name}.py": ("torch",) for name in ("gpu_scripts", "learning_figures")},
    **{f"benchmarks/test_{name}.py": ("jax",) for name in ("compiled_programs", "compiled_report", "convolutions")},
    **{f"benchmarks/test_{name}.py": BOTH for name in ("chaos", "fuzz", "restart_costs")},
    "config/test_engine_doors.py": BOTH,
    "core/test_full_memory.py": BOTH,
    "envs/test_env_twins.py": ("jax",),
    "envs/test_graphics.py": ("torch", "mujoco"),
    "networks/test_parameter_names.py": BOTH,
    "runs/test_mirror_fetch.py": ("fsspec",),
    "runs/test_mirror_place.py": ("fsspec", "s3fs", "moto"),
    "runs/test_places_of_groups.py": ("fsspec", "torch"),
    "runs/test_stored_config.py": BOTH,
    "test_forked_command.py": BOTH,
    "test_layers.py": ("importlinter",),
    "training/test_loss_fingerprint.py": ("torch",),
}
"""What the tests of a folder or of a file run, in their own process or as ``lockstep train``, by its path in
``tests``; the others run without an engine."""


class Unavailable(pytest.Dir):  # pyright: ignore[reportGeneralTypeIssues]
    """A folder whose tests can't be imported here."""

    def collect(self) -> list[pytest.Item]:
        """Skips the folder."""
        pytest.skip(reason(self.path))


class UnavailableFile(pytest.File):
    """A file whose tests can't be imported here."""

    def collect(self) -> list[pytest.Item]:
        """Skips the file."""
        pytest.skip(reason(self.path))


def installed(name: str) -> bool:
    """Whether a package is; ``tests/jax`` is a folder that ``import jax`` finds, and isn't one."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


class Missing(MetaPathFinder, Loader):
    """Has the import of a package that isn't installed fail, which would find a folder of tests of the same name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Claims the package."""
        return ModuleSpec(fullname, self) if fullname == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        """Fails as ``import`` does.

        Raises:
            ModuleNotFoundError: always.
        """
        raise ModuleNotFoundError(f"No module named {self._name!r}", name=self._name)


if not installed("jax"):
    sys.meta_path.insert(0, Missing("jax"))


def needed(path: Path) -> tuple[str, ...]:
    """The frameworks that a folder or file of tests needs."""
    return NEEDS.get(path.relative_to(TESTS).as_posix(), ()) if path.is_relative_to(TESTS) else ()


def missing(path: Path) -> list[str]:
    """Those of them that aren't installed."""
    return [name for name in needed(path) if not installed(name)]


def reason(path: Path) -> str:
    """Why a folder or file is skipped."""
    return f"tests/{path.relative_to(TESTS).as_posix()} needs {' and '.join(missing(path))}"


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collects a folder as one skip where what it needs is missing."""
    return Unavailable.from_parent(parent, path=path) if missing(path) else None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collects a file as one skip where what it needs is missing."""
    return UnavailableFile.from_parent(parent, path=module_path) if missing(module_path) else None
