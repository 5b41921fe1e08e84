"""Files of ``lockstep eval --json`` that hold something else than it writes: each is one line."""

import json

import numpy as np
import pytest

from lockstep.cli import main
from lockstep.policies.results import edges_of, is_evaluation, read_json

HUGE = 10**400
GOOD = {"environment": "E-v0", "per_episode": {"return": [1.5, 2.0, None], "length": [3, 4, 5]}}


def written(path, facts):
    path.write_text(json.dumps(facts))
    return path


def with_columns(**columns):
    return GOOD | {"per_episode": GOOD["per_episode"] | columns}


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (with_columns(**{"return": [HUGE, 1, 2]}), "int too large to convert to float"),
        (with_columns(length=[HUGE, 1, 2]), "int too large to convert to float"),
        ({"per_episode": GOOD["per_episode"]}, "it names no environment"),
        (GOOD | {"environment": ["E-v0"]}, "it names no environment"),
        (GOOD | {"per_episode": {"return": [1, 2]}}, "no lists of return and length"),
        (with_columns(**{"return": ["1", 2, 3]}), "a return is no number"),
        (with_columns(score=5), "no lists"),
        (with_columns(success=[[], None, True]), "a success is no number"),
        (with_columns(length=[3, None, 5]), "a length is no number of steps"),
        (with_columns(length=[3, -1, 5]), "a length is no number of steps"),
        (with_columns(length=[3, float("inf"), 5]), "a length is no number of steps"),
        (with_columns(length=[3, 2**60, 5]), "a length is no number of steps"),
        (with_columns(length=[3, 4]), "lists of different lengths"),
        (with_columns(**{"return": [], "length": []}), "no episodes"),
        (GOOD | {"per_episode": {"return": {}, "length": {}}}, "no lists"),
        ([GOOD], "it has no per_episode"),
    ],
)
def test_what_is_no_evaluation_is_refused_in_one_line(facts, why, tmp_path, capsys):
    good, bad = written(tmp_path / "good.json", with_columns(**{"return": [1, 2, 3]})), tmp_path / "bad.json"
    written(bad, facts)
    assert not is_evaluation(bad)
    for words in ((good, bad), (bad, good)):
        assert main(["compare", *map(str, words)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"lockstep: error: {bad} is no evaluation (lockstep eval RUN --json {bad}): ")
        assert why in line


def test_what_an_evaluation_may_lack_is_not_known(tmp_path):
    facts, table = read_json(written(tmp_path / "a.json", GOOD))
    assert facts == {"environment": "E-v0"}
    assert np.isnan(table[:, [0, 3]]).tolist() == [[False, True], [False, True], [True, True]]
    assert table[:, 1:3].tolist() == [[3, 0], [4, 0], [5, 0]]


@pytest.mark.parametrize("value", [1.7e308, -1e299, float("inf")])
def test_a_return_whose_square_is_no_number_is_not_compared(value, tmp_path, capsys):
    files = [written(tmp_path / f"{n}.json", with_columns(**{"return": [1, 2, x]})) for n, x in enumerate((3, value))]
    assert main(["compare", *map(str, files)]) == 2
    assert capsys.readouterr().err == "lockstep: error: compare: a return of 1 is no finite number\n"


@pytest.mark.parametrize("odd", [5, [1], None, "text"])
def test_facts_that_are_no_tables_are_left_out(odd, tmp_path, capsys):
    facts = with_columns(**{"return": [1, 2, 3]})
    files = [written(tmp_path / "a.json", facts | {"env_settings": {"frame_skip": 2}})]
    files.append(written(tmp_path / "b.json", facts | {"env_settings": odd, "max_steps": odd, "global_step": odd}))
    assert main(["compare", *map(str, files)]) == 0
    assert "b against a: mean return +0.00" in capsys.readouterr().out


@pytest.mark.parametrize("values", [[1e17], [1e17, 1e17 + 16], [-1e140, 1e140], [2.0**60, 2.0**60 + 512]])
def test_large_returns_have_bins(values):
    edges = edges_of(np.array(values))
    assert len(edges) > 2
    assert (np.diff(edges) >= 0).all()
    assert edges[0] <= min(values) <= max(values) <= edges[-1]
    assert edges[0] < edges[-1]
