"""The PyTorch engine's PPO loss against the float64 reference, and its gradient against finite differences."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from lockstep import reference
from lockstep.torch_engine.losses import loss_and_terms
from lockstep.training.losses import TERMS, LossSettings

TRAINED = ("log_prob", "entropy", "values")
STEP = 1e-6


class Samples(NamedTuple):
    """The arguments of `loss_and_terms` in their order, float64 `[N]`."""

    log_prob: np.ndarray
    entropy: np.ndarray
    values: np.ndarray
    old_log_prob: np.ndarray
    old_values: np.ndarray
    advantages: np.ndarray
    returns: np.ndarray


@st.composite
def samples(draw, size=None):
    """Samples of a policy that moved: ratios from 0.6 to 1.6, values and returns of order 1."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = draw(st.integers(1, 12)) if size is None else size
    old_log_prob, old_values = rng.normal(-1, 0.5, n), rng.normal(size=n)
    return Samples(
        log_prob=old_log_prob + rng.uniform(-0.5, 0.5, n),
        entropy=rng.uniform(0, 2, n),
        values=old_values + rng.uniform(-1, 1, n),
        old_log_prob=old_log_prob,
        old_values=old_values,
        advantages=rng.normal(size=n),
        returns=rng.normal(size=n),
    )


@st.composite
def loss_settings(draw, count=None):
    return LossSettings(
        clip_range=draw(st.sampled_from([0.1, 0.2, 0.3])),
        value_clip_range=draw(st.sampled_from([None, 0.05, 0.2])),
        entropy_coef=draw(st.sampled_from([0.0, 0.01, 0.5])),
        value_coef=draw(st.sampled_from([0.0, 0.5, 1.0])),
        count=draw(st.integers(1, 64)) if count is None else count,
    )


def expected_loss(x: Samples, settings: LossSettings) -> dict[str, float]:
    return reference.ppo_loss(
        x.log_prob,
        x.old_log_prob,
        x.advantages,
        x.values,
        x.old_values,
        x.returns,
        x.entropy,
        clip_range=settings.clip_range,
        value_clip_range=settings.value_clip_range,
        entropy_coef=settings.entropy_coef,
        value_coef=settings.value_coef,
        count=settings.count,
    )


def tensors(x: Samples, dtype=torch.float64) -> list[torch.Tensor]:
    return [torch.from_numpy(part).to(dtype) for part in x]


def ratio_edge(x: Samples, settings: LossSettings) -> float:
    """How near the nearest sample is to where clipping sets in."""
    ratio = np.exp(x.log_prob - x.old_log_prob)
    return float(np.abs(np.abs(ratio - 1.0) - settings.clip_range).min())


@given(samples(), loss_settings())
def test_every_term_is_the_references(x, settings):
    expected = expected_loss(x, settings)
    assume(ratio_edge(x, settings) > 1e-6)
    loss, terms = loss_and_terms(*tensors(x), settings=settings)
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-12, abs=1e-12)
    assert terms.tolist() == pytest.approx([expected[name] for name in TERMS], rel=1e-12, abs=1e-12)


@given(samples(), loss_settings())
def test_float32_loses_no_more_than_rounding(x, settings):
    assume(ratio_edge(x, settings) > 1e-4)
    expected = expected_loss(x, settings)
    loss, terms = loss_and_terms(*tensors(x, torch.float32), settings=settings)
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-5, abs=1e-5)
    assert terms.tolist() == pytest.approx([expected[name] for name in TERMS], rel=1e-5, abs=1e-5)


@given(st.floats(-1e-3, 1e-3))
def test_a_small_change_of_the_policy_has_the_references_kl_in_float32(change):
    """(r - 1) - log r as it stands leaves nothing but rounding, of either sign, of a change below 1e-3."""
    old, zeros = torch.zeros(1), torch.zeros(1)
    new = torch.tensor([change], dtype=torch.float32)
    _, terms = loss_and_terms(new, zeros, zeros, old, zeros, zeros, zeros, LossSettings(0.2, None, 0.0, 0.5, 1))
    kl = terms[TERMS.index("approx_kl")].item()
    assert kl >= 0.0
    assert kl == pytest.approx(reference.kl_k3([0.0], [float(new)]), rel=1e-2, abs=1e-11)


def test_each_option_changes_the_loss():
    """The negative of the parity above: options that were ignored would pass it at one setting only."""
    x = Samples(*(np.array([v]) for v in (0.5, 1.5, 2.0, 0.0, 0.0, 1.0, 1.0)))
    base = LossSettings(0.2, None, 0.0, 0.5, 1)
    # ratio e^0.5 = 1.65 is clipped to 1.2: policy -1.2; value 0.5 * (2 - 1)^2 = 0.5, halved.
    losses = {"base": -1.2 + 0.25}
    losses["clip_range"] = -1.1 + 0.25
    losses["value_clip_range"] = -1.2 + 0.5 * 0.5 * max(1.0, (0.1 - 1.0) ** 2)  # the unclipped error is the worse
    losses["entropy_coef"] = -1.2 + 0.25 - 0.1 * 1.5
    losses["value_coef"] = -1.2 + 0.5
    losses["count"] = (-1.2 + 0.25) / 4
    changed = {
        "base": base,
        "clip_range": LossSettings(0.1, None, 0.0, 0.5, 1),
        "value_clip_range": LossSettings(0.2, 0.1, 0.0, 0.5, 1),
        "entropy_coef": LossSettings(0.2, None, 0.1, 0.5, 1),
        "value_coef": LossSettings(0.2, None, 0.0, 1.0, 1),
        "count": LossSettings(0.2, None, 0.0, 0.5, 4),
    }
    assert {k: loss_and_terms(*tensors(x), settings=s)[0].item() for k, s in changed.items()} == pytest.approx(losses)


def test_value_clipping_takes_the_worse_error():
    # V moves from 0 to 0.9 towards R = 1; clipped at 0.1 the error is (0.1 - 1)^2 = 0.81, not 0.01.
    x = Samples(*(np.array([v]) for v in (0.0, 0.0, 0.9, 0.0, 0.0, 0.0, 1.0)))
    clipped, unclipped = (
        loss_and_terms(*tensors(x), settings=LossSettings(0.2, c, 0.0, 1.0, 1))[0].item() for c in (0.1, None)
    )
    assert clipped == pytest.approx(0.5 * 0.81)
    assert unclipped == pytest.approx(0.5 * 0.01)


@given(samples(size=8), loss_settings(count=8), st.sampled_from([1, 2, 4, 8]))
def test_the_sums_of_shards_add_up_to_the_whole(x, settings, num_shards):
    whole_loss, whole_terms = loss_and_terms(*tensors(x), settings=settings)
    loss, terms = loss_and_terms(*(part.view(num_shards, -1) for part in tensors(x)), settings=settings)
    assert loss.shape == (num_shards,)
    assert terms.shape == (num_shards, len(TERMS))
    assert loss.sum().item() == pytest.approx(whole_loss.item(), rel=1e-12, abs=1e-12)
    assert terms.sum(0).tolist() == pytest.approx(whole_terms.tolist(), rel=1e-12, abs=1e-12)


def test_the_mean_of_the_shards_own_means_is_another_number_if_counts_are_local():
    x = Samples(*(np.arange(8.0) / 8 for _ in range(7)))
    whole = loss_and_terms(*tensors(x), settings=LossSettings(0.2, None, 0.0, 0.5, 8))[0]
    local = loss_and_terms(*(part.view(2, 4) for part in tensors(x)), settings=LossSettings(0.2, None, 0.0, 0.5, 4))[0]
    assert local.sum().item() == pytest.approx(2 * whole.item())


def smooth_here(x: Samples, settings: LossSettings) -> bool:
    """Whether no sample lies at a kink of the loss, where a finite difference means nothing."""
    change = np.abs(x.values - x.old_values)
    clip = settings.value_clip_range or np.inf
    clipped = x.old_values + np.clip(x.values - x.old_values, -clip, clip)
    errors = np.abs((x.values - x.returns) ** 2 - (clipped - x.returns) ** 2)
    tie = (errors < 1e-4) & (change > clip)
    return ratio_edge(x, settings) > 1e-4 and bool((np.abs(change - clip) > 1e-4).all()) and not tie.any()


@given(samples(), loss_settings())
def test_the_gradient_is_the_references_by_finite_differences(x, settings):
    assume(smooth_here(x, settings))
    inputs = tensors(x)
    trained = [inputs[Samples._fields.index(name)].requires_grad_() for name in TRAINED]
    loss, terms = loss_and_terms(*inputs, settings=settings)
    assert not terms.requires_grad
    gradients = torch.autograd.grad(loss, trained)
    for name, gradient in zip(TRAINED, gradients, strict=True):
        for i in range(len(x.log_prob)):
            step = np.where(np.arange(len(x.log_prob)) == i, STEP, 0.0)
            up, down = (x._replace(**{name: getattr(x, name) + sign * step}) for sign in (1, -1))
            slope = (expected_loss(up, settings)["loss"] - expected_loss(down, settings)["loss"]) / (2 * STEP)
            assert gradient[i].item() == pytest.approx(slope, rel=1e-5, abs=1e-8), (name, i)


def test_a_clipped_sample_that_gains_has_no_gradient_and_one_that_loses_has():
    # ratio 1.5 beyond 1.2: with A > 0 the surrogate is flat, with A < 0 it is not.
    log_prob = torch.full((2,), float(np.log(1.5)), dtype=torch.float64, requires_grad=True)
    zeros, advantages = torch.zeros(2, dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64)
    loss, _ = loss_and_terms(
        log_prob, zeros, zeros, zeros, zeros, advantages, zeros, LossSettings(0.2, None, 0, 0.5, 1)
    )
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert gradient.tolist() == pytest.approx([0.0, 1.5])
