"""A rank that is stopped (SIGSTOP, a laptop's lid): the others wait for it, unless it lasts longer than they may."""

import os
import signal
import time

import pytest
from command_line import (
    GATED,
    NEEDS_PROC,
    Run,
    assert_no_orphans,
    ending,
    error_line,
    metrics_of,
    ranks_of,
    running,
    same,
    wait_until,
)
from variants import variants

pytestmark = [NEEDS_PROC, pytest.mark.exact]
ENGINES = {"torch": (), "jax": ("--engine", "jax", "--devices", 1)}
ROWS = {"torch": 4, "jax": 3}
"""Before the gate; the last row of a JAX run waits for its next call."""
STOPPED_SECONDS = 3.0
LIMIT = 10
"""Seconds; a machine that is busy lets a rank stand still for some."""


def stop_in_the_fifth_iteration(cwd, mark, engine):
    """Stops rank 1 where both ranks stand at the gate, and opens it; returns the stopped process."""
    wait_until(lambda: len(metrics_of(cwd / "runs" / "run")) >= ROWS[engine], "the gate isn't reached")
    (stopped,) = wait_until(lambda: ranks_of(mark, 1), "there is no rank 1")
    os.kill(stopped, signal.SIGSTOP)
    (cwd / "gate").unlink()
    return stopped


def words(engine, *more):
    return ("train", *GATED, *ENGINES[engine], "--nproc", 2, "--name", "run", "--quiet", *more)


@pytest.mark.parametrize("engine", variants(ENGINES, ["torch"]))
def test_a_rank_that_is_stopped_for_a_while_is_waited_for_and_changes_nothing(trained, tmp_path, engine):
    (tmp_path / "gate").touch()
    path = tmp_path / "runs" / "run"
    with running(*words(engine), cwd=tmp_path, GATE=str(tmp_path / "gate")) as (process, mark):
        stopped = stop_in_the_fifth_iteration(tmp_path, mark, engine)
        time.sleep(STOPPED_SECONDS)
        assert len(metrics_of(path)) <= 4
        assert process.poll() is None
        os.kill(stopped, signal.SIGCONT)
        ended = ending(process, mark)
    assert ended.code == 0, ended.stderr
    same(trained(*GATED, *("--engine", "jax") if engine == "jax" else ()), Run(path, ended))


@pytest.mark.parametrize("engine", variants(ENGINES, ["torch"]))
def test_one_that_stays_so_ends_the_run_by_name(tmp_path, engine):
    (tmp_path / "gate").touch()
    limit = ("--collective-timeout", LIMIT)
    with running(*words(engine, *limit), cwd=tmp_path, GATE=str(tmp_path / "gate")) as (process, mark):
        stop_in_the_fifth_iteration(tmp_path, mark, engine)
        ended = ending(process, mark)
        assert_no_orphans(ended)  # the stopped one, too
    said = error_line(ended)
    assert ended.code == 1
    assert f"nobody has made progress for {LIMIT} s (collective_timeout)" in said
    assert "rank 1 was last heard of" in said
