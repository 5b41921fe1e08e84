"""Environments that raise, hang, die, or return nonsense end the run in one line, and leave its checkpoints whole."""

import json
import re

import pytest
from command_line import SMALL, assert_no_orphans, copy_of, error_line, lockstep
from variants import variants

from lockstep.runs.checkpoint import checkpoints_in, problem_with

ID = "faulty:FaultyCartPole-v0"
NUMBER = f"environment 5 ({ID})"
LIMIT = 10
"""Of seconds, in which environments that fail wait for a checkpoint to be on the disk."""


def fail(cwd, fault, nproc, workers, *more):
    """A run whose environment 5 fails in its third iteration, and the one line that says so."""
    after = cwd / "runs" / "run" / "checkpoints" / "step_256"
    words = ("--checkpoint.interval", 2, "--env.kwargs", json.dumps({"fault": fault}), "--env.workers", workers, *more)
    ended = lockstep(*("train", ID, *SMALL, *words, "--nproc", nproc, "--name", "run"), cwd=cwd, FAILS_AFTER=str(after))
    line = error_line(ended)
    assert_no_orphans(ended)
    return line


def assert_checkpoints_whole(cwd):
    path = cwd / "runs" / "run"
    (checkpoint,) = checkpoints_in(path / "checkpoints")
    assert checkpoint.name == "step_256"
    assert problem_with(checkpoint) is None
    assert len((path / "metrics.jsonl").read_text().splitlines()) == 2
    assert not (path / "summary.json").exists()


@pytest.mark.parametrize(("nproc", "workers"), variants([(1, 0), (1, 2), (2, 0), (2, 1)], [(1, 2), (2, 0)]))
def test_raising_in_a_step(tmp_path, nproc, workers):
    line = fail(tmp_path, "step", nproc, workers)
    assert f"{NUMBER} raised in step: RuntimeError: the motor is gone for good (faulty.py:" in line
    assert ("rank 1: " in line) == (nproc == 2)
    assert_checkpoints_whole(tmp_path)


@pytest.mark.parametrize(("nproc", "workers"), [(1, 0), (2, 1)])
def test_raising_in_a_reset(tmp_path, nproc, workers):
    line = fail(tmp_path, "reset", nproc, workers)
    assert f"{NUMBER} raised in reset: RuntimeError: the cart left the track" in line
    assert_checkpoints_whole(tmp_path)


@pytest.mark.parametrize(("nproc", "workers"), variants([(1, 0), (2, 0), (2, 1)], [(2, 0)]))
def test_hanging_in_a_step(tmp_path, nproc, workers):
    line = fail(tmp_path, "hang", nproc, workers, "--env.timeout", LIMIT)
    assert NUMBER in line
    assert f"didn't answer within {LIMIT} s (env.timeout)" in line
    assert_checkpoints_whole(tmp_path)
    assert not (tmp_path / "runs" / "run" / ".lock").exists()


@pytest.mark.parametrize(("nproc", "workers"), variants([(1, 2), (2, 1)], [(2, 1)]))
def test_a_worker_process_that_dies(tmp_path, nproc, workers):
    line = fail(tmp_path, "death", nproc, workers)
    assert NUMBER in line
    assert "died (exit code 3)" in line
    assert_checkpoints_whole(tmp_path)


def test_a_worker_process_that_is_interrupted(tmp_path):
    line = fail(tmp_path, "interrupt", 1, 2)
    assert NUMBER in line
    assert line.endswith("was interrupted")
    assert_checkpoints_whole(tmp_path)


def test_an_environment_that_takes_its_rank_along(tmp_path):
    assert fail(tmp_path, "death", 2, 0).endswith("rank 1 ended with exit code 3")
    assert_checkpoints_whole(tmp_path)


@pytest.mark.parametrize("nproc", [1, 2])
def test_an_environment_that_cannot_be_made_starts_no_run(tmp_path, nproc):
    line = fail(tmp_path, "construction", nproc, 0)
    assert f"env.id: {ID} can't be made: RuntimeError: the pole is missing" in line
    assert not (tmp_path / "runs").exists()


def test_an_environment_that_can_be_made_in_the_launcher_only(tmp_path):
    line = fail(tmp_path, "construction in a rank", 2, 1)
    assert f"env.id: {ID} can't be made: RuntimeError: the pole is missing" in line


@pytest.mark.parametrize(
    ("fault", "number"), [("nan reward", "reward nan in step"), ("nan observation", r"observation nan \(component 0\)")]
)
def test_numbers_that_are_none_stop_every_rank_before_the_optimiser(tmp_path, fault, number):
    assert re.search(rf"{re.escape(NUMBER)} gave {number} .*of iteration 3; ", fail(tmp_path, fault, 2, 0))
    assert_checkpoints_whole(tmp_path)


def test_a_checkpoint_that_was_due_is_written_before_a_failure_ends_the_run(tmp_path):
    ended = lockstep(
        *("train", ID, *SMALL, "--checkpoint.interval", 2, "--env.kwargs", '{"fault": "nan reward"}', "--nproc", 2),
        *("--name", "run"),
        cwd=tmp_path,
    )
    assert "gave reward nan" in error_line(ended)
    assert_checkpoints_whole(tmp_path)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_observation_of_another_shape_than_the_space(tmp_path, workers):
    assert NUMBER in fail(tmp_path, "shape", 1, workers)
    assert_checkpoints_whole(tmp_path)


def test_worker_processes_that_fail_at_the_same_time_share_one_line(tmp_path):
    ended = lockstep("train", ID, *SMALL, "--env.workers", 4, "--name", "run", cwd=tmp_path, FAULT="step")
    line = error_line(ended)
    assert re.search(rf"environment [0-7] \({re.escape(ID)}\)", line)
    assert_no_orphans(ended)


SAVING = "heedless:Saving-v0"


@pytest.mark.parametrize(("nproc", "workers"), [(1, 0), (2, 1)])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("get", "raised in get_env_state: RuntimeError: the disk is gone (heedless.py:"),
        ("words", "raised in get_env_state: TypeError: 'state' must be an array of numbers, and is 'somewhere'"),
    ],
)
def test_state_that_cannot_be_saved(tmp_path, fault, said, nproc, workers):
    words = ("--nproc", nproc, "--env.workers", workers, "--name", "run")
    ended = lockstep("train", SAVING, *SMALL, *words, cwd=tmp_path, STATE_FAILS=fault)
    assert re.search(rf"environment [04] \({SAVING}\) {re.escape(said)}", error_line(ended))
    assert_no_orphans(ended)


@pytest.mark.parametrize("workers", [0, 1])
def test_hanging_while_its_state_is_saved(tmp_path, workers):
    words = ("--env.workers", workers, "--env.timeout", LIMIT, "--name", "run")
    ended = lockstep("train", SAVING, *SMALL, *words, cwd=tmp_path, STATE_FAILS="hang")
    assert f"environment 0 ({SAVING})" in error_line(ended)
    assert f"didn't answer within {LIMIT} s (env.timeout)" in ended.stderr


def test_state_that_cannot_be_given_back(trained, tmp_path):
    path = copy_of(trained(SAVING, *SMALL), tmp_path / "run")
    ended = lockstep("train", "--resume", path / "checkpoints" / "step_384", cwd=tmp_path, STATE_FAILS="set")
    assert f"environment 0 ({SAVING}) raised in set_env_state: RuntimeError: no such state" in error_line(ended)


LINGERING = "heedless:Lingering-v0"


def test_a_close_that_hangs_ends_no_run_and_holds_none_up(tmp_path):
    words = ("--env.timeout", 4, "--name", "run")
    ended = lockstep("train", LINGERING, *SMALL, *words, cwd=tmp_path, LINGERS="1")
    assert ended.code == 0, ended.stderr
    assert f"environment 0 ({LINGERING}) wasn't closed within 2 s, and is left behind" in ended.stderr
    assert json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())["status"] == "finished"


def test_nor_does_it_hide_the_failure_before_it(tmp_path):
    ended = lockstep("train", LINGERING, *SMALL, "--name", "run", cwd=tmp_path, LINGERS="1", BREAKS="1")
    assert ended.code == 1
    *before, line = ended.stderr.splitlines()
    assert f"environment 0 ({LINGERING}) raised in step: RuntimeError: the motor is gone" in line
    assert any("wasn't closed within 2 s" in told for told in before)


@pytest.mark.parametrize("words", [("eval",), ("play", "--video", "out.mp4")], ids=["eval", "play"])
def test_raising_while_a_policy_is_watched(trained, tmp_path, words):
    name, *options = words
    ended = lockstep(name, trained(ID, *SMALL).path, *options, cwd=tmp_path, FAULT="step")
    line = error_line(ended)
    assert ID in line
    assert "raised in step: RuntimeError: the motor is gone for good" in line


def test_without_a_fault_the_same_environment_trains(trained):
    run = trained(ID, *SMALL)
    assert run.ended.stderr == ""
    assert run.summary["status"] == "finished"
