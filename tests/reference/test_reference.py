"""The reference against arithmetic written out by hand, and against properties that hold for every input."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lockstep import reference

LN2 = math.log(2.0)


def floats(low=-10.0, high=10.0):
    return st.floats(low, high, allow_subnormal=False)


def vectors(min_size=1, max_size=12, low=-10.0, high=10.0):
    return st.integers(min_size, max_size).flatmap(lambda n: arrays(np.float64, n, elements=floats(low, high)))


def matrices(num_rows=1, low=-10.0, high=10.0):
    """Stacks of `num_rows` equally long vectors, `[num_rows, N]`."""
    return st.integers(1, 12).flatmap(lambda n: arrays(np.float64, (num_rows, n), elements=floats(low, high)))


def close(actual, expected, tolerance=1e-9):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


# --- gae --------------------------------------------------------------------------------------------------------------


def column(*numbers):
    """One environment: `[T, 1]`."""
    return np.array(numbers, dtype=np.float64)[:, None]


def test_gae_by_hand():
    # gamma = lambda = 1/2, so gamma * lambda = 1/4.
    # env 0, one unfinished episode:
    #   delta_2 = 3 + 4/2 - 8 = -3      A_2 = -3
    #   delta_1 = 2 + 8/2 - 2 =  4      A_1 = 4 - 3/4 = 3.25
    #   delta_0 = 1 + 2/2 - 4 = -2      A_0 = -2 + 3.25/4 = -1.1875
    # env 1, truncated at step 0 (V(final_obs) = 6), terminated at step 1 (the 100 is ignored):
    #   delta_2 = 1 + 6/2 - 2 =  2      A_2 = 2
    #   delta_1 = 1 +  0  - 4 = -3      A_1 = -3 (nothing flows back)
    #   delta_0 = 1 + 6/2 - 2 =  2      A_0 = 2 (nothing flows back)
    advantages, returns = reference.gae(
        rewards=[[1, 1], [2, 1], [3, 1]],
        values=[[4, 2], [2, 4], [8, 2]],
        bootstrap_values=[[2, 6], [8, 100], [4, 6]],
        terminated=[[False, False], [False, True], [False, False]],
        truncated=[[False, True], [False, False], [False, False]],
        gamma=0.5,
        gae_lambda=0.5,
    )
    assert advantages.dtype == np.float64
    assert advantages.tolist() == [[-1.1875, 2.0], [3.25, -3.0], [-3.0, 2.0]]
    assert returns.tolist() == [[2.8125, 4.0], [5.25, 1.0], [5.0, 4.0]]


def test_gae_at_a_step_both_terminated_and_truncated_bootstraps_from_zero():
    # delta = 1 + 0 - 2 = -1
    advantages, _ = reference.gae(column(1), column(2), column(8), [[True]], [[True]], 0.5, 0.5)
    assert advantages.item() == -1.0


def test_gae_ignores_even_a_nan_after_termination():
    advantages, _ = reference.gae(column(1), column(2), column(np.nan), [[True]], [[False]], 0.5, 0.5)
    assert advantages.item() == -1.0


def test_gae_refuses_values_that_would_broadcast():
    with pytest.raises(ValueError, match=r"values \(2,\)"):
        reference.gae(np.ones((2, 2)), np.ones(2), np.ones((2, 2)), np.zeros((2, 2)), np.zeros((2, 2)), 0.9, 0.9)


@st.composite
def rollouts(draw, num_envs=2):
    """Rewards, values, bootstrap_values, terminated, truncated of shape `[T, num_envs]`."""
    shape = (draw(st.integers(1, 8)), num_envs)
    numbers = [draw(arrays(np.float64, shape, elements=floats())) for _ in range(3)]
    flags = [draw(arrays(np.bool_, shape)) for _ in range(2)]
    return (*numbers, *flags)


@given(rollouts(), floats(0.0, 1.0))
def test_gae_with_lambda_1_is_discounted_returns_minus_values(rollout, gamma):
    rewards, values, bootstrap_values, terminated, truncated = rollout
    # Inside an episode V' is V of the next row; only the ends keep the values drawn for them.
    inside = ~(terminated | truncated)[:-1]
    bootstrap_values[:-1][inside] = values[1:][inside]
    _, returns = reference.gae(*rollout, gamma=gamma, gae_lambda=1.0)
    for env in range(rewards.shape[1]):
        following = bootstrap_values[-1, env]
        for t in reversed(range(len(rewards))):
            if terminated[t, env]:
                following = 0.0
            elif truncated[t, env]:
                following = bootstrap_values[t, env]
            following = rewards[t, env] + gamma * following
            close(returns[t, env], following)


@given(rollouts(), floats(0.0, 1.0))
def test_gae_with_lambda_0_is_the_one_step_error(rollout, gamma):
    rewards, values, bootstrap_values, terminated, _ = rollout
    advantages, _ = reference.gae(*rollout, gamma=gamma, gae_lambda=0.0)
    close(advantages, rewards + gamma * bootstrap_values * ~terminated - values)


@pytest.mark.parametrize(("end", "effect"), [("terminated", 0.0), ("truncated", 0.9)])
@given(rollout=rollouts())
def test_termination_cuts_the_bootstrap_and_truncation_does_not(end, effect, rollout):
    _, _, bootstrap_values, terminated, truncated = rollout
    terminated[-1], truncated[-1] = end == "terminated", end == "truncated"
    before, _ = reference.gae(*rollout, gamma=0.9, gae_lambda=0.5)
    bootstrap_values[-1] += 1.0
    after, _ = reference.gae(*rollout, gamma=0.9, gae_lambda=0.5)
    close(after[-1] - before[-1], np.full(2, effect))


@pytest.mark.parametrize("end", ["terminated", "truncated"])
@given(rollout=rollouts(), reward=floats())
def test_nothing_after_the_end_of_an_episode_reaches_it(end, rollout, reward):
    length = len(rollout[0])
    doubled = [np.concatenate([part, part]) for part in rollout]
    rewards, _, _, terminated, truncated = doubled
    terminated[length - 1], truncated[length - 1] = end == "terminated", end == "truncated"
    before, _ = reference.gae(*doubled, gamma=0.9, gae_lambda=0.5)
    rewards[length:] = reward
    after, _ = reference.gae(*doubled, gamma=0.9, gae_lambda=0.5)
    np.testing.assert_array_equal(after[:length], before[:length])


@given(rollouts(num_envs=3))
def test_gae_of_one_environment_does_not_depend_on_the_others(rollout):
    together, _ = reference.gae(*rollout, gamma=0.9, gae_lambda=0.8)
    alone, _ = reference.gae(*(part[:, 1:2] for part in rollout), gamma=0.9, gae_lambda=0.8)
    np.testing.assert_array_equal(together[:, 1:2], alone)


# --- group_advantages -------------------------------------------------------------------------------------------------


def test_group_advantages_by_hand():
    # group 0: 1, 3: mean 2, population std 1 -> -1/(1 + 1), 1/(1 + 1)
    # group 1: 0, 6: mean 3, population std 3 -> -3/(3 + 1), 3/(3 + 1)
    # group 2: 5, 5: mean 5, std 0            -> 0, 0
    assert reference.group_advantages([1, 3, 0, 6, 5, 5], 2, eps=1.0).tolist() == [-0.5, 0.5, -0.75, 0.75, 0.0, 0.0]


@given(arrays(np.float64, 12, elements=floats()), floats(-5.0, 5.0))
def test_group_advantages_ignore_a_reward_offset_and_sum_to_zero(returns, offset):
    advantages = reference.group_advantages(returns, 4, eps=1.0)
    close(reference.group_advantages(returns + offset, 4, eps=1.0), advantages)
    close(advantages.reshape(3, 4).sum(axis=1), np.zeros(3))


@pytest.mark.parametrize(("returns", "group_size"), [([1.0, 2.0, 3.0], 2), ([1.0, 2.0], 0), ([[1.0, 2.0]], 2)])
def test_group_advantages_refuse_groups_that_do_not_fit(returns, group_size):
    with pytest.raises(ValueError, match=f"groups of {group_size}"):
        reference.group_advantages(returns, group_size, eps=1e-8)


# --- discounted_returns -----------------------------------------------------------------------------------------------


def test_discounted_returns_by_hand():
    # gamma = 1/2. env 0: 8/2 + 1 = 5; 5/2 + 2 = 4.5, done; 0 + 3 = 3; 3/2 + 4 = 5.5
    #              env 1: 0 + 1 = 1; 1/2 + 1 = 1.5; 1.5/2 + 1 = 1.75; 1.75/2 + 1 = 1.875, done
    running, final = reference.discounted_returns(
        rewards=[[1, 1], [2, 1], [3, 1], [4, 1]],
        dones=[[False, False], [True, False], [False, False], [False, True]],
        initial=[8, 0],
        gamma=0.5,
    )
    assert running.tolist() == [[5.0, 1.0], [4.5, 1.5], [3.0, 1.75], [5.5, 1.875]]
    assert final.tolist() == [5.5, 0.0]


@given(rollouts(), st.integers(0, 8))
def test_discounted_returns_continue_across_iterations_without_a_seam(rollout, cut):
    rewards, _, _, dones, _ = rollout
    whole, final = reference.discounted_returns(rewards, dones, np.ones(2), 0.9)
    first, carried = reference.discounted_returns(rewards[:cut], dones[:cut], np.ones(2), 0.9)
    second, last = reference.discounted_returns(rewards[cut:], dones[cut:], carried, 0.9)
    np.testing.assert_array_equal(np.concatenate([first, second]), whole)
    np.testing.assert_array_equal(last, final)


def test_discounted_returns_refuse_an_initial_value_per_step():
    with pytest.raises(ValueError, match=r"expected \(2,\)"):
        reference.discounted_returns(np.ones((3, 2)), np.zeros((3, 2)), np.zeros(3), 0.9)


# --- explained_variance -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0], 0.75),  # errors 0, 1: variance 1/4; Var(returns) = 1: 1 - 1/4
        ([0.0, 2.0], 1.0),  # errors 1, 1: a constant error counts as none
        ([7.0, 7.0], 0.0),  # errors -6, -4: variance 1: 1 - 1
        ([3.0, 1.0], -3.0),  # errors -2, 2: variance 4: 1 - 4
    ],
)
def test_explained_variance_by_hand(values, expected):
    assert reference.explained_variance(values, [1.0, 3.0]) == expected


@given(floats(), st.integers(1, 9))
def test_explained_variance_of_equal_returns_is_nan(value, size):
    assert math.isnan(reference.explained_variance(np.arange(size), np.full(size, value)))


# --- ppo_loss ---------------------------------------------------------------------------------------------------------

# Five of the eight samples of a global minibatch.
SAMPLES: dict[str, Any] = {
    "new_log_prob": [LN2, LN2, -LN2, -LN2, 0.0],  # ratios 2, 2, 1/2, 1/2, 1
    "old_log_prob": [0.0, 0.0, 0.0, 0.0, 0.0],
    "advantages": [1.0, -1.0, 1.0, -2.0, 0.25],
    "new_values": [1.0, 2.0, 3.0, 4.0, 1.0],
    "old_values": [0.0, 2.0, 3.0, 0.0, 1.0],
    "returns": [2.0, 2.0, 1.0, 0.0, 1.0],
    "entropy": [0.5, 0.5, 1.0, 2.0, 0.0],
}
SETTINGS: dict[str, Any] = {
    "clip_range": 0.25,
    "value_clip_range": 0.5,
    "entropy_coef": 0.25,
    "value_coef": 0.5,
    "count": 8,
}


def ppo_loss(**changes: Any) -> dict[str, float]:
    return reference.ppo_loss(**{**SAMPLES, **SETTINGS, **changes})


def test_ppo_loss_by_hand():
    result = ppo_loss()
    # policy: max(-2, -1.25) + max(2, 1.25) + max(-.5, -.75) + max(1, 1.5) + max(-.25, -.25)
    #       = -1.25 + 2 - .5 + 1.5 - .25 = 1.5;                                        / 8 = .1875
    # value, clipped values .5, 2, 3, .5, 1:
    #   max(1, 2.25) + max(0, 0) + max(4, 4) + max(16, .25) + max(0, 0) = 22.25;   / 2 / 8 = 1.390625
    # entropy: 4 / 8 = .5
    # loss: .1875 + .5 * 1.390625 - .25 * .5 = .7578125
    # k3: 2 (1 - ln 2) + 2 (-1/2 + ln 2) + 0 = 1;                                      / 8 = .125
    # clipped: four of them;                                                           / 8 = .5
    expected = {
        "policy_loss": 0.1875,
        "value_loss": 1.390625,
        "entropy": 0.5,
        "loss": 0.7578125,
        "approx_kl": 0.125,
        "clip_fraction": 0.5,
    }
    assert result == pytest.approx(expected, abs=1e-12)


def test_ppo_value_loss_without_clipping_by_hand():
    # (1 + 0 + 4 + 16 + 0) / 2 / 8 = 1.3125
    result = ppo_loss(value_clip_range=None)
    assert result["value_loss"] == 1.3125
    assert result["loss"] == pytest.approx(0.1875 + 0.5 * 1.3125 - 0.25 * 0.5, abs=1e-12)


def test_clip_fraction_counts_only_what_is_strictly_outside():
    result = ppo_loss(new_log_prob=np.zeros(5), clip_range=0.0)
    assert result["clip_fraction"] == 0.0


def test_approx_kl_is_that_of_the_old_policy_from_the_new():
    result = ppo_loss(count=5)
    assert result["approx_kl"] == pytest.approx(
        reference.kl_k3(SAMPLES["old_log_prob"], SAMPLES["new_log_prob"]), abs=1e-12
    )
    one_sample = {name: array[:1] for name, array in SAMPLES.items()}
    result = ppo_loss(**one_sample, count=1)
    assert result["approx_kl"] == pytest.approx(1.0 - LN2, abs=1e-12)  # and not LN2 - 1/2, the other direction


@given(matrices(len(SAMPLES), -3.0, 3.0), st.integers(0, 12), st.sampled_from([None, 0.2]))
def test_ppo_losses_of_shards_add_up_to_the_whole(rows, cut, value_clip_range):
    settings = {"value_clip_range": value_clip_range, "count": rows.shape[1]}
    whole, left, right = (
        ppo_loss(**dict(zip(SAMPLES, part, strict=True)), **settings) for part in (rows, rows[:, :cut], rows[:, cut:])
    )
    assert tuple(whole) == tuple(left) == tuple(right)
    close([left[key] + right[key] for key in whole], [whole[key] for key in whole])


@given(matrices(2, -3.0, 3.0))
def test_ppo_clipping_never_lowers_either_loss(rows):
    samples = dict.fromkeys(SAMPLES, np.zeros(rows.shape[1]))
    samples |= {"new_log_prob": rows[0], "advantages": rows[1], "new_values": rows[0], "returns": rows[1]}
    clipped = ppo_loss(**samples)
    free = ppo_loss(**samples, clip_range=1e6, value_clip_range=None)
    assert clipped["policy_loss"] >= free["policy_loss"] - 1e-12
    assert clipped["value_loss"] >= free["value_loss"] - 1e-12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"new_values": np.ones((5, 1))}, r"new_values \(5, 1\)"),  # would broadcast to [5, 5]
        ({"advantages": np.ones(4)}, r"advantages \(4,\)"),
        ({"count": 0}, "count is 0"),
    ],
)
def test_ppo_loss_refuses_shapes_and_counts_that_make_no_sense(changes, message):
    with pytest.raises(ValueError, match=message):
        ppo_loss(**changes)


# --- KL divergence ----------------------------------------------------------------------------------------------------

# p = 1/2, 1/4, 1/4 and q = 1/4, 1/4, 1/2: KL(p || q) = 1/2 ln 2 + 0 + 1/4 ln(1/2) = 1/4 ln 2.
LOGITS_P = np.log([0.5, 0.25, 0.25])
LOGITS_Q = np.log([0.25, 0.25, 0.5])


def test_kl_k3_by_hand():
    # Two samples with r = q / p = 1/2 and 4: (-1/2 + ln 2), (3 - 2 ln 2).
    assert reference.kl_k3([0.0, 0.0], [-LN2, 2 * LN2]) == pytest.approx(1.25 - LN2 / 2, abs=1e-12)


def test_kl_k3_averages_to_the_exact_kl():
    samples = [0, 0, 1, 2]  # distributed exactly as p
    assert reference.kl_k3(LOGITS_P[samples], LOGITS_Q[samples]) == pytest.approx(LN2 / 4, abs=1e-12)


@given(matrices(2))
def test_kl_k3_is_never_negative_and_zero_only_without_change(rows):
    assert reference.kl_k3(rows[0], rows[1]) >= -1e-15
    assert reference.kl_k3(rows[0], rows[0]) == 0.0
    assert reference.kl_k3(rows[0], rows[0] + 0.5) > 0.1


def test_k3_keeps_the_digits_of_a_small_ratio():
    # (e^x - 1) - x = x^2 / 2 + x^3 / 6 + ...; with exp(x) - 1 the result for x = 1e-7 would have one right digit.
    assert reference.kl_k3([0.0], [1e-7]) == pytest.approx(5e-15, rel=1e-6, abs=0.0)


def test_kl_k3_refuses_arrays_that_would_broadcast():
    with pytest.raises(ValueError, match="same shape"):
        reference.kl_k3(np.zeros((3, 1)), np.zeros(3))


# --- Action distributions ---------------------------------------------------------------------------------------------


def test_categorical_log_prob_by_hand():
    # Weights 1, 2, 5 of 8; the second row is the same distribution 1000 higher, where exp overflows.
    logits = np.log([1.0, 2.0, 5.0]) + np.array([[0.0], [1000.0]])
    close(reference.categorical_log_prob(logits, [0, 2]), [math.log(1 / 8), math.log(5 / 8)], 1e-12)


@pytest.mark.parametrize(("actions", "message"), [([3], "in"), ([-1], "in"), ([0, 1], "expected")])
def test_categorical_log_prob_refuses_actions_that_do_not_exist(actions, message):
    with pytest.raises(ValueError, match=message):
        reference.categorical_log_prob(np.zeros((1, 3)), actions)


def test_categorical_entropy_by_hand():
    # 1/2, 1/4, 1/4: 1/2 ln 2 + 2 * 1/4 * 2 ln 2 = 3/2 ln 2; four equal: ln 4; one possible action: 0
    assert reference.categorical_entropy(LOGITS_P + 3.0) == pytest.approx(1.5 * LN2, abs=1e-12)
    assert reference.categorical_entropy(np.full((2, 4), 9.0)).tolist() == pytest.approx([2 * LN2] * 2, abs=1e-12)
    assert reference.categorical_entropy([0.0, -np.inf]) == 0.0


@given(vectors())
def test_categorical_entropy_is_the_mean_negative_log_prob(logits):
    actions = np.arange(len(logits))
    log_prob = reference.categorical_log_prob(np.tile(logits, (len(logits), 1)), actions)
    close(np.exp(log_prob).sum(), 1.0)
    close(reference.categorical_entropy(logits), -np.sum(np.exp(log_prob) * log_prob))


def test_gaussian_log_prob_by_hand():
    # dim 0, N(1, 1) at 1:   -ln(2 pi) / 2
    # dim 1, N(0, 2^2) at 2: -1/2 - ln 2 - ln(2 pi) / 2
    log_prob = reference.gaussian_log_prob([[1.0, 0.0]], [0.0, LN2], [[1.0, 2.0]])
    close(log_prob, [-0.5 - LN2 - math.log(2 * math.pi)], 1e-12)


def test_gaussian_log_prob_refuses_actions_that_would_broadcast():
    with pytest.raises(ValueError, match=r"actions \(3,\)"):
        reference.gaussian_log_prob(np.zeros((3, 1)), np.zeros(1), np.zeros(3))


def test_gaussian_entropy_by_hand():
    # Two dimensions, std 1 and 2: 2 (1 + ln(2 pi)) / 2 + ln 2
    assert reference.gaussian_entropy([0.0, LN2]) == pytest.approx(1 + math.log(2 * math.pi) + LN2, abs=1e-12)


@given(floats(-1.0, 1.0), floats(-0.7, 0.7))
def test_gaussian_density_and_entropy_agree_by_integration(mean, log_std):
    grid, width = np.linspace(-21.0, 21.0, 2001, retstep=True)
    grid = grid[:, None]
    log_p = reference.gaussian_log_prob(np.full_like(grid, mean), log_std, grid)
    p = np.exp(log_p) * width
    close(p.sum(), 1.0)
    close(-np.sum(p * log_p), reference.gaussian_entropy([log_std]))


# --- Moments ----------------------------------------------------------------------------------------------------------


def test_moments_by_hand():
    # 1, 2, 6: mean 3, m2 = 4 + 1 + 9 = 14;   0, 0, 3: mean 1, m2 = 1 + 1 + 4 = 6
    count, mean, m2 = reference.moments([[1, 0], [2, 0], [6, 3]])
    assert count == 3
    assert mean.tolist() == [3.0, 1.0]
    assert m2.tolist() == [14.0, 6.0]


def test_merge_moments_by_hand():
    # {2, 4}: (2, 3, 2) and {7, 8, 9}: (3, 8, 2). delta = 5; mean = 3 + 5 * 3/5 = 6; m2 = 2 + 2 + 25 * 6/5 = 34
    # Check: 2, 4, 7, 8, 9 has mean 6 and m2 = 16 + 4 + 1 + 4 + 9 = 34.
    count, mean, m2 = reference.merge_moments((2, 3.0, 2.0), (3, 8.0, 2.0))
    assert count == 5
    assert mean == pytest.approx(6.0, abs=1e-12)
    assert m2 == pytest.approx(34.0, abs=1e-12)


def test_merging_with_nothing_changes_nothing():
    some, none = reference.moments([[1.0, 0.1], [2.0, 0.7]]), reference.moments(np.zeros((0, 2)))
    for merged in (reference.merge_moments(some, none), reference.merge_moments(none, some)):
        assert merged.count == 2
        np.testing.assert_array_equal(merged.mean, some.mean)
        np.testing.assert_array_equal(merged.m2, some.m2)
    assert reference.merge_moments(none, none).count == 0


@given(arrays(np.float64, (12, 2), elements=floats()), st.lists(st.integers(0, 12), max_size=4), floats(-1e3, 1e3))
def test_merging_any_split_gives_the_moments_of_the_whole(samples, cuts, offset):
    samples = samples + offset
    count, mean, m2 = reference.merge_all([reference.moments(part) for part in np.split(samples, sorted(cuts))])
    assert count == 12
    close(mean, samples.mean(axis=0), 1e-8)
    close(m2 / 12, samples.var(axis=0), 1e-8)


def test_merge_all_goes_from_first_to_last():
    parts = [reference.moments(np.array(numbers)) for numbers in ([0.1, 0.7], [1e8], [0.3], [-3.0, 5.0])]
    merged = parts[0]
    for part in parts[1:]:
        merged = reference.merge_moments(merged, part)
    assert reference.merge_all(parts) == merged  # bit for bit
    assert reference.merge_all(parts[:1]) == parts[0]


def test_merging_refuses_what_cannot_be_merged():
    with pytest.raises(ValueError, match="no moments"):
        reference.merge_all([])
    with pytest.raises(ValueError, match=r"mean_b \(3,\)"):
        reference.merge_moments(reference.moments(np.ones((2, 1))), reference.moments(np.ones((2, 3))))


def test_normalize_advantages_by_hand():
    # Global minibatch 1, 1, 5, 5: mean 3, m2 = 16, population std 2 (a sample std would be 2.309...).
    # (1 - 3) / (2 + 2) = -1/2, (5 - 3) / (2 + 2) = 1/2
    assert reference.normalize_advantages([1.0, 5.0], 3.0, 16.0, 4, eps=2.0).tolist() == [-0.5, 0.5]


@given(vectors(min_size=2), st.integers(0, 12))
def test_normalised_parts_make_up_a_whole_of_mean_0_and_variance_1(advantages, cut):
    count, mean, m2 = reference.moments(advantages)
    parts = np.split(advantages, [cut])
    whole = np.concatenate(
        [reference.normalize_advantages(part, float(mean), float(m2), count, eps=0.0625) for part in parts]
    )
    std = advantages.std()
    close(whole.mean(), 0.0)
    close(whole.std(), std / (std + 0.0625))


def test_normalize_advantages_uses_eps_where_nothing_varies_and_refuses_no_samples():
    assert reference.normalize_advantages([3.0, 3.0], 3.0, 0.0, 2).tolist() == [0.0, 0.0]
    assert reference.normalize_advantages([4.0], 3.0, 0.0, 2).tolist() == [1e8]  # the default eps is 1e-8
    with pytest.raises(ValueError, match="count is 0"):
        reference.normalize_advantages([1.0], 1.0, 0.0, 0)


# --- Optimiser step ---------------------------------------------------------------------------------------------------


def test_clip_by_global_norm_by_hand():
    # 3, 0 and 4 together: norm 5; coefficient 2.5 / (5 + 1e-6)
    (first, second), norm = reference.clip_by_global_norm([[3.0, 0.0], [[4.0]]], 2.5)
    assert norm == 5.0
    assert first.tolist() == pytest.approx([1.5 / 1.0000002, 0.0], rel=1e-12)
    assert second.tolist() == [pytest.approx([2.0 / 1.0000002], rel=1e-12)]


def test_clip_by_global_norm_leaves_a_small_gradient_alone_and_does_not_hide_a_nan():
    (grad,), norm = reference.clip_by_global_norm([[0.1, 0.2]], 1.0)
    assert grad.tolist() == [0.1, 0.2]
    assert norm == pytest.approx(math.sqrt(0.05))
    (broken, other), norm = reference.clip_by_global_norm([[np.nan], [1.0]], 1.0)
    assert math.isnan(norm)
    assert np.isnan(broken).all()
    assert np.isnan(other).all()


@given(vectors(), vectors(), floats(0.1, 20.0))
def test_clipping_bounds_the_norm_and_keeps_the_direction(first, second, max_norm):
    clipped, norm = reference.clip_by_global_norm([first, second], max_norm)
    before, after = np.concatenate([first, second]), np.concatenate(clipped)
    assert np.linalg.norm(after) <= max_norm
    close(after * norm, before * np.linalg.norm(after), 1e-8)


def test_first_adam_step_by_hand():
    # g = 3 from zero moments: the bias corrections undo the decays, so m^ = 3 and sqrt(v^) = 3.
    # 1 - .1 * 3 / (3 + 1) = .925;   m = .1 * 3 = .3;   v = .001 * 9 = .009
    params, exp_avg, exp_avg_sq = reference.adam_step([1.0], [3.0], [0.0], [0.0], 1, 0.1, 0.9, 0.999, 1.0)
    close(params, [0.925], 1e-12)
    close(exp_avg, [0.3], 1e-12)
    close(exp_avg_sq, [0.009], 1e-12)


def test_second_adam_step_by_hand():
    # beta1 = 1/2, beta2 = 3/4, g = 4, m = 2, v = 4:
    # m = 1 + 2 = 3;   v = 3 + 4 = 7;   m^ = 3 / (1 - 1/4) = 4;   v^ = 7 / (1 - 9/16) = 16
    # 1 - .5 * 4 / (4 + 1) = .6;   with eps under the root or before the correction it would be another number
    params, exp_avg, exp_avg_sq = reference.adam_step([1.0], [4.0], [2.0], [4.0], 2, 0.5, 0.5, 0.75, 1.0)
    close(params, [0.6], 1e-12)
    assert exp_avg.tolist() == [3.0]
    assert exp_avg_sq.tolist() == [7.0]


@given(vectors(low=0.01), floats(0.001, 1.0))
def test_a_first_adam_step_without_eps_moves_every_parameter_by_the_learning_rate(grad, lr):
    zeros = np.zeros_like(grad)
    params, _, _ = reference.adam_step(zeros, grad, zeros, zeros, 1, lr, 0.9, 0.999, 0.0)
    close(params, np.full_like(grad, -lr))


def test_adam_step_refuses_step_0_and_does_not_touch_its_arguments():
    params, moment = np.ones(1), np.zeros(1)
    with pytest.raises(ValueError, match="step is 0"):
        reference.adam_step(params, params, moment, moment, 0, 0.1, 0.9, 0.999, 1e-8)
    reference.adam_step(params, params, moment, moment, 1, 0.1, 0.9, 0.999, 1e-8)
    assert (params.item(), moment.item()) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("lr", "kl", "expected"),
    [
        (3e-3, 0.021, 2e-3),  # above twice the target: / 1.5
        (3e-3, 0.020, 3e-3),  # exactly twice: unchanged
        (3e-3, 0.010, 3e-3),
        (3e-3, 0.005, 3e-3),  # exactly half: unchanged
        (3e-3, 0.004, 4.5e-3),  # below half: * 1.5
        (3e-3, 0.0, 3e-3),  # zero is no measurement
        (3e-3, 0.99e-8, 3e-3),  # nor is rounding
        (3e-3, 1.01e-8, 4.5e-3),
        (3e-3, -0.004, 3e-3),
        (3e-3, float("nan"), 3e-3),
        (1.2e-5, 1.0, 1e-5),  # floor
        (9e-3, 0.001, 1e-2),  # ceiling
    ],
)
def test_adaptive_learning_rate_by_hand(lr, kl, expected):
    assert reference.adaptive_learning_rate(lr, kl, desired_kl=0.01) == pytest.approx(expected, rel=1e-12)


def test_adaptive_learning_rate_takes_other_limits():
    assert reference.adaptive_learning_rate(1.0, 1.0, 0.01, low=0.75) == 0.75
    assert reference.adaptive_learning_rate(1.0, 1e-9, 0.01, high=1.25, noise=0.0) == 1.25
    assert reference.adaptive_learning_rate(1.0, 1e-3, 0.01, high=1.25) == 1.25
