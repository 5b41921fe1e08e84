"""Folders of tests that need a framework, skipped with a reason where it isn't installed."""

import importlib.util
from pathlib import Path

import pytest

NEEDS = {
    **dict.fromkeys(
        ("commands", "distributed", "faults", "launch", "learning", "torch_engine"),
        ("torch",),
    ),
    "integrations": ("torch", "stable_baselines3"),
    **dict.fromkeys(("jax", "jax_engine"), ("jax",)),
    **dict.fromkeys(("doctor", "golden", "parity", "planning", "policies", "proof", "scaling"), ("torch", "jax")),
}
"""What the tests of a folder run, in their own process or as ``lockstep train``; the others run without an engine."""


class Unavailable(pytest.Dir):  # pyright: ignore[reportGeneralTypeIssues]
    """A folder whose tests can't be imported here."""

    def collect(self) -> list[pytest.Item]:
        """Skips the folder."""
        pytest.skip(f"tests/{self.path.name} needs {' and '.join(missing(self.path))}")


def installed(name: str) -> bool:
    """Whether a package is; ``tests/jax`` is a folder that ``import jax`` finds, and isn't one."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def missing(path: Path) -> list[str]:
    """The frameworks that a folder of tests needs and that aren't installed."""
    return [name for name in NEEDS.get(path.name, ()) if not installed(name)]


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collects a folder as one skip where what it needs is missing."""
    if path.parent == Path(__file__).parent and missing(path):
        return Unavailable.from_parent(parent, path=path)
    return None
