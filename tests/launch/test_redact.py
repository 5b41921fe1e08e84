"""Secrets in the words of a command line are not written down."""

import pytest

from lockstep.launch.redact import without_secrets


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("--checkpoint.mirror s3://me:geheim@host/runs", "--checkpoint.mirror s3://***@host/runs"),
        ("--checkpoint.mirror=https://host/a?sig=geheim&x=1", "--checkpoint.mirror=https://host/a?***"),
        ("--env.kwargs.api-key geheim --seed 3", "--env.kwargs.api-key *** --seed 3"),
        ("--env.kwargs.token=geheim", "--env.kwargs.token=***"),
        ("env.kwargs.password=geheim", "env.kwargs.password=***"),
        ("""--env.kwargs {"my_token":"geheim","size":5}""", """--env.kwargs {"my_token":***,"size":5}"""),
        ("--env.kwargs.SECRET --seed 3", "--env.kwargs.SECRET --seed 3"),
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
    ],
)
def test_everything_else_stays(words):
    assert " ".join(without_secrets(words.split())) == words
