"""Numbers that no float holds, of which JSON has no limit: a file that says one is read as one that doesn't say any."""

import json
import math

import pytest

from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.core.files import is_finite
from lockstep.runs.checkpoint import best_of, score_in
from lockstep.runs.checkpoint_writer import commit
from lockstep.runs.curves import METRIC, that_know
from lockstep.runs.groups import begin_group
from lockstep.runs.making import create_run
from lockstep.runs.plot import line_of

HUGE = 10**400


@pytest.mark.parametrize("value", [HUGE, -HUGE, math.inf, math.nan, None, "1", [1]])
def test_a_number_that_is_none_is_found(value):
    assert not is_finite(value)


@pytest.mark.parametrize("value", [0, -1.5, 2**63, 1.7e308])
def test_and_one_that_is(value):
    assert is_finite(value)


def test_a_checkpoint_with_such_a_score_is_not_the_best(tmp_path):
    commit(tmp_path, 1, {"state.json": b"{}"}, 2.0)
    commit(tmp_path, 2, {"state.json": b"{}"}, 1.0)
    file = tmp_path / "step_2" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"score": HUGE}))
    assert score_in(json.loads(file.read_text())) is None
    assert best_of(tmp_path) == tmp_path / "step_1"


def rows_of(path, *rows):
    lines = [{"iteration": number, "global_step": 10 * number, **row} for number, row in enumerate(rows, start=1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def test_rows_with_such_returns_and_times_are_drawn_without_them(tmp_path):
    assert not that_know([rows_of(tmp_path, {METRIC: HUGE})], METRIC)
    rows_of(tmp_path, {METRIC: HUGE, "time/t_iter": 1.0}, {METRIC: 2.0, "time/t_iter": HUGE}, {METRIC: 3.0})
    assert line_of(tmp_path, "a", "time", METRIC).y == [2.0, 3.0]
    assert line_of(tmp_path, "a", "time", METRIC).x == [1.0, 1.0]


@pytest.mark.parametrize("key", ["iteration", "global_step"])
def test_a_row_of_such_a_step_is_no_record(tmp_path, key):
    rows_of(tmp_path, {METRIC: 1.0, key: HUGE}, {METRIC: 1.0})
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 1 is no metrics record"):
        line_of(tmp_path, "a", "steps", METRIC)


def test_a_group_that_has_trained_for_so_long_begins_at_nothing(tmp_path):
    group = create_run(str(tmp_path), "group", resolve(Config()))
    (group.path / "group.json").write_text(json.dumps({"seeds": [0], "wall_time": HUGE}))
    assert begin_group(group, []).wall_time == 0.0
    group.unlock()
