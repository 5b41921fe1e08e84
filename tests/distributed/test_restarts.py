"""Ranks that are killed, and started again by our launcher: the agent of an undisturbed run, on any number of them."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from command_line import (
    CARTPOLE,
    GATED,
    NEEDS_PROC,
    SMALL,
    Run,
    assert_no_orphans,
    ending,
    error_line,
    lockstep,
    metrics_of,
    ranks_of,
    resume,
    running,
    same,
    wait_until,
)
from variants import variants

from lockstep.runs.checkpoint import checkpoints_in, step_of
from lockstep.training.due import SOONEST

pytestmark = [NEEDS_PROC, pytest.mark.quick]
STEPS = 128
WORDS = {
    "torch": ("--nproc", 2),
    "torch, one": ("--nproc", 1),
    "torch, backend": ("--nproc", 2, "--collectives", "backend"),
    "jax": ("--engine", "jax", "--nproc", 2, "--devices", 1),
    "jax, one": ("--engine", "jax"),
}


def kill(mark, rank, path, rows):
    """Kills a rank once so many iterations are logged; returns when it is gone."""
    wait_until(lambda: len(metrics_of(path)) >= rows, f"iteration {rows} isn't reached")
    (victim,) = wait_until(lambda: ranks_of(mark, rank), f"there is no rank {rank}")
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: victim not in ranks_of(mark, rank), "it lives")


def kept(launcher):
    """The newest step of which a launcher has a state in memory."""
    steps = [0]
    for fd in Path(f"/proc/{launcher}/fd").iterdir():
        with suppress(OSError):
            held = Path(os.readlink(fd))
            steps += [step_of(path) or 0 for path in checkpoints_in(held.parent)] if held.name == ".held" else []
    return max(steps)


def restarts_of(run):
    return run.summary["restarts"]


@pytest.mark.parametrize(
    ("which", "rank"), variants([(w, r) for w in WORDS for r in (0, 1)], [("torch", 1), ("jax, one", 0)])
)
def test_killed_ranks_are_started_again(trained, tmp_path, which, rank):
    if which.endswith("one") and rank:
        pytest.skip("there is one rank")
    gate, path = tmp_path / "gate", tmp_path / "runs" / "run"
    gate.touch()
    words = ("train", *GATED, *WORDS[which], "--name", "run", "--max-restarts", 3, "--quiet")
    with running(*words, cwd=tmp_path, GATE=str(gate)) as (process, mark):
        wait_until((path / "checkpoints" / "step_384").is_dir, "no checkpoint of the third iteration")
        kill(mark, rank, path, 3 if which.startswith("jax") else 4)  # the last row of a JAX run waits for its next call
        gate.unlink()
        ended = ending(process, mark)
    assert ended.code == 0, ended.stderr
    run = Run(path, ended)
    same(trained(*GATED, *("--engine", which[:3]) if which.startswith("jax") else ()), run)
    (row,) = restarts_of(run)
    assert row["why"] == f"rank {rank} was killed by SIGKILL; out of memory?"
    assert (row["from"], row["iteration"], row["iterations_again"]) in [
        ("disk", 3, 0),
        ("disk", 3, 1),
        ("memory", 4, 0),
    ]
    (line,) = [line for line in ended.stderr.splitlines() if "restart" in line]
    assert line.startswith(f"lockstep: restart 1 of 3: rank {rank} was killed by SIGKILL")
    assert_no_orphans(ended)
    assert restarts_of(resume(path, "--total-steps", 9 * STEPS)) == [row]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_the_number_of_ranks_follows_the_cores_and_states_are_kept_in_memory(trained, tmp_path):
    gate, path, cores = tmp_path / "gate", tmp_path / "runs" / "run", sorted(os.sched_getaffinity(0))[:2]
    later = tmp_path / "gate.later"  # so that the run isn't over before a rank is killed
    gate.touch()
    later.touch()
    words = (
        "train",
        *GATED,
        "--name",
        "run",
        "--nproc",
        "1:2",
        "--checkpoint.interval",
        0,
        "--max-restarts",
        3,
        "--quiet",
    )
    with running(*words, cwd=tmp_path, GATE=str(gate)) as (process, mark):
        wait_until(lambda: len(metrics_of(path)) >= 4, "the gate isn't reached")
        os.sched_setaffinity(process.pid, cores[:1])
        time.sleep(2 * SOONEST)  # so that a state is due in the fifth iteration
        gate.unlink()  # each step takes a while from here on
        state = wait_until(lambda: (step := kept(process.pid)) >= 5 * STEPS and step, "no state is kept")
        kill(mark, 0, path, 5)
        later.unlink()
        ended = ending(process, mark)
    assert ended.code == 0, ended.stderr
    run = Run(path, ended)
    same(trained(*CARTPOLE), run)
    (row,) = restarts_of(run)
    assert (row["ranks_before"], row["ranks_after"], row["from"]) == (2, 1, "memory")
    assert row["iteration"] >= state // STEPS  # what was kept, or what has been since
    assert row["iteration"] + row["iterations_again"] >= 5


@pytest.mark.parametrize("which", variants(["torch", "torch, one"], ["torch"]))
def test_what_fails_at_the_same_place_twice_isnt_started_a_third_time(tmp_path, which):
    words = ("train", "dying:DyingCartPole-v0", *SMALL, *WORDS[which], "--name", "run", "--max-restarts", 9, "--quiet")
    ended = lockstep(*words, cwd=tmp_path, DIES_AT="72")
    lines = ended.stderr.splitlines()
    assert ended.code == 1
    assert (
        len([line for line in lines if line.startswith("lockstep: restart ")]) <= 2
    )  # the first may be before a state
    assert "killed by SIGSEGV" in lines[-1]
    assert lines[-1].endswith("(twice without a newer state in between, so it isn't started again)")
    assert_no_orphans(ended)


KILLING = """
import os, signal
from pathlib import Path
from gymnasium.envs.classic_control import CartPoleEnv

class Killing(CartPoleEnv):
    def __init__(self, **more):
        super().__init__(**more)
        parent = os.getppid()
        if Path(f"/proc/{parent}/comm").read_text() == "lockstep server\\n" and not Path("runs/run").exists():
            with open("kills", "a") as file:
                kills = file.write("x") and file.tell()
            if kills <= 2:
                os.kill(parent, signal.SIGKILL)
"""


@pytest.mark.parametrize(("allowed", "code"), [(3, 0), (1, 1), (0, 1)])
def test_a_server_killed_before_there_is_a_run_is_started_again(tmp_path, allowed, code):
    (tmp_path / "killing.py").write_text(KILLING)
    words = ("train", "killing:Killing", *SMALL, *WORDS["torch"], "--name", "run", "--max-restarts", allowed, "--quiet")
    ended = lockstep(*words, "--total-steps", 2 * STEPS, cwd=tmp_path)
    assert ended.code == code, ended.stderr
    assert_no_orphans(ended)
    why, path = "the process that starts the ranks was killed by SIGKILL; out of memory?", tmp_path / "runs" / "run"
    said = [f"lockstep: restart {n} of {allowed}: {why}; another takes its place, before any rank" for n in (1, 2)]
    if code:
        after = " (after 1 restart, as many as were allowed)" if allowed else ""
        assert ended.stderr.splitlines() == [*said[:allowed], f"lockstep: error: {why}{after}"]
        assert not path.exists()
    else:
        assert ended.stderr.splitlines() == said
        rows = restarts_of(Run(path, ended))
        assert [(row["why"], row["from"], row["iterations_again"]) for row in rows] == [(why, "beginning", 0)] * 2


def test_as_many_restarts_as_were_allowed(tmp_path):
    gate, path = tmp_path / "gate", tmp_path / "runs" / "run"
    gate.touch()
    words = ("train", *GATED, "--total-steps", 10**8, "--nproc", 2, "--name", "run", "--max-restarts", 1, "--quiet")
    with running(*words, cwd=tmp_path, GATE=str(gate)) as (process, mark):
        kill(mark, 1, path, 4)
        gate.unlink()
        wait_until(lambda: ranks_of(mark, 1), "it isn't started again")
        kill(mark, 1, path, 6)
        ended = ending(process, mark)
    assert ended.code == 1
    assert "(after 1 restart, as many as were allowed)" in ended.stderr.splitlines()[-1]


def test_bad_input_is_no_reason_to_start_again(tmp_path):
    words = ("train", "CartPole-v1", *SMALL, "--nproc", 3, "--num-shards", 2, "--max-restarts", 3)
    assert "3 ranks can't share 2 shards" in error_line(lockstep(*words, cwd=tmp_path))
