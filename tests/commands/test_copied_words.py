"""Commands that are shown can be copied into a shell, and a ``~`` that no shell has replaced is the user's home."""

import json
import os
import shlex
from pathlib import Path

import pytest
from made_runs import summary_of

from lockstep.cli import main
from lockstep.commands.next_steps import next_steps
from lockstep.commands.parser import CommandParser, add_runs_dir
from lockstep.config.checks import resolve
from lockstep.config.command_line import read_request
from lockstep.config.run import Config, RunOptions
from lockstep.launch.request import config_named
from lockstep.proof.kept import run_of
from lockstep.runs.making import create_run


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def paths_in(text, command):
    words = [shlex.split(line) for line in text.splitlines() if f" {command} " in line]
    return [word for line in words for word in line if "my run" in word]


def test_next_steps_name_a_run_with_a_space_in_one_word(tmp_path):
    path = tmp_path / "my run"
    (path / "tensorboard").mkdir(parents=True)
    text = next_steps(path, summary_of(status="stopped at step", episodes=1, environment="CartPole-v1"))
    for command in ("train --resume", "eval", "play"):
        assert paths_in(text, command) == [str(path)]
    assert paths_in(text, "--logdir") == [str(path / "tensorboard")]
    assert f"run: {path}   " in text


def test_so_do_those_of_several_seeds(tmp_path):
    path = tmp_path / "my run"
    seeds = [{"directory": "seed_0", "global_step": 1000}]
    more = {"seeds": seeds, "final_return": None, "steps_per_second": 1.0, "status": "stopped at step"}
    text = next_steps(path, summary_of(environment="CartPole-v1") | more)
    assert paths_in(text, "train --resume") == [str(path)]
    assert paths_in(text, "eval") == [str(path / "seed_0")]


def test_and_an_error_that_says_how_a_run_goes_on(tmp_path):
    run = create_run(str(tmp_path), "my run", resolve(Config()))
    run.unlock()
    (run.path / "metrics.jsonl").write_text('{"iteration": 1}\n')
    with pytest.raises(ValueError, match="exists already") as caught:
        create_run(str(tmp_path), "my run", resolve(Config()))
    assert f"--resume '{run.path}' continues it" in str(caught.value)
    (run.checkpoints / "step_1").mkdir(parents=True)
    with pytest.raises(ValueError, match="is a checkpoint") as caught:
        read_request([str(run.checkpoints / "step_1")])
    assert f"--resume '{run.checkpoints / 'step_1'}' continues" in str(caught.value)


def test_a_tilde_in_settings_is_the_users_home(home, monkeypatch):
    monkeypatch.chdir(home)
    read = read_request(["CartPole-v1", "--runs-dir=~/runs", "--log.jsonl=~/second.jsonl"])
    assert (read.options.runs_dir, read.config.log.jsonl) == (str(home / "runs"), str(home / "second.jsonl"))
    (home / "a.yaml").write_text("env: CartPole-v1\nruns_dir: ~/runs\nresume: ~/runs/demo\n")
    options = read_request([str(home / "a.yaml")]).options
    assert (options.runs_dir, options.resume) == (str(home / "runs"), str(home / "runs" / "demo"))


@pytest.mark.parametrize("place", ["runs", "a~b", "/data/~", "s3://bucket/~/run"])
def test_elsewhere_it_is_a_letter(home, place):
    assert RunOptions(runs_dir=place, resume=place) == RunOptions.model_construct(
        **{**RunOptions().model_dump(), "runs_dir": place, "resume": place}
    )


def test_so_it_is_in_options_of_commands(home):
    parser = CommandParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument_group("more").add_argument("--csv", type=Path, default=Path("a.csv"))
    add_runs_dir(parser)
    options = parser.parse_args(["--out=~/a.png", "--runs-dir=~/runs"])
    assert (options.out, options.csv, options.runs_dir) == (home / "a.png", Path("a.csv"), str(home / "runs"))
    assert os.fspath(parser.parse_args([]).runs_dir) == "runs"


def test_so_it_is_of_what_commands_read(home, tmp_path_factory, monkeypatch, capsys):
    """Of a config file, a run, a directory of runs, and what the doctor reads and writes."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    (home / "a.yaml").write_text("env: Acrobot-v1\nseed: 3\n")
    for words in (["~/a.yaml"], ["--config=~/a.yaml"], ["~/a.yaml", "--seed", "3"]):
        config = read_request(words).config
        assert (config.env.id, config.seed) == ("Acrobot-v1", 3)
    assert config_named("~/a.yaml", "runs").seed == 3
    run = create_run(str(home), "run", resolve(Config(seed=4)))
    run.unlock()
    (run.path / "checkpoints").mkdir()
    read = read_request(["~/run"])
    assert (read.config.seed, read.run) == (4, run.path)
    assert run_of("~/run") == run_of("~/run/config.json") == run.path
    assert main(["list", "~", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["run"]
    (home / "one.json").write_text("{}")
    assert main(["compare", "~/one.json", "~/one.json"]) == 2
    assert str(home / "one.json") in capsys.readouterr().err
    script = home / "script.py"
    script.touch()
    for option, named in (("--json=~/one.json", home / "one.json"), ("--directory=~/none", home / "none")):
        assert main(["doctor", option, "--", str(script)]) == 2
        assert str(named) in capsys.readouterr().err


def test_a_file_whose_name_begins_so_is_meant_by_its_path(home, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    Path("~a.yaml").write_text("env: Acrobot-v1\nseed: 5\n")
    assert read_request(["./~a.yaml"]).config.seed == 5
