"""A run directory that somebody else made executes nothing, reads and writes nothing outside, unless it is trusted."""

import json
import shutil

import pytest
from command_line import CARTPOLE, copy_of, error_line, lockstep

import lockstep as library

COMMANDS = (
    ("eval",),
    ("play", "--video", "x.mp4"),
    ("record", "--out", "x.npz"),
    ("eval", "--policy", "random"),
    ("train", "--resume"),
    ("train",),
    ("verify",),
)


@pytest.fixture
def theirs(trained, tmp_path):
    """A run whose config is changed by a stranger."""

    def make(**sections):
        path = copy_of(trained(*CARTPOLE), tmp_path / "theirs")
        config = json.loads((path / "config.json").read_text())
        for name, changes in sections.items():
            config[name] = {**config[name], **changes} if isinstance(changes, dict) else changes
        (path / "config.json").write_text(json.dumps(config))
        return path

    return make


def popen(tmp_path):
    return {"id": "subprocess:Popen", "backend": "jax", "kwargs": {"args": ["touch", str(tmp_path / "owned")]}}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_config_that_names_a_command_runs_none(theirs, tmp_path, words):
    path = theirs(engine="jax", env=popen(tmp_path))
    message = error_line(lockstep(*words, path, cwd=tmp_path))
    assert f"env.id: {path / 'config.json'} names subprocess:Popen, which would be imported from " in message
    assert message.endswith("give --trust")
    assert not (tmp_path / "owned").exists()


def test_nor_where_it_is_compared_or_loaded(theirs, trained, tmp_path):
    path = theirs(engine="jax", env=popen(tmp_path))
    message = error_line(lockstep("compare", trained(*CARTPOLE).path, path, cwd=tmp_path))
    assert "names subprocess:Popen" in message
    with pytest.raises(ValueError, match="names subprocess:Popen"):
        library.load_policy(path)
    assert not (tmp_path / "owned").exists()


def test_trusted_it_is_still_no_environment(theirs, tmp_path):
    """A class is looked at before it is called."""
    path = theirs(engine="jax", env=popen(tmp_path))
    message = error_line(lockstep("eval", path, "--trust", cwd=tmp_path))
    assert "env.id: subprocess:Popen has no reset and no step" in message
    assert not (tmp_path / "owned").exists()


def test_a_network_that_is_none_is_not_called(theirs, tmp_path):
    path = theirs(network={"custom": "subprocess:Popen", "custom_kwargs": {"args": ["touch", str(tmp_path / "owned")]}})
    assert "network.custom: " in error_line(lockstep("eval", path, cwd=tmp_path))
    message = error_line(lockstep("eval", path, "--trust", cwd=tmp_path))
    assert "network.custom: subprocess:Popen is no torch.nn.Module class" in message
    assert not (tmp_path / "owned").exists()


def test_trust_imports_what_is_named_for_once(theirs, tmp_path):
    (tmp_path / "theirs_too.py").write_text(
        "import gymnasium, pathlib\npathlib.Path('imported').touch()\n"
        "gymnasium.register('Theirs-v0', 'gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=500)\n"
    )
    path = theirs(env={"id": "theirs_too:Theirs-v0"})
    words = ("eval", path, "--episodes", 1)
    assert f"theirs_too:Theirs-v0, which would be imported from {tmp_path / 'theirs_too.py'}" in error_line(
        lockstep(*words, cwd=tmp_path)
    )
    assert not (tmp_path / "imported").exists()
    assert lockstep(*words, "--trust", cwd=tmp_path).code == 0
    assert (tmp_path / "imported").exists()
    error_line(lockstep(*words, cwd=tmp_path))


def test_what_was_trained_with_is_played_without_a_word(theirs, tmp_path):
    (tmp_path / "mine_here.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Mine-v0', 'gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=500)\n"
    )
    words = ("train", "mine_here:Mine-v0", *CARTPOLE[1:], "--name", "mine")
    assert lockstep(*words, "--trust", cwd=tmp_path).code == 0
    assert "names mine_here:Mine-v0" in error_line(lockstep("eval", "mine", cwd=tmp_path))  # it was for once
    shutil.rmtree(tmp_path / "runs")
    assert lockstep(*words, cwd=tmp_path).code == 0
    assert lockstep("eval", "mine", "--episodes", 1, cwd=tmp_path).code == 0


def test_a_file_in_the_working_directory_takes_no_packages_place(trained, tmp_path):
    for name in ("numpy", "gymnasium", "json", "torch"):
        (tmp_path / f"{name}.py").write_text("import pathlib; pathlib.Path('owned').touch(); raise SystemExit(7)")
    ended = lockstep("train", *CARTPOLE, "--nproc", 2, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    assert not (tmp_path / "owned").exists()


def test_a_log_elsewhere_is_not_written(theirs, tmp_path):
    (tmp_path / "mine").write_text("precious\n")
    path = theirs(log={"jsonl": str(tmp_path / "mine")}, total_steps=2048)
    message = error_line(lockstep("train", "--resume", path, cwd=tmp_path))
    assert f"names {tmp_path / 'mine'}, which would be written" in message
    assert (tmp_path / "mine").read_text() == "precious\n"


def test_its_config_says_nothing_of_how_another_run_is_started(theirs, tmp_path):
    path = theirs(trust=True, env=popen(tmp_path))
    message = error_line(lockstep("train", path, cwd=tmp_path))
    assert f"trust: {path / 'config.json'} is the config of a run" in message
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints"])
def test_nothing_is_written_through_a_link(theirs, tmp_path, name):
    path, mine = theirs(total_steps=2048), tmp_path / "mine"
    (path / name).rename(mine)
    (path / name).symlink_to(mine)
    before = sorted(mine.iterdir()) if mine.is_dir() else mine.read_text()
    message = error_line(lockstep("train", "--resume", path, cwd=tmp_path))
    assert f"{name} is a link to {mine}, which would be written" in message
    assert before == (sorted(mine.iterdir()) if mine.is_dir() else mine.read_text())


def test_nor_through_one_where_a_temporary_file_will_be(theirs, tmp_path):
    path, mine = theirs(), tmp_path / "mine"
    mine.write_text("precious\n")
    for name in (".config.json.tmp", ".summary.json.tmp"):
        (path / name).symlink_to(mine)
    assert lockstep("train", "--resume", path, cwd=tmp_path).code == 0
    assert mine.read_text() == "precious\n"
    assert not (path / "config.json").is_symlink()
