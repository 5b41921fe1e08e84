"""Keys in the tables of the user's own are texts, as in JSON, by which they reach ranks and a resumed run."""

import pytest

import lockstep
from lockstep.config.command_line import read_request
from lockstep.config.run import Config

TABLES = [
    ({"env": {"kwargs": {"rewards": {0: -1.0}}}}, "env.kwargs.rewards: key 0 is int; keys are text, '0'"),
    ({"env": {"kwargs": {"at": [{(1, 2): 3}]}}}, "env.kwargs.at: key (1, 2) is tuple; keys are text, '(1, 2)'"),
    ({"network": {"custom_kwargs": {"a": {0.5: 1}}}}, "network.custom_kwargs.a: key 0.5 is float; keys are text"),
    ({"ppo": {"loss_kwargs": {"a": {None: 1}}}}, "ppo.loss_kwargs.a: key None is NoneType; keys are text"),
]


@pytest.mark.parametrize(("settings", "said"), TABLES)
@pytest.mark.parametrize("as_config", [False, True])
def test_other_keys_are_refused_from_python(settings, said, as_config, tmp_path):
    config = Config.model_validate(settings) if as_config else None
    with pytest.raises(ValueError) as refusal:
        lockstep.train("CartPole-v1", config=config, runs_dir=tmp_path / "runs", **({} if as_config else settings))
    assert str(refusal.value).startswith(said)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "runs").exists()


def test_they_are_in_a_file_too(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("env: CartPole-v1\nenv.kwargs: {rewards: {0: -1.0}}\n")
    with pytest.raises(ValueError) as refusal:
        read_request([str(file)])
    assert str(refusal.value) == f"{file}: env.kwargs.rewards: key 0 is int; keys are text, '0'"
    file.write_text("env: CartPole-v1\nenv.kwargs: {rewards: {'0': -1.0}}\n")
    assert read_request([str(file)]).config.env.kwargs == {"rewards": {"0": -1.0}}
