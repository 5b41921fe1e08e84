"""What a rank says when its engine fails: too little memory in a line, what nobody foresaw with its traceback."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os
import sys
import types
from pathlib import Path

from lockstep.config.checks import resolve
from lockstep.config.run import Config, RunOptions
from lockstep.core.topology import Topology
from lockstep.launch import rank


def train(*_):
    raise type(os.environ.get("KIND", "SomeError"), (RuntimeError,), {})(sys.argv[1])


rank.engine_module = lambda engine: types.SimpleNamespace(train=train)
Path("run").mkdir()
config = resolve(Config.model_validate({"env": {"id": "CartPole-v1"}}))
sys.exit(rank.run_rank(rank.Assignment(config, Path("run"), RunOptions(quiet=True)), Topology()))
"""


def said_after(error, tmp_path, **variables):
    """What a rank says whose engine raises this, on standard error; it fails."""
    command = [sys.executable, "-c", PROGRAM, error]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **variables})
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.delenv("LOCKSTEP_TRACEBACK", raising=False)


@pytest.mark.usefixtures("plain")
def test_full_memory_is_one_line(tmp_path):
    errors = said_after("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`", tmp_path)
    assert errors.startswith("lockstep: error: device cpu: too little memory: CUDA error: out of memory; ")
    assert errors.count("\n") == 1


def test_its_traceback_is_shown_where_it_is_asked_for(tmp_path):
    errors = said_after("CUDA error: out of memory", tmp_path, LOCKSTEP_TRACEBACK="1")
    assert "Traceback" in errors
    assert errors.splitlines()[-1].startswith("lockstep: error: device cpu: too little memory: CUDA error")


@pytest.mark.usefixtures("plain")
def test_what_nobody_foresaw_is_told_with_its_traceback(tmp_path):
    errors = said_after("index out of range", tmp_path)
    assert "lockstep: error: this is a bug in lockstep or in a custom part\nTraceback" in errors


@pytest.mark.usefixtures("plain")
def test_what_a_device_reports_is_no_bug_of_ours(tmp_path):
    """PyTorch's class, by its name: the same words in another error would be one."""
    said = "CUDA error: uncorrectable ECC error encountered\nCompile with `TORCH_USE_CUDA_DSA`"
    errors = said_after(said, tmp_path, KIND="AcceleratorError")
    assert errors.startswith(
        "lockstep: error: the device reported an error, its own or of a kernel that ran there: CUDA"
    )
    assert errors.count("\n") == 1
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert "this is a bug in lockstep" in said_after(said, elsewhere)
