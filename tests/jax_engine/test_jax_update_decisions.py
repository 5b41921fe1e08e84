"""What an update of the JAX engine decides about the learning rate, and where it says that it failed."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import numpy as jnp
from small_programs import arrays_of, opened, small_config, trained

from lockstep import reference
from lockstep.core.errors import NonFiniteError
from lockstep.jax_engine.program.iterations import numbers_of
from lockstep.jax_engine.state import adam
from lockstep.jax_engine.update import Learner, Update, adapted_learning_rate
from lockstep.training.limits import KL_NOISE, LEARNING_RATE_LIMITS
from lockstep.training.losses import TERMS

pytestmark = pytest.mark.quick

KINDS = {"exact": (1, {}), "fast": (2, {"reduction": "fast"}), "apart": (2, {"reduction": "fast", "sync_period": 2})}


def after_an_update(kind, **ppo):
    """The learning rate after an iteration that begins with 5e-3, and how many optimiser steps it took."""
    devices, changes = KINDS[kind]
    run = opened(small_config(devices, **changes, ppo={"schedule": "adaptive", **ppo}), devices)
    trained(run)
    arrays = arrays_of(run)
    return float(run.state.learning_rate), int(arrays["optimizer/step"][0])


@given(st.floats(1e-6, 1e-1), st.floats(0, 1), st.floats(1e-4, 1e-1))
def test_an_adapted_learning_rate_is_the_references(learning_rate, kl, desired_kl):
    low, high = LEARNING_RATE_LIMITS
    expected = reference.adaptive_learning_rate(learning_rate, kl, desired_kl, low, high)
    found = float(adapted_learning_rate(jnp.float32(learning_rate), jnp.float32(kl), desired_kl))
    near = any(np.isclose(kl, edge * desired_kl, rtol=1e-6) for edge in (KL_NOISE, 0.5, 2.0))
    assert near or found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_follows_the_minibatch_that_stops_the_update_too(kind):
    """Whose steps aren't applied: the second one's, or none's with periods, where a stop comes after the steps."""
    rate, steps = after_an_update(kind, target_kl=1e-9, desired_kl=1e-9)
    assert rate == pytest.approx(5e-3 / 1.5)
    assert steps == (2 if kind == "apart" else 1)


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("exact", "epoch 1, minibatch 2"),
        ("fast", "epoch 1, minibatch 2"),
        ("apart", "epoch 1, the 2 minibatches up to 2"),
    ],
)
def test_where_a_loss_is_not_finite_is_named_as_far_as_it_is_known(kind, place):
    """The first step makes parameters that the second one can't compute with."""
    devices, changes = KINDS[kind]
    ppo = {"learning_rate": 1e38, "max_grad_norm": None}
    config = small_config(devices, **changes, ppo=ppo)
    (iteration,) = trained(opened(config, devices))
    with pytest.raises(NonFiniteError, match=rf"in iteration 1, {place} \(policy_loss"):
        numbers_of(iteration, config)


def scripted(kls, gradients, **ppo) -> Any:
    """An update whose minibatches have these KLs, gradients of one number, and terms by which they are known."""
    config = small_config(ppo={"max_grad_norm": None, **ppo})
    layout: Any = SimpleNamespace(axes=(), named=lambda x: x, reduce=lambda x: x, norm=jnp.linalg.norm)
    made: Any = SimpleNamespace(config=config, layout=layout, terms=TERMS, of_minibatch=lambda _, __, now, ___: now)
    terms = np.tile(np.arange(len(TERMS), dtype=np.float32), (len(kls), 1))
    terms[:, TERMS.index("approx_kl")] = kls
    minibatches: Any = np.tile(np.array(gradients, np.float32)[:, None], 3), terms
    weights: Any = jnp.zeros(3)
    learner = Learner(weights, adam(config).init(weights), jnp.float32(5e-3))  # pyright: ignore[reportArgumentType]
    return Update(made)(learner, jnp.zeros(()), jnp.arange(len(kls)), minibatches, jnp.zeros(()))


NAN = float("nan")


@pytest.mark.parametrize(
    ("kls", "gradients"), [([0.0, 0.5, NAN, 1.0], [1.0, NAN, 1.0, 1.0]), ([0.0, NAN, 0.5, 1.0], [1.0, 1.0, NAN, 1.0])]
)
def test_of_two_numbers_that_are_none_the_first_is_told(kls, gradients):
    """Nothing after it counts, whatever it is: neither steps nor rates."""
    learner, result = scripted(kls, gradients, schedule="adaptive", desired_kl=0.2)
    alone = scripted(kls[:1], gradients[:1], schedule="adaptive", desired_kl=0.2)
    assert int(result.failed) == 1
    np.testing.assert_array_equal(result.failed_terms[TERMS.index("approx_kl")], kls[1])
    assert (int(result.evaluated), int(result.steps), int(learner.optimizer.count)) == (1, 1, 1)
    assert float(result.grad_norm) == float(alone.result.grad_norm) > 0
    np.testing.assert_array_equal(result.terms, alone.result.terms)
    np.testing.assert_array_equal(learner.parameters, alone.learner.parameters)
    assert float(learner.learning_rate) == float(alone.learner.learning_rate)


def test_a_number_that_is_none_after_a_stop_by_the_kl_fails_nothing():
    learner, result = scripted([0.0, 0.5, NAN, 0.0], [1.0, 1.0, NAN, NAN], target_kl=0.2)
    assert (int(result.failed), bool(result.stopped_by_kl)) == (-1, True)
    assert (int(result.evaluated), int(result.steps), int(learner.optimizer.count)) == (2, 1, 1)


def test_a_kl_that_comes_with_a_number_that_is_none_stops_nothing():
    _, result = scripted([0.0, 0.5], [1.0, NAN], target_kl=0.2)
    assert (int(result.failed), bool(result.stopped_by_kl)) == (1, False)


def test_a_policy_that_has_not_moved_changes_no_rate():
    """The KL divergence of so few samples is 0 or a little more by rounding, over and over."""
    one = {"schedule": "adaptive", "num_epochs": 1, "num_minibatches": 1}
    run = opened(small_config(ppo=one, env={"id": "lockstep/Pendulum-v1"}), 1)
    kls = [iteration.numbers["terms"][TERMS.index("approx_kl")] for iteration in trained(run, 4)]
    assert 0.0 < max(kls) < 1e-12
    assert float(run.state.learning_rate) == np.float32(5e-3)
