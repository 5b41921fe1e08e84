"""``lockstep report``, ``lockstep train --report`` and ``Run.report``: where the page goes, and what is refused."""

import importlib.util
import json
import re

import pytest
from command_line import SMALL, lockstep
from made_runs import PARAMS, make_group, make_run

import lockstep as package
from lockstep.cli import main

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from lockstep.report.charts import TITLES, charts_of
from lockstep.report.reading import read_run


def refused(capsys, *words):
    assert main(["report", *map(str, words)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_runs_by_name_and_by_place_are_one_page(tmp_path, monkeypatch, capsys):
    make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "other" / "a", scale=2.0)
    make_group(tmp_path / "runs" / "many")
    monkeypatch.chdir(tmp_path)
    assert main(["report", "a"]) == 0
    assert main(["report", "a", "other/a", "runs/a", "many", "--out", "out/page.html"]) == 0
    assert capsys.readouterr().out == "a → report.html\nruns/a, other/a, many → out/page.html\n"
    assert PARAMS in (tmp_path / "report.html").read_text()
    assert "<h1>3 runs compared</h1>" in (tmp_path / "out" / "page.html").read_text()


def test_what_can_not_be_written_about_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "demo")
    assert "did you mean demo?" in refused(capsys, "demos")
    assert "page.txt must end in .html or .htm" in refused(capsys, "demo", "--out", "page.txt")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    wanted = "lockstep: error: report: needs jinja2 and matplotlib; pip install 'lockstep-rl[report]'"
    assert refused(capsys, "demo") == wanted
    assert main(["train", "CartPole-v1", "--report", "--name", "new"]) == 2
    assert capsys.readouterr().err.strip() == wanted
    assert not (tmp_path / "runs" / "new").exists()


def test_a_run_writes_its_page_at_its_end_and_lives_without(tmp_path):
    words = ("train", "CartPole-v1", *SMALL, "--runs-dir", tmp_path, "--total-steps", 256)
    done = lockstep(*words, "--report", "--name", "one", "--eval.interval", 1, cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"report:    {tmp_path / 'one' / 'report.html'}"
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    assert summary["params_sha256"] in (tmp_path / "one" / "report.html").read_text()
    assert {chart.key for chart in charts_of([read_run(tmp_path / "one", "one")])} <= TITLES.keys()  # no user's metric
    run = package.load_run(tmp_path / "one")
    assert run.report() == tmp_path / "one" / "report.html"
    assert run.report(tmp_path / "page.html").read_text().startswith("<!doctype html>")
    (tmp_path / "one" / "report.html").unlink()
    (tmp_path / "one" / "report.html").mkdir()
    (tmp_path / "one" / "report.html" / "in_the_way").touch()
    again = lockstep("train", "--resume", tmp_path / "one", "--total-steps", 512, "--report", cwd=tmp_path)
    assert again.code == 0
    assert re.search(r"^lockstep: warning: .*report.html isn't written: report: .*$", again.stderr, re.MULTILINE)
