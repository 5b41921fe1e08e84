"""What a run may name on an account that hasn't trained with it: what the words that resume it name, and no more."""

import contextlib
import json

import pytest

from lockstep.core.topology import Topology
from lockstep.launch.defaults import request_of
from lockstep.launch.start import prepare
from lockstep.runs.trust import trusted_names

SMALL = ("--num-envs", "8", "--num-steps", "16", "--total-steps", "256", "--quiet")
AGAIN = ("--name", "run", "--resume", "auto")
NAMING = {
    "paced:PacedCartPole-v0": ("paced:PacedCartPole-v0",),
    "log.jsonl": ("CartPole-v1", "--log.jsonl", "second.jsonl"),
    "wandb:us/p": ("CartPole-v1", "--log.wandb", "--log.entity", "us", "--log.project", "p"),
    "trackio:": ("CartPole-v1", "--log.trackio"),
    "mlflow:": ("CartPole-v1", "--log.mlflow"),
    "file:///net/runs": ("CartPole-v1", "--checkpoint.mirror", "file:///net/runs/"),
}


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Begins or resumes a run on an account, but for its training; gives its config, or the line that refuses it."""
    monkeypatch.chdir(tmp_path)

    def begin(account, *words, topology=Topology()):  # noqa: B008
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / account))
        with contextlib.ExitStack() as stack:
            try:
                assignment, run, *_ = prepare(request_of([*words, *SMALL]), topology, stack)
            except ValueError as error:
                return str(error)
            run.unlock()
            return assignment.config

    return begin


def edit(tmp_path, **sections):
    """Changes the run's config as a stranger would who brought it."""
    file = tmp_path / "runs" / "run" / "config.json"
    config = json.loads(file.read_text())
    for name, changes in sections.items():
        config[name] |= changes
    file.write_text(json.dumps(config))


@pytest.mark.parametrize("words", NAMING.values(), ids=NAMING)
def test_the_same_words_go_on_with_a_run_on_another_account(start, words):
    config = start("first", *words, *AGAIN)
    assert not isinstance(config, str), config
    refused = start("third", "--resume", "run")  # which names nothing
    assert refused.endswith("and you haven't trained with it on this account; look at it, then give --trust")
    assert start("second", *words, *AGAIN) == config
    assert start("second", "--resume", "run") == config  # it has trained with it by now
    assert start("third", "--resume", "run") == refused


def test_a_log_of_ones_own_takes_the_place_of_another(start, tmp_path):
    start("first", *NAMING["log.jsonl"], *AGAIN)
    edit(tmp_path, log={"jsonl": "/etc/passwd"})
    assert "names /etc/passwd, which would be written" in start("second", "CartPole-v1", *AGAIN)
    assert start("second", *NAMING["log.jsonl"], *AGAIN).log.jsonl == str(tmp_path / "second.jsonl")


STRANGERS = {
    "network.custom": {"network": {"custom": "subprocess:Popen"}},
    "env.kwargs": {"env": {"kwargs": {"maker": "subprocess:Popen"}}},
    "log.wandb": {"log": {"wandb": True, "entity": "them"}},
    "checkpoint.mirror": {"checkpoint": {"mirror": "s3://theirs/runs"}},
}


@pytest.mark.parametrize("key", STRANGERS)
def test_what_only_the_run_names_is_refused(start, tmp_path, key):
    """Whether it is resumed, or its directory is given in place of a config file."""
    words = NAMING["paced:PacedCartPole-v0"]
    assert not isinstance(start("first", *words, *AGAIN), str)
    edit(tmp_path, **STRANGERS[key])
    for each in ((*words, "--log.wandb") if key == "log.wandb" else words, ("runs/run", "--env-id", *words)):
        said = start("second", *each, *AGAIN)
        assert said.startswith(f"{key}: runs/run/config.json names "), said
    assert "subprocess:Popen" not in trusted_names()


def test_an_environment_that_only_the_run_names_is_refused(start, tmp_path):
    start("first", "CartPole-v1", *AGAIN)
    edit(tmp_path, env={"id": "subprocess:Popen"})
    assert start("second", "--resume", "run").startswith("env.id: runs/run/config.json names subprocess:Popen, which w")
    assert "can't be resumed with CartPole-v1" in start("second", "CartPole-v1", *AGAIN)


@pytest.mark.parametrize(("local", "known"), [(0, {"paced:PacedCartPole-v0"}), (1, set())])
def test_each_host_remembers_for_its_own_home(start, local, known):
    place = Topology(2 + local, 4, local, 2, launched=True, master_addr="10.0.0.1")
    assert not isinstance(start("other", "paced:PacedCartPole-v0", *AGAIN, topology=place), str)
    assert trusted_names() == known


def test_nor_is_it_remembered_where_it_was_trusted_for_once(start):
    assert not isinstance(start("first", "paced:PacedCartPole-v0", *AGAIN, "--trust"), str)
    assert trusted_names() == set()
