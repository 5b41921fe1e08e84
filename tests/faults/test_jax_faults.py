"""Engine jax: crashes, losses that are no numbers, and signals leave a run that can go on."""

import json
import re
import signal

import pytest
from command_line import (
    SMALL,
    Run,
    assert_no_orphans,
    copy_of,
    ending,
    error_line,
    lockstep,
    metrics_of,
    resume,
    running,
    train,
    wait_until,
)
from device_runs import CARTPOLE, JAX, ON_THE_HOST, TWO_PROCESSES, devices, inside, same_agent
from faulty import BAD_END
from variants import variants

from lockstep.runs.checkpoint import checkpoints_in, problem_with

pytestmark = pytest.mark.exact
PLACES = pytest.mark.parametrize(
    "place", [devices(2), pytest.param(TWO_PROCESSES, marks=pytest.mark.long)], ids=["two devices", "two processes"]
)


def checkpoints_of(path):
    """Names of a run's checkpoints, which are all whole."""
    found = checkpoints_in(path / "checkpoints")
    assert [problem_with(checkpoint) for checkpoint in found] == [None] * len(found)
    return [checkpoint.name for checkpoint in found]


# --- crashes --------------------------------------------------------------------------------------------------------


@pytest.mark.long
@PLACES
def test_killed_in_the_middle_of_a_checkpoint(trained, tmp_path, place):
    path = tmp_path / "runs" / "run"
    ended = lockstep("train", *inside("dying"), *place, "--name", "run", cwd=tmp_path, DIES="step_768")
    if place == TWO_PROCESSES:
        assert ended.code == 1
        assert error_line(ended).startswith("lockstep: error: rank 0 was killed by SIGKILL")
    else:
        assert ended.code == -signal.SIGKILL
    assert_no_orphans(ended)
    (left,) = (path / "checkpoints").glob(".step_768.*.tmp")
    assert "policy.safetensors" in [file.name for file in left.iterdir()]
    assert checkpoints_of(path) == ["step_384"]
    assert len(metrics_of(path)) == 8  # training had gone on while it was being written
    resumed = resume(path, *place)
    assert resumed.ended.stderr == ""
    assert not left.exists()
    same_agent(trained(*inside("cart_pole"), *devices(1)), resumed)


# --- devices that drift apart ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", variants([0, 3], [0]))
def test_devices_that_drift_apart_end_the_run_before_it_saves_anything(tmp_path, interval):
    """They are compared after iteration 3: while the next call runs where nothing else is due, or first of all."""
    path = tmp_path / "runs" / "run"
    intervals = ("--proof.interval", 3, "--checkpoint.interval", interval)
    line = error_line(lockstep("train", *inside("unreduced"), *devices(2), "--name", "run", *intervals, cwd=tmp_path))
    assert "ranks are out of sync after iteration 3: rank 1 of 2" in line
    assert "policy/actor.0.weight" in line
    assert checkpoints_of(path) == []
    assert len(metrics_of(path)) == 2


def test_the_last_comparison_comes_before_the_last_checkpoint(tmp_path):
    path = tmp_path / "runs" / "run"
    words = (*inside("unreduced"), *devices(2), "--name", "run", "--proof.interval", 0, "--checkpoint.interval", 0)
    assert "ranks are out of sync at the end: rank 1 of 2" in error_line(lockstep("train", *words, cwd=tmp_path))
    words = (*inside("unreduced"), *devices(2), "--name", "saves", "--proof.interval", 0, "--checkpoint.interval", 2)
    line = error_line(lockstep("train", *words, cwd=tmp_path))
    assert "ranks are out of sync after iteration 2: rank 1 of 2" in line
    assert list((tmp_path / "runs" / "saves" / "checkpoints").iterdir()) == []
    assert checkpoints_of(path) == []
    assert len(metrics_of(path)) == 8


# --- losses that are no numbers ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_loss_that_is_no_number_ends_the_run_in_one_line_and_it_goes_on_from_before(trained, tmp_path):
    path = copy_of(trained(*inside("poisoned"), "--stop-at-step", 384, *devices(2)), tmp_path / "run")
    ended = lockstep("train", "--resume", path, *TWO_PROCESSES, cwd=tmp_path, POISON="1")
    line = error_line(ended)
    assert "non-finite loss or gradient in iteration 4, epoch 1, minibatch 1" in line
    assert "policy_loss nan" in line
    assert_no_orphans(ended)
    assert checkpoints_of(path) == ["step_384"]
    assert len(metrics_of(path)) == 3
    assert not (path / "summary.json").exists()
    same_agent(trained(*inside("cart_pole"), *devices(1)), resume(path, *devices(2)))


def test_a_reward_that_is_no_number_on_the_host(tmp_path):
    words = ("faulty:FaultyCartPole-v0", *SMALL, *JAX, "--env.kwargs", json.dumps({"fault": "nan reward"}))
    ended = lockstep("train", *words, "--checkpoint.interval", 2, *devices(2), "--name", "run", cwd=tmp_path)
    assert re.search(r"environment 5 .* gave reward nan in step \d+ of iteration 3; ", error_line(ended))
    assert checkpoints_of(tmp_path / "runs" / "run") == ["step_256"]
    assert len(metrics_of(tmp_path / "runs" / "run")) == 2


# --- signals --------------------------------------------------------------------------------------------------------


def stopped_by_sigterm(process, mark, path):
    """A run that a signal was sent to: it ends in one line, with a checkpoint of where it stood."""
    ended = ending(process, mark)
    assert ended.code == 128 + signal.SIGTERM
    assert ended.stderr.splitlines() == ["lockstep: stopped by a signal, with a checkpoint"]
    assert_no_orphans(ended)
    stopped = Run(path, ended)
    assert stopped.summary["status"] == f"stopped by signal {int(signal.SIGTERM)}"
    assert checkpoints_of(path)[0] == f"step_{stopped.summary['global_step']}"
    return stopped


@PLACES
def test_sigterm_stops_a_run_inside_the_program_with_a_checkpoint(tmp_path, place):
    words, path = (*CARTPOLE, "--total-steps", 128 * 1_000_000), tmp_path / "runs" / "run"
    with running("train", *words, *place, "--name", "run", cwd=tmp_path) as (process, mark):
        wait_until(lambda: len(metrics_of(path)) >= 4, "nothing is logged")
        process.send_signal(signal.SIGTERM)
        stopped = stopped_by_sigterm(process, mark, path)
    step = stopped.summary["global_step"]
    assert step >= 512
    assert len(stopped.metrics) == step // 128
    same_agent(stopped, train(tmp_path, *words, *devices(1), "--stop-at-step", step, name="again"))


@pytest.mark.long
@PLACES
def test_sigterm_stops_a_run_on_the_host_with_a_checkpoint(trained, tmp_path, place):
    gate, path = tmp_path / "gate", tmp_path / "runs" / "run"
    gate.touch()
    with running("train", *ON_THE_HOST, *place, "--name", "run", cwd=tmp_path, GATE=str(gate)) as (process, mark):
        wait_until(lambda: len(metrics_of(path)) == 3, "the run doesn't reach the gate")
        process.send_signal(signal.SIGTERM)
        gate.unlink()
        stopped = stopped_by_sigterm(process, mark, path)
    assert 384 < stopped.summary["global_step"] < 1024
    same_agent(trained(*ON_THE_HOST, *devices(1)), resume(path, *devices(1)))


def test_only_the_second_ctrl_c_leaves_out_what_libraries_do_at_exit(tmp_path):
    """After the second one, XLA may still compile, and its threads crash there."""

    def interrupted(presses):
        fault = json.dumps({"fault": f"Ctrl-C {presses}"})
        words = ("faulty:FaultyCartPole-v0", *SMALL, *JAX, "--env.kwargs", fault, *devices(1))
        return lockstep("train", *words, "--name", str(presses), cwd=tmp_path)

    twice = interrupted(2)
    assert twice.code == 130
    assert "interrupted at once; --resume goes on" in error_line(twice)
    assert not (tmp_path / "runs" / "2" / ".lock").exists()
    assert interrupted(1).code == BAD_END
    assert Run(tmp_path / "runs" / "1", twice).summary["status"] == f"stopped by signal {int(signal.SIGINT)}"
