"""Rows that are made inside the program are those that are made on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, MultiBinary, MultiDiscrete
from net_cases import CASES, PARTS, VECTOR, masks_of, picture

from lockstep.core.spaces import ActionLayout, observation_layout
from lockstep.jax_engine.nets.encoders import action_mask, encode_rows, float_columns, image, one_hot

COUNT = 5
SPACES = {
    **{name: CASES[name].space for name in ("categorical", "indices", "nature, channels first", "simple")},
    "Dict": PARTS,
    "numbers in a Dict": Dict({"b": MultiBinary(3), "a": VECTOR}),
    "odd bytes": Dict({"eye": picture(3, 5), "x": Box(-1, 1, (1,), np.float32)}),
    "only odd bytes": picture(3, 3, 1),
}


def sampled(space):
    space.seed(3)
    return [space.sample() for _ in range(COUNT)]


@pytest.mark.parametrize("name", SPACES)
def test_rows_are_the_hosts(name):
    layout, observations = observation_layout(SPACES[name]), sampled(SPACES[name])
    expected = np.stack([layout.encode(x) for x in observations])
    ours = jax.jit(lambda x: encode_rows(layout, x))(jax.tree.map(lambda *parts: np.stack(parts), *observations))
    assert ours.dtype == layout.dtype
    np.testing.assert_array_equal(ours, expected)
    np.testing.assert_array_equal(float_columns(layout, ours), layout.floats(expected))
    assert len(np.unique(expected, axis=0)) > 1


@pytest.mark.parametrize("choices", [[11, 6, 3] * 4, [3] * 4, [2, 4, 2]])
def test_choices_that_repeat_are_one_hot_vectors_one_after_another(choices):
    space = MultiDiscrete(choices)
    layout = observation_layout(space)
    rows = np.stack([layout.encode(x) for x in sampled(space)])
    expected = [np.eye(count)[rows[:, n].astype(int)] for n, count in enumerate(choices)]
    found = np.concatenate(one_hot(layout.leaves[0], jax.numpy.asarray(rows)), -1)
    np.testing.assert_array_equal(found, np.concatenate(expected, -1))
    assert len(np.unique(found, axis=0)) > 1


@pytest.mark.parametrize("space", [VECTOR, PARTS["eye"]], ids=["numbers", "image"])
def test_a_mask_that_comes_apart_is_in_the_row(space):
    layout, observations = observation_layout(space, mask_size=6), np.stack(sampled(space))
    masks = masks_of(layout, ActionLayout("discrete", (6,), (0,)), COUNT, 0)
    rows = jnp.stack([layout.encode(x, mask) for x, mask in zip(observations, masks, strict=True)])
    np.testing.assert_array_equal(action_mask(layout, rows), masks)
    assert not masks.all()
    allowing = encode_rows(layout, observations)
    np.testing.assert_array_equal(allowing, np.stack([layout.encode(x, np.ones(6)) for x in observations]))
    assert np.all(action_mask(layout, allowing))
    assert action_mask(observation_layout(space), rows) is None


def test_images_are_channels_last_between_0_and_1():
    pixels = np.random.default_rng(0).integers(0, 256, (COUNT, 6, 7, 3), dtype=np.uint8)
    last, first = observation_layout(picture(6, 7, 3)), observation_layout(picture(3, 6, 7))
    by_last = image(last.leaves[0], encode_rows(last, pixels))
    by_first = image(first.leaves[0], encode_rows(first, pixels.transpose(0, 3, 1, 2)))
    np.testing.assert_array_equal(by_last, by_first)
    np.testing.assert_allclose(by_last, pixels / 255.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("observation", "said"),
    [
        (np.zeros((COUNT, 4)), "observation of shape (5, 4), its space says (5, 5)"),
        (np.zeros((2, COUNT, 5)), "observation of shape (2, 5, 5), its space says (2, 5)"),
    ],
)
def test_another_shape_is_refused(observation, said):
    with pytest.raises(ValueError) as caught:
        encode_rows(observation_layout(VECTOR), observation)
    assert str(caught.value) == said


def test_a_part_of_another_shape_or_dtype_is_named():
    observations = jax.tree.map(lambda *parts: np.stack(parts), *sampled(PARTS))
    layout = observation_layout(PARTS)
    with pytest.raises(ValueError, match=r"part 'arm/1' of shape \(5, 4\), its space says \(5, 2, 2\)"):
        encode_rows(layout, observations | {"arm": (observations["arm"][0], np.zeros((COUNT, 4), np.float32))})
    with pytest.raises(ValueError, match="observation of dtype float32, its space says uint8"):
        encode_rows(layout, observations | {"eye": observations["eye"].astype(np.float32)})
