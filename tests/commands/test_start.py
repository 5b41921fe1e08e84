"""What is found before anything starts: changed configs on resume, reference policies, networks that don't fit."""

import contextlib
import json
import sys

import pytest

from lockstep.commands.train import report
from lockstep.config.checks import resolve
from lockstep.config.engines import check_engine_options
from lockstep.config.keys import validate
from lockstep.config.presets import PRESETS
from lockstep.config.run import Config
from lockstep.core.topology import Topology
from lockstep.envs.describe import describe
from lockstep.launch.checks import check_machine
from lockstep.launch.defaults import request_of
from lockstep.launch.resume import resumed_config
from lockstep.launch.start import prepare, start_run


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
    assert resumed_config(path, {"network": {"custom_kwargs": before}}, trust=True).network.custom_kwargs == before
    with pytest.raises(ValueError, match=r"^network\.custom_kwargs: run .* was started with"):
        resumed_config(path, {"network": {"custom_kwargs": after}}, trust=True)


SMALL = ("--num-envs", "16", "--num-steps", "8", "--total-steps", "128", "--ppo.num-minibatches", "1", "--quiet")
GROUPS = ("--algorithm", "grpo", "--num-shards", "2", "--grpo.group-size", "4")


def train(words):
    return start_run(request_of(words), report=report)


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


def test_a_resume_that_is_refused_changes_nothing(tmp_path):
    """Else the next one, which says nothing of it, would train by what was refused."""
    words = ("CartPole-v1", *SMALL, "--runs-dir", str(tmp_path), "--name", "run", "--stop-at-step", "64")
    assert train([*words, "--num-envs", "8"]) == 0
    before = (tmp_path / "run" / "config.json").read_text()
    more = ("--resume", str(tmp_path / "run"), "--quiet", "--total-steps", "4096")
    with pytest.raises(ValueError, match="no_such_scheme"):
        train([*more, "--checkpoint.mirror", "no_such_scheme://place"])
    assert (tmp_path / "run" / "config.json").read_text() == before
    assert train([*more, "--stop-at-step", "128"]) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["total_steps"] == 4096


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
    assert request_of(["CartPole-v1", *GROUPS]).config.grpo.group_size == 4


def calls_of(functions, act):
    """How often each of these functions is called while ``act`` runs."""
    names = {function.__code__: function.__name__ for function in functions}
    found = dict.fromkeys(names.values(), 0)

    def count(frame, event, _):
        if event == "call" and frame.f_code in names:
            found[names[frame.f_code]] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (("CartPole-v1",), {}),
        (("CartPole-v1", "--num-envs-per-rank", "4"), {}),
        (("CartPole-v1", "--num-envs-per-rank", "auto"), {"resolve": 1}),  # the first number tried fits
        (("CartPole-v1", "--engine", "jax"), {}),
        (("lockstep/GridWorld-v0",), {"validate": 1}),  # again with the defaults that its spaces have chosen
    ],
)
def test_each_check_runs_once(tmp_path, monkeypatch, words, more):
    monkeypatch.delitem(PRESETS, "lockstep/GridWorld-v0")
    request = [*words, "--runs-dir", str(tmp_path), "--name", "run"]

    def checked():
        _, run, *_ = prepare(request_of(request), Topology(), contextlib.ExitStack())
        run.unlock()

    once = dict.fromkeys(("check_engine_options", "check_machine", "describe", "resolve"), 1)
    expected = once | {"validate": 2 + more.get("validate", 0)} | {"resolve": 1 + more.get("resolve", 0)}
    assert calls_of([validate, check_engine_options, check_machine, describe, resolve], checked) == expected


def test_a_session_that_wrote_no_summary_doesnt_speak_of_the_one_before(tmp_path, monkeypatch, capsys):
    words = ["CartPole-v1", *SMALL, *GROUPS, "--runs-dir", str(tmp_path), "--name"]
    assert train([*words, "run", "--stop-at-step", "128", "--total-steps", "256"]) == 0
    capsys.readouterr()
    monkeypatch.setattr("lockstep.launch.start.run_rank", lambda *_: 143)  # stopped before it trained
    assert train(["--resume", str(tmp_path / "run")]) == 143
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("lockstep.launch.start._last_written", lambda run: object())
    assert train(["--resume", str(tmp_path / "run")]) == 143
    assert capsys.readouterr().err == "lockstep: stopped by a signal, with a checkpoint\n"
