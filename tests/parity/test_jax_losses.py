"""The JAX engine's losses against the float64 references, and their gradient against finite differences."""

from functools import lru_cache
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax import numpy as jnp

from lockstep import reference
from lockstep.jax_engine.losses import loss_and_terms
from lockstep.training.losses import REFERENCE_KL, TERMS, LossSettings

ROWS = 6
ARGUMENTS: tuple[str, ...] = ("log_prob", "entropy", "values", "old_log_prob", "old_values", "advantages", "returns")
TRAINED: tuple[str, ...] = ("log_prob", "entropy", "values")
STEP = 1e-6
Samples = dict[str, np.ndarray]


@st.composite
def samples(draw) -> Samples:
    """Samples of a policy that moved: ratios from 0.6 to 1.6, values and returns of order 1; some don't count."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old_log_prob, old_values = rng.normal(-1, 0.5, ROWS), rng.normal(size=ROWS)
    return {
        "log_prob": old_log_prob + rng.uniform(-0.5, 0.5, ROWS),
        "entropy": rng.uniform(0, 2, ROWS),
        "values": old_values + rng.uniform(-1, 1, ROWS),
        "old_log_prob": old_log_prob,
        "old_values": old_values,
        "advantages": rng.normal(size=ROWS),
        "returns": rng.normal(size=ROWS),
        "valid": (rng.random(ROWS) < 0.7).astype(np.float64),
        "reference_log_prob": old_log_prob + rng.uniform(-0.5, 0.5, ROWS),
    }


@st.composite
def coefficients(draw) -> dict[str, Any]:
    return {
        "clip_range": draw(st.sampled_from([0.1, 0.2, 0.3])),
        "value_clip_range": draw(st.sampled_from([None, 0.05, 0.2])),
        "entropy_coef": draw(st.sampled_from([0.0, 0.01, 0.5])),
        "value_coef": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "count": draw(st.integers(ROWS, 64)),
    }


@lru_cache
def _compiled(kl_coef: float) -> Any:
    def run(x: dict[str, Any], settings: dict[str, Any]) -> Any:
        def loss(trained: dict[str, Any]) -> Any:
            given = x | trained
            named: Any = {name: given.get(name) for name in (*ARGUMENTS, "valid", "reference_log_prob")}
            return loss_and_terms(**named, settings=LossSettings(**settings, kl_coef=kl_coef))

        return jax.value_and_grad(loss, has_aux=True)({name: x[name] for name in TRAINED if name in x})

    return jax.jit(run)


def engine(x: Samples, settings: dict[str, Any], dtype: type = np.float64, kl_coef: float = 0.0) -> Any:
    """Loss, terms and gradients, of a program in which the settings are traced."""
    with jax.enable_x64(dtype is np.float64):
        (loss, terms), gradients = _compiled(kl_coef)({k: v.astype(dtype) for k, v in x.items()}, settings)
        assert loss.dtype == terms.dtype == dtype
        return float(loss), np.asarray(terms).tolist(), {k: np.asarray(v) for k, v in gradients.items()}


def ppo(x: Samples) -> Samples:
    return {name: x[name] for name in ARGUMENTS}


def expected_loss(x: Samples, settings: dict[str, Any]) -> dict[str, float]:
    names = ("log_prob", "old_log_prob", "advantages", "values", "old_values", "returns", "entropy")
    return reference.ppo_loss(*(x[name] for name in names), **settings)


def expected_grpo_loss(x: Samples, settings: dict[str, Any], kl_coef: float) -> dict[str, float]:
    names = ("log_prob", "old_log_prob", "advantages", "valid", "entropy")
    used = {name: settings[name] for name in ("clip_range", "entropy_coef", "count")}
    against = x["reference_log_prob"] if kl_coef else None
    return reference.grpo_loss(*(x[name] for name in names), kl_coef=kl_coef, reference_log_prob=against, **used)


def ratio_edge(x: Samples, settings: dict[str, Any]) -> float:
    """How near the nearest sample is to where clipping sets in."""
    ratio = np.exp(x["log_prob"] - x["old_log_prob"])
    return float(np.abs(np.abs(ratio - 1.0) - settings["clip_range"]).min())


@given(samples(), coefficients())
def test_every_term_is_the_references(x, settings):
    expected = expected_loss(x, settings)
    assume(ratio_edge(x, settings) > 1e-6)
    loss, terms, _ = engine(ppo(x), settings)
    assert loss == pytest.approx(expected["loss"], rel=1e-12, abs=1e-12)
    assert terms == pytest.approx([expected[name] for name in TERMS], rel=1e-12, abs=1e-12)


@given(samples(), coefficients())
def test_float32_loses_no_more_than_rounding(x, settings):
    assume(ratio_edge(x, settings) > 1e-4)
    expected = expected_loss(x, settings)
    loss, terms, _ = engine(ppo(x), settings, np.float32)
    assert loss == pytest.approx(expected["loss"], rel=1e-5, abs=1e-5)
    assert terms == pytest.approx([expected[name] for name in TERMS], rel=1e-5, abs=1e-5)


@given(samples(), coefficients(), st.sampled_from([0.0, 0.3]))
def test_grpo_is_the_references_whatever_stands_where_nothing_counts(x, settings, kl_coef):
    assume(ratio_edge(x, settings) > 1e-6)
    expected = expected_grpo_loss(x, settings, kl_coef)
    given_, without = {k: v for k, v in x.items() if k not in ("values", "old_values", "returns")}, x["valid"] == 0
    for nothing in (0.0, np.inf, np.nan):
        spoilt = given_ | {"advantages": np.where(without, nothing, x["advantages"])}
        loss, terms, gradients = engine(spoilt, settings, kl_coef=kl_coef)
        assert loss == pytest.approx(expected["loss"], rel=1e-12, abs=1e-12)
        names = [name for name in (*TERMS, *([REFERENCE_KL] if kl_coef else [])) if name != "value_loss"]
        assert [terms[(*TERMS, REFERENCE_KL).index(n)] for n in names] == pytest.approx([expected[n] for n in names])
        assert all(np.all(g[without] == 0.0) for g in gradients.values() if np.isfinite(nothing))


@given(st.floats(-1e-3, 1e-3))
def test_a_small_change_of_the_policy_has_the_references_kl_in_float32(change):
    """(r - 1) - log r as it stands leaves nothing but rounding, of either sign, of a change below 1e-3."""
    x = {name: np.zeros(1) for name in ARGUMENTS} | {"log_prob": np.array([change], np.float32)}
    settings = {"clip_range": 0.2, "value_clip_range": None, "entropy_coef": 0.0, "value_coef": 0.5, "count": 1}
    kl = engine(x, settings, np.float32)[1][TERMS.index("approx_kl")]
    assert kl >= 0.0
    assert kl == pytest.approx(reference.kl_k3([0.0], [float(x["log_prob"][0])]), rel=1e-2, abs=1e-11)


def test_each_option_changes_the_loss():
    """The negative of the parity above: options that were ignored would pass it at one setting only."""
    x = dict(zip(ARGUMENTS, (np.array([v]) for v in (0.5, 1.5, 2.0, 0.0, 0.0, 1.0, 1.0)), strict=True))
    base = {"clip_range": 0.2, "value_clip_range": None, "entropy_coef": 0.0, "value_coef": 0.5, "count": 1}
    # ratio e^0.5 = 1.65 is clipped to 1.2: policy -1.2; value 0.5 * (2 - 1)^2 = 0.5, halved.
    expected = {
        "clip_range": (0.1, -1.1 + 0.25),
        "value_clip_range": (0.1, -1.2 + 0.5 * 0.5 * max(1.0, (0.1 - 1.0) ** 2)),
        "entropy_coef": (0.1, -1.2 + 0.25 - 0.1 * 1.5),
        "value_coef": (1.0, -1.2 + 0.5),
        "count": (4, (-1.2 + 0.25) / 4),
    }
    assert engine(x, base)[0] == pytest.approx(-1.2 + 0.25)
    for name, (value, loss) in expected.items():
        assert engine(x, base | {name: value})[0] == pytest.approx(loss), name


def smooth_here(x: Samples, settings: dict[str, Any]) -> bool:
    """Whether no sample lies at a kink of the loss, where a finite difference means nothing."""
    change = np.abs(x["values"] - x["old_values"])
    clip = settings["value_clip_range"] or np.inf
    clipped = x["old_values"] + np.clip(x["values"] - x["old_values"], -clip, clip)
    errors = np.abs((x["values"] - x["returns"]) ** 2 - (clipped - x["returns"]) ** 2)
    tie = (errors < 1e-4) & (change > clip)
    return ratio_edge(x, settings) > 1e-4 and bool((np.abs(change - clip) > 1e-4).all()) and not tie.any()


def slope(function: Any, x: Samples, name: str, row: int) -> float:
    step = np.where(np.arange(ROWS) == row, STEP, 0.0)
    up, down = (function(x | {name: x[name] + sign * step})["loss"] for sign in (1, -1))
    return (up - down) / (2 * STEP)


@given(samples(), coefficients())
def test_the_gradient_is_the_references_by_finite_differences(x, settings):
    assume(smooth_here(x, settings))
    _, _, gradients = engine(ppo(x), settings)
    for name, gradient in gradients.items():
        expected = [slope(lambda x: expected_loss(x, settings), x, name, row) for row in range(ROWS)]
        assert gradient.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-8), name


@given(samples(), coefficients())
def test_the_gradient_of_grpo_is_the_references_by_finite_differences(x, settings):
    assume(ratio_edge(x, settings) > 1e-4)
    _, _, gradients = engine({k: v for k, v in x.items() if k not in ("values", "old_values")}, settings, kl_coef=0.3)
    for name, gradient in gradients.items():
        expected = [slope(lambda x: expected_grpo_loss(x, settings, 0.3), x, name, row) for row in range(ROWS)]
        assert gradient.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-8), name


def test_no_gradient_flows_through_the_terms():
    x = jnp.linspace(-1.0, 1.0, ROWS)
    settings = LossSettings(0.2, 0.2, 0.01, 0.5, ROWS)
    gradients = jax.jacobian(lambda v: loss_and_terms(v, v, v, x, x, x, x, settings)[1])(x + 0.1)
    assert not np.any(gradients)
    assert np.any(jax.grad(lambda v: loss_and_terms(v, v, v, x, x, x, x, settings)[0])(x + 0.1))
