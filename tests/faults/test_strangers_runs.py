"""A run directory that somebody else made executes nothing, reads and writes nothing outside, unless it is trusted."""

import hashlib
import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
from command_line import CARTPOLE, Run, copy_of, error_line, lockstep
from safetensors.numpy import save

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


def longer_refused(ended):
    """The error line of a run that was to go on for longer than it was begun for, which may be said before it."""
    said, _, rest = ended.stderr.partition("\n")
    known = said.startswith("lockstep: warning: total_steps was 1024 and is 2048 from here on")
    return error_line(replace(ended, stderr=rest) if known else ended)


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
    for file in path.glob("checkpoints/*/manifest.json"):  # as versions that kept no config there wrote it
        file.write_text(
            json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "config"})
        )
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


def test_what_was_trained_with_is_played_without_a_word(tmp_path):
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


def test_a_file_in_the_working_directory_takes_no_packages_place(tmp_path):
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


def test_a_policy_is_taken_without_what_training_alone_uses(theirs, tmp_path):
    log = {"wandb": True, "project": "theirs", "jsonl": str(tmp_path / "mine")}
    path = theirs(log=log, checkpoint={"mirror": "memory://theirs"}, total_steps=2048)
    assert library.load_policy(path)([0.0, 0.0, 0.0, 0.0]) in (0, 1)
    assert lockstep("eval", path, "--episodes", 1, cwd=tmp_path).code == 0
    assert not (tmp_path / "mine").exists()
    assert "names " in error_line(lockstep("train", "--resume", path, cwd=tmp_path))


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
    message = longer_refused(lockstep("train", "--resume", path, cwd=tmp_path))
    assert f"{name} is a link to {mine}, which would be written" in message
    assert before == (sorted(mine.iterdir()) if mine.is_dir() else mine.read_text())


LINKS = (
    "tensorboard/events.out.tfevents.0000000001.lockstep",
    "checkpoints/.step_2048.77.tmp",
    "videos/.step_2048.unfinished.mp4",
    ".config.json.tmp",
    ".lock",
)


@pytest.mark.parametrize("name", LINKS)
def test_nor_through_one_further_down_or_where_a_temporary_file_will_be(theirs, tmp_path, name):
    path, mine = theirs(total_steps=2048), tmp_path / "mine"
    mine.write_text("precious\n")
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).symlink_to(mine)
    message = longer_refused(lockstep("train", "--resume", path, cwd=tmp_path))
    assert f"run {path}: {name} is a link to {mine}, which would be written; if that is yours, give --trust" in message
    assert mine.read_text() == "precious\n"


@pytest.mark.parametrize("resume", [(), ("--resume", "auto")])
def test_nor_when_a_run_begins_in_a_directory_that_is_there(tmp_path, resume):
    mine, path = tmp_path / "mine", tmp_path / "runs" / "run"
    path.mkdir(parents=True)
    (path / "metrics.jsonl").symlink_to(mine)
    message = error_line(lockstep("train", *CARTPOLE, "--name", "run", *resume, cwd=tmp_path))
    assert f"metrics.jsonl is a link to {mine}" in message
    assert not mine.exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", ".lock", "checkpoints/step_1024/manifest.json"])
def test_a_pipe_keeps_nobody_waiting(theirs, tmp_path, name):
    path = theirs(total_steps=2048)
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    message = longer_refused(lockstep("train", "--resume", path, cwd=tmp_path))
    assert f"{name} is neither a file nor a directory" in message
    if name.startswith("checkpoints"):
        assert lockstep("eval", path, "--episodes", 2, cwd=tmp_path).code == 0  # of the checkpoint before


def test_a_log_of_another_run_of_ones_own_is_not_cut_and_gone_on_with(tmp_path):
    words = ("train", *CARTPOLE, "--log-jsonl", "second.jsonl")
    assert lockstep(*words, "--name", "one", cwd=tmp_path).code == 0
    before = (tmp_path / "second.jsonl").read_text()
    shutil.copytree(tmp_path / "runs" / "one", tmp_path / "runs" / "other")
    rows = (tmp_path / "runs" / "other" / "metrics.jsonl").read_text()
    (tmp_path / "runs" / "other" / "metrics.jsonl").write_text(rows.replace('"rollout/episodes"', '"rollout/others"'))
    message = error_line(lockstep("train", "--resume", "runs/other", cwd=tmp_path))
    assert "already holds another run's records" in message
    assert (tmp_path / "second.jsonl").read_text() == before
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert lockstep("eval", tmp_path / "runs" / "one", "--episodes", 2, cwd=elsewhere).code == 0  # the path is absolute
    again = lockstep("train", "--resume", tmp_path / "runs" / "one", "--total-steps", 1152, cwd=elsewhere)
    assert again.code == 0, again.stderr
    assert (tmp_path / "second.jsonl").read_text().startswith(before)
    assert not list(elsewhere.glob("*.jsonl"))


@pytest.mark.parametrize("lost", ["zeros", "emptied", "removed", "with the table"])
def test_a_run_that_lost_its_rows_goes_on_with_its_own_second_log(trained, tmp_path, lost):
    words = ("train", *CARTPOLE, "--log-jsonl", "second.jsonl", "--name", "one", "--stop-at-step", 640)
    assert lockstep(*words, cwd=tmp_path).code == 0
    run, second = tmp_path / "runs" / "one", tmp_path / "second.jsonl"
    rows, before = run / "metrics.jsonl", second.read_text()
    rows.write_bytes(bytes(rows.stat().st_size - 1) + b"\n" if lost == "zeros" else b"")
    for each in {"removed": [rows], "with the table": [rows, run / "metrics.csv"]}.get(lost, []):
        each.unlink()
    again = lockstep("train", "--resume", run / "checkpoints" / "step_384", cwd=tmp_path)
    assert again.code == 0, again.stderr
    assert second.read_text().splitlines()[:3] == before.splitlines()[:3]
    assert second.read_text().splitlines()[3:] == rows.read_text().splitlines()
    assert Run(run, again).agent == trained(*CARTPOLE).agent


def test_a_run_that_lost_its_rows_does_not_go_on_in_the_log_of_another(tmp_path):
    words = ("train", *CARTPOLE, "--log-jsonl", "second.jsonl")
    for seed, name in enumerate(("one", "two")):
        (tmp_path / "second.jsonl").unlink(missing_ok=True)
        assert lockstep(*words, "--name", name, "--seed", seed, cwd=tmp_path).code == 0
    run = tmp_path / "runs" / "one"
    (run / "metrics.jsonl").write_text("")
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    message = error_line(lockstep("train", "--resume", run / "checkpoints" / "step_384", cwd=tmp_path))
    assert f"log.jsonl: {tmp_path / 'second.jsonl'} already holds another run's records" in message
    assert {path: path.read_bytes() for path in before if path.is_file()} == before


def test_a_run_that_was_killed_before_its_first_row_does_not_begin_again_in_the_log_of_another(tmp_path):
    words = ("train", *CARTPOLE, "--log-jsonl", "second.jsonl", "--stop-at-step", 256)
    assert lockstep(*words, "--name", "one", cwd=tmp_path).code == 0
    run, second = tmp_path / "runs" / "one", tmp_path / "second.jsonl"
    for path in (*run.glob("metrics.*"), run / "summary.json", second):
        path.unlink()
    shutil.rmtree(run / "checkpoints")
    assert lockstep(*words, "--name", "two", "--seed", 1, cwd=tmp_path).code == 0
    before = second.read_bytes()
    message = error_line(lockstep("train", "--resume", run, cwd=tmp_path))
    assert f"log.jsonl: {second} already holds another run's records" in message
    assert second.read_bytes() == before
    second.unlink()
    assert lockstep("train", "--resume", run, cwd=tmp_path).code == 0


def replaced(path, name, content):
    """Another content of a checkpoint's file, with a manifest that says so."""
    manifest = json.loads((path / "manifest.json").read_text())
    (path / name).write_bytes(content)
    manifest["files"][name] = hashlib.sha256(content).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))


def refused_with(path, name, content, words, cwd):
    """The error line of a command on a run whose only checkpoint holds such a file."""
    for other in ("step_384", "step_768"):
        shutil.rmtree(path / "checkpoints" / other, ignore_errors=True)
    replaced(path / "checkpoints" / "step_1024", name, content)
    return longer_refused(lockstep(*words, path, cwd=cwd))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("policy.safetensors", b"garbage!", "holds what no checkpoint holds"),
        ("policy.safetensors", (1 << 62).to_bytes(8, "little") + b"{}", "holds what no checkpoint holds"),
        ("state.json", b"{}", "state.json lacks environment"),
        ("state.json", b'{"environment": {}, "global_step": 1}', "state.json lacks iteration"),
        ("state.json", b'{"environment": 5, "global_step": 1, "iteration": 1}', "environment of state.json is 5"),
        ("state.json", b"[" * 200_000, "holds what no checkpoint holds"),
    ],
    ids=["garbage", "huge header", "empty state", "no iteration", "another environment", "deep state"],
)
@pytest.mark.parametrize("words", [("eval",), ("train", "--resume")], ids=" ".join)
def test_contents_that_are_not_a_checkpoints_are_one_line(theirs, tmp_path, words, name, content, said):
    assert said in refused_with(theirs(total_steps=2048), name, content, words, tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("eval",), "step_1024 lacks 'policy/actor.0.weight': it isn't a checkpoint of this run's networks"),
        (("train", "--resume"), "the checkpoint doesn't fit this config: policy/actor.0.weight is missing there"),
    ],
    ids=["eval", "train --resume"],
)
def test_so_are_other_arrays_than_the_policys(theirs, tmp_path, words, said):
    content = save({"x": np.zeros(1, np.float32)})
    assert said in refused_with(theirs(total_steps=2048), "policy.safetensors", content, words, tmp_path)


def test_a_name_that_paints_the_screen_is_shown_plainly(theirs, tmp_path):
    path = theirs(env={"kwargs": {"name": "evil:\x1b[2J\x07 all is well"}})
    assert "evil:\\x1b[2J\\x07 all is well" in error_line(lockstep("eval", path, cwd=tmp_path))


@pytest.mark.parametrize("command", ["compare", "plot", "report"])
def test_so_is_a_directory_of_such_a_name(theirs, trained, tmp_path, command):
    path = theirs()
    evil = path.rename(path.with_name("evil\x1b[2J\nlockstep: error: forged"))
    words = {"compare": ("--episodes", 2), "plot": ("--out", "a.svg"), "report": ()}[command]
    ended = lockstep(command, trained(*CARTPOLE).path, evil, *words, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    assert "evil?[2J?lockstep: error: forged" in ended.stdout
    assert "\x1b" not in ended.stdout + ended.stderr
    assert not any(line.startswith("lockstep: error") for line in (ended.stdout + ended.stderr).splitlines())
