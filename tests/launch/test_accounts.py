"""What a run may name on an account that hasn't trained with it: what the words that resume it name, and no more."""

import contextlib
import json

import pytest

from lockstep.core.topology import Topology
from lockstep.launch.request import request_of
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
                prepared = prepare(request_of([*words, *SMALL]), topology, stack)
            except ValueError as error:
                return str(error)
            prepared.run.unlock()
            return prepared.assignment.config

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


@pytest.fixture
def theirs(start, tmp_path):
    """A run of another account, which sent its metrics to that one's place."""
    words = ("--log.wandb", "--log.entity", "them", "--log.project", "p", "--log.group", "g", "--log.tags", "t")
    start("first", "CartPole-v1", *words, "--name", "theirs")
    return tmp_path / "runs" / "theirs"


def where(config):
    return config.log.entity, config.log.project, config.log.group, config.log.tags


def test_metrics_of_a_run_by_a_strangers_config_go_where_its_user_sends_them(start, theirs):
    """``lockstep train THEIRS --log.wandb`` asks for a service, and not for the stranger's project."""
    config = start("second", "runs/theirs", "--log.wandb", "--name", "a")
    assert (config.log.wandb, *where(config)) == (True, None, None, None, None)
    config = start("second", "runs/theirs", "--log.wandb", "--log.project", "mine", "--name", "b")
    assert where(config) == (None, "mine", None, None)
    assert trusted_names() == {"wandb:", "wandb:mine"}
    assert "log.wandb: runs/theirs/config.json names wandb:them/p, to which m" in start("second", "runs/theirs")
    request = request_of(["runs/theirs", "--log.wandb"])
    assert request.note == (
        "left out of runs/theirs/config.json, for you haven't sent metrics there: log.project p, log.group g, log.tags "
        "['t'], log.entity them; --trust takes all of it"
    )


def test_what_is_left_out_is_said_in_one_plain_line(start, theirs):
    config = json.loads((theirs / "config.json").read_text())
    config["log"]["project"] = "p\x1b[2J\nlockstep: error: forged"
    (theirs / "config.json").write_text(json.dumps(config))
    start("second", "runs/theirs", "--log.wandb", "--name", "a")
    note = request_of(["runs/theirs", "--log.wandb"]).note or ""
    assert "log.project p?[2J?lockstep: error: forged, " in note
    assert note.isprintable()


@pytest.mark.parametrize(
    ("account", "words"),
    [
        ("first", ("runs/theirs", "--log.wandb")),  # whose it is
        ("first", ("runs/theirs", "--log.wandb", "--log.mlflow")),  # also in another service
        ("second", ("runs/theirs", "--log.wandb", "--trust")),
        ("second", ("runs/theirs/config.json",)),  # a config file is the user's own choice
    ],
)
def test_what_is_ones_own_or_trusted_is_taken_as_it_is(start, theirs, account, words):
    config = start(account, *words, "--name", "again")
    assert where(config) == ("them", "p", "g", ("t",))
    assert request_of(list(words)).note is None


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
