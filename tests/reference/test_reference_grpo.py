"""GRPO's reference against arithmetic written out by hand, and against properties that hold for every input."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep import reference

LN2 = math.log(2.0)


def close(actual, expected, tolerance=1e-9):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


# --- Advantages -------------------------------------------------------------------------------------------------------


def test_group_advantages_without_scale_by_hand():
    # Groups (1, 3) and (10, 40): means 2 and 25; deviations 1 and 15.
    close(reference.group_advantages([1, 3, 10, 40], 2, eps=0.0), [-1, 1, -1, 1])
    close(reference.group_advantages([1, 3, 10, 40], 2, eps=0.0, scale=False), [-1, 1, -15, 15])
    close(reference.group_advantages([1, 3, 10, 40], 2, eps=1.0), [-1 / 2, 1 / 2, -15 / 16, 15 / 16])
    close(reference.group_advantages([1, 3, 10, 40], 4, eps=0.0, scale=False), [-12.5, -10.5, -3.5, 26.5])


@given(st.integers(0, 2**32 - 1), st.sampled_from([2, 3, 6]), st.booleans())
def test_a_group_knows_nothing_of_the_others(seed, group_size, scale):
    returns = np.random.default_rng(seed).normal(size=12)
    whole = reference.group_advantages(returns, group_size, 1e-8, scale)
    parts = [
        reference.group_advantages(returns[i : i + group_size], group_size, 1e-8, scale)
        for i in range(0, 12, group_size)
    ]
    np.testing.assert_array_equal(whole, np.concatenate(parts))
    close(whole.reshape(-1, group_size).mean(1), 0.0)


# --- Loss -------------------------------------------------------------------------------------------------------------

# Four steps, the last one invalid, eps = 1/2.
#   step 0: A = 2,  ratio 2,   clipped to 3/2: max(-4, -3) = -3            outside
#   step 1: A = -1, ratio 2,   clipped to 3/2: max( 2, 3/2) = 2            outside
#   step 2: A = 3,  ratio 1:   -3
# policy: (-3 + 2 - 3) / 4 = -1 with a global count of 4; entropy (1 + 2 + 3) / 4 = 3/2; clip fraction 2/4;
# approx_kl: 2 · (2 - 1 - ln 2) / 4.
# The reference policy's log-probability is above the new one's by ln 2, by 0, and by -ln 2:
#   k3: 2 - ln 2 - 1, 0, 1/2 + ln 2 - 1: sum 1/2, / 4 = 1/8.
BY_HAND = {
    "new_log_prob": [LN2 - 1, LN2 - 2, -3, math.nan],
    "old_log_prob": [-1, -2, -3, math.nan],
    "advantages": [2, -1, 3, math.inf],
    "mask": [True, True, True, False],
    "entropy": [1, 2, 3, math.nan],
    "reference_log_prob": [2 * LN2 - 1, LN2 - 2, -3 - LN2, math.nan],
}


def test_grpo_loss_by_hand():
    result = reference.grpo_loss(**BY_HAND, clip_range=0.5, entropy_coef=0.1, kl_coef=0.4, count=4)
    assert result == pytest.approx(
        {
            "policy_loss": -1.0,
            "reference_kl": 1 / 8,
            "entropy": 3 / 2,
            "approx_kl": (1 - LN2) / 2,
            "clip_fraction": 1 / 2,
            "loss": -1.0 + 0.4 / 8 - 0.1 * 3 / 2,
        }
    )


def test_without_a_reference_policy_there_is_no_divergence():
    columns = {name: column for name, column in BY_HAND.items() if name != "reference_log_prob"}
    result = reference.grpo_loss(**columns, clip_range=0.5, count=4)
    assert (result["reference_kl"], result["loss"]) == (0.0, pytest.approx(-1.0))
    with pytest.raises(ValueError, match=r"kl_coef is 0.1, but there is no reference_log_prob"):
        reference.grpo_loss(**columns, clip_range=0.5, kl_coef=0.1, count=4)


def made(seed, size=24):
    rng = np.random.default_rng(seed)
    names = ("new_log_prob", "old_log_prob", "advantages", "entropy", "reference_log_prob")
    columns = {name: rng.normal(size=size) for name in names}
    return columns | {"mask": rng.random(size) < 0.6}


def loss_of(columns, count, part=slice(None)):
    chosen = {name: column[part] for name, column in columns.items()}
    return reference.grpo_loss(**chosen, clip_range=0.2, entropy_coef=0.01, kl_coef=0.1, count=count)


@given(st.integers(0, 2**32 - 1), st.integers(1, 23))
def test_parts_add_up_with_the_global_count_and_not_with_their_own(seed, cut):
    columns = made(seed)
    columns["mask"][[0, -1]] = True
    count, parts = int(columns["mask"].sum()), (slice(cut), slice(cut, None))
    whole, results = loss_of(columns, count), [loss_of(columns, count, part) for part in parts]
    for name, value in whole.items():
        close(sum(result[name] for result in results), value)
    own = [loss_of(columns, int(columns["mask"][part].sum()), part)["loss"] for part in parts]
    if columns["mask"][parts[0]].sum() != columns["mask"][parts[1]].sum():
        assert sum(own) / 2 != pytest.approx(whole["loss"], rel=1e-9)  # the mean of the ranks' means


def test_with_every_step_valid_and_no_reference_it_is_ppos_loss():
    columns = made(1)
    columns["mask"][:] = True
    zeros = np.zeros(24)
    ours = {name: columns[name] for name in ("new_log_prob", "old_log_prob", "advantages", "entropy")}
    settings = {"clip_range": 0.2, "entropy_coef": 0.01, "count": 24}
    ppo = reference.ppo_loss(
        **ours, new_values=zeros, old_values=zeros, returns=zeros, value_clip_range=None, value_coef=0.5, **settings
    )
    grpo = reference.grpo_loss(**ours, mask=columns["mask"], **settings)
    for name in ("policy_loss", "entropy", "approx_kl", "clip_fraction", "loss"):
        close(grpo[name], ppo[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": np.ones((24, 1), bool)}, r"mask \(24, 1\)"),
        ({"mask": np.ones(24, bool)}, r"count is 23: .* here are 24"),
        ({"mask": np.zeros(24, bool), "count": 0}, r"count is 0"),
    ],
)
def test_shapes_and_counts_that_make_no_sense_are_refused(changes, message):
    columns = made(0) | changes
    count = columns.pop("count", 23)
    with pytest.raises(ValueError, match=message):
        reference.grpo_loss(**columns, clip_range=0.2, kl_coef=0.1, count=count)
