"""What an environment says of a step: numbers are read, and whatever is none is passed over."""

import math
from fractions import Fraction

import numpy as np
import pytest

from lockstep.envs.gymnasium.step_info import info_metrics, info_score, info_success, number

RAGGED = [[1], [2, 3]]


class Failing:
    def __array__(self, *_, **__):
        raise RuntimeError("not on this device")


@pytest.mark.parametrize("value", [RAGGED, Failing(), "solved", None, [1, 2], 1 + 2j])
def test_what_is_no_single_number_is_passed_over(value):
    assert info_metrics({"metrics": {"distance": 3.2, "other": value}}) == {"distance": 3.2}
    assert info_success({"is_success": value, "success": np.array([True])}) == 1
    assert info_success({"success": value}) == 0
    assert math.isnan(info_score({"score": value}))


def test_single_numbers_are_read_in_every_form():
    found = {"a": np.float32(0.5), "b": np.array([[2]]), "c": True, "d": math.inf, "e": math.nan}
    assert info_metrics({"metrics": found}) == {"a": 0.5, "b": 2.0, "c": 1.0}
    assert [info_success({"success": value}) for value in (0.5, 0.6, np.bool_(False))] == [-1, 1, -1]
    assert (info_score({"score": np.array([7])}), math.isnan(info_score({"score": True}))) == (7.0, True)


@pytest.mark.parametrize(
    "reward",
    [
        1,
        True,
        1.0,
        Fraction(1),
        np.int64(1),
        np.bool_(True),
        np.float32(1),
        np.float64(1),
        np.array(1.0),
        np.array([1.0]),
        np.array([[1]]),
    ],
)
def test_a_reward_of_a_single_element_is_a_number(reward):
    assert number(reward) == 1.0
    assert type(number(reward)) is float


@pytest.mark.parametrize(
    "reward", [None, "much", "1.5", b"2", np.str_("3"), np.array("1.5"), 1 + 2j, np.zeros(2), RAGGED]
)
def test_any_other_reward_is_shown(reward):
    with pytest.raises(TypeError, match=r"^the reward returned by step\(\) must be a number, and is "):
        number(reward)
