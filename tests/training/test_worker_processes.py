"""How many worker processes ``env.workers auto`` chooses, and that every rank chooses the same."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config.run import EnvConfig
from lockstep.core.topology import Topology
from lockstep.envs.describe import describe
from lockstep.envs.gymnasium import choose_workers
from lockstep.envs.gymnasium.choose_workers import Measured, chosen_workers, measure_step
from lockstep.training import worker_processes
from lockstep.training.worker_processes import settle_workers

FAST, SLOW = 5e-6, 5e-3


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([Measured(FAST, 64, 16)], 0),  # their price is higher than what they spare
        ([Measured(SLOW, 64, 1)], 0),  # nobody is there to help
        ([Measured(SLOW, 1, 16)], 0),  # a single environment can't be shared out
        ([Measured(SLOW, 64, 2)], 2),
        ([Measured(SLOW, 64, 16)], 16),
        ([Measured(SLOW, 6, 16)], 6),
        ([Measured(100e-6, 64, 64)], 8),  # more would spare less than their price
        ([Measured(SLOW, 64, 8), Measured(FAST, 32, 4)], 4),  # one number for all
        ([Measured(FAST, 32, 4), Measured(SLOW, 64, 8)], 4),
    ],
)
def test_as_many_workers_as_pay(measured, expected):
    assert chosen_workers(measured) == expected


def test_a_step_is_measured_in_seconds_and_its_environment_is_closed(monkeypatch):
    closed = []
    monkeypatch.setattr(choose_workers.InProcessEnvs, "close", lambda self: closed.append(self))
    config = EnvConfig(id="CartPole-v1")
    assert 1e-7 < measure_step(config, describe(config), pytest.fail) < 1.0
    assert len(closed) == 1


HERE = ["node", [*range(8)]]


def settled(
    config: EnvConfig,
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
    others: list[Any],
    given: int | None = None,
    limit: int | None = None,
) -> Any:
    monkeypatch.setattr(worker_processes, "measure_step", lambda *_: seconds)
    monkeypatch.setattr(worker_processes, "bound_cores", lambda: 8)
    monkeypatch.setattr(worker_processes, "cpu_limit", lambda: limit)
    monkeypatch.setattr(worker_processes, "place_of_process", lambda: HERE)
    topology = Topology(rank=0, world_size=2, local_world_size=2, cores=given)
    return settle_workers(config, describe(config), 16, topology, lambda facts: [facts, *others])


def test_every_rank_settles_on_the_same_number_and_says_why(monkeypatch):
    auto = EnvConfig(id="CartPole-v1", workers="auto")
    slow, fast = ([seconds, 16, [8, HERE, None, None]] for seconds in (SLOW, FAST))
    here, line = settled(auto, SLOW, monkeypatch, [fast])
    there, other_line = settled(auto, FAST, monkeypatch, [slow])
    assert (here.workers, there.workers) == (4, 4)
    assert line == other_line
    assert line == "env.workers auto: 4 worker processes a rank (a step of one takes 5 ms, and a rank has 4 cores)"
    none, line = settled(auto, FAST, monkeypatch, [fast])
    assert none.workers == 0
    assert line is not None
    assert line.startswith("env.workers auto: environments are stepped in the rank itself (a step of one takes 5 µs")


@pytest.mark.parametrize(
    ("other", "given", "limit", "workers"),
    [
        (["node", [*range(8, 16)]], None, None, 8),  # each is bound to cores of its own
        (["other", [*range(8)]], None, None, 8),
        (HERE, None, None, 4),
        (["node", [*range(8, 16)]], 8, None, 8),
        (HERE, 2, None, 2),  # none is bound, and Slurm gave each two
        (["node", [*range(8, 16)]], None, 8, 4),  # one container's limit for both, however they are bound
        (["node", [*range(8, 16)]], 8, 6, 3),
        (["other", [*range(8)]], None, 6, 6),  # a container each
        (HERE, None, 12, 4),
        (HERE, None, 6, 3),
    ],
)
def test_cores_are_shared_by_the_ranks_that_are_bound_to_the_same(monkeypatch, other, given, limit, workers):
    auto = EnvConfig(id="CartPole-v1", workers="auto")
    config, line = settled(auto, SLOW, monkeypatch, [[SLOW, 16, [8, other, limit, given]]], given, limit)
    assert config.workers == workers
    assert f"a rank has {workers} cores" in line


def test_a_process_has_a_place():
    host, cores = worker_processes.place_of_process()
    assert host
    assert len(cores) in (0, len(set(cores)))


def test_a_number_that_was_given_stays_and_nothing_is_measured(monkeypatch):
    for config in (EnvConfig(id="CartPole-v1", workers=3), EnvConfig(id="lockstep/CartPole-v1", workers="auto")):
        monkeypatch.setattr(worker_processes, "measure_step", lambda *_: pytest.fail("measured"))
        found, line = settle_workers(config, describe(config), 16, Topology(), lambda _: pytest.fail("asked"))
        assert found.workers == (3 if config.workers == 3 else 0)
        assert line is None


def test_each_rank_has_a_core_at_least():
    here = ["node", [0, 1]]
    assert worker_processes.cores_of_ranks([[2, here, None, None]] * 3) == [1, 1, 1]
    assert worker_processes.cores_of_ranks([[8, here, 1, None]] * 2) == [1, 1]
