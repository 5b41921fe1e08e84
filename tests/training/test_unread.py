"""Settings that nothing reads are said, each with what would read it; those that are read aren't."""

import pytest
from fake_session import FakeSession

from lockstep.config.command_line import read_request
from lockstep.config.files import nested
from lockstep.config.presets import defaults_for
from lockstep.config.presets.by_id import PRESETS
from lockstep.config.run import Config
from lockstep.runs.directory import RunDirectory
from lockstep.training.announcement import unread_settings
from lockstep.training.recorder import Recorder

UNREAD = [
    ({"grpo.kl_coef": 0.1}, True, "grpo.kl_coef: 0.1 changes nothing: algorithm ppo has no reference policy"),
    ({"network.shared": True, "algorithm": "grpo"}, True, "network.shared: true changes nothing: algorithm grpo"),
    ({"ppo.desired_kl": 0.02}, True, "ppo.desired_kl: 0.02 changes nothing: ppo.schedule is linear; adaptive follows"),
    ({"network.state_dependent_std": True}, True, "network.state_dependent_std: true changes nothing: actions are"),
    ({"network.log_std_init": -1.0}, True, "network.log_std_init: -1.0 changes nothing: actions are discrete"),
    (
        {"network.recurrent_size": 256},
        True,
        "network.recurrent_size: 256 changes nothing: networks have no memory; net",
    ),
    (
        {"network.recurrent_size": 256, "network.custom": "my_nets:Wide"},
        True,
        "network.recurrent_size: 256 changes nothing: network.custom my_nets:Wide stands in place of all networks",
    ),
    ({"network.sequence_length": 16}, True, "network.sequence_length: 16 changes nothing: networks have no memory"),
    (
        {"normalize.clip_observations": 5},
        True,
        "normalize.clip_observations: 5.0 changes nothing: normalize.observa",
    ),
    (
        {"normalize.clip_rewards": 5, "normalize.observations": True},
        True,
        "normalize.clip_rewards: 5.0 changes nothing: normalize.returns is off",
    ),
    ({"grpo.group_size": 4}, True, "grpo.group_size: 4 changes nothing: algorithm ppo has no groups; algorithm grpo"),
    ({"grpo.normalize_std": False}, True, "grpo.normalize_std: false changes nothing: algorithm ppo has no groups"),
]
READ = [
    ({}, True),
    ({"grpo.kl_coef": 0.1, "algorithm": "grpo"}, True),
    ({"network.shared": True}, True),
    ({"ppo.desired_kl": 0.02, "ppo.schedule": "adaptive"}, True),
    ({"network.state_dependent_std": True, "network.log_std_init": -1.0}, False),
    ({"network.recurrent": "gru", "network.recurrent_size": 256, "network.sequence_length": 16}, True),
    ({"normalize.observations": True, "normalize.clip_observations": 5}, True),
    ({"normalize.returns": True, "normalize.clip_rewards": 5}, True),
    ({"algorithm": "grpo", "grpo.group_size": 4, "grpo.normalize_std": False}, True),
]


@pytest.mark.parametrize(("settings", "discrete", "line"), UNREAD, ids=str)
def test_what_nothing_reads_is_said(settings, discrete, line):
    (said,) = unread_settings(Config.model_validate(nested(settings)), discrete)
    assert said.startswith(line)


@pytest.mark.parametrize(("settings", "discrete"), READ, ids=str)
def test_of_what_is_read_nothing_is_said(settings, discrete):
    assert unread_settings(Config.model_validate(nested(settings)), discrete) == []


def test_a_run_says_it_at_its_start(tmp_path, capsys):
    recorder = Recorder(FakeSession(grpo={"kl_coef": 0.5}), RunDirectory(tmp_path, quiet=True), 0.0)
    recorder.warn_of_unread()
    recorder.close()
    assert capsys.readouterr().err.startswith("lockstep: warning: grpo.kl_coef: 0.5 changes nothing: ")


@pytest.mark.parametrize(("algorithm", "env_id"), [*(("ppo", each) for each in PRESETS), ("grpo", "CartPole-v1")])
def test_of_presets_nothing_is_said(algorithm, env_id):
    config = read_request([env_id, f"--algorithm={algorithm}"]).config
    assert not unread_settings(config, discrete=False)


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("images", [False, True])
def test_of_defaults_neither(continuous, images):
    settings, _ = defaults_for(continuous=continuous, images=images)
    assert not unread_settings(Config.model_validate(settings), discrete=not continuous)
