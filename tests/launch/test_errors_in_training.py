"""Errors of a user's own code: what is refused before training begins, and what is a failure once it has."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import CARTPOLE, Run, error_line, lockstep

from lockstep.config.checks import resolve
from lockstep.config.run import Config, RunOptions
from lockstep.core import errors
from lockstep.core.life import life
from lockstep.core.process import report_failure
from lockstep.core.topology import Topology
from lockstep.launch import rank
from lockstep.launch.supervise import Outcome, StopSignals, exit_code, watch
from lockstep.runs.checkpoint import CheckpointError

BUG = "this is a bug in lockstep or in a custom part"
NET = (*CARTPOLE, "--network.custom", "faltering_nets:Faltering", "--quiet", "--name", "run")


def test_a_value_error_in_the_midst_of_training_is_a_reason_to_start_again(tmp_path):
    flag = tmp_path / "faltered"
    ended = lockstep("train", *NET, "--nproc", 2, "--max-restarts", 3, cwd=tmp_path, FALTERED=str(flag))
    assert ended.code == 0, ended.stderr
    (row,) = Run(tmp_path / "runs" / "run", ended).summary["restarts"]
    assert BUG in row["why"]
    assert "faltering_nets.py" in row["why"]
    assert "the net\nhas lost its way" in row["why"]


@pytest.mark.parametrize("words", [(), ("--nproc", 2)], ids=["one process", "two"])
def test_a_value_error_in_the_midst_of_training_is_told_with_its_traceback(tmp_path, words):
    ended = lockstep("train", *NET, *words, cwd=tmp_path, FALTERED=str(tmp_path / "faltered"))
    assert ended.code == 1
    assert BUG in ended.stderr
    assert "faltering_nets.py" in ended.stderr


def test_what_a_rank_refuses_before_training_is_bad_input(tmp_path):
    words = (*CARTPOLE, "--network.custom", "faltering_nets:Unranked", "--quiet", "--nproc", 2)
    for more in ((), ("--max-restarts", 3)):
        ended = lockstep("train", *words, *more, cwd=tmp_path)
        assert ended.code == 2
        assert "network.custom: faltering_nets:Unranked: ValueError: not among several" in error_line(ended)


class OwnError(ValueError):
    """A user's."""


@pytest.mark.parametrize(
    ("error", "before", "after"),
    [
        (ValueError("wrong"), 2, None),
        (OwnError("wrong"), 2, None),
        (errors.RankMismatchError("wrong"), 2, 2),
        (errors.UnavailableError("wrong"), 2, 2),
        (CheckpointError("wrong"), 1, 1),
        (errors.RunError("wrong"), 1, 1),
        (OSError("wrong"), 1, 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_the_status_of_an_error_before_and_after_training_has_begun(
    tmp_path, monkeypatch, capsys, error, before, after
):
    states = [False, True]

    def train(*_):
        life.trains = states.pop(0)
        raise error

    monkeypatch.setattr(rank, "engine_module", lambda engine: SimpleNamespace(train=train))
    monkeypatch.delenv("LOCKSTEP_TRACEBACK", raising=False)
    config = resolve(Config.model_validate({"env": {"id": "CartPole-v1"}}))
    for code in (before, after):
        assert rank.run_rank(rank.Assignment(config, tmp_path, RunOptions(quiet=True)), Topology()) == (code or 1)
        said = capsys.readouterr().err
        assert (BUG in said) is (code is None)
        assert (said == "lockstep: error: wrong\n") is (code is not None)


def test_every_attempt_begins_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(life, "trains", True)
    monkeypatch.setattr(rank, "engine_module", refuse)
    config = resolve(Config.model_validate({"env": {"id": "CartPole-v1"}}))
    assert rank.run_rank(rank.Assignment(config, tmp_path, RunOptions(quiet=True)), Topology()) == 2


def refuse(engine):
    raise ValueError(f"engine: {engine} is refused")


@pytest.mark.parametrize(
    ("codes", "trains", "code"),
    [
        ({1: 2, 0: 2}, True, 2),
        ({0: 1, 1: 2}, True, 2),
        ({1: 1, 0: 1}, True, 1),
        ({1: -9, 0: 2}, True, 1),
        ({1: 2, 0: 1}, False, 1),
    ],
)
def test_the_status_is_that_of_the_rank_that_failed_of_itself(tmp_path, monkeypatch, codes, trains, code):
    """Rank 0 says that it lost the others where it says anything; a script's 2 is its own affair."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0"))
    monkeypatch.setenv("LOCKSTEP_LAUNCHER", "1")
    if codes[0] == 1:
        report_failure("rank 0 lost its peers", secondary=True)
    ranks: Any = SimpleNamespace(
        exit_codes=lambda: codes, send=lambda number: None, message_file=lambda number: str(tmp_path / str(number))
    )
    signals = StopSignals()
    assert exit_code(watch(ranks, signals, trains=trains), signals) == code


def test_a_signal_is_the_status_of_what_it_stopped():
    signals = StopSignals()
    signals.received.append(15)
    assert exit_code(Outcome("refused", stopped=True, bad_input=True), signals) == 143


def test_a_working_directory_that_is_gone_is_told_in_a_line(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    words = f"rmdir {gone}; exec {sys.executable} -P -m lockstep list"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if os.path.isabs(path))}
    ended = subprocess.run(["sh", "-c", words], cwd=gone, env=variables, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr == ("lockstep: error: the working directory has been removed; change to one that is there\n")
