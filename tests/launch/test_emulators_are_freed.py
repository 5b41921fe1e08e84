"""Emulators of games are freed at the end of a run: ale-py complains of those that are left when the process ends."""

import subprocess
import sys

import pytest

PROGRAM = """
import gc
import sys
import types
import weakref
from pathlib import Path

from lockstep.config.run import Config, RunOptions
from lockstep.config.checks import resolve
from lockstep.core.topology import Topology
from lockstep.launch import rank

gc.disable()


class Emulator:
    pass


def train(*_):
    global left
    emulator = Emulator()
    emulator.itself = emulator  # as environments and their wrappers do
    left = weakref.ref(emulator)
    return types.SimpleNamespace(signal=None)


if sys.argv[1] == "game":
    sys.modules["ale_py"] = types.ModuleType("ale_py")
rank.engine_module = lambda _: types.SimpleNamespace(train=train)
Path("run").mkdir()
config = resolve(Config.model_validate({"num_envs": 8, "num_steps": 4, "ppo": {"num_minibatches": 2}}))
assert rank.run_rank(rank.Assignment(config, Path("run"), RunOptions(quiet=True)), Topology()) == 0
print("left" if left() is not None else "freed")
"""


@pytest.mark.parametrize(("run", "said"), [("game", "freed"), ("other", "left")])
def test_what_lies_in_cycles_is_freed_after_games(tmp_path, run, said):
    found = subprocess.run([sys.executable, "-c", PROGRAM, run], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split()[-1] == said
