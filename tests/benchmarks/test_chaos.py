"""The chaos driver: what it draws, what it notices, and that nothing breaks where it strikes."""

import dataclasses
import json
import random
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import NEEDS_PROC
from variants import variants

from benchmarks.chaos import __main__ as chaos
from benchmarks.chaos.campaign import Campaign, met
from benchmarks.chaos.plan import CASES, KINDS, Fault, drawn, world_of
from benchmarks.chaos.report import aims, faults_table, in_words, missed, totals
from benchmarks.chaos.session import Told

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


@pytest.mark.parametrize("moment", ["start-up", "commit"])
def test_a_session_that_trains_has_no_start_up_any_more(moment):
    source = random.Random(0)
    faults = [drawn(source, CASES[0], True, begun=True) for _ in range(400)]
    assert any(fault.moment == moment for fault in faults) == (moment != "start-up")


def aimed(*struck, moment="commit"):
    """A campaign of faults at a moment that struck or not."""
    return Campaign("torch", 1, [{"moment": moment, "struck": one} for one in struck])


def test_the_share_of_faults_that_struck_is_said_and_none_of_many_is_a_failure():
    counts = aims([aimed(*[False] * 19, True), aimed(None, True, moment="evaluation"), aimed(None, moment="training")])
    assert counts == {
        "commit": {"aimed": 20, "told": 20, "struck": 1},
        "evaluation": {"aimed": 2, "told": 1, "struck": 1},
    }
    assert "aimed at a commit: 20 faults, 1 of the 20 that can be told struck it" in in_words(counts)
    assert missed(counts) is None
    assert missed(aims([aimed(*[False] * 19)])) is None
    assert missed(aims([aimed(*[False] * 20)])) == "none of 20 faults aimed at a commit struck one"


@NEEDS_PROC
def test_a_campaign_that_strikes_no_commit_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(chaos, "reference_of", lambda *_: ({}, set()))
    monkeypatch.setattr(chaos, "faults_table", lambda _: "")
    for campaign, code in ((aimed(*[False] * 21), 1), (aimed(*[False] * 20, True), 0)):
        monkeypatch.setattr(chaos, "attack_all", lambda *_, campaign=campaign: [campaign])
        assert chaos.main(["--out", str(tmp_path / "chaos.json")]) == code
        assert ("chaos: none of 21 faults" in capsys.readouterr().err) == bool(code)
        assert json.loads((tmp_path / "chaos.json").read_text())["aims"]["commit"]["struck"] == 1 - code


def test_a_fault_without_a_target_is_followed_by_another_one():
    """A worker is struck in a session that has none; the next fault is done."""
    first, second = (Fault("kill", target, "training", 1, 0.5) for target in ("worker", "rank"))
    ended, done = Told(None, 0, "", 9, 0.0), Told(second, 1, "", 3, 0.1)
    session: Any = SimpleNamespace(attacked=lambda fault: None if fault is first else done, ended=lambda: ended)
    assert met(session, first, lambda begun: second) is done
    assert met(session, first, lambda begun: None) is ended
    assert met(session, first, lambda begun: first) is ended


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
    disks = []

    def attack(case, seed, kills, place, reference, with_disk):
        disks.append((case.name, with_disk))
        time.sleep(0.001 * (seed % 3))
        return Campaign(case.name, seed, [{"fault": "x"}] * min(kills, 1 + seed % 4))

    monkeypatch.setattr(chaos, "attack", attack)
    arguments = chaos.read_arguments(["--kills", "50", "--jobs", "3"])
    campaigns = chaos.attack_all(arguments, tmp_path, {case.name: ({}, set()) for case in CASES}, True)
    assert sum(len(campaign.faults) for campaign in campaigns) == 50
    assert [campaign.seed for campaign in campaigns] == list(range(len(campaigns)))
    assert set(disks) == {(case.name, with_disk) for case in CASES for with_disk in (True, False)}


def test_the_documentation_shows_what_was_kept():
    kept = json.loads((ROOT / "benchmarks" / "results" / "chaos.json").read_text())
    campaigns = [Campaign(**campaign) for campaign in kept["campaigns"]]
    page = (ROOT / "docs" / "reliability.md").read_text()
    assert faults_table(campaigns) in page
    assert totals(campaigns) in page
    assert kept["date"] in page
    assert kept["commit"] in page
