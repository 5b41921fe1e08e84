"""The JAX engine's Adam against the float64 reference, for any decay rates; usual ones leave optax's bits."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from lockstep import reference
from lockstep.config.run import Config
from lockstep.jax_engine.state import adam

SIZE, EPSILON = 20, 1e-8


def stepped(rule: optax.GradientTransformation, gradients: np.ndarray) -> np.ndarray:
    """The directions of some steps, float32 ``[steps, SIZE]``."""
    state: Any = rule.init(np.zeros(SIZE, np.float32))
    update, out = jax.jit(rule.update), []
    for gradient in gradients:
        direction, state = update(gradient, state)
        out.append(np.asarray(direction))
    return np.stack(out)


def rule_of(betas: tuple[float, float]) -> optax.GradientTransformation:
    return adam(Config.model_validate({"ppo": {"adam_betas": betas, "adam_eps": EPSILON}}))


def drawn(steps: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(steps, SIZE)).astype(np.float32)


@pytest.mark.parametrize("betas", [(0.9, 0.99999), (0.99995, 0.999999), (0.0, 0.9999999), (0.9, 1 - 1e-9)])
def test_large_decay_rates_are_corrected_to_the_precision_of_float32(betas):
    gradients, (first, second) = drawn(60), betas
    wanted, zeros = [], np.zeros(SIZE)
    m = v = zeros
    for number, gradient in enumerate(gradients, 1):
        moved, m, v = reference.adam_step(zeros, gradient, m, v, number, 1.0, first, second, EPSILON)
        wanted.append(-moved)
    largest = np.abs(wanted).max()
    np.testing.assert_allclose(stepped(rule_of(betas), gradients), wanted, rtol=1e-5, atol=1e-5 * largest)
    theirs = np.abs(stepped(optax.scale_by_adam(first, second, EPSILON), gradients) - wanted).max()
    assert not theirs <= 1e-4 * largest  # float32 doesn't hold such powers


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.9999), (0.5, 0.9)])
def test_usual_decay_rates_leave_the_bits_of_optax(betas):
    gradients, theirs = drawn(20), optax.scale_by_adam(betas[0], betas[1], EPSILON)
    assert stepped(rule_of(betas), gradients).tobytes() == stepped(theirs, gradients).tobytes()
