"""A file's settings are checked together with those of the command line, which completes or replaces them."""

import json
from pathlib import Path

import pytest

from lockstep.config.command_line import read_request


@pytest.fixture
def file(tmp_path):
    def write(settings):
        path = tmp_path / "c.json"
        path.write_text(json.dumps({"env": "CartPole-v1", **settings}))
        return str(path)

    return write


@pytest.mark.parametrize(
    ("settings", "words", "name", "value"),
    [
        ({"coordinator": "a:1", "num_processes": 2}, ["--process-id", "1"], "process_id", 1),
        ({"resume": "auto"}, ["--name", "x"], "name", "x"),
        ({"simulate_devices": 2, "devices": 4}, ["--simulate-devices", "4"], "simulate_devices", 4),
        ({"nproc": "many"}, ["--nproc", "2"], "nproc", 2),
    ],
)
def test_the_command_line_completes_the_options_of_a_file(file, settings, words, name, value):
    assert getattr(read_request([file(settings), *words]).options, name) == value


def test_a_file_that_names_its_run_resumes_it_too(file):
    options = read_request([file({"name": "demo"}), "--resume", "runs/demo"]).options
    assert (options.resume, options.name) == ("runs/demo", None)
    assert read_request([file({"name": "demo"}), "--resume", "auto"]).options.name == "demo"
    with pytest.raises(ValueError, match="name: 'x' with resume 'runs/demo'; a resumed run keeps its name"):
        read_request([file({"resume": "runs/demo"}), "--name", "x"])


def test_and_its_settings(file):
    game = file({"env": {"id": "ALE/Pong-v5", "frame_skip": 2, "atari": True}})
    assert read_request([game, "--env.atari.enabled", "false"]).config.env.frame_skip == 2
    assert read_request([file({"num_envs": 0}), "--num-envs", "4"]).config.num_envs == 4


@pytest.mark.parametrize(
    ("settings", "words", "said"),
    [
        ({"resume": "auto"}, [], "c.json: resume: auto goes on with the run of a name; give --name"),
        ({"resume": "auto"}, ["--quiet"], "c.json: resume: auto goes on with the run of a name; give --name"),
        ({"coordinator": "a:1"}, ["--process-id", "1"], "command line: coordinator: given without num_processes; give"),
        ({"num_envs": 0}, ["--lr", "-1"], "c.json: num_envs: 0: input should be greater than or equal to 1"),
        ({"total_steps": 9}, ["--num-envs", "0"], "command line: num_envs: '0': input should be greater than or equ"),
    ],
)
def test_what_stays_wrong_is_said_of_where_it_stands(file, settings, words, said):
    with pytest.raises(ValueError) as refusal:
        read_request([file(settings), *words])
    assert str(refusal.value).removeprefix(f"{Path(file(settings)).parent}/").startswith(said)
