"""The fuzzer of configs: what it draws, that it draws everything, and that it notices what depends on more."""

import dataclasses
import json
import os
import random
import warnings

import pytest
from variants import variants

from benchmarks.chaos.campaign import Campaign
from benchmarks.commit import ROOT
from benchmarks.fuzz import __main__ as fuzz
from benchmarks.fuzz import trial as trial_of
from benchmarks.fuzz.draw import drawn_config
from benchmarks.fuzz.environment import OBSERVATIONS, Drawn
from benchmarks.fuzz.environments import FOR_JAX, FOR_TORCH, drawn_environment
from benchmarks.fuzz.options import FITTED, NOT_DRAWN, OF_A_SESSION, OPTIONS
from benchmarks.fuzz.trial import DrawnCase, Trial, held_to_it, tried
from lockstep.config.checks import resolve
from lockstep.config.command_line import read_request
from lockstep.config.files import nested
from lockstep.config.keys import leaves
from lockstep.config.run import Config

MANY = 600


@pytest.fixture(scope="module")
def drawn():
    """Many configs of both engines, untrained."""
    return [drawn_config(seed, engine) for engine in ("torch", "jax") for seed in range(MANY)]


def test_a_seed_draws_the_same_config_again_and_another_seed_another():
    assert drawn_config(3, "torch") == drawn_config(3, "torch")
    assert drawn_config(3, "torch") != drawn_config(4, "torch") != drawn_config(4, "jax")


def test_every_setting_is_drawn_or_there_is_a_reason_why_not(drawn):
    settings = {leaf.path for leaf in leaves(Config)}
    tables = (set(OPTIONS), set(OF_A_SESSION), set(FITTED), set(NOT_DRAWN))
    assert set().union(*tables) == settings, "put a new setting into benchmarks/fuzz/options.py"
    assert sum(map(len, tables)) == len(settings), "a setting stands in two tables"
    found = {name for one in drawn for name in one.values}
    assert found == set(OPTIONS) | set(FITTED)
    words = {word for one in drawn for words in one.sessions for word in words if "." in word or "coll" in word}
    assert {word[2:].replace("-", "_") for word in words if word.startswith("--")} == set(OF_A_SESSION)


def test_every_value_of_a_setting_is_drawn(drawn):
    for name, draw in OPTIONS.items():
        found = [one.values[name] for one in drawn if name in one.values]
        assert all(value in found for value in draw.values), name


def test_every_environment_of_its_engine_is_drawn(drawn):
    ids = {one.engine: {d.values["env.id"] for d in drawn if d.engine == one.engine} for one in drawn}
    assert {"ALE/Breakout-v5", "benchmarks.fuzz.environment:Drawn-v0", "BipedalWalker-v3"} <= ids["torch"]
    assert "benchmarks.fuzz.functional:Drawn" in ids["jax"] - ids["torch"]
    assert set(FOR_TORCH) - set(FOR_JAX) == {"tensor", "game"}


def test_what_is_drawn_fits_together_on_all_ranks_that_a_session_has(drawn, tmp_path):
    file = tmp_path / "config.json"
    for one in drawn[::7]:
        file.write_text(json.dumps(one.config))
        assert one.iterations == -(-one.values["total_steps"] // one.steps)
        for words in one.sessions:
            request = read_request(["--config", str(file), *words])
            ranks = int(words[3 if words[2] == "--devices" else 1])
            assert resolve(request.config_over({}), ranks).shards >= ranks


def test_of_fast_the_ranks_stay_the_same_and_of_exact_they_change(drawn):
    for one in drawn:
        ranks = {words[1] for words in one.sessions if words[0] == "--nproc" or one.engine == "jax"}
        fast = one.values.get("reduction") == "fast"
        assert not fast or len(ranks) == 1
        assert not (fast and any("--collectives" in words for words in one.sessions))
    assert any(len({words[:2] for words in one.sessions}) > 3 for one in drawn)


def test_processes_of_engine_jax_never_go_on_with_memory_that_one_process_shared(drawn):
    spread = [words for one in drawn if one.engine == "jax" for words in one.sessions if words[0] == "--nproc"]
    exact = [words for words in spread if "--collectives" in words]
    assert exact
    assert all(words[words.index("--collectives") + 1] == "backend" for words in exact)
    for one in drawn:
        if one.engine == "jax" and any("shared" in words for words in one.sessions):
            assert all("--collectives" in words for words in one.sessions if words[0] == "--nproc")


def test_a_trial_in_a_line_and_all_in_a_sentence():
    config = nested({"env.id": "CartPole-v1"})
    two, one = ("--nproc", "2"), ("--nproc", "1", "--collectives", "shared")
    good = Trial("torch", 1, config, one, two, sessions=4, faults=[{}, {}], seconds=9.0)
    bad = dataclasses.replace(good, seed=2, problems=["alone: x", "through faults: y"])
    refused = dataclasses.replace(good, seed=3, sessions=1, faults=[], refused="lockstep: seed: 1")
    assert good.name == "torch 1, CartPole-v1"
    assert fuzz.verdict(good) == "4 sessions, 2 faults, 9.0 s: the same"
    assert fuzz.verdict(bad) == f"alone: x; through faults: y\n    config: {json.dumps(config)}"
    assert fuzz.verdict(refused) == "refused: lockstep: seed: 1"
    same, calm = dataclasses.replace(good, other_words=one[:2]), dataclasses.replace(good, faults=[])
    assert [trial.changes_ranks for trial in (good, same, dataclasses.replace(good, other_words=()))] == [
        True,
        False,
        False,
    ]
    said = (
        "4 configs (1 more were refused), of which 3 were trained on another number of ranks or devices and 3 met "
        "faults, 17 sessions, 6 faults: 1 configs whose runs differed"
    )
    assert fuzz.totals([good, bad, same, calm, dataclasses.replace(refused, other_words=())]) == said


def test_what_shows_nothing_is_no_success(monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # put back afterwards
    good = Trial("torch", 1, {"env": {"id": "x"}})
    bad, refused = dataclasses.replace(good, problems=["x"]), dataclasses.replace(good, refused="lockstep: error: x")
    for trials, code, said in (
        ([good, refused], 0, ""),
        ([good, refused, bad, refused, refused], 1, "fuzz: 3 of 5 configs were refused\n"),
        ([good, refused, refused], 2, "fuzz: 2 of 3 configs were refused\n"),
        ([refused], 2, "fuzz: no config was trained, 1 were refused\n"),
        ([], 2, "fuzz: no config was trained, 0 were refused\n"),
    ):
        monkeypatch.setattr(fuzz, "_all", lambda *_, trials=trials: iter(trials))
        assert fuzz.main([]) == code
        assert capsys.readouterr().err == said


def test_a_run_that_is_over_before_its_first_fault_is_attacked_again(monkeypatch, tmp_path):
    drawn, seeds = drawn_config(1, "torch"), []
    case = DrawnCase("x", (), drawn.iterations, 0, drawn.sessions, False, tmp_path / "config.json", drawn.steps)

    def attack(case, seed, kills, place, reference, with_disk):
        seeds.append(seed)
        return Campaign(case.name, seed, [{"fault": "x"}] * kills if len(seeds) == faulty else [])

    monkeypatch.setattr(trial_of, "attack", attack)
    for faulty, tries in ((1, 1), (3, 3), (9, trial_of.MOST_ATTACKS)):
        seeds.clear()
        root = tmp_path / str(faulty)
        root.mkdir()
        trial = Trial("torch", 7, drawn.config)
        campaign = trial_of.attacked(trial, case, 2, ({}, set()), root)
        assert seeds == [f"7.{number}" for number in range(tries)]
        assert len(campaign.faults) == (2 if faulty == tries else 0)
        assert trial.sessions == tries + len(campaign.faults)


def test_engines_take_turns_unless_one_is_wanted():
    assert [fuzz.engine_of("both", n) for n in range(8)] == ["torch", "torch", "torch", "jax"] * 2
    assert {fuzz.engine_of("jax", n) for n in range(8)} == {"jax"}


def test_bad_arguments_are_refused(capsys):
    with pytest.raises(SystemExit):
        fuzz.read_arguments(["--configs", "0"])
    assert "--configs: 0 is below 1" in capsys.readouterr().err


def test_configs_are_shown_without_being_trained(capsys):
    assert fuzz.main(["--configs", "4", "--seed", "5", "--show"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["torch 5", "torch 6", "torch 7", "jax 8"]
    assert json.loads(lines[3].partition(": ")[2]) == json.loads(json.dumps(drawn_config(8, "jax").config))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("engine", "seed"), variants([("torch", 1), ("torch", 2), ("jax", 1)], [("torch", 1)]))
@pytest.mark.usefixtures("importable")
def test_a_drawn_config_keeps_its_promise(tmp_path, engine, seed):
    trial = tried(engine, seed, tmp_path / "trial")
    assert (trial.problems, trial.refused) == ([], None)
    assert trial.sessions >= 3
    assert trial.faults
    assert trial.reference_words
    assert trial.other_words


@pytest.fixture
def importable(monkeypatch):
    """Lets commands import the drawn environments, as the driver's own command does."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "src"))))


OWN = {"env.id": "benchmarks.fuzz.environment:Drawn-v0", "num_envs": 4, "num_shards": 2, "num_steps": 8}


def _changed(values):
    drawn = drawn_config(1, "torch")
    sessions = (("--nproc", "1"), ("--nproc", "2"))
    values = {**OWN, "total_steps": 128, "ppo.num_minibatches": 1, **values}
    return dataclasses.replace(drawn, values=values, iterations=4, steps=32, sessions=sessions)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("importable")
def test_a_run_that_depends_on_more_than_its_config_is_noticed(tmp_path):
    trial = held_to_it(_changed({"env.kwargs": {"reads_clock": True}}), 1, tmp_path / "trial")
    assert any(problem.startswith("--nproc 2: params_sha256: ") for problem in trial.problems)
    assert trial.refused is None


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("importable")
def test_a_config_that_is_none_is_refused_and_breaks_no_promise(tmp_path):
    trial = held_to_it(_changed({"normalize.clip_rewards": 1.0, "env.backend": "tensor"}), 1, tmp_path / "trial")
    assert trial.refused is not None
    assert trial.refused.startswith("lockstep: ")
    assert (trial.problems, trial.sessions) == ([], 1)


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_what_an_environment_shows_lies_in_its_space(name):
    env = Drawn(observation=name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shown, _ = env.reset(seed=1)
        for _ in range(5):
            assert env.observation_space.contains(shown)
            shown, *_ = env.step(1)


def test_environments_come_of_a_seed():
    first, second = (drawn_environment(random.Random(4), "torch") for _ in range(2))
    assert first == second
