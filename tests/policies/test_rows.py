"""Rows of a policy, as its environment takes them."""

from fractions import Fraction

import gymnasium
import numpy as np
import pytest

from lockstep.core.spaces import ActionLayout, observation_layout
from lockstep.policies.rows import action_rows, native_batch, observation_rows


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_actions_of_a_batch_are_those_of_each_and_keep_within_the_bounds(dtype):
    low, high = (np.array(bounds, dtype).tolist() for bounds in ([-0.1, -3.0], [0.1, 0.7]))
    layout = ActionLayout("continuous", shape=(2,), low=tuple(low), high=tuple(high), dtype=dtype)
    rows = np.array([[1.0, 1.0], [-1.0, 0.25], [0.05, -9.0]], np.float32)
    found = native_batch(layout, rows)
    assert found.dtype == dtype
    assert ((found >= low) & (found <= high)).all()  # 0.1 as a float32 is above it
    np.testing.assert_array_equal(found, [layout.native(row) for row in rows])
    assert native_batch(layout, rows[:0]).shape == (0, 2)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32, np.float64])
def test_an_index_of_an_action_may_be_a_whole_number_of_any_dtype(dtype):
    layout = ActionLayout("multi_discrete", (3, 2), (4, 0), (2,))
    rows, _ = action_rows(layout, np.array([[4, 1], [6, 0]], dtype), 2, False)
    assert rows.tolist() == [[0, 1], [2, 0]]
    assert rows.dtype == np.int64
    switch = action_rows(ActionLayout("discrete", (2,), (0,)), np.array([True, False]), 2, False)
    assert switch[0].tolist() == [1, 0]


@pytest.mark.parametrize("index", [0.9, 1.7, -0.5, float("nan"), float("inf"), 1e300, 2])
def test_an_index_that_is_no_choice_is_one_line(index):
    layout = ActionLayout("discrete", (2,), (0,))
    with pytest.raises(ValueError, match=r"^action: .* is out of range; use 0 to 1$"):
        action_rows(layout, index, 1, False)


@pytest.mark.parametrize("action", [None, "left", 1j, [None]], ids=str)
@pytest.mark.parametrize(
    "layout",
    [ActionLayout("discrete", (2,), (0,)), ActionLayout("continuous", shape=(1,), low=(-1.0,), high=(1.0,))],
    ids=["discrete", "continuous"],
)
def test_an_action_that_is_no_number_is_one_line(layout, action):
    with pytest.raises(ValueError, match=r"^action: .* isn't made of numbers; give what the policy returns$"):
        action_rows(layout, action, 1, False)


PAIR = ActionLayout("multi_discrete", (3, 3), (0, 0), (2,))
FIRST, SECOND = np.array([[1, 0, 1], [0, 1, 1]]), np.array([[1, 1, 0], [0, 0, 1]])
"""Masks of two observations, a row for each index."""
FLAT = np.stack([FIRST.ravel(), SECOND.ravel()])
OF_EACH_INDEX = tuple(np.stack(pair) for pair in zip(FIRST, SECOND, strict=True))
FORMS = {
    "flat": FLAT,
    "an array": np.stack([FIRST, SECOND]),
    "list of arrays": [FIRST, SECOND],
    "list of tuples": [tuple(FIRST), tuple(SECOND)],
    "list of lists of arrays": [list(FIRST), list(SECOND)],
    "nested lists": [FIRST.tolist(), SECOND.tolist()],
    "tuple of tuples": (tuple(FIRST), tuple(SECOND)),
    "tuple of an array for each index": OF_EACH_INDEX,
}


def masks_of(mask, count=2):
    layout = observation_layout(gymnasium.spaces.Box(-1, 1, (1,)), mask_size=6)
    rows, _ = observation_rows(layout, PAIR, np.zeros((count, 1)), mask)
    return rows[:, 1:]


@pytest.mark.parametrize("form", FORMS)
def test_masks_of_equal_indices_stay_with_their_observations(form):
    np.testing.assert_array_equal(masks_of(FORMS[form]), FLAT)


def test_a_list_of_arrays_is_an_array_for_each_observation_however_many_there_are():
    np.testing.assert_array_equal(masks_of([FIRST, SECOND, FIRST], 3), FLAT[[0, 1, 0]])
    np.testing.assert_array_equal(masks_of(tuple(part[[0, 1, 0]] for part in OF_EACH_INDEX), 3), FLAT[[0, 1, 0]])
    np.testing.assert_array_equal(masks_of(list(FIRST)), FLAT[[0, 0]])  # one for all
    with pytest.raises(ValueError, match=r"^action_mask: 2 masks for 3 observations; give one for all"):
        masks_of([part[[0, 1, 0]] for part in OF_EACH_INDEX], 3)


FOUR = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]], np.float32)
BOTH = {"tuple": tuple, "list": list}


def rows_of(space, observation):
    return observation_rows(observation_layout(space), PAIR, observation, None)


@pytest.mark.parametrize("kind", BOTH.values(), ids=BOTH)
def test_a_tuple_or_list_of_observations_is_a_batch_of_them(kind):
    vectors, indices = gymnasium.spaces.Box(-99, 99, (4,)), gymnasium.spaces.Discrete(9)
    for batch in (FOUR, FOUR[:3], FOUR[:1]):
        rows, single = rows_of(vectors, kind(batch))
        np.testing.assert_array_equal(rows, batch)
        assert not single
    rows, single = rows_of(vectors, kind(FOUR[0].tolist()))
    np.testing.assert_array_equal(rows, FOUR[:1])
    assert single
    assert rows_of(indices, kind([3, 1, 2]))[0].tolist() == [[3], [1], [2]]
    rows, _ = rows_of(gymnasium.spaces.Dict({"a": vectors, "b": indices}), {"a": kind(FOUR), "b": kind([3, 1, 2, 0])})
    np.testing.assert_array_equal(rows, np.concatenate([FOUR, [[3], [1], [2], [0]]], -1))


@pytest.mark.parametrize("kind", BOTH.values(), ids=BOTH)
def test_the_parts_of_a_tuple_space_come_first_in_a_tuple_or_a_list(kind):
    part = gymnasium.spaces.Box(-99, 99, (2,))
    space = gymnasium.spaces.Tuple([part, gymnasium.spaces.Dict({"a": part})])
    first, second = FOUR[:2, :2], FOUR[2:, 2:]
    rows, single = rows_of(space, kind([first, {"a": second}]))
    np.testing.assert_array_equal(rows, np.concatenate([first, second], -1))
    assert not single
    rows, single = rows_of(space, kind([first[0], {"a": kind(second[0])}]))
    np.testing.assert_array_equal(rows, [[*first[0], *second[0]]])
    assert single


@pytest.mark.parametrize("mask", [[1, 0, 1, 0, 1, 1], np.ones((4, 6)), "x"], ids=["one", "one-each", "none-at-all"])
def test_a_mask_for_a_policy_that_takes_none_is_one_line(mask):
    plain = observation_layout(gymnasium.spaces.Box(-99, 99, (4,)))
    line = r"^action_mask: this policy was trained without one .*, or train with env=dict\(action_mask='info'\) .*$"
    with pytest.raises(ValueError, match=line):
        observation_rows(plain, PAIR, FOUR, mask)
    parts = {"at": gymnasium.spaces.Box(-99, 99, (4,)), "legal": gymnasium.spaces.MultiBinary(6)}
    within = observation_layout(gymnasium.spaces.Dict(parts), mask_key="legal")
    given = {"at": FOUR, "legal": np.ones((4, 6))}
    assert observation_rows(within, PAIR, given, None)[0].shape == (4, 10)
    line = r"^action_mask: this policy's mask is the entry 'legal' of the observation; give it there$"
    with pytest.raises(ValueError, match=line):
        observation_rows(within, PAIR, given, mask)


def test_numbers_that_python_holds_are_numbers():
    given = np.array([Fraction(1, 2), 2, np.float32(3), True], object)
    assert rows_of(gymnasium.spaces.Box(-99, 99, (4,)), given)[0].tolist() == [[0.5, 2, 3, 1]]


def test_a_pixel_out_of_range_is_one_line():
    camera = gymnasium.spaces.Box(0, 255, (9, 9, 3), np.uint8)
    picture = np.full((9, 9, 3), 255)
    rows, single = rows_of(camera, picture)
    assert single
    np.testing.assert_array_equal(rows, rows_of(camera, picture.astype(np.uint8))[0])
    for pixel in (300, 256, -1):
        for wrong in (picture.copy(), np.stack([picture, picture])):
            wrong[..., -1, 0, 0] = pixel
            with pytest.raises(ValueError, match=f"^observation: pixel {pixel} is outside 0 to 255$"):
                rows_of(camera, wrong)
            with pytest.raises(ValueError, match=f"^observation part 'eye': pixel {pixel} is outside 0 to 255$"):
                rows_of(gymnasium.spaces.Dict({"eye": camera}), {"eye": wrong})


@pytest.mark.parametrize(
    "wrong", [[1 + 2j] * 4, ["1", "2", "3", "4"], ["left"] * 4], ids=["complex", "digits", "words"]
)
def test_what_is_no_real_number_is_one_line(wrong):
    box = gymnasium.spaces.Box(-99, 99, (4,))
    with pytest.raises(ValueError, match=r"^observation of dtype \S+; this policy takes real numbers$"):
        rows_of(box, wrong)
    with pytest.raises(ValueError, match=r"^observation part 'a' of dtype \S+; this policy takes real numbers$"):
        rows_of(gymnasium.spaces.Dict({"a": box}), {"a": [wrong]})


@pytest.mark.parametrize("wrong", [None, {}, [3, "left", None]], ids=str)
def test_what_is_no_number_at_all_is_one_line(wrong):
    with pytest.raises(ValueError, match=rf"^observation: {type(wrong).__name__} isn't an array of numbers$"):
        rows_of(gymnasium.spaces.Discrete(9), wrong)
    with pytest.raises(ValueError, match=r"^observation: a pair of observation and info, as env\.reset\(\) returns it"):
        rows_of(gymnasium.spaces.Discrete(9), (3, {}))
