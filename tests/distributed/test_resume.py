"""A run that was stopped, killed or moved to other ranks ends as the one that never stopped."""

import csv
import os
import shutil
import signal
from contextlib import suppress

import pytest
from command_line import (
    CARTPOLE,
    EVALUATED,
    GATED,
    NEEDS_PROC,
    SMALL,
    Run,
    assert_no_orphans,
    copy_of,
    ending,
    error_line,
    lockstep,
    marked,
    metrics_of,
    ranks_of,
    resume,
    running,
    same,
    wait_until,
)
from mirror_places import content_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from variants import variants

from lockstep.cli import main
from lockstep.runs.checkpoint import problem_with, read_checkpoint

STEPS = [128 * iteration for iteration in range(1, 9)]


def tensorboard_steps(path):
    events = EventAccumulator(str(path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def csv_steps(path):
    with (path / "metrics.csv").open(newline="") as file:
        return [int(row["global_step"]) for row in csv.DictReader(file)]


def each_step_stands_once(path):
    tags = tensorboard_steps(path)
    waited = tags.pop("time/waited_for", [])  # of iterations on several ranks
    assert waited == [step for step in STEPS if step in waited]
    assert tags.get("eval/return_mean", STEPS[3::4]) == STEPS[3::4]
    assert all(steps == STEPS for tag, steps in tags.items() if tag.startswith(("train/", "time/")))
    assert {"train/loss", "time/global_fps"} <= set(tags)
    assert csv_steps(path) == STEPS
    assert [record["global_step"] for record in metrics_of(path)] == STEPS


@pytest.mark.parametrize(
    ("first", "nproc"), variants([(2, 1), (2, 4), (3, 5), (3, 2), (5, 3)], [(2, 1), (2, 4), (3, 5)])
)
def test_stopped_on_some_ranks_and_resumed_on_others(trained, tmp_path, first, nproc):
    stopped = trained(*EVALUATED, "--stop-at-step", 512, "--nproc", first)
    assert stopped.summary["status"] == "stopped at step"
    assert csv_steps(stopped.path) == STEPS[:4]
    assert f"--resume {stopped.path.relative_to(stopped.path.parents[1])}" in stopped.ended.stdout
    words = ("--nproc", nproc, "--proof.interval", 1, "--collectives", "backend")
    resumed = resume(copy_of(stopped, tmp_path / "run"), *words)
    same(trained(*EVALUATED), resumed)
    assert resumed.summary["status"] == "finished"
    assert resumed.summary["world_size"] == nproc
    assert resumed.summary["restarted_environments"] == []
    assert resumed.ended.stderr == ""
    each_step_stands_once(resumed.path)


def test_the_same_command_line_starts_a_run_and_goes_on_with_it(trained, tmp_path):
    words = ("train", *CARTPOLE, "--name", "run", "--resume", "auto")
    run = Run(tmp_path / "runs" / "run", lockstep(*words, "--nproc", 2, "--stop-at-step", 512, cwd=tmp_path))
    assert run.summary["status"] == "stopped at step"
    for _ in range(2):  # the second of them finds nothing left to train
        assert lockstep(*words, cwd=tmp_path).code == 0
        same(trained(*CARTPOLE), run)
    message = error_line(lockstep(*words, "--seed", 3, cwd=tmp_path))
    assert "seed: run runs/run was started with 0 and can't be resumed with 3" in message
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]


def without_checkpoints(run, cwd):
    """A copy of a run, of which the checkpoints were removed, and its files."""
    path = copy_of(run, cwd / "runs" / "run")
    shutil.rmtree(path / "checkpoints")
    return path, content_of(path)


def test_a_run_that_has_lost_its_checkpoints_does_not_begin_again(trained, tmp_path):
    """Its records would be cut."""
    path, before = without_checkpoints(trained(*EVALUATED, "--stop-at-step", 512, "--nproc", 2), tmp_path)
    gone = "lockstep: error: resume: runs/run has done 512 steps and its checkpoints are gone; "
    auto = ("train", *EVALUATED, "--resume", "auto", "--name", "run")
    for words in (("train", "--resume", "run"), auto):
        ended = lockstep(*words, cwd=tmp_path)
        assert error_line(ended) == f"{gone}put them back, or give another --name for a new run"
        assert ended.code == 2
    place = f"file://{tmp_path}/mirror"
    brings = f"--resume {place}/run brings what its mirror has of them, another --name starts a new run"
    assert error_line(lockstep(*auto, "--checkpoint.mirror", place, cwd=tmp_path)) == gone + brings
    assert content_of(path) == before


def test_if_it_is_done_the_command_to_repeat_has_nothing_left_to_do(trained, tmp_path):
    path, before = without_checkpoints(trained(*CARTPOLE), tmp_path)
    words, said = (
        ("train", *CARTPOLE, "--resume", "auto", "--name", "run"),
        "run runs/run has done 1,024 of 1,024 steps",
    )
    ended = lockstep(*words, cwd=tmp_path)
    assert (ended.code, ended.stdout, ended.stderr) == (0, f"{said}; its checkpoints are gone\n", "")
    for more in (("train", "--resume", "run"), (*words, "--total-steps", 2048)):
        assert "runs/run has done 1,024 steps and its checkpoints are gone; " in error_line(
            lockstep(*more, cwd=tmp_path)
        )
    assert content_of(path) == before


@NEEDS_PROC
def test_a_killed_rank_ends_the_run_and_the_run_can_go_on(trained, tmp_path):
    gate, path = tmp_path / "gate", tmp_path / "runs" / "killed"
    gate.touch()
    with running("train", *GATED, "--nproc", 2, "--name", path.name, cwd=tmp_path, GATE=str(gate)) as (process, mark):
        wait_until(lambda: len(metrics_of(path)) == 4, "the run doesn't reach the gate")
        wait_until((path / "checkpoints" / "step_384").is_dir, "no checkpoint of the third iteration")
        (rank,) = ranks_of(mark, 1)
        os.kill(rank, signal.SIGKILL)
        gate.unlink()
        ended = ending(process, mark)
    assert "rank 1 was killed by SIGKILL" in error_line(ended)
    assert_no_orphans(ended)
    assert problem_with(path / "checkpoints" / "step_384") is None
    resumed = resume(path, "--nproc", 1)
    same(trained(*CARTPOLE), resumed)
    each_step_stands_once(path)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", variants(["SIGTERM", "SIGINT"], ["SIGTERM"]))
def test_a_signal_stops_all_ranks_with_a_checkpoint(trained, tmp_path, name, ranks):
    number, gate, path = signal.Signals[name], tmp_path / "gate", tmp_path / "runs" / "stopped"
    gate.touch()
    words = ("train", *GATED, "--nproc", ranks, "--env.workers", 2 // ranks, "--name", path.name)
    with running(*words, cwd=tmp_path, GATE=str(gate)) as (process, mark):
        wait_until(lambda: len(metrics_of(path)) == 4, "the run doesn't reach the gate")
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does: to the launcher and to all that share its group
        else:
            process.send_signal(number)
        gate.unlink()
        ended = ending(process, mark)
    assert ended.code == 128 + number
    assert ended.stderr.splitlines() == ["lockstep: stopped by a signal, with a checkpoint"]
    assert_no_orphans(ended)
    stopped = Run(path, ended)
    assert stopped.summary["status"] == f"stopped by signal {int(number)}"
    step = stopped.summary["global_step"]
    assert 640 <= step < 1024
    assert problem_with(path / "checkpoints" / f"step_{step}") is None
    same(trained(*CARTPOLE), resume(path, "--nproc", 1))
    each_step_stands_once(path)


@NEEDS_PROC
@pytest.mark.skipif(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, reason="nohup: a closed terminal is ignored")
@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGHUP), (signal.SIGINT,)], ids=["logout", "SIGINT"])
def test_signals_to_every_process_stop_a_run_with_a_checkpoint(tmp_path, numbers):
    """As systemd and Slurm may send them; the launcher passes them on to ranks once more."""
    gate, path = tmp_path / "gate", tmp_path / "runs" / "stopped"
    gate.touch()
    with running("train", *GATED, "--nproc", 2, "--name", path.name, cwd=tmp_path, GATE=str(gate)) as (process, mark):
        wait_until(lambda: len(metrics_of(path)) == 4, "the run doesn't reach the gate")
        pids = marked(mark)
        for number in numbers:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        gate.unlink()
        ended = ending(process, mark)
    assert len(pids) >= 4  # the launcher, the server of ranks, and the ranks
    assert ended.stderr == "lockstep: stopped by a signal, with a checkpoint\n"
    assert ended.code in [128 + number for number in numbers]  # signals that come together have no order
    step = Run(path, ended).summary["global_step"]
    assert problem_with(path / "checkpoints" / f"step_{step}") is None


def test_a_resumed_run_cannot_change_what_it_is_a_function_of(trained, capsys):
    stopped = trained(*EVALUATED, "--stop-at-step", 512, "--nproc", 2)
    before = (stopped.path / "config.json").read_bytes()
    assert main(["train", "--resume", str(stopped.path), "--ppo.learning-rate", "0.1"]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("lockstep: error: ppo.learning_rate: ")
    assert "0.005" in line
    assert "0.1" in line
    assert (stopped.path / "config.json").read_bytes() == before


def test_ranks_behind_ddp_add_gradients_after_a_resume_as_before(trained, tmp_path):
    """A backend adds three and more ranks in an order that depends on where in DDP's buckets a number lies."""
    pixels = ("lockstep/GridWorldPixels-v0", *SMALL, "--reduction", "fast", "--collectives", "backend", "--nproc", 3)
    whole, stopped = trained(*pixels), trained(*pixels, "--stop-at-step", 384)
    same(whole, resume(copy_of(stopped, tmp_path / "run"), "--collectives", "backend", "--nproc", 3))


def test_an_environment_that_no_seed_repeats_is_restarted_and_named(trained, tmp_path):
    stopped = trained("forgetful:ForgetfulCartPole-v0", *SMALL, "--stop-at-step", 384)
    shards = read_checkpoint(stopped.path / "checkpoints" / "step_384").env_shards
    live = [shard for shard in sorted(shards) if shards[shard]["lengths"][0] > 0]
    resumed = resume(copy_of(stopped, tmp_path / "run"))
    assert live
    assert resumed.summary["restarted_environments"] == live
    warning = f"lockstep: warning: environments {live} couldn't be restored exactly and began a new episode"
    (line,) = resumed.ended.stderr.splitlines()
    assert line.startswith(f"{warning}: from here on the agent isn't that of an uninterrupted run")
    each_step_stands_once(resumed.path)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_episode_may_take_longer_to_replay_than_a_step_may_take(trained, tmp_path, workers):
    one_environment = ("slow:SlowPendulum-v0", *SMALL, "--num-envs", 1, "--stop-at-step", 64)
    stopped = trained(*one_environment)
    words = ("--env.workers", workers, "--env.timeout", 2, "--stop-at-step", 64)
    resumed = resume(copy_of(stopped, tmp_path / "run"), *words, SECONDS="0.05")
    assert resumed.summary["restarted_environments"] == []
    assert resumed.agent == stopped.agent
