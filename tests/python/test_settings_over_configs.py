"""Settings that ``lockstep.train`` is given lie over its config, as the command line's do over a file."""

import json
from pathlib import Path

import pytest

import lockstep
from lockstep.config.checks import resolve
from lockstep.config.command_line import read_request
from lockstep.config.run import Config


@pytest.fixture
def config_of(monkeypatch, tmp_path):
    """The resolved config of what would be trained on some ranks."""
    monkeypatch.setattr("lockstep.python.train.start", lambda asked, *_: asked)

    def read(config, ranks=1, **settings):
        (tmp_path / "asked.json").write_text(json.dumps(lockstep.train(config, **settings)))
        return resolve(read_request([str(tmp_path / "asked.json")]).config, ranks)

    return read


def of_a_run():
    """As ``run.config`` is: it says every setting."""
    config = resolve(Config.model_validate({"env": {"id": "CartPole-v1"}, "num_envs": 8, "num_steps": 64}))
    return Config.model_validate(config.model_dump())


def test_of_two_settings_that_say_the_same_the_given_one_counts(config_of):
    config = of_a_run()
    assert config_of(config).model_dump() == config.model_dump()
    assert config_of(config, ppo={"batch_size": 64}).ppo.num_minibatches == 8
    assert config_of(config, batch_size=64).ppo.num_minibatches == 8
    assert config_of(config, total_iterations=5).total_steps == 5 * 8 * 64
    assert config_of(config, ranks=4, num_envs_per_rank=4).num_envs == 16


def test_the_other_way_round_too(config_of, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("env: CartPole-v1\ntotal_iterations: 3\nnum_envs_per_rank: 4\nppo: {batch_size: 64}\n")
    found = config_of(file, total_steps=9, num_envs=16, ppo={"num_minibatches": 2})
    assert (found.total_steps, found.num_envs, found.ppo.num_minibatches) == (9, 16, 2)
    file.write_text("env: CartPole-v1\ntotal_steps: 4096\nnum_steps: 64\n")
    assert config_of(file, total_iterations=5).total_steps == 5 * 8 * 64


def test_a_callers_own_mapping_stays_as_it_is(config_of):
    config = {"env": "CartPole-v1", "total_steps": 4096, "num_steps": 128, "ppo": {"num_minibatches": 2}}
    before = json.dumps(config)
    assert config_of(config, total_iterations=1, ppo={"batch_size": 256}).total_steps == 8 * 128
    assert json.dumps(config) == before


@pytest.mark.parametrize("given", [{"total_steps": 9, "total_iterations": 3}, {"total_steps": 9}, {}])
def test_both_in_one_place_are_refused(config_of, given):
    """In the settings, or in the config, which settings beside it don't hide."""
    config = {} if len(given) == 2 else {"total_steps": 9, "total_iterations": 3}
    with pytest.raises(ValueError, match=r"^total_iterations: 3 given together with total_steps 9; give one$"):
        config_of({"env": "CartPole-v1", **config}, **given)


def test_a_number_that_is_none_reaches_the_run(monkeypatch, tmp_path):
    """It isn't the preset's then, as with the same file on the command line."""
    passed = []
    monkeypatch.setattr(
        "lockstep.python.start.run_command", lambda words, *_: passed.append(json.loads(Path(words[1]).read_text()))
    )
    file = tmp_path / "config.yaml"
    file.write_text("env: Acrobot-v1\nnum_envs: null\n")
    lockstep.train(file, runs_dir=str(tmp_path / "runs"))
    (told,) = passed
    (tmp_path / "asked.json").write_text(json.dumps(told))
    by_python, by_command = (read_request([str(tmp_path / name)]).config for name in ("asked.json", "config.yaml"))
    assert by_python == by_command != read_request(["Acrobot-v1"]).config
