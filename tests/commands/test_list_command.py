"""``lockstep list`` and what it reads of real runs, through the command line."""

import json
import re
import shutil
import sys
import time

import pytest
from command_line import CARTPOLE, copy_of, resume
from made_runs import make_run, summary_of

from lockstep.cli import main
from lockstep.commands.list import COLUMNS
from lockstep.runs.progress import UNKNOWN
from lockstep.runs.shown.numerals import format_size

EVALUATED = (*CARTPOLE, "--eval.interval", 2, "--eval.episodes", 2)


def printed(capsys, *words):
    assert main(["list", *map(str, words)]) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def stopped(trained):
    return trained(*EVALUATED, "--stop-at-step", 640)


def test_a_run_is_a_row_and_its_facts_survive_a_resume(stopped, capsys, tmp_path):
    path = copy_of(stopped, tmp_path / "runs" / "again")
    before = stopped.summary
    assert before["command"][:3] == ["lockstep", "train", "CartPole-v1"]
    state = json.loads((path / "checkpoints" / f"step_{before['global_step']}" / "state.json").read_text())
    assert state["started"] == before["started"]
    rows = [row for row in stopped.metrics if "eval/return_mean" in row]
    best = max(rows, key=lambda row: (row["eval/return_mean"], row["global_step"]))
    assert before["best_evaluation"] == {"step": best["global_step"], "return_mean": best["eval/return_mean"]}
    assert before["last_evaluation"]["step"] == rows[-1]["global_step"]
    resumed = resume(path)
    after = resumed.summary
    assert (after["status"], after["started"]) == ("finished", before["started"])
    assert after["command"] == ["lockstep", "train", "--resume", str(path)]
    assert after["best_evaluation"]["return_mean"] >= before["best_evaluation"]["return_mean"]
    assert after["best_checkpoint"] in {int(p.name[5:]) for p in (path / "checkpoints").iterdir()}
    (row,) = json.loads(printed(capsys, path.parent, "--json"))
    assert {name: row[name] for name in ("name", "environment", "seed", "seeds", "status", "started", "ranks")} == {
        "name": "again",
        "environment": "CartPole-v1",
        "seed": 0,
        "seeds": 1,
        "status": "finished",
        "started": before["started"],
        "ranks": 1,
    }
    assert (row["steps"], row["return"]) == (1024, after["final_return"])
    assert row["size"] == sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_a_run_is_found_by_its_name(stopped, capsys, tmp_path, monkeypatch):
    copy_of(stopped, tmp_path / "runs" / "one")
    copy_of(stopped, tmp_path / "runs" / "two")
    monkeypatch.chdir(tmp_path)
    assert [row["name"] for row in json.loads(printed(capsys, "two", "--json"))] == ["two"]


def test_the_table_has_a_line_a_run(stopped, capsys, tmp_path, monkeypatch):
    runs = tmp_path / "runs"
    copy_of(stopped, runs / "[bold]a")
    broken = copy_of(stopped, runs / "b")
    (broken / "config.json").write_text("{")
    shutil.rmtree(broken / "checkpoints")
    (runs / "foreign").mkdir()
    monkeypatch.chdir(tmp_path)
    heading, first, second, problem = printed(capsys, "--sort", "name").splitlines()
    assert heading.split() == ["name", "environment", "seed", "steps", "status", "return", "ranks", "started", "size"]
    assert first.startswith("[bold]a  CartPole-v1")
    assert "  640  stopped at step  " in first
    assert second.startswith("b ")
    assert " damaged " in second
    assert problem.startswith("runs/b/config.json is damaged: ")
    assert "runs/b " in printed(capsys, "runs", "runs/b")


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (140, ["name", "environment", "seed", "steps", "status", "return", "ranks", "started", "size"]),
        (100, ["name", "environment", "seed", "steps", "status", "return"]),
        (80, ["name", "seed", "steps", "status", "return"]),
        (66, ["name", "steps", "status", "return"]),
        (30, ["name", "steps", "status", "return"]),
    ],
)
def test_a_narrow_terminal_shows_whole_names_and_fewer_columns(stopped, capsys, tmp_path, monkeypatch, width, columns):
    name = "CartPole-v1-seed0-20260131-120000"
    path = copy_of(stopped, tmp_path / "runs" / name)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    heading, row, *rest = re.sub(r"\x1b\[[0-9;]*m", "", printed(capsys, path.parent)).splitlines()
    assert heading.split() == columns
    assert row.startswith(f"{name}  ")
    assert len(row.rstrip()) <= max(width, 80)
    hidden = [c for c in COLUMNS if c not in columns]
    assert rest == ([f"not shown: {', '.join(hidden)}; a wider terminal or --json shows them"] if hidden else [])


def test_nothing_that_a_run_names_is_imported(stopped, capsys, tmp_path, monkeypatch):
    path = copy_of(stopped, tmp_path / "runs" / "a")
    (tmp_path / "hostile.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["env"]["id"] = "hostile:Game-v0"
    (path / "config.json").write_text(json.dumps(config))
    assert "hostile:Game-v0" in printed(capsys, path.parent)
    assert "hostile" not in sys.modules


def test_without_runs_there_is_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert printed(capsys) == "no runs in runs; lockstep train ENVIRONMENT makes one\n"
    assert json.loads(printed(capsys, "--json")) == []
    assert main(["list", "elsewhere"]) == 2
    assert capsys.readouterr().err == "lockstep: error: list: elsewhere is no directory, and no run in runs\n"
    assert printed(capsys, "--runs-dir", "mine") == "no runs in mine; lockstep train ENVIRONMENT makes one\n"
    assert main(["list", "a", "--runs-dir", "mine"]) == 2
    assert capsys.readouterr().err == "lockstep: error: list: a is no directory, and no run in mine\n"
    assert main(["list", "--sort", "luck"]) == 2
    assert "luck" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("zone", "started"),
    [("America/New_York", "0001-01-01T00:00:00+00:00"), ("Asia/Tokyo", "9999-12-31T23:00:00+00:00")],
)
def test_a_date_at_the_edge_of_the_calendar_hides_no_run(capsys, tmp_path, monkeypatch, zone, started):
    for name, date in (("odd", started), ("usual", "2026-01-31T03:00:00+00:00")):
        make_run(tmp_path / name, summary_of(started=date))
    try:
        with monkeypatch.context() as patched:
            patched.setenv("TZ", zone)
            time.tzset()
            rows = [line.split() for line in printed(capsys, tmp_path).splitlines()]
    finally:
        time.tzset()
    dates = {row[0]: row[row.index("2") + 1] for row in rows[1:]}
    assert dates == {"odd": UNKNOWN, "usual": "2026-01-30" if zone == "America/New_York" else "2026-01-31"}


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_960, "1.0 MB"), (12_345_678, "12.3 MB")]
)
def test_sizes(size, words):
    assert format_size(size) == words
