"""What is put into a run shows where it belongs: a slow collective in t_comm, a slow rank in the others' t_wait.

By clocks that are moved by what is put in alone (``tests/modules/delaying.py``): how busy the machine is says nothing.
"""

import json

import pytest
from command_line import lockstep

ITERS = 6
SMALL = ("--num-envs", 8, "--num-steps", 16, "--ppo.num-epochs", 1, "--ppo.num-minibatches", 2, "--proof.interval", 0)
SWEEP = ("--mode", "strong", "--repeats", 1, "--warmup-iters", 2, "--iters", ITERS, "--no-ceiling", "--name", "sweep")
PARTS = ("t_rollout", "t_learn", "t_comm", "t_wait", "t_other")
COLLECTIVE, SLOW = 3.0, 7.0
NOTHING = 1e-3  # a thousand looks at the clock


def measured(folder, world_size, **environment):
    """The measured iterations of one run on ``world_size`` ranks."""
    words = ("bench", "delaying:UnevenCartPole-v0", *SMALL, *SWEEP, "--world-sizes", world_size)
    ended = lockstep(*words, cwd=folder, **environment)
    assert ended.code == 0, ended.stderr
    log = folder / "runs" / "sweep" / "logs" / f"ranks_{world_size}_repeat_1.jsonl"
    records = [record for line in log.read_text().splitlines() if (record := json.loads(line))["measured"]]
    assert len(records) == ITERS
    return records


def about(seconds):
    return pytest.approx(seconds, abs=NOTHING)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return measured(tmp_path_factory.mktemp("plain"), 2)


@pytest.fixture(scope="module")
def slow_collectives(tmp_path_factory):
    return measured(tmp_path_factory.mktemp("collectives"), 2, COLLECTIVE_DELAY=str(COLLECTIVE))


@pytest.fixture(scope="module")
def slow_rank(tmp_path_factory):
    return measured(tmp_path_factory.mktemp("rank"), 4, SLOW_RANK="2", SLOW_SECONDS=str(SLOW))


def test_delayed_collectives_are_in_comm(plain, slow_collectives):
    for record in slow_collectives:
        assert record["t_comm"] == about([COLLECTIVE * record["collectives"]] * 2)
    calls = [record["collectives"] for record in slow_collectives]
    assert calls == [record["collectives"] for record in plain] == [4] * ITERS  # statistics, two steps, metrics


def test_delayed_collectives_are_nowhere_else(slow_collectives):
    for record in slow_collectives:
        for part in ("t_rollout", "t_learn", "t_wait", "t_other"):
            assert record[part] == about([0.0] * 2), part


@pytest.mark.long
def test_the_others_wait_for_a_slow_rank(slow_rank):
    for record in slow_rank:
        assert record["t_wait"] == about([SLOW, SLOW, 0.0, SLOW])


def test_the_slow_rank_itself_is_slow_where_it_is_slow(slow_rank):
    for record in slow_rank:
        assert record["t_rollout"] == about([0.0, 0.0, SLOW, 0.0])
        for part in ("t_comm", "t_learn", "t_other"):
            assert record[part] == about([0.0] * 4), part


def test_without_anything_slow_nobody_waits(plain):
    """The negative of the above."""
    for record in plain:
        assert record["t_wait"] == about([0.0] * 2)
        assert record["t_comm"] == about([0.0] * 2)


def test_the_parts_are_the_iteration(plain, slow_collectives, slow_rank):
    for records in (plain, slow_collectives, slow_rank):
        for record in records:
            whole = [sum(record[part][rank] for part in PARTS) for rank in range(len(record["t_iter"]))]
            assert record["t_iter"] == about(whole)


def test_iterations_follow_one_another_without_a_gap(slow_collectives, slow_rank):
    """From the first record to the last, by a clock of its own, is the sum of ``t_iter``."""
    for records in (slow_collectives, slow_rank):
        whole = records[-1]["ended"] - records[0]["ended"]
        assert sum(record["t_iter"][0] for record in records[1:]) == about(whole)
