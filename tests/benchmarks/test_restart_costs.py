"""The tool that kills ranks of a run which starts them again, and says what that costs."""

import json

import pytest
from command_line import NEEDS_PROC

from benchmarks import restart_cost, restarts

ROW = {"environment": "CartPole", "engine": "torch", "launcher": "lockstep", "kills": 3, "steps": 10, "iterations": 5}
ROW |= {"seconds_alone": 1.0, "seconds_killed": 2.0, "differs": []}
ROW |= {"recoveries": [0.5, 0.7, 2.0], "iterations_again": [0, 3, 1]}
FACTS = {"facts": {"date": "2026-01-31", "commit": "abc", "Python": "3.11"}}


def test_a_table_of_recoveries():
    text = restarts.report([ROW | FACTS, ROW | FACTS | {"differs": ["rows"], "recoveries": [], "kills": 0}])
    assert (
        "| CartPole | torch | lockstep | 3 | 0.70 s (0.50 to 2.00) | 1 (3) of 5 | nothing | 2026-01-31, abc |" in text
    )
    assert "| 0.00 s (0.00 to 0.00) | 1 (3) of 5 | rows |" in text


def test_rows_of_other_engines_are_kept(tmp_path):
    out = tmp_path / "restarts.md"
    restarts.keep([ROW | FACTS], out)
    restarts.keep([ROW | FACTS | {"engine": "jax"}], out)
    restarts.keep([ROW | FACTS | {"kills": 7}], out)
    rows = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert [(row["engine"], row["kills"]) for row in rows] == [("jax", 3), ("torch", 7)]
    assert out.read_text().count("| CartPole |") == 2


def test_the_cost_is_the_median_of_the_pairs_and_stays_beside_the_rows(tmp_path):
    out = tmp_path / "restarts.md"
    restarts.keep([ROW | FACTS], out)
    rates = {"without": [100, 200, 100], "with": [99, 190, 50]}
    restarts.keep([], out, {"rates": rates, "facts": {**FACTS["facts"], "load average": "0.1"}})
    restarts.keep([ROW | FACTS | {"engine": "jax"}], out)
    assert restart_cost.slower(rates) == pytest.approx(0.05)
    assert "5.0 % slower" in out.read_text()
    assert json.loads(out.with_suffix(".json").read_text())["cost"]["rates"] == rates


@pytest.mark.parametrize("words", [["--cost", "2"], ["--env", "CartPole", "--engine", "torch"]])
def test_the_load_is_that_of_before_the_measurement(monkeypatch, tmp_path, words):
    load = [0.5]

    def busy(value):
        load[0] = 9.0
        return value

    monkeypatch.setattr(restarts.os, "getloadavg", lambda: (load[0],) * 3)
    monkeypatch.setattr(restarts, "measure", lambda *_: busy(ROW))
    monkeypatch.setattr(restart_cost, "cost", lambda _: busy({"without": [100], "with": [99]}))
    out = tmp_path / "restarts.md"
    assert restarts.main([*words, "--out", str(out)]) == 0
    kept = json.loads(out.with_suffix(".json").read_text())
    (facts,) = [found["facts"] for found in (kept["rows"] or [kept["cost"]])]
    assert (facts["load average"], load) == ("0.5", [9.0])


def test_what_is_timed_differs_in_restarts_alone():
    plain, ready = restart_cost.programs()
    assert ready.command == (*plain.command, "--max-restarts", "1")
    assert ready.config == plain.config


@NEEDS_PROC
@pytest.mark.long
@pytest.mark.parametrize("launcher", [[], ["--torchrun"]], ids=["lockstep", "torchrun"])
def test_two_kills_change_nothing(tmp_path, launcher):
    out = tmp_path / "restarts.md"
    words = ["--kills", "2", "--every", "1", "--engine", "torch", "--env", "CartPole", "--steps", "80000"]
    assert restarts.main([*words, "--out", str(out), *launcher]) == 0
    (row,) = json.loads(out.with_suffix(".json").read_text())["rows"]
    assert row["differs"] == []
    assert row["kills"] == len(row["recoveries"]) == len(row["iterations_again"]) == 2
    assert min(row["recoveries"]) > 0
