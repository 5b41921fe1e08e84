"""Groups of seeds in processes of their own: each is the run that it is by itself; stopped, failed, and resumed."""

import json
import os
import shutil
import signal
import sys

import numpy as np
import pytest
from command_line import (
    CARTPOLE,
    GATED,
    NEEDS_PROC,
    SMALL,
    assert_no_orphans,
    command,
    copy_of,
    ending,
    error_line,
    lockstep,
    marked,
    metrics_of,
    run_words,
    running,
    wait_until,
)

import lockstep as library
from lockstep.runs.curves import interquartile_mean
from lockstep.runs.directory import RunDirectory

SEEDS = ("--seeds", "3,5")


def state_of(path):
    return json.loads((path / "summary.json").read_text())["state_sha256"]


def alone(trained, seed, *words):
    return trained(*CARTPOLE, "--seed", seed, *words).summary["state_sha256"]


@pytest.fixture(scope="module")
def group(trained):
    return trained(*CARTPOLE, *SEEDS, "--nproc", 2, "--seeds-at-once", 2)


def test_each_seed_is_the_run_that_it_would_be_by_itself(trained, group):
    assert [state_of(group.path / f"seed_{seed}") for seed in (3, 5)] == [alone(trained, seed) for seed in (3, 5)]
    assert "2 seeds, 3 … 5, 2 side by side (engine torch trains one agent a process)" in group.ended.stdout
    assert json.loads((group.path / "seed_5" / "summary.json").read_text())["world_size"] == 2


def test_the_group_is_summed_up(group):
    finals = [json.loads((group.path / f"seed_{seed}/summary.json").read_text())["final_return"] for seed in (3, 5)]
    assert group.summary["final_return"] == interquartile_mean(np.array(finals))
    assert [seed["directory"] for seed in group.summary["seeds"]] == ["seed_3", "seed_5"]
    assert (group.summary["status"], group.summary["num_seeds"]) == ("finished", 2)
    assert {"curves.csv", "curves.json", "curves.png"} <= set(os.listdir(group.path))
    assert "interquartile mean over 2 seeds" in group.ended.stdout
    words = json.loads((group.path / "seed_5" / "summary.json").read_text())["command"]
    assert words[:3] == ["lockstep", "train", "CartPole-v1"]
    assert words[-2:] == ["--seed", "5"]
    assert "--seeds" not in words


def test_a_group_that_was_stopped_is_resumed(trained, group, tmp_path):
    """By the group's name, or as a supervisor does, by the same words."""
    stopped = trained(*CARTPOLE, *SEEDS, "--stop-at-step", 512)
    assert stopped.summary["status"] == "stopped at step"
    (tmp_path / "runs").mkdir()
    path = copy_of(stopped, tmp_path / "runs" / "group")
    assert "train --resume runs/" in stopped.ended.stdout
    words = (*CARTPOLE, *SEEDS, "--name", "group", "--resume", "auto")
    assert lockstep("train", *words, "--stop-at-step", 640, cwd=tmp_path).code == 0
    assert json.loads((path / "seed_5" / "summary.json").read_text())["global_step"] == 640
    assert lockstep("train", "--resume", "group", cwd=tmp_path).code == 0
    assert [state_of(path / f"seed_{seed}") for seed in (3, 5)] == [alone(trained, seed) for seed in (3, 5)]
    assert json.loads((path / "summary.json").read_text())["status"] == "finished"


def test_the_same_words_again_mirror_seeds_to_their_places(tmp_path):
    words = (*CARTPOLE, "--seed", 3, "--num-seeds", 2, "--name", "group", "--resume", "auto")
    words = (*words, "--checkpoint.mirror", (tmp_path / "mirror").as_uri(), "--quiet")
    for step in (128, 256):
        assert lockstep("train", *words, "--stop-at-step", step, cwd=tmp_path).code == 0
    assert os.listdir(tmp_path / "mirror") == ["group"]
    for seed in (3, 4):
        assert (tmp_path / f"mirror/group/seed_{seed}/checkpoints/step_256").is_dir()


def test_a_copied_groups_seed_goes_on_by_itself_without_writing_over_the_originals_mirror(tmp_path):
    words = (*CARTPOLE, *SEEDS, "--name", "group", "--checkpoint.mirror", (tmp_path / "mirror").as_uri(), "--quiet")
    assert lockstep("train", *words, "--stop-at-step", 128, cwd=tmp_path).code == 0
    shutil.copytree(tmp_path / "runs" / "group", tmp_path / "runs" / "group2")
    ended = lockstep("train", "--resume", "group2/seed_3", "--stop-at-step", 256, "--nproc", 2, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    at_copys, at_originals = (tmp_path / "mirror" / name / "seed_3" / "checkpoints" for name in ("group2", "group"))
    assert (at_copys / "step_256").is_dir()
    assert os.listdir(at_originals) == ["step_128"]
    assert lockstep("train", "--resume", "group2", "--stop-at-step", 384, "--quiet", cwd=tmp_path).code == 0
    for seed in (3, 5):
        assert (tmp_path / f"mirror/group2/seed_{seed}/checkpoints/step_384").is_dir()
        assert os.listdir(tmp_path / f"mirror/group/seed_{seed}/checkpoints") == ["step_128"]


def test_fewer_steps_than_a_seed_has_done_are_refused_before_anything_is_written(group, tmp_path):
    path = copy_of(group, tmp_path / "group")
    files = [each / name for each in (path, path / "seed_5") for name in ("config.json", "summary.json")]
    before = [file.read_text() for file in files]
    ended = lockstep("train", "--resume", path, "--total-steps", 512, cwd=tmp_path)
    assert ended.code == 2
    assert "total_steps: 512, but" in error_line(ended)
    assert "has done 1,024 steps of 1,024; give more" in error_line(ended)
    assert [file.read_text() for file in files] == before


def test_a_finished_group_that_is_resumed_trains_nothing_and_says_so(group, tmp_path):
    """Its summaries are those of what was trained."""
    path = copy_of(group, tmp_path / "group")
    files = [each / "summary.json" for each in (path, path / "seed_3", path / "seed_5")]
    before = [json.loads(file.read_text()) for file in files]
    assert lockstep("train", "--resume", path, cwd=tmp_path).code == 0
    assert [json.loads(file.read_text()) for file in files] == before


@pytest.mark.long
def test_jax_trains_in_turn_what_is_stepped_on_the_host(trained):
    words = ("--engine", "jax", "--env.backend", "gymnasium", "--devices", 1)
    run = trained(*CARTPOLE, *SEEDS, *words, "--stop-at-step", 256)
    assert "(CartPole-v1 is stepped on the host)" in run.ended.stdout
    assert state_of(run.path / "seed_5") == alone(trained, 5, *words, "--stop-at-step", 256)


@NEEDS_PROC
@pytest.mark.parametrize("everyone", [False, True], ids=["SIGTERM to the group", "SIGINT to every process"])
def test_a_signal_stops_all_with_checkpoints(tmp_path, everyone):
    number = signal.SIGINT if everyone else signal.SIGTERM
    words = ("CartPole-v1", *SEEDS, "--total-steps", 10**8, "--seeds-at-once", 2, "--name", "group")
    rows = [tmp_path / "runs" / "group" / f"seed_{seed}" / "metrics.jsonl" for seed in (3, 5)]
    with running("train", *words, cwd=tmp_path) as (process, mark):
        wait_until(lambda: all(file.exists() and file.stat().st_size for file in rows), "rows of both seeds")
        for pid in marked(mark) if everyone else [process.pid]:
            os.kill(pid, number)
        assert ending(process, mark).code == 128 + number
    summaries = [json.loads((file.parent / "summary.json").read_text()) for file in rows]
    assert [summary["status"] for summary in summaries] == [f"stopped by signal {number:d}"] * 2
    assert json.loads((tmp_path / "runs/group/summary.json").read_text())["status"] == f"stopped by signal {number:d}"


def test_what_no_seed_can_be_is_one_line_and_leaves_nothing(tmp_path):
    ended = lockstep("train", "no_such_module:Env", *SEEDS, cwd=tmp_path)
    assert "no_such_module" in error_line(ended)
    assert ended.code == 2
    assert not list((tmp_path / "runs").glob("*"))


def test_a_seed_that_fails_leaves_the_others_to_finish(tmp_path):
    ended = lockstep("train", "failing_seed:FailingSeed", *SMALL, *SEEDS, "--name", "group", cwd=tmp_path)
    group = tmp_path / "runs" / "group"
    assert ended.code == 1
    assert "seed_3: " in error_line(ended)
    assert "the third seed" in error_line(ended)
    assert json.loads((group / "seed_5" / "summary.json").read_text())["status"] == "finished"
    assert [seed["seed"] for seed in json.loads((group / "summary.json").read_text())["seeds"]] == [5]


IGNORING = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"


def test_a_seed_that_fails_is_told_where_the_caller_ignores_the_ends_of_children(tmp_path):
    words = command("train", "failing_seed:FailingSeed", *SMALL, *SEEDS, "--name", "group")
    ended = run_words([sys.executable, "-c", IGNORING, *words], tmp_path)
    assert ended.code == 1
    assert "seed_3: " in error_line(ended)


@NEEDS_PROC
@pytest.mark.parametrize("at_once", [1, 2])
def test_what_seeds_have_started_neither_holds_a_group_up_nor_outlives_it(tmp_path, at_once):
    left = tmp_path / "left"
    words = ("--total-steps", 128, "--seeds-at-once", at_once, "--name", "group")
    ended = lockstep("train", "lingering:Lingering", *SMALL, *SEEDS, *words, cwd=tmp_path, LEFT=str(left))
    assert ended.code == 0, ended.stderr
    assert "over" not in left.read_text()
    assert_no_orphans(ended)


def test_a_seed_that_is_refused_by_itself_leaves_the_others_to_finish(trained, tmp_path):
    path = copy_of(trained(*CARTPOLE, *SEEDS, "--stop-at-step", 512), tmp_path / "group")
    elsewhere = RunDirectory(path / "seed_3")
    elsewhere.lock()
    try:
        ended = lockstep("train", "--resume", path, "--seeds-at-once", 1, "--quiet", cwd=tmp_path)
    finally:
        elsewhere.unlock()
    assert ended.code == 1
    assert "seed_3: run " in error_line(ended)
    assert "is being written by another process" in error_line(ended)
    summaries = [json.loads((path / f"seed_{seed}" / "summary.json").read_text()) for seed in (3, 5)]
    assert [summary["status"] for summary in summaries] == ["stopped at step", "finished"]


@NEEDS_PROC
def test_a_group_of_which_one_seed_was_stopped_says_so_in_its_exit_status(tmp_path):
    gate, runs = tmp_path / "gate", tmp_path / "runs" / "group"
    gate.touch()
    words = (*GATED, *SEEDS, "--total-steps", 768, "--seeds-at-once", 1, "--name", "group")
    with running("train", *words, cwd=tmp_path, GATE=str(gate)) as (process, mark):
        wait_until(lambda: len(metrics_of(runs / "seed_3")) == 4, "four iterations of the first seed")
        (seed,) = (pid for pid in marked(mark) if pid != process.pid)
        os.kill(seed, signal.SIGTERM)
        gate.unlink()
        ended = ending(process, mark)
    assert ended.code == 143, ended.stderr
    summaries = [json.loads((runs / each / "summary.json").read_text()) for each in ("seed_3", "seed_5", ".")]
    stopped = "stopped by signal 15"
    assert [summary["status"] for summary in summaries] == [stopped, "finished", stopped]


@pytest.mark.long
def test_from_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"num_steps": 16, "total_steps": 256, "quiet": True}
    run = library.train("CartPole-v1", seeds=range(2), name="group", **settings)
    assert [each.path.name for each in run.seeds] == ["seed_0", "seed_1"]
    assert run.summary["final_return"] == np.mean([each.final_return for each in run.seeds])
    single = library.train("CartPole-v1", seed=1, name="single", **settings)
    assert single.seeds == []
    assert run.seeds[1].summary["state_sha256"] == single.summary["state_sha256"]
    assert library.load_run("group").resume(512, quiet=True).seeds[0].summary["global_step"] == 512
