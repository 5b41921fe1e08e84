"""Permutations without sorting: each is one, all are about equally likely, and keys decide."""

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from lockstep.jax_engine.shards import shuffle

KEYS = 6000


def drawn(n: int, keys: int = KEYS, seed: int = 0) -> np.ndarray:
    """Permutations ``[keys, n]`` of as many keys."""
    split = jax.random.split(jax.random.key(seed), keys)
    return np.asarray(jax.jit(jax.vmap(lambda key: shuffle.permutation(key, n)))(split))


def likelihood(outcomes: np.ndarray, kinds: int) -> float:
    """P-value of a chi-square test that outcomes ``0 … kinds-1`` are equally likely."""
    return float(stats.chisquare(np.bincount(outcomes.ravel(), minlength=kinds)).pvalue)


def first_two(permutations: np.ndarray) -> tuple[np.ndarray, int]:
    """The first two values of each permutation as one number below ``n · (n-1)``."""
    n = permutations.shape[1]
    a, b = permutations[:, 0], permutations[:, 1]
    return a * (n - 1) + np.where(b > a, b - 1, b), n * (n - 1)


@given(n=st.integers(1, 5000))
@example(n=1)
@example(n=2)
@example(n=3)
@example(n=1024)
@example(n=1025)
@settings(max_examples=2)
def test_it_is_a_permutation(n):
    for row in drawn(n, keys=3, seed=n):
        np.testing.assert_array_equal(np.sort(row), np.arange(n))


@pytest.mark.parametrize("n", [12, 16], ids=["walks back", "a power of two"])
def test_every_value_is_as_likely_at_every_position(n):
    permutations = drawn(n)
    for position in range(n):
        assert likelihood(permutations[:, position], n) > 1e-3 / n, position


@pytest.mark.parametrize("n", [12, 16], ids=["walks back", "a power of two"])
def test_what_comes_first_says_nothing_of_what_comes_next(n):
    assert likelihood(*first_two(drawn(n))) > 1e-3


def test_one_round_is_noticed(monkeypatch):
    monkeypatch.setattr(shuffle, "ROUNDS", 1)
    assert likelihood(*first_two(drawn(16))) < 1e-6


def test_keys_decide_and_nothing_else():
    one, again, other = drawn(1000, 8), drawn(1000, 8), drawn(1000, 8, seed=1)
    np.testing.assert_array_equal(one, again)
    rows = np.concatenate([one, other])
    assert len({row.tobytes() for row in rows}) == 16
    assert (one[0] == np.arange(1000)).mean() < 0.01
