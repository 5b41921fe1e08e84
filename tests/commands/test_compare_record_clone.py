"""``lockstep compare``, ``record`` and ``clone`` through the command line, on CartPole and Snake."""

import json
import os
import pickle
import re
import shutil
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from command_line import CARTPOLE, SMALL
from commands_here import printed, refused

from lockstep import load_policy
from lockstep.cli import main
from lockstep.commands.compare import Recorded, settings_that_differ, short_names
from lockstep.envs.arrays.players.snake import greedy_actions
from lockstep.policies import cloning
from lockstep.policies.recordings import read_recording
from lockstep.runs.directory import RunDirectory

PENDULUM = ("Pendulum-v1", *SMALL, "--normalize.observations", "--stop-at-step", 256)


@pytest.fixture(scope="module")
def greedy(tmp_path_factory):
    """Greedy games on a board of 5 x 5, recorded by both kinds of file."""
    folder = tmp_path_factory.mktemp("recorded")
    config = folder / "snake.json"
    kwargs = {"id": "Snake-v0", "kwargs": {"size": 5}}
    config.write_text(json.dumps({"env": kwargs, "network": {"image": {"width": 0.5}}}))
    for suffix in ("npz", "safetensors"):
        words = ("--policy", "greedy", "--episodes", "70", "--out", str(folder / f"games.{suffix}"))
        assert main(["record", str(config), *words]) == 0
    return folder


def test_runs_are_compared_by_their_episodes(trained, capsys, tmp_path):
    run, early, found = trained(*CARTPOLE).path, tmp_path / "early.json", tmp_path / "found.json"
    printed(capsys, "eval", run, "--checkpoint", 384, "--seed", 0, "--episodes", 30, "--json", early)
    text = printed(capsys, "compare", early, run, "--episodes", 30, "--json", found)
    facts = json.loads(found.read_text())
    assert json.loads(printed(capsys, "compare", early, run, "--episodes", 30, "--json")) == facts
    facing = json.loads(printed(capsys, "compare", "--json", run, early, "--episodes", 30))
    assert [each["episodes"] for each in facing["policies"]] == [30, 30]
    assert [each["name"] for each in facts["policies"]] == ["early", run.name]
    assert facts["policies"][0]["return"]["mean"] == pytest.approx(json.loads(early.read_text())["return_mean"])
    (difference,) = facts["differences"]
    assert difference["return"]["difference_low"] > 0  # it learnt something
    assert difference["return"]["probability_of_improvement"] > 0.5
    assert f"{run.name} against early: mean return +" in text
    assert printed(capsys, "compare", early, run, "--episodes", 30).strip() + f"\n→ {found}\n" == text


def test_written_files_stand_behind_all_lines(capsys, monkeypatch, tmp_path):
    """Else they would seem to belong to the setting that is told last."""
    files = [tmp_path / f"{name}.json" for name in ("one", "two", "found")]
    for seed, file in enumerate(files[:2]):
        printed(capsys, "eval", "CartPole-v1", "--policy", "random", "--episodes", 3, "--seed", seed, "--json", file)
    monkeypatch.setattr("lockstep.commands.compare.settings_in_words", lambda _: ["gamma: 0.9 (one), 0.8 (two)"])
    text = printed(capsys, "compare", *files[:2], "--json", files[2])
    assert text.endswith(f"gamma: 0.9 (one), 0.8 (two)\n→ {files[2]}\n")


def test_an_evaluation_is_not_overwritten_by_a_comparison(capsys, tmp_path):
    files = [tmp_path / f"{name}.json" for name in ("random", "greedy", "again")]
    for file in files:
        words = ("--policy", "greedy" if file.stem == "greedy" else "random", "--episodes", 3, "--json", file)
        printed(capsys, "eval", "Snake-v0", *words)
    kept = files[0].read_text()
    for words in (["--json", *files], [*files[1:], "--json", files[0]]):
        said = refused(capsys, "compare", *words)
        assert f"json: {files[0]} is an evaluation and would be lost; to print, put --json behind the runs" in said
    assert files[0].read_text() == kept
    found = tmp_path / "found.json"
    for _ in range(2):  # a comparison takes the place of an earlier one
        printed(capsys, "compare", *files, "--json", found)
    assert len(json.loads(found.read_text())["policies"]) == 3


def test_settings_that_differ_are_said(trained, capsys):
    one, other = trained(*CARTPOLE).path, trained(*CARTPOLE, "--ppo.clip-range", 0.3, "--log.no-timing").path
    facts = json.loads(printed(capsys, "compare", one, other, "--episodes", 2, "--json"))
    called = [each["name"] for each in facts["policies"]]
    assert facts["settings"] == {"ppo.clip_range": dict(zip(called, (0.2, 0.3), strict=True))}
    text = printed(capsys, "compare", one, other, "--episodes", 2)
    assert text.splitlines()[-1] == f"ppo.clip_range: 0.2 ({called[0]}), 0.3 ({called[1]})"
    assert json.loads(printed(capsys, "compare", one, one, "--episodes", 2, "--json"))["settings"] == {}


def test_a_seed_that_ended_early_is_named(trained, capsys, tmp_path):
    run, group = trained(*CARTPOLE).path, tmp_path / "many"
    for seed in range(3):
        shutil.copytree(run, group / f"seed_{seed}")
    shutil.copy(run / "config.json", group)
    steps = sorted(int(each.name.removeprefix("step_")) for each in (run / "checkpoints").iterdir())
    for step in steps[1:]:
        shutil.rmtree(group / "seed_1" / "checkpoints" / f"step_{step}")
    text = printed(capsys, "compare", group, group, "--episodes", 2)
    said = f"other lengths of training in many: {steps[-1]:,} steps (seed_0, seed_2), {steps[0]:,} (seed_1)"
    assert text.splitlines()[-1] == said


def test_a_run_that_cuts_its_episodes_earlier_is_said_to(trained, capsys, tmp_path):
    run = trained(*CARTPOLE).path
    cut = Path(shutil.copytree(run, tmp_path / "cut"))
    for file in (cut / "config.json", *cut.glob("checkpoints/*/manifest.json")):
        facts = json.loads(file.read_text())
        facts.get("config", facts)["eval"]["max_steps"] = 5
        file.write_text(json.dumps(facts))
    text = printed(capsys, "compare", run, cut, "--episodes", 2)
    assert text.splitlines()[-1] == f"episodes are cut after 10,000 steps ({run.name}), 5 (cut)"
    early = tmp_path / "early.json"
    printed(capsys, "eval", cut, "--seed", 0, "--episodes", 2, "--json", early)
    assert f"episodes are cut after 10,000 steps ({run.name}), 5 (early)" in printed(capsys, "compare", run, early)


def test_settings_are_said_plainly_and_without_what_is_secret():
    def recorded(kwargs):
        return Recorded({"ppo": {"loss": None}, "env": {"id": "tasks:Mine-v0", "kwargs": kwargs}}, Path("none"))

    runs = {"a": recorded({"api_key": "geheim", "name": "\x9b2J"}), "b": recorded({"api_key": "other", "name": "x"})}
    found = settings_that_differ(runs)
    hidden = {"a": {"api_key": "***", "name": "\x9b2J"}, "b": {"api_key": "***", "name": "x"}}
    assert found == {"env.kwargs": hidden}


def test_a_comparison_is_drawn(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("random", "greedy"):
        words = ("--policy", name, "--episodes", 20, "--json", tmp_path / f"{name}.json")
        printed(capsys, "eval", "Snake-v0", *words)
    both = (tmp_path / "random.json", tmp_path / "greedy.json")
    assert "greedy against random: mean score +" in printed(capsys, "compare", *both, "--plot", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("runs", "names"),
    [
        (["runs/a", "b"], ["a", "b"]),
        (["many/seed_0", "fast/seed_0", "many/seed_1"], ["many/seed_0", "fast/seed_0", "seed_1"]),
        (["a", "a"], ["a", "a"]),
        (["runs/a", "a"], ["runs/a", "a"]),
        (["x/a.json", "y/a.json", "b.json"], ["x/a", "y/a", "b"]),
        (["r/a", "r/a.json"], ["a", "a.json"]),
        (["r/a.json", "b", "r/a"], ["a.json", "b", "a"]),
        (["a", "r/a.json"], ["a", "r/a"]),
    ],
)
def test_runs_of_one_name_are_told_apart(runs, names):
    assert short_names(runs) == names


def test_what_cannot_be_compared_is_refused(trained, capsys, tmp_path):
    run = trained(*CARTPOLE).path
    assert "give two or more runs or evaluations" in refused(capsys, "compare", run)
    (tmp_path / "a.json").write_text("{}")
    assert "a.json is no evaluation (lockstep eval RUN --json" in refused(capsys, "compare", tmp_path / "a.json", run)
    printed(capsys, "eval", "Snake-v0", "--policy", "random", "--episodes", 2, "--json", tmp_path / "b.json")
    assert "played in different environments" in refused(capsys, "compare", run, tmp_path / "b.json", "--episodes", 1)


def test_what_is_not_alike_is_told(capsys, tmp_path):
    for size, sampled in ((5, False), (6, True)):
        config, file = tmp_path / f"{size}.yaml", tmp_path / f"of{size}.json"
        config.write_text(json.dumps({"env": {"id": "Snake-v0", "kwargs": {"size": size}}}))
        printed(capsys, "eval", config, "--policy", "random", "--episodes", 5, "--json", file)
        facts = json.loads(file.read_text())
        assert facts["stochastic"] is None  # it has no most likely action
        file.write_text(json.dumps(facts | {"stochastic": sampled}))
    printed(capsys, "eval", "Snake-v0", "--policy", "random", "--episodes", 5, "--json", tmp_path / "of10.json")
    settings = tmp_path / "10.yaml"
    settings.write_text(json.dumps({"env": {"id": "Snake-v0", "kwargs": {"size": 10}}}))  # what it is by itself
    printed(capsys, "eval", settings, "--policy", "random", "--episodes", 5, "--json", tmp_path / "again.json")
    assert "other" not in printed(capsys, "compare", tmp_path / "of10.json", tmp_path / "again.json")
    text = printed(capsys, "compare", tmp_path / "of5.json", tmp_path / "of6.json", "--json", tmp_path / "a.json")
    settings = 'other environment settings: env.kwargs {"size": 5} (of5), {"size": 6} (of6)'
    assert settings in text
    assert "other choice of actions: most likely (of5), sampled (of6)" in text
    assert len(json.loads((tmp_path / "a.json").read_text())["unlike"]) == 2
    assert "other" not in printed(capsys, "compare", tmp_path / "of5.json", tmp_path / "of5.json")


def test_a_recording_is_what_was_seen_and_done(greedy):
    one, other = (read_recording(greedy / f"games.{suffix}") for suffix in ("npz", "safetensors"))
    for name in ("observations", "actions", "episodes", "table"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert one.facts == other.facts
    assert one.facts["policy"] == "greedy"
    assert len(one.table) == 70
    assert np.bincount(one.episodes).tolist() == one.table[:, 1].tolist()
    images = one.observations[:, :75].reshape(-1, 5, 5, 3)
    first = np.r_[0, np.flatnonzero(np.diff(one.episodes)) + 1]
    assert (images[first, 2, 2, 0] == 255).all()  # every game begins in the middle
    moved = np.array([-1, 5, 1, -5])[one.actions]
    heads = images[..., 0].reshape(len(images), -1).argmax(1)
    goes_on = np.flatnonzero(np.diff(one.episodes) == 0)
    np.testing.assert_array_equal((heads + moved)[goes_on], heads[goes_on + 1])
    free = images[..., 1].reshape(len(images), -1)[np.arange(len(heads))[goes_on], heads[goes_on + 1]] == 0
    assert free.mean() > 0.9  # a greedy one runs into itself only where it must
    assert set(greedy_actions(images[:10], np.random.default_rng(0)).tolist()) <= {0, 1, 2, 3}


@pytest.mark.long
def test_a_clone_plays_like_what_it_saw(greedy, capsys, tmp_path):
    out = tmp_path / "runs" / "clone"
    words = ("--epochs", 12, "--learning-rate", 4e-3, "--batch", 128)
    text = printed(capsys, "clone", greedy / "games.npz", "--out", out, *words)
    assert "steps of greedy, " in text
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records] == list(range(1, 13))
    assert records[-1]["clone/loss"] < 0.75 * records[0]["clone/loss"]
    assert records[-1]["clone/accuracy"] > 0.5
    summary = json.loads((out / "summary.json").read_text())
    assert summary["accuracy"] == records[-1]["clone/accuracy"]
    scores = {}
    for name in (out, "random"):
        target = (name,) if name == out else ("Snake-v0", "--policy", "random")
        printed(capsys, "eval", *target, "--seed", 1, "--episodes", 40, "--json", tmp_path / "a.json")
        scores[name] = json.loads((tmp_path / "a.json").read_text())["score_mean"]
    assert scores[out] > 1 > scores["random"]
    assert "→" in printed(capsys, "play", out, "--video", tmp_path / "a.gif")
    assert "exists already" in refused(capsys, "clone", greedy / "games.npz", "--out", out)
    assert "is a cloned policy, which has no environments to go on with" in refused(capsys, "train", "--resume", out)
    again = tmp_path / "runs" / "again"
    printed(capsys, "clone", greedy / "games.safetensors", "--out", again, *words)
    assert json.loads((again / "summary.json").read_text())["params_sha256"] == summary["params_sha256"]


def test_a_clone_that_plays_what_it_learnt_from_is_warned_of(greedy, capsys, tmp_path):
    out = tmp_path / "clone"
    assert main(["clone", str(greedy / "games.npz"), "--out", str(out), "--epochs", "1"]) == 0
    warning = "it learnt from recorded episodes of seed 0, which flatter it; --seed N plays others\n"
    other = tmp_path / "other.json"
    for words, said in (
        (("eval", out), f"lockstep: warning: {warning}"),
        (("eval", out, "--stochastic"), f"lockstep: warning: {warning}"),
        (("eval", out, "--seed", 1, "--json", other), ""),
        (("compare", other, out, "--seed", 1), ""),
        (("compare", out, out, "--seed", 0), 2 * f"lockstep: warning: {out}: {warning}"),
    ):
        capsys.readouterr()
        assert main([*map(str, words), "--episodes", "2"]) == 0
        assert capsys.readouterr().err == said


def test_continuous_actions_and_normalised_numbers_are_cloned_too(trained, capsys, tmp_path):
    run, file, out = trained(*PENDULUM).path, tmp_path / "a.safetensors", tmp_path / "clone"
    printed(capsys, "record", run, "--episodes", 12, "--out", file)
    printed(capsys, "clone", file, "--out", out, "--epochs", 30, "--batch", 64, "--learning-rate", 5e-3)
    original, copy, recording = load_policy(run), load_policy(out), read_recording(file)
    rows = recording.observations[::7]
    theirs, ours = original.native(rows), copy.native(rows)
    np.testing.assert_allclose(theirs, recording.actions[::7], atol=1e-6)
    assert np.abs(ours - theirs).mean() < 0.3 * np.abs(theirs - theirs.mean()).mean() + 0.02


def test_a_clone_is_written_where_it_is_said_to_be(capsys, tmp_path, monkeypatch):
    printed(capsys, "record", "Snake-v0", "--policy", "random", "--episodes", 2, "--out", tmp_path / "two.npz")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    words = ("clone", tmp_path / "two.npz", "--validation", 0, "--epochs", 1, "--out")
    assert printed(capsys, *words, ".").endswith(" → .\n")
    assert load_policy(tmp_path / "here").cloned
    assert sorted(path.name for path in tmp_path.glob("**/checkpoints")) == ["checkpoints"]
    above = f"out: run {tmp_path} exists already, with files that are no run's; choose another --out"
    assert refused(capsys, *words, "..") == f"lockstep: error: {above}\n"
    assert "out: / is no directory that a run can have; give one like runs/clone" in refused(capsys, *words, "/")


def test_what_cannot_be_cloned_is_refused(greedy, capsys, tmp_path):
    out = ("--out", tmp_path / "out")
    assert "there is no file" in refused(capsys, "clone", tmp_path / "a.npz", *out)
    assert "must end in .npz or .safetensors" in refused(capsys, "clone", tmp_path / "a.pt", *out)
    assert "must end in .npz or .safetensors" in refused(capsys, "record", "Snake-v0", "--out", tmp_path / "a.pkl")
    for name in ("a.npz", "a.safetensors"):
        (tmp_path / name).write_bytes(b"nothing of the kind")
        assert f"{name} is none: " in refused(capsys, "clone", tmp_path / name, *out)
    recurrent = tmp_path / "recurrent.json"
    recurrent.write_text(json.dumps({"env": "Snake-v0", "network": {"recurrent": "lstm"}}))
    games = greedy / "games.npz"
    assert "network.recurrent: lstm learns no single steps" in refused(
        capsys, "clone", games, "--like", recurrent, *out
    )
    assert "validation: 1.0 of the episodes" in refused(capsys, "clone", games, "--validation", 1, *out)
    printed(capsys, "record", "Snake-v0", "--policy", "random", "--episodes", 1, "--out", tmp_path / "one.npz")
    words = ("clone", tmp_path / "one.npz", "--validation", 0.6, *out)
    assert "validation: 0.6 holds out all 1 episodes" in refused(capsys, *words)
    assert not (tmp_path / "out").exists()


def test_a_clone_that_learns_no_numbers_is_refused(trained, capsys, tmp_path, monkeypatch):
    file, out = tmp_path / "a.npz", tmp_path / "runs" / "clone"
    printed(capsys, "record", trained(*CARTPOLE).path, "--episodes", 3, "--out", file)
    clone = ("clone", file, "--out", out, "--learning-rate")
    for rate in ("inf", "nan", "1e+39", "0.0"):
        assert f"learning_rate: {rate}; use a number above 0 and below 1e+37" in refused(capsys, *clone, rate)
    assert main([*map(str, (*clone, 9e36, "--epochs", 3, "--batch", 10_000))]) == 1
    line = r"clone/loss is (nan|inf) in epoch [23]; nothing is written; a smaller --learning-rate may help"
    assert re.fullmatch(rf"lockstep: error: {line}\n", capsys.readouterr().err)
    assert not out.exists()
    engine = {"check_recording": lambda *_: None, "learnt_episodes": lambda *_: 1}
    engine["train_clone"] = lambda *_: ({"policy/a": np.zeros(3), "policy/b": np.array([1.0, np.nan])}, {"loss": 1.0})
    with monkeypatch.context() as patched:
        patched.setattr(cloning, "_engine", lambda: SimpleNamespace(**engine))
        assert main([*map(str, (*clone, 1e-3))]) == 1
    assert "policy/b isn't finite after the last epoch; nothing is written;" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "torch", None)
        assert "clone: needs torch; pip install 'lockstep-rl[torch]'" in refused(capsys, *clone, 1e-3)
    assert not out.exists()
    printed(capsys, *clone, 1e-3, "--epochs", 1)  # under the same name


@pytest.mark.parametrize("place", ["train_clone", "commit", "write_summary"])
@pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt(), 130), (OSError(28, "No space left on device"), 1)])
def test_a_clone_that_is_not_finished_leaves_nothing_in_the_way(
    greedy, capsys, tmp_path, monkeypatch, place, raised, code
):
    words = ("clone", greedy / "games.npz", "--out", tmp_path / "runs" / "clone", "--epochs", 1)
    (tmp_path / "runs" / "clone" / "checkpoints").mkdir(parents=True)
    mine = tmp_path / "runs" / "clone" / "checkpoints" / "notes.txt"
    mine.touch()
    begun = []

    def fail(*given):
        begun.extend(path.name for path in mine.parent.parent.iterdir())
        if place == "train_clone":
            given[-1]({"iteration": 1})
        if place == "commit":
            (given[0] / f".step_0.{os.getpid()}.tmp").mkdir()
        raise raised

    with monkeypatch.context() as patched:
        where = {"train_clone": cloning._engine(), "commit": cloning, "write_summary": RunDirectory}[place]
        patched.setattr(where, place, fail)
        assert main([*map(str, words)]) == code
    assert {"config.json", "metrics.jsonl"} <= set(begun)
    assert [path for path in (tmp_path / "runs").rglob("*") if path.is_file()] == [mine]
    capsys.readouterr()
    printed(capsys, *words)


class Harmful:
    """Leaves a mark when it is unpickled."""

    def __reduce__(self):
        return MARKS.append, ("executed",)


class Marks(list):
    """A list that is pickled by its name."""

    def __reduce__(self):
        return "MARKS"


MARKS = Marks()


def test_a_recording_that_hides_code_is_not_opened(tmp_path):
    file = tmp_path / "a.npz"
    np.savez(file, observations=np.array([Harmful()], object), facts=np.array("{}"))
    with pytest.raises(ValueError, match="Object arrays cannot be loaded"):
        read_recording(file)
    assert MARKS == []
    with zipfile.ZipFile(file) as content:
        raw = content.read("observations.npy")
    pickle.loads(raw[raw.index(b"\x80\x04") :])  # which would have done it
    assert MARKS == ["executed"]
