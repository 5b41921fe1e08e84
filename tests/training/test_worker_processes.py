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


def settled(config: EnvConfig, seconds: float, monkeypatch: pytest.MonkeyPatch, others: list[Any]) -> Any:
    monkeypatch.setattr(worker_processes, "measure_step", lambda *_: seconds)
    monkeypatch.setattr(worker_processes, "available_cores", lambda: 8)
    topology = Topology(rank=0, world_size=2, local_world_size=2)
    return settle_workers(config, describe(config), 16, topology, lambda facts: [facts, *others])


def test_every_rank_settles_on_the_same_number_and_says_why(monkeypatch):
    auto = EnvConfig(id="CartPole-v1", workers="auto")
    slow, fast = [SLOW, 16, 4], [FAST, 16, 4]
    here, line = settled(auto, SLOW, monkeypatch, [fast])
    there, other_line = settled(auto, FAST, monkeypatch, [slow])
    assert (here.workers, there.workers) == (4, 4)
    assert line == other_line
    assert line == "env.workers auto: 4 worker processes a rank (a step of one takes 5 ms, and a rank has 4 cores)"
    none, line = settled(auto, FAST, monkeypatch, [fast])
    assert none.workers == 0
    assert line is not None
    assert line.startswith("env.workers auto: environments are stepped in the rank itself (a step of one takes 5 µs")


def test_a_number_that_was_given_stays_and_nothing_is_measured(monkeypatch):
    for config in (EnvConfig(id="CartPole-v1", workers=3), EnvConfig(id="lockstep/CartPole-v1", workers="auto")):
        monkeypatch.setattr(worker_processes, "measure_step", lambda *_: pytest.fail("measured"))
        found, line = settle_workers(config, describe(config), 16, Topology(), lambda _: pytest.fail("asked"))
        assert found.workers == (3 if config.workers == 3 else 0)
        assert line is None
