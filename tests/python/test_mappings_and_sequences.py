"""Settings come in mappings and sequences of any kind, as configs of other libraries are."""

import argparse
import dataclasses
import decimal
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
import users_losses
import users_nets

import lockstep
from lockstep.config.command_line import read_request
from lockstep.python.arguments import in_plain_words
from lockstep.python.run import Run

untyped: Any = lockstep


class Settings(Mapping[str, Any]):
    """A mapping that is no dict; what is in it is of its kind as well."""

    def __init__(self, content):
        self._content = content

    def __getitem__(self, key):
        found = self._content[key]
        if found == "???":
            raise LookupError(f"Missing mandatory value: {key}\n    full_key: {key}\n    object_type=dict")
        kinds = {dict: Settings, list: Listed}
        return kinds.get(type(found), lambda it: it)(found)

    def __iter__(self):
        return iter(self._content)

    def __len__(self):
        return len(self._content)


class Listed(Sequence[Any]):
    """A sequence that is no list."""

    def __init__(self, content):
        self._content = content

    def __getitem__(self, place):
        return self._content[place]

    def __len__(self):
        return len(self._content)


KINDS = [dict, MappingProxyType, Settings]


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What would be trained: the config as it is read from the settings that the command gets."""
    monkeypatch.setattr("lockstep.python.train.start", lambda found, given, *_: (found, given))

    def read(*args, **settings):
        found, _ = untyped.train(*args, **settings)
        (tmp_path / "asked.json").write_text(json.dumps(in_plain_words(found)))
        return read_request([str(tmp_path / "asked.json")]).config

    return read


@pytest.mark.parametrize("kind", KINDS)
def test_a_section_keeps_its_settings_beside_others(asked, kind):
    config = {"env": {"id": "CartPole-v1"}, "ppo": kind({"gamma": 0.5, "learning_rate": 0.123})}
    for found in (asked(config, ppo={"num_epochs": 7}), asked({}, env=kind({"id": "CartPole-v1"}), **config["ppo"])):
        assert (found.ppo.gamma, found.ppo.learning_rate) == (0.5, 0.123)
    config["ppo"] = {"gamma": 0.5, "learning_rate": 0.123}
    found = asked(config, ppo=kind({"num_epochs": 7}))
    assert (found.ppo.gamma, found.ppo.learning_rate, found.ppo.num_epochs) == (0.5, 0.123, 7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_config_is_read_at_all_levels(asked, kind):
    inside = {"env": kind({"id": "CartPole-v1", "kwargs": kind({"sutton_barto_reward": True})}), "ppo": kind({"lr": 1})}
    found = asked(kind({"total_steps": 999, **inside}), ppo=kind({"gamma": 0.5}))
    assert (found.env.id, found.env.kwargs) == ("CartPole-v1", {"sutton_barto_reward": True})
    assert (found.total_steps, found.ppo.learning_rate, found.ppo.gamma) == (999, 1.0, 0.5)
    beside = asked("CartPole-v1", config=kind({"env": kind({"workers": 1})}), env=kind({"workers": 2}))
    assert (beside.env.id, beside.env.workers) == ("CartPole-v1", 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_setting_that_is_given_twice_is_refused(asked, kind):
    with pytest.raises(ValueError, match=r"^ppo\.learning_rate 0\.5 given together with lr 0\.01; give one$"):
        asked("CartPole-v1", lr=0.01, ppo=kind({"learning_rate": 0.5}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_or_a_function_may_be_in_one(monkeypatch, kind):
    monkeypatch.setattr("lockstep.python.train.start", lambda found, given, *_: (found, given))
    network, ppo = kind({"custom": users_nets.Tiny}), kind({"loss": users_losses.spo})
    found, given = untyped.train("CartPole-v1", network=network, ppo=ppo)
    assert (found["network"]["custom"], found["ppo"]["loss"]) == ("users_nets:Tiny", "users_losses:spo")
    assert [each.given for each in given] == [users_nets.Tiny, users_losses.spo]


@pytest.mark.parametrize("sizes", [Listed([32, 16]), (32, 16), [32, 16]])
def test_sequences_are_lists(asked, sizes):
    config = Settings({"env": "CartPole-v1", "network": {"hidden_sizes": sizes}, "total_steps": 999})
    assert asked(config).network.hidden_sizes == (32, 16)
    kwargs = asked("CartPole-v1", env={"kwargs": {"inside": [Settings({"sizes": sizes})]}}).env.kwargs
    assert kwargs == {"inside": [{"sizes": [32, 16]}]}


def test_what_a_mapping_says_against_being_read_is_one_line(asked):
    line = r"^config: Settings can't be read: LookupError: Missing mandatory value: total_steps$"
    with pytest.raises(ValueError, match=line):
        asked(Settings({"env": "CartPole-v1", "total_steps": "???"}))
    with pytest.raises(ValueError, match=r"^ppo: Settings can't be read: LookupError: Missing mandatory value: gamma$"):
        asked("CartPole-v1", ppo=Settings({"gamma": "???"}))


def test_what_is_nested_in_itself_is_one_line(asked):
    sections, kwargs = dict[str, Any](), dict[str, Any]()
    sections["ppo"], kwargs["more"] = Settings(sections), [kwargs, kwargs]
    with pytest.raises(ValueError, match=r"^ppo: nested in more than 100 levels, or within itself$"):
        asked("CartPole-v1", ppo=sections)
    with pytest.raises(ValueError, match=r"^env\.kwargs: nested in more than 100 levels, or within itself$"):
        asked("CartPole-v1", env={"kwargs": kwargs})


class Dictable:
    """As ConfigDict of ml_collections: no mapping, though it has keys."""

    def to_dict(self):
        return {}

    def __repr__(self):
        return "env: CartPole-v1\nseed: 1"


@dataclasses.dataclass
class Fields:
    seed: int = 1


@pytest.mark.parametrize(
    ("given", "form"),
    [
        (Dictable(), "Dictable is no mapping, give its to_dict()"),
        (argparse.Namespace(seed=1), "Namespace is no mapping, give vars() of it"),
        (Fields(), "Fields is no mapping, give dataclasses.asdict() of it"),
    ],
)
def test_settings_that_are_no_mapping_are_answered_with_what_to_give(asked, given, form):
    uses = (lambda: asked(given), lambda: asked("CartPole-v1", config=given), lambda: asked("CartPole-v1", ppo=given))
    for use, beginning in zip(uses, ("env: ", "config: ", "ppo: "), strict=True):
        with pytest.raises(ValueError) as refusal:
            use()
        said = str(refusal.value)
        assert said.startswith(beginning)
        assert said.endswith(f"; {form}")
        assert "\n" not in said


def test_numbers_of_other_kinds_are_answered_with_what_to_give(asked):
    said = r"^ppo\.learning_rate: Decimal\('0\.1'\) is of a kind that a config can't hold; give float\(\) of it"
    with pytest.raises(ValueError, match=said):
        asked("CartPole-v1", lr=decimal.Decimal("0.1"))


def test_quiet_by_keyword_counts_more_than_the_configs(monkeypatch):
    monkeypatch.setattr("lockstep.python.train.start", lambda asked, *_: asked)
    config = {"env": "CartPole-v1", "quiet": True}
    assert [untyped.train(config, quiet=quiet)["quiet"] for quiet in (False, True, None)] == [False, True, True]
    assert "quiet" not in untyped.train("CartPole-v1")


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_resumed_with_a_config_too(monkeypatch, tmp_path, kind):
    monkeypatch.setattr("lockstep.python.run.start", lambda asked, *_: asked)
    config = kind({"max_restarts": 3, "ppo": kind({"gamma": 0.5}), "total_steps": 9})
    asked: Any = Run(tmp_path).resume(512, config=config, ppo={"num_epochs": 7}, seeds=range(2))
    assert asked["ppo"] == {"gamma": 0.5, "num_epochs": 7}
    assert (asked["total_steps"], asked["max_restarts"]) == (512, 3)
    assert (asked["resume"], asked["seeds"]) == (str(tmp_path), "0,1")


def test_a_run_is_resumed_with_the_defaults_of_train(monkeypatch, tmp_path):
    monkeypatch.setattr("lockstep.python.run.start", lambda asked, *_: asked)
    names = ("env", "engine", "nproc", "name", "runs_dir", "resume", "seeds", "quiet", "config")
    assert untyped.Run(tmp_path).resume(512, **dict.fromkeys(names)) == {"total_steps": 512, "resume": str(tmp_path)}
    for given in ({"resume": "other"}, {"config": {"resume": "other"}}):
        with pytest.raises(ValueError, match=r"^resume: 'other' is given, but this resumes .*; leave it out$"):
            Run(tmp_path).resume(512, **given)
