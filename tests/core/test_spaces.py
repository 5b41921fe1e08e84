"""Observations as rows and back, for every space; actions as the environments take them; masks; what is refused."""

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Sequence, Text, Tuple
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.spaces import ObservationLayout, action_layout, layouts_from_json, observation_layout, texts_in

SIZES = st.integers(1, 4)
VECTOR = Box(-1.0, 1.0, (3,), np.float32)
IMAGE = Box(0, 255, (5, 6, 3), np.uint8)


@st.composite
def boxes(draw):
    shape = tuple(draw(st.lists(SIZES, max_size=3)))
    dtype = draw(st.sampled_from([np.float32, np.float64, np.int64, np.int8]))
    return Box(-7, 9, shape, dtype)


@st.composite
def multi_discretes(draw):
    shape = tuple(draw(st.lists(SIZES, min_size=1, max_size=2)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return MultiDiscrete(rng.integers(1, 6, shape), start=rng.integers(-3, 4, shape))


images = st.lists(SIZES, min_size=2, max_size=3).map(lambda shape: Box(0, 255, tuple(shape), np.uint8))
discretes = st.builds(Discrete, st.integers(1, 9), start=st.integers(-4, 4))
binaries = st.lists(SIZES, min_size=1, max_size=2).map(MultiBinary)
leaf_spaces = st.one_of(boxes(), images, discretes, multi_discretes(), binaries)
observation_spaces = st.recursive(
    leaf_spaces,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(["arm", "b", "camera", "Ü"]), inner, min_size=1, max_size=3).map(Dict),
        st.lists(inner, min_size=1, max_size=3).map(Tuple),
    ),
    max_leaves=5,
)
action_spaces = st.one_of(
    discretes, multi_discretes(), binaries, st.sampled_from([VECTOR, Box(-2.0, 0.5, (2, 2), np.float64)])
)


def by_number(space) -> Any:
    """Parts with a key that is no text."""
    return {1: space}


def sampled(space, seed=0):
    space.seed(seed)
    return space.sample()


def as_decoded(observation):
    """An observation as ``decode`` gives it: tuples as dicts by number."""
    if isinstance(observation, tuple):
        observation = {str(n): part for n, part in enumerate(observation)}
    if isinstance(observation, dict):
        return {name: as_decoded(part) for name, part in observation.items()}
    return np.asarray(observation)


def assert_equal(ours, theirs):
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for name, part in theirs.items():
            assert_equal(ours[name], part)
    else:
        assert ours.shape == theirs.shape
        np.testing.assert_array_equal(ours, theirs.astype(np.float32) if ours.dtype == np.float32 else theirs)


# ---- observations


@given(observation_spaces, st.integers(0, 1000))
def test_an_observation_comes_back_from_its_row(space, seed):
    layout, observation = observation_layout(space), sampled(space, seed)
    row = layout.encode(observation)
    assert (row.shape, row.dtype) == ((layout.width,), layout.dtype)
    assert_equal(layout.decode(row), as_decoded(observation))
    assert np.array_equal(layout.encode(observation), row)


@given(observation_spaces, st.integers(0, 1000))
def test_no_two_observations_share_a_row(space, seed):
    """The negative: what comes back above is not there by chance."""
    layout, one, other = observation_layout(space), sampled(space, seed), sampled(space, seed + 1)
    same = np.array_equal(layout.encode(one), layout.encode(other))
    try:
        assert_equal(as_decoded(one), as_decoded(other))
    except AssertionError:
        assert not same
    else:
        assert same


@given(observation_spaces)
def test_the_parts_of_a_row_lie_side_by_side_in_order(space):
    layout = observation_layout(space)
    floats = [leaf for leaf in layout.leaves if leaf.kind != "image"]
    columns = [c for leaf in floats for c in range(leaf.start, leaf.start + leaf.size)]
    assert columns == list(range(layout.float_size))
    pixels = [b for leaf in layout.leaves if leaf.kind == "image" for b in range(leaf.start, leaf.start + leaf.size)]
    assert pixels == list(range(4 * layout.float_size, 4 * layout.float_size + layout.image_bytes))
    assert [leaf.kind for leaf in floats] == sorted((leaf.kind for leaf in floats), key=["vector", "one_hot"].index)
    assert layout.vector_size == sum(leaf.size for leaf in floats if leaf.kind == "vector")
    if layout.image_bytes:
        assert layout.dtype == np.uint8
        assert layout.width % 4 == 0
        assert 0 <= layout.width - (4 * layout.float_size + layout.image_bytes) < 4
    else:
        assert (layout.dtype, layout.width) == (np.float32, layout.float_size)


def test_floats_of_rows_are_a_view_also_of_bytes():
    layout = observation_layout(Dict({"camera": IMAGE, "speed": VECTOR}))
    rows = layout.zeros(4)
    assert rows.shape == (4, 12 + 92)  # 90 bytes of image, filled up
    layout.floats(rows)[2] = [1.0, 2.0, 3.0]
    assert layout.decode(rows[2])["speed"].tolist() == [1.0, 2.0, 3.0]
    assert not layout.decode(rows[2])["camera"].any()
    assert not rows[3].any()


@pytest.mark.parametrize(
    ("shape", "channels_first", "image_shape"),
    [
        ((84, 84, 4), False, (4, 84, 84)),
        ((4, 84, 84), True, (4, 84, 84)),
        ((84, 96), False, (1, 84, 96)),
        ((3, 210, 160), True, (3, 210, 160)),
        ((7, 7, 3), False, (3, 7, 7)),
    ],
)
def test_where_an_images_channels_are(shape, channels_first, image_shape):
    (leaf,) = observation_layout(Box(0, 255, shape, np.uint8)).leaves
    assert (leaf.kind, leaf.channels_first, leaf.image_shape, leaf.high) == ("image", channels_first, image_shape, 255)


@pytest.mark.parametrize("space", [Box(0, 255, (9,), np.uint8), Box(0.0, 1.0, (8, 8, 3), np.float32)])
def test_what_is_no_image_is_numbers(space):
    layout = observation_layout(space)
    assert layout.plain
    assert layout.dtype == np.float32


def test_plain_is_one_vector_of_numbers_and_nothing_else():
    assert observation_layout(Dict({"a": VECTOR, "b": MultiBinary(2)})).plain
    for space in (Discrete(3), MultiDiscrete([2]), IMAGE, Dict({"a": VECTOR, "b": Discrete(2)})):
        assert not observation_layout(space).plain
    assert not observation_layout(VECTOR, mask_size=2).plain


# ---- masks


@pytest.mark.parametrize("name", ["legal", "action_mask"])
def test_a_mask_in_the_observation_is_taken_from_there(name):
    layout = observation_layout(Dict({name: MultiBinary(3), "x": Discrete(4), "y": VECTOR}), name)
    assert layout.mask is not None
    assert (layout.mask.kind, layout.mask.start, layout.mask.apart) == ("mask", 4, False)
    row = layout.encode({name: np.array([1, 0, 1]), "x": 2, "y": np.zeros(3)}, np.zeros(3))
    assert layout.floats(row)[4:7].tolist() == [1, 0, 1]
    assert layout.decode(row)[name].tolist() == [1, 0, 1]


def test_a_mask_apart_is_taken_from_the_argument_also_beside_one_of_its_name():
    layout = observation_layout(Dict({"action_mask": MultiBinary(2), "y": VECTOR}), mask_size=2)
    row = layout.encode({"action_mask": np.array([1, 1]), "y": np.zeros(3)}, np.array([0, 1]))
    assert layout.mask is not None
    assert layout.mask.apart
    assert layout.floats(row)[layout.mask.start :].tolist() == [0, 1]
    assert layout.decode(row)["action_mask"].tolist() == [1, 1]
    plain = observation_layout(VECTOR, mask_size=2)
    assert plain.decode(plain.encode(np.array([0.5, 0, 0]), np.ones(2))).tolist() == [0.5, 0, 0]


def test_empty_rows_allow_every_action():
    for space in (VECTOR, IMAGE):
        layout = observation_layout(space, mask_size=3)
        floats = layout.floats(layout.zeros(2))
        assert layout.mask is not None
        assert floats[:, layout.mask.start :].tolist() == [[1.0] * 3] * 2
        assert not floats[:, : layout.mask.start].any()


# ---- errors


@pytest.mark.parametrize(
    ("space", "observation", "said"),
    [
        (VECTOR, np.zeros(2), "observation of shape (2,), its space says (3,)"),
        (IMAGE, np.zeros((5, 6, 4), np.uint8), "observation of shape (5, 6, 4), its space says (5, 6, 3)"),
        (Dict({"a": Tuple([VECTOR])}), {"a": (np.zeros(4),)}, "observation part 'a/0' of shape (4,)"),
    ],
)
def test_an_observation_of_another_shape_is_named(space, observation, said):
    layout = observation_layout(space)
    with pytest.raises(ValueError) as caught:
        layout.encode(observation)
    assert said in str(caught.value)
    layout.encode(sampled(space))


def test_texts_beside_other_parts_are_left_out():
    space = Dict({"a": VECTOR, "b": Tuple([Discrete(3), Text(9)]), "words": Text(5)})
    layout = observation_layout(space)
    assert texts_in(space) == ("b/1", "words")
    assert [leaf.name for leaf in layout.leaves] == ["a", "b/0"]
    assert layout == observation_layout(Dict({"a": VECTOR, "b": Tuple([Discrete(3)])}))
    rows = [layout.encode({"a": np.ones(3), "b": (2, text), "words": text}) for text in ("go", "stay")]
    np.testing.assert_array_equal(rows, [[1, 1, 1, 2]] * 2)
    assert texts_in(Text(3)) == texts_in(VECTOR) == texts_in(Dict({"a": MultiBinary(2), "b": IMAGE})) == ()


@pytest.mark.parametrize(
    ("choices", "pattern"),
    [
        ([11, 6, 3] * 4, (11, 6, 3)),
        ([4] * 5, (4,)),
        ([2, 3, 2], (2, 3, 2)),
        ([2, 3, 2, 3, 2], (2, 3, 2, 3, 2)),
        ([7], (7,)),
    ],
)
def test_what_of_the_choices_repeats(choices, pattern):
    (leaf,) = observation_layout(MultiDiscrete(choices)).leaves
    assert leaf.pattern == pattern
    assert leaf.pattern * (len(choices) // len(pattern)) == leaf.choices


@pytest.mark.parametrize(
    ("space", "mask", "said"),
    [
        (Text(4), None, "Text(1, 4, charset="),
        (Tuple([VECTOR, Sequence(VECTOR)]), None, "isn't supported; supported are Box, Discrete"),
        (Dict({"a": Text(2), "b": Tuple([Text(4)])}), None, "holds nothing but text"),
        (
            Dict({"a": VECTOR, "b": Text(2)}),
            "b",
            "env.action_mask: 'b' is no entry of the observation; there are ['a']",
        ),
        (
            VECTOR,
            "b",
            "env.action_mask: 'b' is no entry of the observation, which has none; give info or method, or leave it out",
        ),
        (Dict({}), None, "is empty"),
        (Box(0, 1, (0,), np.float32), None, "is empty"),
        (Dict({"a/b": VECTOR}), None, "observation key 'a/b' holds a '/'"),
        (Dict(by_number(VECTOR)), None, "observation key 1 is int and must be text; rename it"),
        (Dict({"arm": Dict(by_number(VECTOR))}), None, "observation key 1 of 'arm' is int and must be text; rename it"),
        (Dict({"": VECTOR}), None, "observation key '' is empty; rename it"),
        (Dict({"a": VECTOR, "b": Dict({"": Dict({"c": VECTOR})})}), None, "observation key '' of 'b' is empty"),
        (Box(0, 0, (5, 6, 3), np.uint8), None, "the observation is an image whose space Box(0, 0, (5, 6, 3), uint8)"),
        (Dict({"a": Box(0, 0, (5, 6), np.uint8)}), None, "observation 'a' is an image whose space Box(0, 0, (5, 6), "),
        (Dict({"a": VECTOR}), "b", "env.action_mask: 'b' is no entry of the observation; there are ['a']"),
    ],
)
def test_observations_that_are_refused(space, mask, said):
    with pytest.raises(ValueError) as caught:
        observation_layout(space, mask)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_is_no_matter_where_only_text_is():
    assert observation_layout(Dict({"a": VECTOR, "b": Dict(by_number(Text(4)) | {"": Text(4)})})) == observation_layout(
        Dict({"a": VECTOR})
    )


@pytest.mark.parametrize("space", [Dict({"a": VECTOR}), Box(0, 3, (2,), np.int32), Text(3)])
def test_actions_that_are_refused(space):
    with pytest.raises(ValueError, match="supported are Discrete, MultiDiscrete, MultiBinary and floating-point Box"):
        action_layout(space)


# ---- actions


def rows_of(layout, count, seed=0):
    rng = np.random.default_rng(seed)
    if layout.kind == "continuous":
        return rng.normal(0, 3, (count, *layout.row_shape)).astype(np.float32)
    rows = np.stack([rng.integers(0, n, count) for n in layout.choices], -1)
    return rows[:, 0] if layout.kind == "discrete" else rows


@given(action_spaces, st.integers(0, 1000))
def test_every_row_is_an_action_that_the_environment_takes(space, seed):
    layout = action_layout(space)
    rows = rows_of(layout, 5, seed)
    assert (rows.shape[1:], rows.dtype) == (layout.row_shape, layout.row_dtype)
    natives = [layout.native(row) for row in rows]
    assert all(space.contains(np.int64(a) if isinstance(a, int) else a) for a in natives)
    np.testing.assert_array_equal(layout.natives(rows), np.stack([np.asarray(a) for a in natives]).astype(np.float32))


def test_actions_by_hand():
    assert action_layout(Discrete(3, start=5)).native(np.int64(2)) == 7
    table = action_layout(MultiDiscrete(np.array([[2, 3], [4, 5]]), start=np.array([[0, -1], [0, 10]])))
    assert (table.outputs, table.row_shape) == (14, (4,))
    assert table.native(np.array([1, 2, 3, 4])).tolist() == [[1, 1], [3, 14]]
    switches = action_layout(MultiBinary(3))
    assert (switches.kind, switches.choices) == ("multi_discrete", (2, 2, 2))
    assert switches.native(np.array([1, 0, 1])).tolist() == [1, 0, 1]
    box = action_layout(Box(np.array([-1.0, 0.0]), np.array([1.0, np.inf]), dtype=np.float64))
    assert (box.outputs, box.bounded) == (2, False)
    assert box.native(np.array([-3.0, 7.0], np.float32)).tolist() == [-1.0, 7.0]


LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize(
    ("low", "high", "bounded"),
    [
        (-1.0, 1.0, True),
        (0.0, LARGEST, True),
        (-LARGEST / 2, LARGEST / 2, True),
        (-LARGEST, LARGEST, False),
        (-LARGEST, 0.5 * LARGEST, False),
        (0.0, np.inf, False),
        (-1e200, 1e200, False),
    ],
)
@pytest.mark.filterwarnings("error")
def test_actions_are_bounded_where_float32_holds_the_span(low, high, bounded):
    layout = action_layout(Box(np.array([low, 0.0]), np.array([high, 1.0]), dtype=np.float64))
    assert layout.bounded == bounded
    assert layout.within.tolist() == [bounded, True]


# ---- JSON


@given(observation_spaces, action_spaces)
def test_layouts_come_back_from_json(space, actions):
    both = observation_layout(space), action_layout(actions)
    told = json.loads(json.dumps([asdict(layout) for layout in both]))
    assert layouts_from_json(*told) == both
    told[0]["leaves"] = told[0]["leaves"][1:]
    assert layouts_from_json(*told) != both
    assert isinstance(layouts_from_json(*told)[0], ObservationLayout)
