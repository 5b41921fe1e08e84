"""Which runs keep all of their memory in one heap, and that a rank says so to ``malloc`` before it trains."""

import subprocess
import sys

import pytest

from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.launch.rank import LARGE_ROLLOUT, wants_one_heap

STEPS = 128
ENVS = LARGE_ROLLOUT // STEPS
PROGRAM = """
import sys
import types
from pathlib import Path

from lockstep.config.checks import resolve
from lockstep.config.run import Config, RunOptions
from lockstep.core.topology import Topology
from lockstep.launch import rank

told = []
rank.keep_freed_memory = lambda one_heap: told.append(one_heap)
done = lambda *_: types.SimpleNamespace(signal=told.append("train"))
rank.engine_module = lambda _: types.SimpleNamespace(train=done)
Path("run").mkdir()
config = resolve(Config.model_validate_json(sys.argv[1]))
assert rank.run_rank(rank.Assignment(config, Path("run"), RunOptions(quiet=True)), Topology()) == 0
print(told)
"""


def config_of(engine: str, envs: int = ENVS, **changes: str) -> Config:
    """A run of so many environments of 128 steps."""
    given = {"engine": engine, "env": {"id": "lockstep/CartPole-v1"}, "num_envs": envs, "num_steps": STEPS}
    return Config.model_validate(given | changes)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (config_of("jax"), True),
        (config_of("jax", ENVS // 2), False),
        (config_of("torch"), False),
    ],
    ids=["large", "small", "torch"],
)
def test_large_iterations_of_xla_on_the_host_alone_want_it(config, wanted):
    assert wants_one_heap(resolve(config)) is wanted


def test_on_an_accelerator_nothing_wants_it():
    assert not wants_one_heap(resolve(config_of("jax")).model_copy(update={"device": "gpu"}))


@pytest.mark.parametrize(("envs", "told"), [(ENVS, [True, "train"]), (8, [False, "train"])], ids=["large", "small"])
def test_a_rank_says_so_before_it_trains(tmp_path, envs, told):
    program = [sys.executable, "-c", PROGRAM, config_of("jax", envs).model_dump_json()]
    found = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == str(told)
