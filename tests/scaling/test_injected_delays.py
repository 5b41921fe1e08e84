"""What is put into a run shows where it belongs: a slow collective in t_comm, a slow rank in the others' t_wait."""

import json
from statistics import fmean, median

import pytest
from command_line import lockstep

ITERS = 20
SMALL = ("--num-envs", 8, "--num-steps", 16, "--ppo.num-epochs", 1, "--ppo.num-minibatches", 2, "--proof.interval", 0)
SWEEP = ("--mode", "strong", "--repeats", 1, "--warmup-iters", 2, "--iters", ITERS, "--no-ceiling", "--name", "sweep")
PARTS = ("t_rollout", "t_learn", "t_comm", "t_wait", "t_other")
COLLECTIVE, SLOW = 0.05, 0.2  # long beside what a busy machine adds to an iteration, and takes from a wait
LEAST, MOST = 0.9, 1.3  # where others want the cores too, who slept is not woken at once


def measured(folder, world_size, **environment):
    """The measured iterations of one run on ``world_size`` ranks."""
    words = ("bench", "delaying:UnevenCartPole-v0", *SMALL, *SWEEP, "--world-sizes", world_size)
    ended = lockstep(*words, cwd=folder, SLEPT=str(folder / "slept"), **environment)
    assert ended.code == 0, ended.stderr
    log = folder / "runs" / "sweep" / "logs" / f"ranks_{world_size}_repeat_1.jsonl"
    records = [record for line in log.read_text().splitlines() if (record := json.loads(line))["measured"]]
    assert len(records) == ITERS
    return records


def middle(records, key, rank=None):
    """The median over iterations of a rank's value, or of the mean over ranks."""
    return median(fmean(r[key]) if rank is None else r[key][rank] for r in records)


def slept(folder):
    """The median of the delays as they were: a busy machine sleeps longer than it was asked to."""
    return median(float(line) for line in (folder / "slept").read_text().split())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return measured(tmp_path_factory.mktemp("plain"), 2)


@pytest.fixture(scope="module")
def slow_collectives(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collectives")
    return measured(folder, 2, COLLECTIVE_DELAY=str(COLLECTIVE)), slept(folder)


@pytest.fixture(scope="module")
def slow_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rank")
    return measured(folder, 4, SLOW_RANK="2", SLOW_SECONDS=str(SLOW)), slept(folder)


def test_delayed_collectives_are_in_comm(plain, slow_collectives):
    records, delay = slow_collectives
    calls = records[0]["collectives"]
    assert [r["collectives"] for r in plain] == [calls] * ITERS == [r["collectives"] for r in records]
    assert calls == 4  # statistics, two optimiser steps, metrics
    more = middle(records, "t_comm") - middle(plain, "t_comm")
    assert LEAST < more / (calls * delay) < MOST


def test_delayed_collectives_are_nowhere_else(plain, slow_collectives):
    for part in ("t_rollout", "t_learn", "t_wait", "t_other"):
        assert middle(slow_collectives[0], part) - middle(plain, part) < 0.1 * 4 * slow_collectives[1], part


@pytest.mark.long
def test_the_others_wait_for_a_slow_rank(slow_rank):
    records, delay = slow_rank
    for rank in (0, 1, 3):
        waited = middle(records, "t_wait", rank) - middle(records, "t_wait", 2)
        assert LEAST < waited / delay < MOST, rank


def test_the_slow_rank_itself_is_slow_where_it_is_slow(slow_rank):
    records, delay = slow_rank
    rollouts = [middle(records, "t_rollout", rank) for rank in range(4)]
    for rank in (0, 1, 3):
        assert LEAST < (rollouts[2] - rollouts[rank]) / delay < MOST


def test_without_a_slow_rank_nobody_waits_that_long(plain):
    """The negative of the above."""
    assert max(middle(plain, "t_wait", rank) for rank in range(2)) < SLOW / 2


def test_the_parts_are_the_iteration(plain, slow_collectives, slow_rank):
    for records in (plain, slow_collectives[0], slow_rank[0]):
        for rank in range(len(records[0]["t_iter"])):
            shares = [sum(r[part][rank] for part in PARTS) / r["t_iter"][rank] for r in records]
            assert median(shares) == pytest.approx(1.0, abs=0.05)


def test_iterations_follow_one_another_without_a_gap(plain, slow_collectives, slow_rank):
    """From the first record to the last, by a clock of its own, is the sum of ``t_iter``."""
    for records in (plain, slow_collectives[0], slow_rank[0]):
        whole = records[-1]["ended"] - records[0]["ended"]
        assert sum(fmean(r["t_iter"]) for r in records[1:]) == pytest.approx(whole, rel=0.05)
