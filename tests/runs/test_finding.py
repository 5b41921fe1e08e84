"""A run is found by its name, whatever else is called so; its directory has a name, however it was spelled."""

import json
import shutil

import pytest

from lockstep.commands.list import main as list_runs
from lockstep.config.checks import resolve
from lockstep.config.run import Config, RunOptions
from lockstep.launch.resume import open_directory
from lockstep.proof.kept import run_of
from lockstep.runs.checkpoint_writer import commit
from lockstep.runs.directory import CONFIG, open_run
from lockstep.runs.finding import find_run, is_run, run_if_any
from lockstep.runs.making import create_run, has_begun

CONFIG_OF = resolve(Config())
MODEL = {"architectures": ["LlamaForCausalLM"], "hidden_size": 2048}
"""A model's ``config.json``, of transformers."""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def create(runs_dir="runs", name="demo"):
    run = create_run(runs_dir, name, CONFIG_OF)
    run.unlock()
    return run.path


def model(path):
    path.mkdir(parents=True)
    (path / CONFIG).write_text(json.dumps(MODEL))
    (path / "model.safetensors").touch()


def test_a_directory_with_another_programs_config_hides_no_run(here, capsys):
    path = create()
    model(here / "demo")
    assert find_run("demo") == (path, "latest")
    assert capsys.readouterr() == ("", "")
    model(here / "other")
    with pytest.raises(ValueError, match="neither other nor runs/other is a run directory"):
        find_run("other")


def test_nor_does_a_checkpoint_of_lockstep_jax(here):
    path = create()
    (here / "demo").mkdir()
    (here / "demo" / "manifest.json").write_text('{"format": 1, "files": {}, "kind": "pytree"}')
    assert find_run("demo") == (path, "latest")
    with pytest.raises(ValueError, match=r"demo holds a checkpoint of lockstep\.jax"):
        find_run("demo", "elsewhere")


def test_of_two_runs_it_is_said_once_which_is_taken(here, capsys):
    create()
    path = create(".")
    for _ in range(2):
        assert find_run("demo") == (path, "latest")
    line = f"lockstep: demo is a run's path and a run's name in runs; {here / 'demo'} is taken\n"
    assert capsys.readouterr().err == line


def test_of_one_run_in_two_words_nothing_is_said(here, monkeypatch, capsys):
    create()
    monkeypatch.chdir(here / "runs")
    assert find_run("demo", "../runs")[0].resolve() == here / "runs" / "demo"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("content", ["", '{"env": {', '{"env": {"id": "CartPole-v1"}, "of_a_newer": 1}'])
def test_a_config_that_is_torn_or_of_a_newer_version_is_a_runs(here, content):
    path = create()
    (path / CONFIG).write_text(content)
    assert is_run(path)


def test_an_empty_object_is_no_runs_config(here):
    (here / "other").mkdir()
    (here / "other" / CONFIG).write_text("{}")
    assert not is_run(here / "other")
    with pytest.raises(ValueError, match=r"neither other nor runs/other is a run directory"):
        find_run("other")


def test_what_is_no_run_is_neither_listed_nor_gone_on_with(here, capsys):
    model(here / "runs" / "demo")
    assert run_if_any("demo") is None
    assert not has_begun(here / "runs" / "demo")
    assert list_runs([]) == 0
    assert capsys.readouterr().out.startswith("no runs in runs")
    with pytest.raises(ValueError, match="with files that are no run's; choose another --name"):
        create()


@pytest.mark.parametrize(("inside", "word"), [(".", "."), (".", "./"), ("checkpoints", ".."), ("checkpoints", "../.")])
def test_a_run_that_is_named_by_dots_has_a_name(here, monkeypatch, inside, word):
    path = here / create()
    (path / "checkpoints").mkdir()
    monkeypatch.chdir(path / inside)
    assert find_run(word) == (path, "latest")
    assert run_of(word) == path


def test_so_it_has_in_a_list(here, monkeypatch, capsys):
    monkeypatch.chdir(create())
    assert list_runs([".", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["path"]) == ("demo", str(here / "runs" / "demo"))


def test_a_folder_without_runs_hides_no_run_from_a_list(here, capsys):
    path, source = create(), here / "demo"
    (source / "src").mkdir(parents=True)

    def listed():
        assert list_runs(["demo", "--json"]) == 0
        return [row["path"] for row in json.loads(capsys.readouterr().out)]

    assert listed() == [str(path)]
    inside = create("demo", "inside")
    assert listed() == [str(inside)]
    shutil.rmtree(path)
    shutil.rmtree(source / "inside")
    assert list_runs(["demo"]) == 0
    assert capsys.readouterr().out.startswith("no runs in demo; ")


def test_a_tilde_is_the_users_home(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here / "home"))
    path = create("home/runs").absolute()
    assert find_run("demo", "~/runs")[0] == path
    assert find_run("~/runs/demo")[0] == path


def test_only_who_holds_a_run_says_that_it_begins_again(here, capsys):
    path = create()
    run = open_run(path, CONFIG_OF)
    with pytest.raises(ValueError, match="is being written by another process"):
        open_directory(CONFIG_OF, RunOptions(), path, None, True)
    assert capsys.readouterr().out == ""
    run.unlock()
    open_directory(CONFIG_OF, RunOptions(), path, None, True)[0].unlock()
    assert capsys.readouterr().out == f"run {path} has no checkpoint yet; it begins again\n"


def test_a_checkpoint_that_a_run_has_not(here):
    path = create()
    with pytest.raises(ValueError, match=r"^run: runs/demo has no checkpoint step_9; it has none$"):
        find_run("runs/demo/checkpoints/step_9")
    commit(path / "checkpoints", 8, {"state.json": b"{}"}, None)
    for word in ("runs/demo/checkpoints/step_9", "demo/checkpoints/step_9"):
        with pytest.raises(ValueError, match=r"^run: runs/demo has no checkpoint step_9; it has step_8$"):
            find_run(word)
    assert find_run("demo/checkpoints/step_8")[1] == "step_8"
