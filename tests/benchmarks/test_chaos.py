"""The chaos driver: what it draws, what it notices, and that nothing breaks where it strikes."""

import dataclasses
import json
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from variants import variants

from benchmarks.chaos import __main__ as chaos
from benchmarks.chaos.campaign import Campaign, differences, newest_checkpoint
from benchmarks.chaos.plan import CASES, KINDS, drawn, world_of
from benchmarks.chaos.report import faults_table, totals

ROOT = Path(__file__).parents[2]


def test_a_seed_draws_the_same_faults_again_and_another_seed_others():
    def draw(seed):
        source = random.Random(seed)
        return [drawn(source, CASES[1], True) for _ in range(50)]

    assert draw(1) == draw(1) != draw(2)


def test_every_kind_is_drawn_where_it_can_be():
    source = random.Random(0)
    found = {
        case.name: Counter((f.kind, f.target) for f in (drawn(source, case, True) for _ in range(400)))
        for case in CASES
    }
    for case in CASES:
        assert set(found[case.name]) == {kind for kind in KINDS if case.workers or kind[1] != "worker"}
    without_disk = {drawn(source, CASES[0], False).kind for _ in range(400)}
    assert "disk" not in without_disk


def test_a_server_is_struck_where_there_is_one():
    source = random.Random(0)
    for case in CASES:
        faults = [fault for _ in range(300) if (fault := drawn(source, case, True)).target == "server"]
        assert faults
        worlds = {world_of(source, case, fault) for fault in faults}
        assert all(words[0] == "--nproc" and words[1] != "1" for words in worlds)


def test_no_server_is_struck_where_there_is_none():
    source, alone = random.Random(0), dataclasses.replace(CASES[0], worlds=(("--nproc", "1"),))
    faults = [drawn(source, alone, True) for _ in range(300)]
    assert {fault.target for fault in faults} == {"rank", "launcher", "everything", "disk"}
    assert {world_of(source, alone, fault) for fault in faults} == {("--nproc", "1")}


@pytest.fixture
def finished(tmp_path):
    """A finished run directory, what it must hold, and an empty directory for temporary files."""
    run, temporary = tmp_path / "run", tmp_path / "tmp"
    (run / "checkpoints" / "step_256").mkdir(parents=True)
    temporary.mkdir()
    (run / "summary.json").write_text(json.dumps({"params_sha256": "a" * 64, "state_sha256": "b" * 64}))
    rows = [{"iteration": n, "loss": 0.5 / n, "time/fps": 1.0} for n in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]
    reference = {"params_sha256": "a" * 64, "state_sha256": "b" * 64, "rows": expected}
    return run, (reference, {path.name for path in run.iterdir()}), temporary


def test_a_run_that_is_as_if_nothing_had_been(finished):
    assert differences(*finished) == []
    assert newest_checkpoint(finished[0]) == 256


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda run, _: (run / "metrics.jsonl").write_text('{"iteration": 1, "loss": 0.5}\n'), "1 rows instead of 2"),
        (
            lambda run, _: (run / "metrics.jsonl").write_text(
                '{"iteration": 1, "loss": 0.5}\n{"iteration": 2, "loss": 0.3}\n'
            ),
            "1 rows differ, the first is number 2",
        ),
        (
            lambda run, _: (run / "summary.json").write_text(
                json.dumps({"params_sha256": "a" * 64, "state_sha256": "c" * 64})
            ),
            "state_sha256: cccccccccccccccc… instead of bbbbbbbbbbbbbbbb…",
        ),
        (lambda run, _: (run / ".lock").touch(), "left in the run directory: .lock"),
        (lambda run, _: (run / "checkpoints" / ".step_3.9.tmp").mkdir(), "left among the checkpoints: .step_3.9.tmp"),
        (lambda _, temporary: (temporary / "lockstep-x").mkdir(), "left in TMPDIR: lockstep-x"),
    ],
)
def test_what_is_lost_changed_or_left_is_said(finished, damage, said):
    damage(finished[0], finished[2])
    assert differences(*finished) == [said]


def test_the_table_counts_by_fault_and_engine():
    faults = [
        {"fault": "rank killed", "moment": "commit", "iteration": 9, "seconds": s, "iterations_lost": n, "code": 1}
        for s, n in ((0.5, 1), (0.7, 4), (0.6, 2))
    ]
    campaigns = [Campaign("torch, workers", 1, faults), Campaign("jax", 2, faults[:1], ["left in TMPDIR: x"])]
    table = faults_table(campaigns)
    assert "| rank killed | torch | 3 | 0.60 s (0.70 s) | 2 (4) |" in table
    assert "| rank killed | jax | 1 | 0.50 s (0.50 s) | 1 (1) |" in table
    assert totals(campaigns) == "4 faults over 2 runs, 1 broken promises"


def test_bad_arguments_are_refused(capsys):
    for words, said in ((["--kills", "0"], "--kills: 0 is below 1"), (["--cases", "tpu"], "'tpu' is no case")):
        with pytest.raises(SystemExit):
            chaos.read_arguments(words)
        assert said in capsys.readouterr().err


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("faults", "iterations", "seed"), variants([(1, 30, 18), (10, 250, 11)], [(1, 30, 18)]))
def test_some_faults_break_nothing(monkeypatch, tmp_path, capsys, faults, iterations, seed):
    cases = [dataclasses.replace(case, iterations=iterations, eval_interval=iterations // 5) for case in CASES]
    monkeypatch.setattr(chaos, "CASES", cases)
    words = ["--kills", str(faults), "--each", str(faults), "--seed", str(seed), "--cases", "torch-workers"]
    assert chaos.main([*words, "--out", str(tmp_path / "chaos.json")]) == 0, capsys.readouterr().out
    kept = json.loads((tmp_path / "chaos.json").read_text())
    assert sum(len(campaign["faults"]) for campaign in kept["campaigns"]) == faults
    assert {"date", "commit", "versions", "machine", "seed"} <= set(kept)


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_nor_do_a_hundred_of_both_engines(capsys):
    assert chaos.main(["--kills", "100", "--seed", "12"]) == 0, capsys.readouterr().out


def test_several_runs_at_a_time_are_as_many_faults(monkeypatch, tmp_path):
    def attack(case, seed, kills, place, reference, with_disk):
        time.sleep(0.001 * (seed % 3))
        return Campaign(case.name, seed, [{"fault": "x"}] * min(kills, 1 + seed % 4))

    monkeypatch.setattr(chaos, "attack", attack)
    arguments = chaos.read_arguments(["--kills", "50", "--jobs", "3"])
    campaigns = chaos.attack_all(arguments, tmp_path, {case.name: ({}, set()) for case in CASES}, False)
    assert sum(len(campaign.faults) for campaign in campaigns) == 50
    assert [campaign.seed for campaign in campaigns] == list(range(len(campaigns)))


def test_the_documentation_shows_what_was_kept():
    kept = json.loads((ROOT / "benchmarks" / "results" / "chaos.json").read_text())
    campaigns = [Campaign(**campaign) for campaign in kept["campaigns"]]
    page = (ROOT / "docs" / "reliability.md").read_text()
    assert faults_table(campaigns) in page
    assert totals(campaigns) in page
    assert kept["date"] in page
    assert kept["commit"] in page
