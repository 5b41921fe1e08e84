"""The slowest of several: order statistics against numbers that are written out by hand."""

import itertools
import math

import numpy as np
import pytest

from lockstep.planning.waiting import expected_max, expected_max_of_sums, normal_excess


def test_the_slowest_of_two_that_take_one_or_two_seconds():
    # (1,1) 1, (1,2) 2, (2,1) 2, (2,2) 2: 7/4
    assert expected_max([[1.0, 2.0], [1.0, 2.0]]) == pytest.approx(1.75)


def test_ranks_with_times_of_their_own():
    # of (1 or 5) and (2, 3 or 4): (2+3+4+5+5+5)/6 = 4
    assert expected_max([[5.0, 1.0], [3.0, 2.0, 4.0]]) == pytest.approx(4.0)


def test_it_is_the_mean_over_all_pairs_triples_and_so_on():
    rng = np.random.default_rng(3)
    times = [rng.exponential(size=n) for n in (4, 5, 6)]
    everything = [max(chosen) for chosen in itertools.product(*times)]
    assert expected_max(times) == pytest.approx(np.mean(everything))


def test_one_alone_waits_for_nobody():
    assert expected_max([[1.0, 2.0, 6.0]]) == pytest.approx(3.0)
    assert normal_excess(1) == 0.0
    assert expected_max_of_sums([1.0, 3.0], 4, 1) == pytest.approx(8.0)


def test_means_would_hide_a_rare_long_time():
    """The negative of taking means: one time in ten is long, and of eight ranks it is nearly always somebody's."""
    times = [1.0] * 9 + [11.0]
    assert np.mean(times) == 2.0
    assert expected_max([times] * 8) == pytest.approx(1 + 10 * (1 - 0.9**8))


def test_the_largest_of_normal_numbers():
    assert normal_excess(2) == pytest.approx(1 / math.sqrt(math.pi), abs=1e-5)
    assert normal_excess(3) == pytest.approx(1.5 / math.sqrt(math.pi), abs=1e-5)
    assert normal_excess(8) == pytest.approx(1.42360, abs=1e-4)


def test_sums_of_many_vary_less_than_their_parts():
    times = [1.0, 2.0]
    few = expected_max_of_sums(times, 1, 2)
    many = expected_max_of_sums(times, 100_000, 64)
    assert few == pytest.approx(1.75, abs=0.15)
    assert many == pytest.approx(150_000 + math.sqrt(100_000) * 0.5 * normal_excess(64), rel=1e-9)
    assert expected_max_of_sums([2.0, 2.0], 10, 5) == 20.0


def test_the_same_question_has_the_same_answer():
    assert expected_max_of_sums([1.0, 4.0], 10, 4) == expected_max_of_sums([1.0, 4.0], 10, 4)


def test_nobody_can_take_no_time_at_all():
    with pytest.raises(ValueError, match="every one of them needs a time"):
        expected_max([[1.0], []])
