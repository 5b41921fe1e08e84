"""Settings that nothing reads are said, each with what would read it; those that are read aren't."""

import numpy as np
import pytest
from fake_session import FakeSession
from gymnasium.spaces import Box, Discrete

from lockstep.config.command_line import read_request
from lockstep.config.files import nested
from lockstep.config.presets import defaults_for
from lockstep.config.presets.by_id import PRESETS
from lockstep.config.run import Config
from lockstep.envs.description import described
from lockstep.runs.directory import RunDirectory
from lockstep.training.announcement import unread_in, unread_settings
from lockstep.training.recorder import Recorder

CUSTOM = {"network.custom": "my_nets:Wide"}
UNREAD = [
    ({"grpo.kl_coef": 0.1}, True, "grpo.kl_coef: 0.1 changes nothing: algorithm ppo has no reference policy"),
    ({"network.shared": True, "algorithm": "grpo"}, True, "network.shared: true changes nothing: algorithm grpo"),
    ({"ppo.desired_kl": 0.02}, True, "ppo.desired_kl: 0.02 changes nothing: ppo.schedule is linear; adaptive follows"),
    ({"network.state_dependent_std": True}, True, "network.state_dependent_std: true changes nothing: actions are"),
    ({"network.log_std_init": -1.0}, True, "network.log_std_init: -1.0 changes nothing: actions are discrete"),
    (
        {"network.custom": "my_nets:Wide", "network.state_dependent_std": True, "network.log_std_init": -1.0},
        False,
        "network.log_std_init: -1.0 changes nothing: network.custom itself gives the standard deviations",
    ),
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
    (
        {"network.hidden_sizes": [256], **CUSTOM},
        True,
        "network.hidden_sizes: [256] changes nothing: network.custom my_",
    ),
    ({"network.activation": "elu", **CUSTOM}, True, "network.activation: elu changes nothing: network.custom my_nets"),
    ({"network.shared": True, **CUSTOM}, True, "network.shared: true changes nothing: network.custom my_nets:Wide st"),
    (
        {"network.shared": True, "algorithm": "grpo", **CUSTOM},
        True,
        "network.shared: true changes nothing: algorithm g",
    ),
    ({"network.image": "impala", **CUSTOM}, True, "network.image.kind: impala changes nothing: network.custom my_nets"),
    ({"env.atari.frame_skip": 2}, True, "env.atari.frame_skip: 2 changes nothing: env.atari is off"),
    ({"ppo.gamma": 0.5, "algorithm": "grpo"}, True, "ppo.gamma: 0.5 changes nothing: algorithm grpo compares whole"),
    ({"ppo.gae_lambda": 0.5, "algorithm": "grpo"}, True, "ppo.gae_lambda: 0.5 changes nothing: algorithm grpo has no"),
    ({"ppo.value_coef": 2, "algorithm": "grpo"}, True, "ppo.value_coef: 2.0 changes nothing: algorithm grpo has no c"),
    ({"eval.episodes": 3}, True, "eval.episodes: 3 changes nothing: eval.interval is 0; evaluations are off"),
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
    ({"network.hidden_sizes": [256], "network.image": "impala"}, True),
    ({"network.custom": "my_nets:Wide", "network.log_std_init": -1.0, "network.squash": True}, False),
    ({"ppo.gamma": 0.5, "ppo.gae_lambda": 0.5, "ppo.value_coef": 2}, True),
    ({"ppo.value_coef": 2, "ppo.loss": "my_losses:mine", "algorithm": "grpo"}, True),  # the loss may read it
    ({"env.atari.enabled": True, "env.atari.frame_skip": 2}, True),
    ({"eval.interval": 4, "eval.episodes": 3}, True),
    ({"eval.max_steps": 3}, True),  # lockstep eval reads it, too
]


@pytest.mark.parametrize(("settings", "discrete", "line"), UNREAD, ids=str)
def test_what_nothing_reads_is_said(settings, discrete, line):
    (said,) = unread_settings(Config.model_validate(nested(settings)), discrete)
    assert said.startswith(line)


@pytest.mark.parametrize(("settings", "discrete"), READ, ids=str)
def test_of_what_is_read_nothing_is_said(settings, discrete):
    assert unread_settings(Config.model_validate(nested(settings)), discrete) == []


def test_an_encoder_of_images_that_nobody_sees_is_said():
    config = Config.model_validate({"network": {"image": {"width": 2.0}}})
    assert unread_settings(config, True, images=True) == []
    (said,) = unread_settings(config, True, images=False)
    assert said == "network.image.width: 2.0 changes nothing: observations have no images"


@pytest.mark.parametrize(
    ("size", "kind", "line"),
    [
        (84, "auto", "network.image.depth: 5 changes nothing: an encoder of the kind nature always has three layers"),
        (84, "impala", None),
        (20, "auto", None),
    ],
)
def test_a_depth_that_the_encoder_lacks_is_said(size, kind, line):
    config = Config.model_validate({"network": {"image": {"kind": kind, "depth": 5}}})
    pixels = Box(0, 255, (size, size, 3), np.uint8)
    seen = described(config.env, pixels, Discrete(2), None)
    assert unread_in(config, seen) == ([] if line is None else [line])


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("env_id", PRESETS)
def test_of_what_a_preset_set_beside_a_custom_network_nothing_is_said(algorithm, env_id):
    words = [env_id, f"--algorithm={algorithm}", "--network.custom=my_nets:Wide", "--env.atari.enabled=false"]
    assert unread_settings(read_request(words).config, discrete=False, images=False) == []


def test_a_run_says_it_at_its_start(tmp_path, capsys):
    recorder = Recorder(FakeSession(grpo={"kl_coef": 0.5}), RunDirectory(tmp_path, quiet=True), 0.0)
    recorder.warn_of_unread()
    recorder.close()
    assert capsys.readouterr().err.startswith("lockstep: warning: grpo.kl_coef: 0.5 changes nothing: ")


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("env_id", PRESETS)
def test_of_presets_nothing_is_said(algorithm, env_id):
    config = read_request([env_id, f"--algorithm={algorithm}"]).config
    assert not unread_settings(config, discrete=False, images=False)


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("images", [False, True])
def test_of_defaults_neither(continuous, images):
    settings, _ = defaults_for(continuous=continuous, images=images)
    assert not unread_settings(Config.model_validate(settings), discrete=not continuous, images=images)
