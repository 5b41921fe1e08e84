"""Keys in the tables of the user's own are texts, as in JSON, by which they reach ranks and a resumed run."""

import json

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


DEEP = "nested in more than 100 levels, or within itself"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "env: &a\n  id: CartPole-v1\n  kwargs: {x: *a}\n", f"env.kwargs: {DEEP}"),
        ("a.yaml", "env: &a\n  id: CartPole-v1\n  kwargs: {x: [*a]}\n", f"env.kwargs: {DEEP}"),
        ("a.yaml", "env: &a\n  id: CartPole-v1\n  x: *a\n", f"env: {DEEP}"),
        ("a.yaml", "env.kwargs: {x: " + "[" * 3000 + "]" * 3000 + "}", DEEP),
        ("a.json", '{"env": {"kwargs": ' + '{"x": ' * 200_000 + "1" + "}" * 200_002, DEEP),
        ("a.json", '{"env": {"kwargs": ' + '{"x": ' * 101 + "1" + "}" * 103, f"env.kwargs: {DEEP}"),
        ("a.toml", "x = " + "[" * 5000 + "]" * 5000, DEEP),
    ],
)
def test_a_file_with_too_many_levels_is_refused(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError) as refusal:
        read_request([str(tmp_path / name)])
    assert str(refusal.value) == f"{tmp_path / name}: {said}"


def test_so_are_words_and_what_python_gives(tmp_path):
    for levels, where in ((200_000, "--env.kwargs"), (101, "env.kwargs")):
        with pytest.raises(ValueError, match=f"^{where}: {DEEP}$"):
            read_request(["CartPole-v1", "--env.kwargs", '{"x": ' * levels + "1" + "}" * levels])
    itself = {}
    itself["x"] = [itself]
    with pytest.raises(ValueError, match=f"^env.kwargs: {DEEP}$"):
        lockstep.train("CartPole-v1", env={"kwargs": itself}, runs_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_hundred_levels_are_read():
    text = '{"x": ' * 100 + "1" + "}" * 100
    assert read_request(["CartPole-v1", "--env.kwargs", text]).config.env.kwargs == json.loads(text)
