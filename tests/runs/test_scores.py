"""By what the best checkpoint is chosen: evaluations, before returns in training."""

import pytest

from lockstep.runs.checkpoint import best_of, checkpoints_in, score_in
from lockstep.runs.checkpoint_writer import commit
from lockstep.runs.pruning import Pruner


def save(directory, step, score, **facts):
    commit(directory, step, {"state.json": b"{}"}, score, facts)


def written(interval):
    """A config in a manifest, as every version writes it."""
    return {"eval": {"interval": interval}}


def test_evaluations_count_more_than_returns_in_training_and_than_what_was_planned(tmp_path):
    save(tmp_path, 1, 2.0, evaluated=True, planned=True)
    save(tmp_path, 2, 1.0, evaluated=True, planned=True)
    save(tmp_path, 3, 9.0, evaluated=False, planned=True)
    save(tmp_path, 4, 5.0, evaluated=True, planned=False)
    assert best_of(tmp_path) == tmp_path / "step_1"
    for path in checkpoints_in(tmp_path):
        if path.name in ("step_1", "step_2"):
            (path / "manifest.json").unlink()
    assert best_of(tmp_path) == tmp_path / "step_4"


def test_the_best_evaluated_one_isnt_removed_for_returns_in_training(tmp_path):
    for step, score, evaluated in ((1, 2.0, True), (2, 1.0, True), (3, 9.0, False), (4, 5.0, False)):
        save(tmp_path, step, score, evaluated=evaluated)
    Pruner(tmp_path, keep_last=0, keep_best=True)()
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step_1"]


@pytest.mark.parametrize(("interval", "best"), [(5, 1), (0, 2)])
def test_older_ones_are_known_by_their_config(tmp_path, interval, best):
    """In a run with evaluations they have no score but an evaluation's."""
    save(tmp_path, 1, 2.0, config=written(interval))
    save(tmp_path, 2, 9.0, evaluated=False, config=written(0))
    assert best_of(tmp_path) == tmp_path / f"step_{best}"


@pytest.mark.parametrize("config", [None, 3, {}, {"eval": None}, {"eval": {}}, {"eval": {"interval": "often"}}])
def test_of_others_returns_are_taken_to_be_of_training(config):
    assert score_in({"score": 2.0, "config": config}) == (False, True, 2.0)
    assert score_in({"score": 2.0, "config": config, "evaluated": True}) == (True, True, 2.0)
