"""Secrets in the words of a command line, in configs and in URLs are not written down."""

import json

import pytest

from lockstep.config.redact import secrets_in, shown_url, shown_value, without_secrets


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("--checkpoint.mirror s3://me:geheim@host/runs", "--checkpoint.mirror s3://***@host/runs"),
        ("--checkpoint.mirror=https://host/a?sig=geheim&x=1", "--checkpoint.mirror=https://host/a?***"),
        ("--env.kwargs.api-key geheim --seed 3", "--env.kwargs.api-key *** --seed 3"),
        ("--env.kwargs.token=geheim", "--env.kwargs.token=***"),
        ("env.kwargs.password=geheim", "env.kwargs.password=***"),
        ("""--env.kwargs {"my_token":"geheim","size":5}""", """--env.kwargs {"my_token":***,"size":5}"""),
        ("--checkpoint.mirror https://geheim@host/runs", "--checkpoint.mirror https://***@host/runs"),
        ("--env.kwargs.SECRET --seed 3", "--env.kwargs.SECRET --seed 3"),
        ("--env.kwargs.secret_key geheim", "--env.kwargs.secret_key ***"),
        (
            "--env.kwargs.private-key=geheim --env.kwargs.pwd geheim",
            "--env.kwargs.private-key=*** --env.kwargs.pwd ***",
        ),
        ("--env.kwargs.accessToken geheim wandbApiKey=geheim", "--env.kwargs.accessToken *** wandbApiKey=***"),
        ("--checkpoint.mirror s3://u:ge/heim@host/runs", "--checkpoint.mirror s3://***@host/runs"),
        ("--checkpoint.mirror s3://u:ge@geheim@host/runs", "--checkpoint.mirror s3://***@host/runs"),
        ("--env.kwargs {hfKey:geheim,size:5}", "--env.kwargs {hfKey:***,size:5}"),
        ("--env.kwargs {auth:[a,geheim],size:5}", "--env.kwargs {auth:***"),
        ("--env.kwargs {token:{value:geheim}}", "--env.kwargs {token:***"),
        ("--env.kwargs {apiKeys:[a,geheim]}", "--env.kwargs {apiKeys:***"),
        (
            "--env.kwargs.apikeys geheim --env.kwargs.hf_tokens=geheim",
            "--env.kwargs.apikeys *** --env.kwargs.hf_tokens=***",
        ),
        ('--env.kwargs {"ssh_keys":["geheim"]}', '--env.kwargs {"ssh_keys":***'),
        ("--env.kwargs.auth.value geheim", "--env.kwargs.auth.value ***"),
        ("--env.kwargs.password1=geheim", "--env.kwargs.password1=***"),
        ("--checkpoint.mirror HTTPS://geheim@host/runs", "--checkpoint.mirror HTTPS://***@host/runs"),
        (r"""--env.kwargs {"token":"a\"geheim","size":5}""", """--env.kwargs {"token":***,"size":5}"""),
    ],
)
def test_secrets_are_hidden(words, kept):
    assert " ".join(without_secrets(words.split())) == kept
    assert "geheim" not in kept


@pytest.mark.parametrize(
    "words",
    [
        "CartPole-v1 --seed 3 --name a",
        "--checkpoint.mirror s3://bucket/runs",
        "--env.kwargs.keyboard a x=b@c {tokenize:1}",
        "--checkpoint.mirror http://host:9000/bucket/a@2",
        "--network.custom low.key:Net --ppo.loss my_keys:loss",
        "--env.kwargs {monkey:1,hotkey:x}",
        "--checkpoint.mirror sftp://me@host/runs",
        '--env.kwargs {"observation_keys":["rgb"],"camera_key":"top","size":5}',
        '--env.kwargs {"plugin":"auth.tasks:Mine","other":"low.key:Net","size":5}',
        "--env.kwargs.stop_token </s> --env.kwargs.render_pass depth --env.kwargs.keys a",
    ],
)
def test_everything_else_stays(words):
    assert " ".join(without_secrets(words.split())) == words


def test_a_config_is_shown_without_what_is_secret():
    config = {
        "seed": 3,
        "env": {"id": "tasks:Mine-v0", "kwargs": {"api_key": "geheim", "num_tokens": 512, "deep": [{"password": "x"}]}},
        "network": {"custom": "low.key:Net", "custom_kwargs": {"auth": ["geheim"], "token": None, "size": 4}},
        "checkpoint": {"mirror": "ftp://me:geheim@host/runs"},
    }
    shown = shown_value(config)
    assert shown == {
        "seed": 3,
        "env": {"id": "tasks:Mine-v0", "kwargs": {"api_key": "***", "num_tokens": 512, "deep": [{"password": "***"}]}},
        "network": {"custom": "low.key:Net", "custom_kwargs": {"auth": "***", "token": None, "size": 4}},
        "checkpoint": {"mirror": "ftp://***@host/runs"},
    }
    assert config["env"]["kwargs"]["api_key"] == "geheim"
    assert shown_value("geheim", "network.custom_kwargs.token") == "***"
    assert shown_value("geheim", "network.custom_kwargs.auth.value") == "***"
    assert shown_value("geheim", "env.kwargs.name") == "geheim"
    assert shown_value(["rgb"], "env.kwargs.obs_keys") == ["rgb"]


def test_of_a_url_the_user_and_the_password_are_known():
    assert secrets_in("ftp://me:ge/heim@host/runs") == ("me:ge/heim", "ge/heim")
    assert secrets_in("https://geheim@host") == ("geheim",)
    assert secrets_in("https://host/a?sig=ge%40heim") == ("sig=ge%40heim", "sig=ge@heim", "ge@heim")
    assert secrets_in("ftp://me:p%40ssword@host") == ("me:p%40ssword", "me:p@ssword", "p%40ssword", "p@ssword")
    assert secrets_in("ftp://me:e@host") == ("me:e",)
    assert secrets_in("sftp://me@host/runs") == secrets_in("http://host:80/a@2") == ()
    assert shown_url("brought ftp://me:geheim@host/runs here") == "brought ftp://***@host/runs here"


def test_what_is_said_in_words_is_hidden_to_its_end():
    assert without_secrets(["{Authorization: Bearer geheim, size: 5}"]) == ("{Authorization: ***, size: 5}",)
    assert without_secrets(["{password: a b geheim}"]) == ("{password: ***}",)


def test_long_words_are_looked_through_once():
    """By each letter's rest this would be 10^12 steps."""
    word = json.dumps({"prompt": "a" * 1_000_000, "token": "geheim"})
    assert without_secrets([word]) == (word.replace('"geheim"', "***"),)
