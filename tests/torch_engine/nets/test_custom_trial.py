"""Networks of the user's own that are no function of parameters and observations are refused before anything starts."""

import random

import numpy as np
import pytest
import torch
from small_runs import described, small_config

from lockstep.torch_engine.state import check_networks, make_net


def checked(name: str, **kwargs):
    """What a launcher makes of a network before it starts ranks."""
    network = {"custom": f"users_nets:{name}", "custom_kwargs": kwargs}
    return check_networks(small_config(network=network), described())


HOSTS = "draws random numbers of Python's random or of numpy.random when it is called, which nothing keys"


@pytest.mark.parametrize(
    ("name", "kwargs", "said"),
    [
        ("AlwaysDropping", {}, "draws random numbers outside of training too, where none are keyed"),
        ("Jittery", {}, HOSTS),
        ("Jittery", {"library": "random"}, HOSTS),
        ("Features", {"where": "parameter"}, "has other numbers (basis) when it is made again under the same key"),
        ("Features", {"where": "buffer"}, "has other numbers (basis) when it is made again under the same key"),
        ("Features", {"where": "attribute"}, "has other numbers (in what it computes) when it is made again under"),
        ("Spectral", {}, "changes its buffer body.0.parametrizations.weight.0._u when it is called"),
        ("Counting", {}, "changes its buffer calls when it is called"),
        ("Counting", {"buffer": False}, "gave other numbers when it was called again with the same observations"),
        ("Running", {"changes": "always"}, "gave other numbers when it was called again with the same observations"),
        ("Running", {"changes": "outside"}, "gave other numbers when it was called again with the same observations"),
        ("Running", {}, "gave other numbers in training when it was called again with the same observations and ra"),
        ("Running", {"dropout": 0.5}, "gave other numbers in training when it was called again with the same "),
        (
            "Squeezed",
            {},
            "gave outputs of shape (3,) and values of shape (1,) for a single observation; needed are (1, 3) and (1,)",
        ),
    ],
)
def test_what_draws_unkeyed_numbers_or_keeps_some_is_refused(name, kwargs, said):
    with pytest.raises(ValueError) as caught:
        checked(name, **kwargs)
    assert str(caught.value).startswith(f"network.custom: users_nets:{name} {said}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("where", ["parameter", "buffer", "attribute"])
def test_what_a_constructor_draws_from_torchs_generator_is_keyed(where):
    assert checked("Features", where=where, keyed=True).custom is not None


def test_making_a_network_draws_nothing_from_the_callers_generators(monkeypatch):
    def refuse(seed):
        raise AssertionError("generators of devices aren't restored")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", refuse)
    before = torch.get_rng_state()
    checked("Features", keyed=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_fails_in_training_alone_is_refused_by_its_place():
    with pytest.raises(
        ValueError, match=r"^network\.custom: users_nets:Untrainable: in training: AttributeError: .*noisy"
    ) as caught:
        checked("Untrainable")
    assert "(users_nets.py, line " in str(caught.value)


def test_what_minds_gradients_is_refused_by_its_place():
    said = r"^network\.custom: users_nets:ThroughNumPy: in training: RuntimeError: Can't call numpy\(\) on Tensor"
    with pytest.raises(ValueError, match=said) as caught:
        checked("ThroughNumPy")
    assert "(users_nets.py, line " in str(caught.value)


def test_what_fails_with_a_single_observation_is_refused_by_its_place():
    said = r"^network\.custom: users_nets:Squeezed: with a single observation: IndexError: .* \(users_nets\.py, line "
    with pytest.raises(ValueError, match=said) as caught:
        checked("Squeezed", joined=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["Running", "Squeezed"])
def test_policies_of_such_networks_are_loaded(name):
    description = described()
    net = make_net(small_config(network={"custom": f"users_nets:{name}"}), description.observation, description.action)
    assert net.custom is not None


def test_a_network_is_tried_with_other_observations_in_a_copy():
    seen = checked("Particular").custom.module.last
    assert not seen.any()
    assert seen.shape == (2, 4)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        *[("Tiny", {"dropout": 0.5}), ("Forgetful", {}), ("Shifted", {}), ("Masking", {}), ("Scaling", {})],
        *[("Particular", {}), ("OfBatch", {}), ("Varied", {})],
    ],
)
def test_keyed_dropout_constants_and_what_is_made_once_are_taken(name, kwargs):
    torch_state, host = torch.get_rng_state(), (random.getstate(), str(np.random.get_state()))
    net = checked(name, **kwargs)
    assert not net.custom.module.training
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (random.getstate(), str(np.random.get_state())) == host


def test_a_network_may_change_its_arguments():
    """It is made more than once."""
    options = {"units": 3}
    checked("Taking", options=options)
    assert options == {"units": 3}
