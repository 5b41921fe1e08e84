"""GRPO's reference policy: of a checkpoint, the initial one, or none."""

import shutil

import numpy as np
import pytest
from fake_session import FakeSession

from lockstep.config.run import Config
from lockstep.runs.directory import RunDirectory
from lockstep.training.recorder import Recorder
from lockstep.training.reference_policy import (
    check_same_networks,
    check_same_reference,
    config_digest,
    config_facts,
    reference_arrays,
    reference_digest,
    with_reference,
)
from lockstep.training.run_history import RunHistory
from lockstep.training.stop import FINISHED

SHAPES = {"w": (3,)}


def initial():
    return {"w": np.full(3, 7, np.float32)}


@pytest.fixture
def finished(tmp_path):
    """A run that ended with weights of one."""
    session, run = FakeSession(), RunDirectory(tmp_path, quiet=True)
    run.write_config(session.config)
    recorder = Recorder(session, run, 0.0)
    session.advance()
    recorder.finish(FINISHED)
    recorder.close()
    return str(tmp_path)


def grpo(reference=None, kl_coef=0.1):
    return Config.model_validate({"algorithm": "grpo", "grpo": {"kl_coef": kl_coef, "reference": reference}})


def test_ranks_agree_on_a_reference_by_its_parameters_wherever_a_host_has_it(finished, tmp_path):
    elsewhere = shutil.copytree(finished, tmp_path / "elsewhere")
    one = config_digest(grpo(finished))
    assert one == config_digest(grpo(str(elsewhere)))
    assert one != config_digest(grpo())
    assert one != config_digest(grpo(finished, kl_coef=0.2))
    session, other = FakeSession(), RunDirectory(tmp_path / "other", quiet=True)
    other.path.mkdir()
    other.write_config(session.config)
    session.weights += 5
    recorder = Recorder(session, other, 0.0)
    session.advance()
    recorder.finish(FINISHED)
    recorder.close()
    assert one != config_digest(grpo(str(other.path)))


def test_ranks_compare_each_setting_and_secrets_by_the_digest_alone(finished):
    mine, theirs = (
        config_facts(Config.model_validate({"seed": seed, "checkpoint": {"mirror": f"s3://me:{seed}secret@host/runs"}}))
        for seed in (1, 2)
    )
    assert {key for key in mine if mine[key] != theirs[key]} == {"config.seed", "config"}
    assert not any("secret" in value for value in mine.values())
    assert finished not in config_facts(grpo(finished))["config.grpo.reference"]


def changed(config, **network):
    """A config with another precision or other networks."""
    precision = {"precision": network.pop("precision")} if "precision" in network else {}
    return Config.model_validate(config.model_dump() | precision | {"network": config.network.model_dump() | network})


OTHERS = [
    ({"activation": "relu"}, "network.activation tanh, this run has relu"),
    ({"hidden_sizes": (64, 64, 64)}, r"network.hidden_sizes \[64, 64\], this run has \[64, 64, 64\]"),
    ({"squash": True}, "network.squash False, this run has True"),
    ({"recurrent": "gru"}, "network.recurrent None, this run has gru"),
    ({"custom": "nets:Net"}, "network.custom None, this run has a class"),
    ({"precision": "bf16"}, "precision fp32, this run has bf16"),
]


@pytest.mark.parametrize(("network", "said"), OTHERS, ids=str)
def test_a_reference_of_other_networks_is_refused_before_anything_starts(finished, tmp_path, network, said):
    config = changed(grpo(finished), **network)
    with pytest.raises(ValueError, match=rf"^grpo\.reference: {finished} was trained with {said}, by which .*; give "):
        with_reference(config, str(tmp_path))
    assert with_reference(config, str(tmp_path), tmp_path).grpo.reference  # a run that goes on as it began


def test_settings_that_change_no_function_of_its_parameters_may_differ(finished, tmp_path):
    names = {"log_std_init": -1.0, "sequence_length": 8, "remat": True, "shared": True, "recurrent_size": 9}
    assert with_reference(changed(grpo(finished), **names), str(tmp_path)).grpo.reference
    linear = changed(grpo(finished), hidden_sizes=())
    check_same_networks(changed(linear, activation="relu"), linear)
    core = changed(linear, recurrent="lstm")
    with pytest.raises(ValueError, match=r"network.recurrent_size 128, this run has 9"):
        check_same_networks(changed(core, recurrent_size=9), core)
    custom = changed(linear, custom="nets:Net", custom_kwargs={"units": 3})
    check_same_networks(changed(custom, activation="relu", hidden_sizes=(3,)), custom)
    check_same_networks(custom, changed(custom, custom="python:Net"))  # of a script, and by now of a module
    check_same_networks(changed(custom, custom="python:Other"), custom)  # whose name may be any
    said = r"was trained with network\.custom nets:Other, this run has nets:Net; give this run nets:Other, which may be"
    with pytest.raises(ValueError, match=said):
        check_same_networks(custom, changed(custom, custom="nets:Other"))
    with pytest.raises(ValueError, match=r"network.custom_kwargs \{'units': 3\}, this run has \{'units': 4\}"):
        check_same_networks(changed(custom, custom_kwargs={"units": 4}), custom)


def test_parameters_that_this_runs_networks_lack_are_of_other_ones(finished, monkeypatch):
    """As of an encoder with another layer of the same shape."""
    found = {f"policy/actor.{n}.weight": np.ones((4, 4), np.float32) for n in range(3)}
    monkeypatch.setattr("lockstep.training.reference_policy._read", lambda _: found | {"policy/critic.3.weight": 0})
    shapes = {f"actor.{n}.weight": (4, 4) for n in range(3)}
    assert set(reference_arrays(grpo(finished), shapes, initial) or ()) == set(shapes)
    shapes.pop("actor.1.weight")
    with pytest.raises(ValueError, match=r"has a parameter actor\.1\.weight, which this run's networks haven't"):
        reference_arrays(grpo(finished), shapes, initial)
    custom = changed(grpo(finished), custom="nets:Net")
    assert set(reference_arrays(custom, shapes, initial) or ()) == set(shapes)


@pytest.mark.parametrize("config", [Config(), grpo(kl_coef=0.0)])
def test_without_a_weight_there_is_none(config):
    assert reference_arrays(config, SHAPES, lambda: pytest.fail("nobody asked")) is None


def test_without_a_run_it_is_the_initial_one():
    arrays = reference_arrays(grpo(), SHAPES, initial)
    assert arrays is not None
    assert arrays["w"].tolist() == [7, 7, 7]


def test_a_runs_parameters_are_read_and_no_others(finished):
    arrays = reference_arrays(grpo(finished), SHAPES, initial)
    assert arrays is not None
    assert {name: array.tolist() for name, array in arrays.items()} == {"w": [1, 1, 1]}


@pytest.mark.parametrize("shapes", [{"w": (4,)}, {"w": (3,), "b": (1,)}])
def test_other_networks_are_refused(finished, shapes):
    with pytest.raises(ValueError, match=rf"^grpo\.reference: {finished} has no parameter \w of shape \(\d,\)$"):
        reference_arrays(grpo(finished), shapes, initial)


def test_another_policy_in_the_references_place_is_refused(finished, tmp_path):
    """A path doesn't tell: the run that lay there was removed, and trained once more."""
    config = grpo(finished)
    facts = {"reference_sha256": reference_digest(config)}
    assert len(facts["reference_sha256"] or "") == 64
    check_same_reference(config, facts)
    check_same_reference(config, {})  # of a version that kept none
    session = FakeSession()
    session.weights = np.full(3, 5, np.float32)
    shutil.rmtree(tmp_path / "checkpoints")
    recorder = Recorder(session, RunDirectory(tmp_path, quiet=True), 0.0)
    session.advance()
    recorder.finish(FINISHED)
    recorder.close()
    with pytest.raises(ValueError, match=r"^grpo\.reference: .* is another policy than .* trained with \(sha256 "):
        check_same_reference(config, facts)


def test_a_checkpoint_says_what_the_reference_was(finished):
    assert RunHistory.of(None, "2030-01-01").to_json()["reference_sha256"] is None
    history = RunHistory.of(None, "2030-01-01")
    history.record_reference(grpo(finished))
    assert history.to_json()["reference_sha256"] == reference_digest(grpo(finished))
    assert RunHistory.of(history.to_json(), "").reference_sha256 == history.reference_sha256


def test_a_run_that_isnt_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is no run directory"):
        reference_arrays(grpo(str(tmp_path / "none")), SHAPES, initial)
