"""What engine jax says of how it ended, where an end comes while calls are under way."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.config.run import Config, RunOptions
from lockstep.jax_engine.seeds.train import SeedsTrainer
from lockstep.jax_engine.train import Trainer
from lockstep.training.stop import CALLBACK, FINISHED, RUNNING, STEP_LIMIT, TIME_LIMIT, StopRequest

ITERATIONS = 4
CONFIG = Config.model_validate({"num_envs": 8, "num_steps": 16, "total_steps": 128 * ITERATIONS})


@pytest.fixture
def trainer(monkeypatch):
    """Makes one whose calls are one iteration each and tell, from the ``first``-th on, that ``code`` was asked for."""

    def dispatch(self, trainers):
        self.pending.append(self.dispatched)
        self.dispatched += 1

    def log_oldest_call(self, last):
        self.record(self.pending.popleft())

    def record(self, iteration):
        self.stop_code = max(self.stop_code, self.code if iteration >= self.first else RUNNING)
        return {}

    for method in (dispatch, log_oldest_call, record):
        monkeypatch.setattr(Trainer, method.__name__, method)
    monkeypatch.setattr(Trainer, "check_in_sync", lambda self, last: None)

    def make(code, first, stop_at_step=None):
        out: Any = object.__new__(Trainer)
        out.config, out.options, out.request = CONFIG, RunOptions(stop_at_step=stop_at_step), StopRequest()
        out.code, out.first, out.dispatched, out.pending = code, first, 0, deque()
        out.stop_code = out.save_code = RUNNING
        last = ITERATIONS if stop_at_step is None else stop_at_step // CONFIG.steps_per_iteration
        out.schedule = SimpleNamespace(due=lambda iteration: iteration >= last)
        audience = SimpleNamespace(waits=False)
        log = lambda *records: None  # noqa: E731
        out.recorder = SimpleNamespace(audience=audience, save_checkpoint=lambda asked: None, log=log)
        return out

    return make


def alone(trainer):
    return trainer.loop()


def of_seeds(trainer):
    seeds: Any = object.__new__(SeedsTrainer)
    seeds.trainers, seeds.lead = [trainer], trainer
    seeds.runner = SimpleNamespace(fetch=lambda iteration: [[iteration]])
    seeds.progress = SimpleNamespace(update=lambda row: None)
    return seeds.loop()


@pytest.fixture(params=[alone, of_seeds])
def ended(request, monkeypatch):
    monkeypatch.setattr("lockstep.jax_engine.seeds.train.together", lambda records: {})
    return request.param


@pytest.mark.parametrize("code", [128 + 15, TIME_LIMIT, CALLBACK])
@pytest.mark.parametrize("first", [ITERATIONS - 2, ITERATIONS - 1])
def test_a_run_that_has_done_all_is_finished_whatever_asked_for_an_end(trainer, ended, code, first):
    assert ended(trainer(code, first)) == FINISHED
    assert ended(trainer(code, first - 2, stop_at_step=128 * (ITERATIONS - 2))) == STEP_LIMIT


def test_one_that_has_not_says_what_stopped_it(trainer, ended):
    stopped = trainer(128 + 15, 1)
    assert ended(stopped) == 128 + 15
    assert stopped.dispatched == ITERATIONS - 1  # one was under way
