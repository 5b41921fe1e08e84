"""What is found before anything starts: changed configs on resume, reference policies, networks that don't fit."""

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from lockstep.commands import train as command
from lockstep.commands.train import report
from lockstep.config.checks import resolve
from lockstep.config.engines import check_engine_options
from lockstep.config.keys import validate
from lockstep.config.presets import PRESETS
from lockstep.config.run import Config
from lockstep.core.topology import Topology, started_by_torchrun
from lockstep.envs.describe import describe
from lockstep.launch.checks import check_machine
from lockstep.launch.request import request_of
from lockstep.launch.resume import resumed_config
from lockstep.launch.seeds.group import Group
from lockstep.launch.start import prepare, start_run
from lockstep.runs.finding import seeds_in
from lockstep.runs.stored import stored_config


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


def test_a_run_with_captured_steps_goes_on_with_more_ranks_once_it_captures_none(tmp_path):
    """Graphs replay what would be launched, so they decide no bits."""
    begun = resolve(Config.model_validate({"device": "cuda", "cuda_graphs": True}))
    (tmp_path / "config.json").write_text(begun.model_dump_json())
    with pytest.raises(ValueError, match=r"^cuda_graphs: true, but .* of 2 ranks .* or resume with --no-cuda-graphs$"):
        resolve(resumed_config(tmp_path, {"total_steps": 9}, trust=True), 2)
    assert resolve(resumed_config(tmp_path, {"cuda_graphs": False}, trust=True), 2).cuda_graphs is False


SMALL = ("--num-envs", "16", "--num-steps", "8", "--total-steps", "128", "--ppo.num-minibatches", "1", "--quiet")
GROUPS = ("--algorithm", "grpo", "--num-shards", "2", "--grpo.group-size", "4")
AGAINST = ("--grpo.kl-coef", "0.1", "--grpo.reference")


def train(words):
    return start_run(request_of(words), report=report)


def trained(folder, name, *words):
    code = train(["CartPole-v1", *SMALL, *GROUPS, "--runs-dir", str(folder), "--name", name, *words])
    assert code == 0
    return json.loads((folder / name / "config.json").read_text())


def test_a_reference_policy_is_one_checkpoint(tmp_path, monkeypatch):
    """By its absolute path, whatever it is called, so that the run goes on from any directory."""
    monkeypatch.chdir(tmp_path)
    trained(Path("out"), "first")
    checkpoint, asked = tmp_path / "out" / "first" / "checkpoints" / "step_128", ("--stop-at-step", "128", *AGAINST)
    for number, name in enumerate(("first", "out/first", "../out/first", str(checkpoint))):
        (tmp_path / "there").mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / "there" if name.startswith("..") else tmp_path)
        run = f"run_{number}"
        found = trained(tmp_path / "out", run, *asked, name, "--total-steps", "256")
        assert found["grpo"]["reference"] == str(checkpoint)
        monkeypatch.chdir(tmp_path / "there")
        assert train(["--resume", str(tmp_path / "out" / run), "--quiet"]) == 0
        assert json.loads((tmp_path / "out" / run / "config.json").read_text()) == found


def test_a_relative_reference_of_an_older_version_is_the_same_as_the_absolute_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained(Path("out"), "first")
    run, relative = tmp_path / "out" / "old", "out/first/checkpoints/step_128"
    with monkeypatch.context() as before:
        before.setattr("lockstep.launch.start.with_reference", lambda config, *_: config)
        found = trained(Path("out"), "old", *AGAINST, relative, "--total-steps", "512", "--stop-at-step", "128")
    assert found["grpo"]["reference"] == relative
    for words, reference in (
        ((), relative),
        (("--grpo.reference", relative), relative),
        (("--grpo.reference", "first"), "first"),
    ):
        resumed = resumed_config(run, request_of(["--resume", str(run), *words]).overrides, trust=True)
        assert resumed.grpo.reference == reference
    assert train(["--resume", "out/old", "--quiet", "--stop-at-step", "256"]) == 0
    found["grpo"]["reference"] = str(tmp_path / relative)
    assert json.loads((run / "config.json").read_text()) == found
    shutil.rmtree(run / "checkpoints" / "step_256")  # as one that was killed before it
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    assert train(["--resume", str(run), "--quiet", "--stop-at-step", "256"]) == 0


def test_another_reference_is_refused_when_a_run_is_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("first", "second")):
        trained(Path("out"), name, "--seed", str(seed))
    trained(Path("out"), "run", *AGAINST, "first", "--total-steps", "256", "--stop-at-step", "128")
    for other in ("second", "out/second/checkpoints/step_128", "nothing"):
        with pytest.raises(ValueError, match=r"^grpo\.reference: run .* was started with .*first/checkpoints/step_128"):
            train(["--resume", "out/run", "--quiet", "--grpo.reference", other])


def test_a_run_and_its_reference_go_on_where_they_are_moved_to(tmp_path, monkeypatch):
    """By the reference's place there, whose policy is compared; a kill before the next checkpoint changes nothing."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    monkeypatch.chdir(old)
    trained(Path("out"), "first")
    trained(Path("out"), "second", "--seed", "1")
    trained(Path("out"), "run", *AGAINST, "first", "--total-steps", "512", "--stop-at-step", "128")
    old.rename(new)
    monkeypatch.chdir(new)
    checkpoint = new / "out" / "first" / "checkpoints" / "step_128"
    again = ("--resume", "out/run", "--quiet", "--stop-at-step", "256")
    gone = rf"^grpo\.reference: {old}/out/first/checkpoints/step_128 is gone.*; put it back, or give --grpo\.reference "
    with pytest.raises(ValueError, match=gone):
        train(again)
    with pytest.raises(ValueError, match=r"^grpo\.reference: run .* was started with .*first/checkpoints/step_128"):
        train([*again, "--grpo.reference", "out/second"])
    assert train([*again, "--grpo.reference", str(checkpoint)]) == 0
    assert stored_config(new / "out" / "run").grpo.reference == str(checkpoint)
    shutil.rmtree(new / "out" / "run" / "checkpoints" / "step_256")  # as one that was killed before it
    assert train(again) == 0
    shutil.copytree(new / "out" / "first", new / "kept")
    shutil.rmtree(new / "out" / "first")
    assert train([*again[:3], "--stop-at-step", "384", "--grpo.reference", "kept"]) == 0
    shutil.rmtree(new / "kept" / "checkpoints" / "step_128")  # pruned
    with pytest.raises(ValueError, match=rf"^grpo\.reference: {new}/kept/checkpoints/step_128 is gone"):
        train(["--resume", "out/run", "--quiet"])


def test_a_group_and_its_reference_go_on_where_they_are_moved_to(tmp_path, monkeypatch):
    old, new = tmp_path / "old", tmp_path / "new"
    monkeypatch.setattr(Group, "train", lambda self: 0)
    trained(old, "first")
    trained(old, "many", *AGAINST, "first", "--num-seeds", "2", "--total-steps", "256")
    for seed in seeds_in(old / "many"):
        assert train(["--resume", str(seed), "--quiet", "--stop-at-step", "128"]) == 0
    old.rename(new)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^grpo\.reference: .* is gone"):
        train(["--resume", "new/many", "--quiet"])
    words = ("--resume", "new/many", "--quiet", "--grpo.reference", "first")
    assert train(words) == 0
    for path in (new / "many", *seeds_in(new / "many")):
        assert stored_config(path).grpo.reference == str(new / "first" / "checkpoints" / "step_128")


def test_seeds_of_a_group_have_one_reference(tmp_path, monkeypatch):
    """Also those that begin once it has been trained further."""
    out = tmp_path / "out"
    monkeypatch.setattr(Group, "train", lambda self: 0)
    trained(out, "first")
    words = ["CartPole-v1", *SMALL, *GROUPS, *AGAINST, "first", "--seeds", "0-1", "--runs-dir", str(out)]
    assert train([*words, "--name", "group"]) == 0
    for path in (out / "group", *seeds_in(out / "group")):
        assert stored_config(path).grpo.reference == str(out / "first" / "checkpoints" / "step_128")
    with pytest.raises(ValueError, match=r"neither nothing nor .* is a run directory"):
        train(["nothing" if word == "first" else word for word in [*words, "--name", "other"]])
    assert not (out / "other").exists()


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
    asked = (*GROUPS, "--name", "third", *AGAINST)
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
        prepare(request_of(request), Topology(), contextlib.ExitStack()).run.unlock()

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


def test_a_rank_of_torchrun_ends_with_its_agent_from_before_its_environment_is_made(monkeypatch):
    done = []

    def request(*_, **__):
        done.append("reads the request")
        raise ValueError("it is none")

    monkeypatch.setattr(command, "end_with_parent", lambda parent: done.append(f"ends with {parent == os.getppid()}"))
    monkeypatch.setattr(command, "request_of", request)
    for variables in ({}, {"TORCHELASTIC_MAX_RESTARTS": "3"}):
        monkeypatch.setattr(command, "started_by_torchrun", lambda given=variables: started_by_torchrun(given))
        with pytest.raises(ValueError, match="it is none"):
            command.main(["CartPole-v1"])
    assert done == ["reads the request", "ends with True", "reads the request"]
