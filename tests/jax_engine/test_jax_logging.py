"""What engine jax logs of a call of several iterations."""

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.config.run import RunOptions
from lockstep.core.errors import NonFiniteError
from lockstep.jax_engine.train import Trainer
from lockstep.training.stop import StopRequest


@pytest.fixture
def trainer(monkeypatch):
    """One whose recorder keeps what it is given, call by call, and whose iteration -1 isn't finite."""

    def record(self, iteration):
        if iteration < 0:
            raise NonFiniteError("non-finite loss")
        return {"iteration": iteration}

    monkeypatch.setattr(Trainer, "record", record)
    out: Any = object.__new__(Trainer)
    out.calls = []
    out.recorder = SimpleNamespace(log=lambda *records: out.calls.append([r["iteration"] for r in records]))
    return out


def test_iterations_are_logged_together(trainer):
    trainer.log([1, 2, 3])
    trainer.log([])
    assert trainer.calls == [[1, 2, 3]]


def test_those_before_one_that_is_not_finite_are_logged(trainer):
    with pytest.raises(NonFiniteError):
        trainer.log([1, 2, -1, 4])
    with pytest.raises(NonFiniteError):
        trainer.log([-1])
    assert trainer.calls == [[1, 2]]


@pytest.mark.parametrize("began", [0, 30])
def test_the_call_that_compiles_takes_one_iteration(began):
    """Or several would share what compiling takes, in every figure that is made of their times."""
    counts: list[int] = []

    def dispatch(first, count, stop, before):
        counts.append(count)

    out: Any = object.__new__(Trainer)
    out.began = out.dispatched = began
    out.pending, out.request, out.options = [], StopRequest(), RunOptions()
    out.session = SimpleNamespace(runner=SimpleNamespace(capacity=4, dispatch=dispatch))
    out.recorder = SimpleNamespace(started=0.0, asks=lambda: 0, audience=SimpleNamespace(waits=False))
    out.schedule = SimpleNamespace(ends=lambda iteration: iteration == began + 10)
    for _ in range(4):
        out.dispatch([out])
    assert counts == [1, 4, 4, 1]
