"""Networks of the user's own that can't be trained as they are written are refused in training, and loaded."""

import random

import numpy as np
import pytest
from net_cases import CASES

from lockstep.config.run import Config
from lockstep.envs.description import EnvDescription
from lockstep.jax_engine.state import check_networks, make_net

pytestmark = pytest.mark.optimized
CASE = CASES["categorical"]
HOSTS = " draws random numbers of Python's random or of numpy.random when it is called, which nothing keys"


def config_of(name, kwargs):
    return Config.model_validate({"network": {"custom": f"equinox_nets:{name}", "custom_kwargs": kwargs}})


def checked(name, kwargs):
    """What a session makes of a network before it compiles anything."""
    return check_networks(config_of(name, kwargs), EnvDescription("it", CASE.observation, CASE.action, None))


REFUSED = [
    ("Jittery", {}, HOSTS),
    ("JitteryInTraining", {}, HOSTS),
    ("Features", {}, " has other numbers (basis) when it is made again under the same key, so ranks and resumed runs"),
    ("Features", {"where": "constant"}, " has other numbers (basis) when it is made again under the same key"),
    ("Features", {"where": "program"}, " has other numbers (in what it computes) when it is made again under"),
    ("Untrainable", {}, ": in training: AttributeError: "),
    (
        "Squeezed",
        {},
        " gave outputs of shape (3,) and values of shape (1,) for a single observation; needed are (1, 3)",
    ),
    ("Imprecise", {}, " has a parameter scale of bfloat16, but parameters are kept and trained in float32; make it "),
    ("Imprecise", {"dtype": "float16"}, " has a parameter scale of float16, but parameters are kept and trained in "),
]


@pytest.mark.parametrize(("name", "kwargs", "said"), REFUSED)
def test_what_cannot_be_trained_as_it_is_written_is_refused(name, kwargs, said):
    with pytest.raises(ValueError) as caught:
        checked(name, kwargs)
    assert str(caught.value).startswith(f"network.custom: equinox_nets:{name}{said}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("where", ["parameter", "constant"])
def test_what_a_constructor_draws_with_its_key_is_keyed(where):
    assert checked("Features", {"where": where, "keyed": True}).custom is not None


@pytest.mark.parametrize(("kind", "alike"), [("lambda", True), ("partial", True), ("drawn", False), ("itself", False)])
def test_modules_that_set_the_same_function_anew_are_alike(kind, alike):
    """As seeds of one program must be, which differ in their parameters alone."""
    one, two = (
        make_net(
            config_of("Activated", {"kind": kind}).model_copy(update={"seed": seed}), CASE.observation, CASE.action
        )
        for seed in (0, 1)
    )
    assert (
        one.custom.initial_parameters()["actor.weight"].tobytes()
        != two.custom.initial_parameters()["actor.weight"].tobytes()
    )
    assert one.custom.alike(two.custom) == alike


def test_what_fails_in_training_is_refused_by_its_place():
    with pytest.raises(ValueError, match=r"noisy.* \(equinox_nets\.py, line \d+\)$"):
        checked("Untrainable", {})


@pytest.mark.parametrize(("name", "kwargs"), [case[:2] for case in REFUSED])
def test_policies_of_such_networks_are_loaded(name, kwargs):
    net = make_net(config_of(name, kwargs), CASE.observation, CASE.action)
    assert all(x.dtype == np.float32 for x in net.custom.initial_parameters().values())


def test_numpys_float64_is_taken_which_jax_computes_in_float32():
    assert checked("Imprecise", {"dtype": "float64"}).custom is not None


def test_keyed_dropout_is_taken_and_leaves_the_hosts_generators():
    host = random.getstate(), str(np.random.get_state())
    assert checked("Tiny", {"dropout": 0.5}).custom is not None
    assert (random.getstate(), str(np.random.get_state())) == host
