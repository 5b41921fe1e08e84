"""Which checkpoint is the best of a run that evaluates in some of its sessions alone."""

import numpy as np
import pytest
from fake_session import FakeSession

from lockstep.runs.checkpoint import checkpoints_in, find_checkpoint, step_of
from lockstep.runs.directory import RunDirectory
from lockstep.training.recorder import Recorder
from lockstep.training.stop import FINISHED


@pytest.fixture
def session_of(tmp_path):
    """A session that goes on with the run, with so much in training and in evaluations; the best checkpoint's step."""

    def train(returns, evaluations=(), **checkpoint):
        settings = {"interval": 1, "keep_last": 1, **checkpoint}
        session = FakeSession(eval={"interval": 1 if evaluations else 0}, checkpoint=settings)
        found = find_checkpoint(tmp_path / "checkpoints") if (tmp_path / "checkpoints").exists() else None
        if found is not None:
            session.remembered, session.iteration = found.state, found.state["iteration"]
            session.global_step = 128 * session.iteration
        recorder = Recorder(session, RunDirectory(tmp_path, quiet=True), 0.0, found)
        for number, value in enumerate(returns):
            record = session.advance(value)
            if evaluations:
                table = np.array([[evaluations[number], 5.0, 0.0, np.nan]])
                record |= recorder.evaluated(table, lambda: pytest.fail("no video is wanted"))
            recorder.log(record)
            recorder.save_checkpoint()
        summary = recorder.finish(FINISHED).summary
        recorder.close()
        return summary["best_checkpoint"]

    return train


def there(path):
    return {step_of(each) for each in checkpoints_in(path / "checkpoints")}


def test_the_best_evaluation_stays_where_evaluations_are_left_off(session_of, tmp_path):
    assert session_of([500.0] * 3, [5.0, 9.0, 7.0]) == 2 * 128
    assert session_of([500.0, 900.0]) == 2 * 128
    assert there(tmp_path) == {2 * 128, 5 * 128}
    assert session_of([1.0], [8.0]) == 2 * 128
    assert session_of([1.0], [10.0]) == 7 * 128
    assert there(tmp_path) == {7 * 128}


def test_an_evaluation_counts_more_than_returns_before_there_was_any(session_of, tmp_path):
    assert session_of([500.0, 400.0]) == 128
    assert session_of([500.0, 500.0], [5.0, 4.0]) == 3 * 128
    assert there(tmp_path) == {3 * 128, 4 * 128}


def test_one_that_was_evaluated_as_a_session_ended_counts_more_than_returns(session_of):
    assert session_of([500.0], [5.0], interval=0, keep_best=False) == 128
    assert session_of([900.0], keep_last=5) == 128
