"""Options that would say nothing of what a command is given are refused, or warned of, in a line."""

import json

import pytest
from command_line import CARTPOLE, EVALUATED
from made_runs import make_run

from lockstep import load_policy
from lockstep.cli import main


def said(capsys, *words, code=0):
    assert main([*map(str, words)]) == code
    return capsys.readouterr().err


@pytest.fixture
def played(capsys, tmp_path):
    """Files of five episodes each of a random policy, with seed 0."""
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        said(capsys, "eval", "CartPole-v1", "--policy", "random", "--episodes", 5, "--json", file)
    return files


@pytest.mark.parametrize("command", ["eval", "record"])
def test_a_baseline_takes_neither_a_checkpoint_nor_samples(capsys, tmp_path, command):
    words = (
        command,
        "CartPole-v1",
        "--policy",
        "random",
        *(("--out", tmp_path / "a.npz") if command != "eval" else ()),
    )
    error = said(capsys, *words, "--checkpoint", "best", code=2)
    assert "checkpoint: best is asked for, and --policy random has none" in error
    error = said(capsys, *words, "--stochastic", code=2)
    assert "stochastic: --policy random has no most likely actions; leave --stochastic out" in error


@pytest.mark.parametrize("command", ["eval", "play", "record", "export"])
def test_a_checkpoint_takes_no_other_checkpoint(trained, capsys, tmp_path, command):
    step = trained(*CARTPOLE).path / "checkpoints" / "step_384"
    more = {"play": ("--video", "a.gif"), "record": ("--out", "a.npz"), "export": ("--torch", "a.pt2")}
    words = [tmp_path / word if word.startswith("a.") else word for word in more.get(command, ())]
    error = said(capsys, command, step, *words, "--checkpoint", "best", code=2)
    assert f"checkpoint: best is asked for, and {step} is a checkpoint itself; leave one of them out" in error
    assert not any(tmp_path.iterdir())


def test_a_checkpoint_may_be_named_twice(trained):
    step = trained(*CARTPOLE).path / "checkpoints" / "step_384"
    assert load_policy(step, 384).global_step == load_policy(step, "384").global_step == 384
    with pytest.raises(ValueError, match="768 is asked for"):
        load_policy(step, 768)


@pytest.mark.parametrize("words", [("--episodes", 5), ("--seed", 0), ("--stochastic",)])
def test_evaluations_that_are_played_already_take_none_of_it(capsys, played, words):
    error = said(capsys, "compare", *played, *words, code=2)
    option = words[0][2:]
    assert f"{option}: these files are of episodes that are played already; leave {words[0]} out" in error


def test_a_checkpoint_is_not_asked_for_where_there_is_no_whole_run(trained, capsys, played):
    steps = [trained(*CARTPOLE).path / "checkpoints" / f"step_{step}" for step in (384, 768)]
    for those in (played, steps, [steps[0], played[0]]):
        error = said(capsys, "compare", *those, "--checkpoint", "best", code=2)
        assert "checkpoint: best is asked for, and none of these is a whole run" in error


def test_what_says_nothing_of_some_is_warned_of(trained, capsys, played):
    run, file = trained(*CARTPOLE).path, played[0]
    warning = f"without effect on {file}, whose episodes are played already"
    for words in (("--episodes", 5), ("--seed", 0), ()):
        assert said(capsys, "compare", run, file, *words) == ""  # it is as asked, or nothing was
    error = said(capsys, "compare", run, file, "--episodes", 4, "--seed", 1)
    assert error == f"lockstep: warning: --episodes, --seed: {warning}\n"
    step = run / "checkpoints" / "step_384"
    error = said(capsys, "compare", step, run, "--episodes", 2, "--checkpoint", "best")
    assert error == f"lockstep: warning: --checkpoint: without effect on {step}, which is a checkpoint itself\n"


def test_a_checkpoint_that_was_chosen_by_the_episodes_that_it_plays_is_warned_of(trained, capsys):
    """They are those of the run's evaluations: the same returns again."""
    run, other = trained(*EVALUATED), trained(*CARTPOLE)
    warning = "checkpoint: best was chosen by episodes of seed 0, so their mean flatters it; --seed N plays others\n"
    words = ("--checkpoint", "best", "--episodes", 16)
    assert said(capsys, "eval", run.path, *words, "--json") == f"lockstep: warning: {warning}"
    assert main(["eval", str(run.path), *map(str, words), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["return_mean"] == run.summary["best_evaluation"]["return_mean"]
    assert said(capsys, "compare", run.path, other.path, *words) == f"lockstep: warning: {run.path}: {warning}"
    for more in (("--seed", 1), ("--stochastic",)):
        assert said(capsys, "eval", run.path, *words, *more) == ""
    assert said(capsys, "eval", run.path, "--episodes", 2) == said(capsys, "eval", other.path, *words) == ""


def test_a_run_that_starts_otherwise_than_a_file_is_told_apart(trained, capsys, played):
    run = trained(*CARTPOLE).path
    assert main(["compare", str(run), str(played[0]), "--episodes", "5", "--seed", "3"]) == 0
    assert f"other starts of episodes: seed 3 ({run.name}), 0 (a)" in capsys.readouterr().out
    assert main(["compare", str(run), str(played[0]), "--episodes", "5"]) == 0
    assert "other starts" not in capsys.readouterr().out


def test_places_of_a_strangers_run_are_none_of_a_baselines_nor_of_a_clones(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "account"))
    places = {
        "log": {"wandb": True, "entity": "them", "jsonl": str(tmp_path / "theirs.jsonl")},
        "checkpoint": {"mirror": "s3://theirs/runs"},
    }
    run = make_run(tmp_path / "runs" / "a", **places)
    said(capsys, "eval", run, "--policy", "random", "--episodes", 1)
    said(capsys, "record", run, "--policy", "random", "--episodes", 2, "--out", tmp_path / "a.npz")
    said(capsys, "clone", tmp_path / "a.npz", "--like", run, "--epochs", 1, "--out", tmp_path / "clone")
    assert not (tmp_path / "theirs.jsonl").exists()
