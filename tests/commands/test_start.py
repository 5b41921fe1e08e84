"""What is found before anything starts: changed configs on resume, reference policies, networks that don't fit."""

import json

import pytest

from lockstep.commands.train import resumed_config, start_run
from lockstep.config.checks import resolve
from lockstep.config.command_line import read_request
from lockstep.config.run import Config


@pytest.fixture
def stored(tmp_path):
    """A run's directory, by the custom network's arguments that it was started with."""

    def make(kwargs):
        network = {"custom": "nets:Net", "custom_kwargs": kwargs}
        (tmp_path / "config.json").write_text(resolve(Config.model_validate({"network": network})).model_dump_json())
        return tmp_path

    return make


@pytest.mark.parametrize(("before", "after"), [({}, {"dropout": 0.5}), ({"dropout": 0.1}, {"units": 9})])
def test_a_resumed_run_keeps_its_custom_networks_arguments(stored, before, after):
    path = stored(before)
    assert resumed_config(path, {"network": {"custom_kwargs": before}}).network.custom_kwargs == before
    with pytest.raises(ValueError, match=r"^network\.custom_kwargs: run .* was started with"):
        resumed_config(path, {"network": {"custom_kwargs": after}})


SMALL = ("--num-envs", "16", "--num-steps", "8", "--total-steps", "128", "--ppo.num-minibatches", "1", "--quiet")
GROUPS = ("--algorithm", "grpo", "--num-shards", "2", "--grpo.group-size", "4")


def train(words):
    return start_run(read_request(words))


def trained(folder, name, *words):
    code = train(["CartPole-v1", *SMALL, *GROUPS, "--runs-dir", str(folder), "--name", name, *words])
    assert code == 0
    return json.loads((folder / name / "config.json").read_text())


def test_a_reference_policy_is_one_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained(tmp_path / "out", "first")
    found = trained(tmp_path / "out", "second", "--grpo.kl-coef", "0.1", "--grpo.reference", "first")
    assert found["grpo"]["reference"].endswith("first/checkpoints/step_128")


def complaint(folder, *words):
    with pytest.raises(ValueError) as caught:
        train(["CartPole-v1", *SMALL, "--runs-dir", str(folder), *words])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_reference_policy_that_sees_other_observations_is_refused(tmp_path):
    out = tmp_path / "out"
    trained(out, "first")
    trained(out, "normalised", "--normalize.observations")
    asked = (*GROUPS, "--grpo.kl-coef", "0.1", "--name", "third", "--grpo.reference")
    assert "but it normalises observations" in complaint(out, *asked, "normalised")
    assert "but this run normalises observations" in complaint(out, *asked, "first", "--normalize.observations")
    assert "neither nothing nor" in complaint(out, *asked, "nothing")
    assert not (out / "third").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--network.squash",), "network.squash: needs continuous actions"),
        (("--network.custom", "no_such:Net"), "network.custom: no_such:Net can't be imported"),
    ],
)
def test_networks_that_do_not_fit_leave_no_run_behind(tmp_path, words, line):
    assert complaint(tmp_path / "out", *words).startswith(line)
    assert not (tmp_path / "out").exists()


def test_a_config_that_fits_is_read():
    """The negative of the above: nothing is said."""
    assert read_request(["CartPole-v1", *GROUPS]).config.grpo.group_size == 4
