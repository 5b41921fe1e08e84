"""The command that has begun a run goes on with it, whatever it left to be chosen."""

import json

import pytest

from lockstep.config.checks import resolve
from lockstep.config.files import config_text
from lockstep.envs.describe import describe
from lockstep.launch.request import request_of
from lockstep.launch.resume import resumed_config
from lockstep.launch.sizing import resolved_here
from lockstep.launch.world import World
from lockstep.runs.making import create_run

SETTINGS = [
    {"num_envs": None},
    {"num_shards": None},
    {"num_envs": 16, "num_shards": None},
    {"num_envs_per_rank": 4},
    {"num_envs": None, "num_shards": None, "num_envs_per_rank": 4},
    {"num_envs": None, "num_envs_per_rank": "max"},
    {"num_envs_per_rank": 4, "ppo.batch_size": 128, "total_iterations": 4},
    {"env": "Acrobot-v1", "algorithm": "grpo"},
    {"anneal_lr": False, "clip_vloss": True},
]


@pytest.fixture
def words(tmp_path):
    """Returns the words that begin a run by settings, which are in a file, and go on with it."""

    def given(settings, *more):
        file = tmp_path / "config.json"
        file.write_text(json.dumps({"env": "CartPole-v1", **settings}))
        return [str(file), "--name", "run", "--runs-dir", str(tmp_path), "--resume", "auto", *more]

    return given


def begun(words):
    """Makes the directory of the run that a command line asks for, and returns its config."""
    request = request_of(words)
    assert request.options.resume is None
    config, _ = resolved_here(request.config, World(1, 1), lambda: describe(request.config.env))
    create_run(request.options.runs_dir, request.options.name, config).unlock()
    return config


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings))
def test_a_run_is_resumed_by_the_file_that_began_it(words, tmp_path, settings):
    config = begun(words(settings))
    request = request_of(words(settings))
    assert request.begun
    assert resumed_config(tmp_path / "run", request.overrides, trust=True) == config


@pytest.mark.parametrize("settings", [{}, *SETTINGS], ids=lambda settings: "-".join(settings) or "none")
def test_and_by_a_file_that_print_config_has_written(words, tmp_path, settings):
    given = words(settings)
    file = tmp_path / "printed.yaml"
    file.write_text(config_text(request_of(given).config))
    given[0] = str(file)
    config = begun(given)
    assert resumed_config(tmp_path / "run", request_of(given).overrides, trust=True) == config


@pytest.mark.parametrize("key", ["--num-envs", "--num-shards"])
def test_and_by_options_that_leave_the_number_open(words, tmp_path, key):
    config = begun(words({}, key, "none"))
    assert resumed_config(tmp_path / "run", request_of(words({}, key, "none")).overrides, trust=True) == config
    with pytest.raises(ValueError, match=rf"^{key[2:].replace('-', '_')}: run .* was started with 8 and can't be"):
        resumed_config(tmp_path / "run", request_of(words({}, key, "4")).overrides, trust=True)


def test_environments_a_rank_are_no_setting_of_a_run(words, tmp_path):
    begun(words({"num_envs_per_rank": 4}))
    with pytest.raises(ValueError, match=r"num_envs_per_rank: 2, but run .*run has num_envs 4 on any ranks; leave it"):
        resumed_config(tmp_path / "run", {"num_envs_per_rank": 2}, trust=True)


def test_a_config_that_has_lost_its_number_of_environments_takes_settings(words, tmp_path):
    config = begun(words({}))
    file = tmp_path / "run" / "config.json"
    file.write_text(json.dumps(config.model_dump(mode="json") | {"num_envs": None, "num_shards": None}))
    again = resumed_config(tmp_path / "run", {"total_iterations": 3}, trust=True)
    assert again.total_steps == 3 * 8 * config.num_steps
    assert resolve(again) == config.model_copy(update={"total_steps": again.total_steps})
