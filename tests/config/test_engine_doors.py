"""The doors of the engines: they open without a framework, answer by name, and say what isn't installed."""

import importlib
import subprocess
import sys

import pytest

from lockstep.config.engines import MissingPackageError, engine_module, is_installed

ENGINES = ("torch", "jax")
ASKED = {
    "check_device",
    "count_accelerators",
    "device_memory",
    "name_ranks",
    "check_networks",
    "check_own_loss",
    "train",
}
ASKED |= {"PolicyFunction"}
"""What is asked of every engine."""


@pytest.mark.parametrize("engine", ENGINES)
def test_a_door_opens_without_its_framework(engine):
    code = f"import sys\nfrom lockstep.config.engines import engine_module\nengine_module({engine!r})\n"
    code += "print(sorted({'torch', 'jax', 'equinox', 'optax'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("engine", ENGINES)
def test_whatever_a_door_names_is_there(engine):
    door = engine_module(engine)
    assert set(door._HOME) >= ASKED
    for name, home in door._HOME.items():
        assert getattr(door, name) is getattr(importlib.import_module(f"lockstep.{engine}_engine.{home}"), name)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_thing'"):
        door.no_such_thing  # noqa: B018


@pytest.mark.parametrize(("engine", "package"), [("torch", "torch"), ("jax", "jax"), ("jax", "optax")])
def test_a_package_that_is_not_installed_is_named(engine, package, monkeypatch):
    assert is_installed(engine)
    monkeypatch.setitem(sys.modules, package, None)
    assert not is_installed(engine)
    with pytest.raises(MissingPackageError) as caught:
        engine_module(engine)
    assert caught.value.package == package
    assert str(caught.value) == f"engine: {engine} needs {package}; pip install 'lockstep-rl[{engine}]'"
