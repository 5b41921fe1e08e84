"""What a run directory may name is what this user has trained with."""

import os
import pwd
import shutil
from pathlib import Path

import pytest

from lockstep.config.run import Config
from lockstep.runs import trust
from lockstep.runs.trust import (
    OF_TRAINING,
    check_trusted,
    handed_over,
    names_in,
    remember_names,
    take_handed_over,
    trusted_config,
    trusted_file,
    trusted_names,
)

THEIRS = {"env": {"id": "subprocess:Popen", "backend": "jax", "kwargs": {"args": ["touch", "owned"]}}, "engine": "jax"}


@pytest.fixture(autouse=True)
def account(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "account"))


def config_of(**settings):
    return Config.model_validate({"env": "CartPole-v1"} | settings)


def the_list() -> Path:
    file = trusted_file()
    assert file is not None
    return file


def refusal(config, tmp_path, **more):
    with pytest.raises(ValueError) as caught:
        check_trusted(config, tmp_path / "config.json", **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_names_are_found_wherever_a_config_can_have_them(tmp_path):
    kwargs = {"deep": [{"of": "evil:env"}], "size": 3, "url": "http://x:80/a", "place": "C:\\x", "text": "no colon"}
    settings = {"env": {"id": "tasks:Mine-v0", "kwargs": kwargs}, "log": {"jsonl": str(tmp_path / "log")}}
    settings["network"] = {"custom": "nets:Net", "custom_kwargs": {"activation": "torch.nn:SiLU"}}
    settings["ppo"] = {"loss": "losses:mine"}
    assert names_in(config_of(**settings)) == {
        "tasks:Mine-v0": "env.id",
        "evil:env": "env.kwargs",
        "nets:Net": "network.custom",
        "losses:mine": "ppo.loss",
        "torch.nn:SiLU": "network.custom_kwargs",
        str(tmp_path / "log"): "log.jsonl",
    }


STRANGE = ["my-evil:Env-v0", "evil:/x", "évil:E", "0evil:E", "evil:E v0", "evil :E", "pkg/evil:X", "evil:"]


@pytest.mark.parametrize("env_id", STRANGE)
def test_whatever_python_would_import_is_a_name(env_id, tmp_path):
    assert names_in(config_of(env=env_id)) == {env_id: "env.id"}
    assert f"names {env_id}," in refusal(config_of(env=env_id), tmp_path)
    assert env_id in names_in(config_of(env={"id": "CartPole-v1", "kwargs": {"env_id": env_id}}))


def test_services_that_would_be_sent_to_are_names_too(tmp_path):
    theirs = config_of(log={"wandb": True, "entity": "them", "project": "p"})
    assert "names wandb:them/p, to which metrics would be sent" in refusal(theirs, tmp_path)
    remember_names(theirs)
    check_trusted(theirs, tmp_path)


def test_what_training_alone_uses_may_be_left_out(tmp_path):
    services = {"wandb": True, "trackio": True, "mlflow": True, "entity": "them"}
    theirs = config_of(
        log=services | {"jsonl": "/etc/passwd"}, checkpoint={"mirror": "s3://x"}, ppo={"loss": "losses:mine"}
    )
    assert len(names_in(theirs)) == 6
    assert not names_in(theirs, OF_TRAINING)
    check_trusted(theirs, tmp_path, unused=OF_TRAINING)


def test_a_place_that_is_left_out_hides_no_code_of_that_name(tmp_path):
    theirs = config_of(env="wandb:them", log={"wandb": True, "entity": "them"})
    assert names_in(theirs, OF_TRAINING) == {"wandb:them": "env.id"}
    assert "env.id: " in refusal(theirs, tmp_path, unused=OF_TRAINING)


@pytest.mark.parametrize(
    "env_id", ["CartPole-v1", "lockstep/CartPole-v1", "ALE/Pong-v5", "lockstep.envs:lockstep/CartPole-v1"]
)
def test_ids_of_registries_need_no_trust(env_id, tmp_path):
    check_trusted(config_of(env=env_id), tmp_path)
    assert not trusted_names()


def test_what_is_refused_is_named_with_its_place(tmp_path):
    message = refusal(config_of(**THEIRS), tmp_path)
    assert message.startswith(
        f"env.id: {tmp_path / 'config.json'} names subprocess:Popen, which would be imported from "
    )
    assert "subprocess.py" in message
    assert message.endswith("give --trust")
    assert "nowhere that Python looks" in refusal(config_of(env="no_such_module:X"), tmp_path)
    assert "names /etc/passwd, which would be written" in refusal(config_of(log={"jsonl": "/etc/passwd"}), tmp_path)


def test_it_is_accepted_once_and_not_remembered(tmp_path):
    check_trusted(config_of(**THEIRS), tmp_path, trust=True)
    refusal(config_of(**THEIRS), tmp_path)


def test_what_was_trained_with_is_remembered_for_this_user_alone(tmp_path):
    config = config_of(env="tasks:Mine-v0")
    refusal(config, tmp_path)
    remember_names(config)
    remember_names(config)
    check_trusted(config, tmp_path)
    assert the_list().read_text() == "tasks:Mine-v0\n"
    assert the_list().stat().st_mode & 0o777 == 0o600
    assert the_list().parent.stat().st_mode & 0o077 == 0
    refusal(config_of(env="tasks:Other-v0"), tmp_path)


@pytest.mark.parametrize("what", ["file", "folder", "owner"])
def test_a_list_that_others_may_write_is_not_believed(tmp_path, what):
    config = config_of(env="tasks:Mine-v0")
    remember_names(config)
    if what == "owner":
        if os.getuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(the_list(), 12345, 12345)
    else:
        (the_list() if what == "file" else the_list().parent).chmod(0o777)
    refusal(config, tmp_path)


def test_without_a_place_for_the_list_nothing_is_remembered(tmp_path):
    (tmp_path / "account").write_text("a file where a directory should be")
    config = config_of(env="tasks:Mine-v0")
    remember_names(config)
    refusal(config, tmp_path)


def test_a_user_without_a_home_believes_no_list_of_the_working_directory(tmp_path, monkeypatch):
    config = config_of(env="tasks:Mine-v0")
    remember_names(config)
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(tmp_path / "account", tmp_path / "elsewhere/~/.config")  # as a stranger may have laid it there
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda _uid: {}["nobody"])
    assert trusted_names() == set()
    refusal(config, tmp_path)
    remember_names(config_of(env="tasks:Other-v0"))
    assert (tmp_path / "elsewhere/~/.config/lockstep/trusted_names").read_text() == "tasks:Mine-v0\n"


def test_a_name_of_two_lines_is_not_remembered(tmp_path):
    remember_names(config_of(env={"id": "tasks:Mine-v0", "kwargs": {"x": "a:b\u2028os:system"}}))
    assert trusted_names() == {"tasks:Mine-v0"}


def test_a_loss_is_for_training_alone(tmp_path):
    config = config_of(ppo={"loss": "losses:mine"})
    assert "ppo.loss: " in refusal(config, tmp_path)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    assert trusted_config(tmp_path, unused=("ppo.loss",)) == config
    with pytest.raises(ValueError, match="names losses:mine, which would be imported"):
        trusted_config(tmp_path)
    elsewhere = config_of(ppo={"loss": "losses:mine"}, env={"kwargs": {"maker": "losses:mine"}})
    (tmp_path / "config.json").write_text(elsewhere.model_dump_json())
    with pytest.raises(ValueError, match=r"^env\.kwargs: .* names losses:mine, which would be imported"):
        trusted_config(tmp_path, unused=("ppo.loss",))


def test_what_a_setting_calls_secret_is_not_said(tmp_path):
    kwargs = {"api_key": "sk:geheim", "plugin": "tasks:Mine"}
    assert "names ***, which would be imported" in refusal(
        config_of(env={"id": "CartPole-v1", "kwargs": kwargs}), tmp_path
    )
    kwargs.pop("api_key")
    message = refusal(config_of(env={"id": "CartPole-v1", "kwargs": kwargs}), tmp_path)
    assert "names tasks:Mine, which would be imported" in message


def test_a_list_in_another_encoding_loses_only_what_it_spells_otherwise(tmp_path):
    remember_names(config_of(env="tasks:Mine-v0"))
    the_list().write_bytes("tasks:Größe-v0\n".encode("latin-1") + the_list().read_bytes())
    check_trusted(config_of(env="tasks:Mine-v0"), tmp_path)
    refusal(config_of(env="tasks:Größe-v0"), tmp_path)


def test_what_is_handed_over_is_what_the_list_lacks_and_goes_no_further(monkeypatch):
    monkeypatch.setattr(trust, "_handed", set())
    remember_names(config_of(env={"id": "tasks:Mine-v0"}))
    assert handed_over(["tasks:Mine-v0"]) == {}
    variables = handed_over(["tasks:Mine-v0", "nets:Net"])
    monkeypatch.setenv(*next(iter(variables.items())))
    assert trusted_names() == {"tasks:Mine-v0"}
    take_handed_over()
    assert not variables.keys() & os.environ.keys()
    assert trusted_names() == {"tasks:Mine-v0", "nets:Net"}
    assert handed_over(["losses:mine"]).keys() == variables.keys()


@pytest.mark.parametrize("text", ["1", "", "{"])
def test_a_variable_that_is_none_of_ours_hands_over_nothing(monkeypatch, text):
    monkeypatch.setattr(trust, "_handed", set())
    monkeypatch.setenv(trust.TRUSTED_VARIABLE, text)
    take_handed_over()
    assert trusted_names() == set()
