"""The independent runs of a ceiling, whose records arrive several at a time, have never done more than was wanted."""

import pytest

from lockstep.config.run import Config
from lockstep.scaling import measure
from lockstep.scaling.plan import Job, Plan


class Copy:
    """A run that has recorded ``count`` iterations of a second each by the first look at it."""

    def __init__(self, count: int) -> None:
        self.records = []
        self._count = count

    def watch(self) -> bool:
        self.records = [{"iteration": n, "ended": float(n), "t_iter": [1.0]} for n in range(1, self._count + 1)]
        return True


@pytest.mark.parametrize(("counts", "shown"), [((9, 9), 5), ((9, 7), 5)])
def test_no_more_iterations_are_shown_than_are_wanted(monkeypatch, tmp_path, counts, shown):
    copies, calls = [Copy(count) for count in counts], []
    starting = iter(copies)
    monkeypatch.setattr(measure, "start_training", lambda *_: next(starting))
    monkeypatch.setattr(measure, "stop", lambda _: None)
    plan = Plan(Config.model_validate({"num_envs": 8}), "weak", (1, 2), warmup_iters=2, iters=3)
    outcome = measure.measure(Job("ceiling", 2, 0), plan, tmp_path, lambda done, wanted: calls.append((done, wanted)))
    assert (outcome.error, calls) == (None, [(shown, 5)])
