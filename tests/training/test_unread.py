"""Settings that nothing reads are said, each with what would read it; those that are read aren't."""

import pytest
from fake_session import FakeSession

from lockstep.config.files import nested
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
]
READ = [
    ({}, True),
    ({"grpo.kl_coef": 0.1, "algorithm": "grpo"}, True),
    ({"network.shared": True}, True),
    ({"ppo.desired_kl": 0.02, "ppo.schedule": "adaptive"}, True),
    ({"network.state_dependent_std": True, "network.log_std_init": -1.0}, False),
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
