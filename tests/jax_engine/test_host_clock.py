"""Times of a run whose environments are stepped on the host, by a clock that the tests move."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from small_programs import program_of, small_config

from lockstep.core.shards import ShardPlan
from lockstep.jax_engine.host import clock
from lockstep.jax_engine.host import runner as host
from lockstep.jax_engine.host.clock import Clock, Laps
from lockstep.jax_engine.host.runner import HostRunner
from lockstep.jax_engine.state import init_state
from lockstep.jax_engine.train import Trainer

ROLLOUT, UPDATE, LOG, CHECKPOINT = 100.0, 40.0, 3.0, 50.0


class Ticks:
    """A clock that stands still but for what the tests say, and an update that ends when somebody waits for it."""

    def __init__(self, monkeypatch):
        self.now, self.under_way = 1000.0, []
        monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def spend(self, seconds):
        self.now += seconds

    def collecting(self, function: Any) -> Any:
        def collect(*args):
            self.spend(ROLLOUT)
            return function(*args)

        return collect

    def learning(self, function: Any) -> Any:
        def learn(*args):
            out = function(*args)
            self.under_way = jax.tree.leaves(out)
            return out

        return learn

    def waiting(self, function: Any) -> Any:
        def fetch(array):
            if any(array is one for one in self.under_way):
                self.spend(UPDATE)
                self.under_way = []
            return function(array)

        return fetch


@pytest.fixture
def ticks(monkeypatch):
    return Ticks(monkeypatch)


@pytest.fixture
def run(ticks, monkeypatch):
    """Two environments of CartPole, whose rollouts take 100 ticks and whose updates take 40."""
    config = small_config(1, env={"id": "CartPole-v1"}, num_envs=2, num_steps=4, ppo={"num_epochs": 1})
    program = program_of(config, 1)
    made = HostRunner(
        program, init_state(config, program.net, program.layout), ShardPlan(config.envs, config.shards), 1
    )
    monkeypatch.setattr(host, "collect", ticks.collecting(host.collect))
    monkeypatch.setattr(made, "_learn", ticks.learning(made._learn))
    for name in ("fetch", "fetch_rows"):
        monkeypatch.setattr(host, name, ticks.waiting(getattr(host, name)))
    ticks.spend(9.0)  # what is before the first iteration is no part of it
    made.begin()
    yield made
    made.close()


def iterations(run, ticks, due):
    """Six iterations in the order of the loop, which reads all that is under way where a checkpoint is due."""
    out, pending = [], deque()
    for number in range(6):
        pending.append(run.dispatch(number, 1, 0))
        while len(pending) > (0 if number + 1 in due else 1):
            out += run.fetch(pending.popleft())
            ticks.spend(LOG)
        if number + 1 in due:
            run.env_arrays()
            ticks.spend(CHECKPOINT)
    return out


def test_parts_add_up_to_the_iteration_they_are_of(run, ticks):
    begun = ticks.now
    found = iterations(run, ticks, due={3, 6})
    assert [one.parts["rollout"] for one in found] == [ROLLOUT] * 6
    # What is logged while an update is under way is hidden behind it; what comes after a checkpoint isn't.
    assert [one.parts["learn"] for one in found] == [UPDATE, *[UPDATE + LOG] * 2, UPDATE, *[UPDATE + LOG] * 2]
    assert [one.parts["other"] for one in found] == [0, 0, 0, LOG + CHECKPOINT, 0, 0]
    assert [sum(one.parts.values()) for one in found] == [one.seconds for one in found]
    assert sum(one.seconds for one in found) == ticks.now - begun - LOG - CHECKPOINT  # of the last iteration


def test_the_record_names_all_parts(run, ticks):
    trainer: Any = SimpleNamespace(config=run.config, recorder=SimpleNamespace(timing=None))
    *_, last = (Trainer.times(trainer, one) for one in iterations(run, ticks, due={5, 6}))
    steps = run.config.steps_per_iteration
    assert last == {
        "time/t_rollout": ROLLOUT,
        "time/t_learn": UPDATE,
        "time/t_other": LOG + CHECKPOINT,
        "time/t_iter": ROLLOUT + UPDATE + LOG + CHECKPOINT,
        "time/global_fps": steps / (ROLLOUT + UPDATE + LOG + CHECKPOINT),
    }


def test_an_update_ends_once(ticks):
    laps = Clock()
    laps.rollout_begins()
    ticks.spend(2.0)
    mine = laps.rollout_ends()
    ticks.spend(5.0)
    laps.update_ends(Laps())  # of an earlier iteration
    laps.update_ends(mine)
    ticks.spend(1.0)
    laps.update_ends()
    assert (mine.rollout, mine.learn, mine.other, mine.total) == (2.0, 5.0, 0.0, 7.0)
