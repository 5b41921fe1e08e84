"""Random actions of the host: uniform over what is allowed or within bounds that float32 can span, else normal."""

import numpy as np
import pytest
from gymnasium.spaces import Box

from lockstep.core.shards import keyed_generator
from lockstep.core.spaces import ActionLayout, observation_layout
from lockstep.envs.gymnasium.random_policy import allowed_actions, draw_actions, draw_replacements


def drawn(low, high):
    layout = ActionLayout("continuous", shape=(len(low),), low=low, high=high, dtype="float32")
    return draw_actions(keyed_generator(0, "random", 0), layout, (1000,))


def test_bounds_whose_span_is_more_than_float32_holds_are_none():
    """As the compiled rollout of engine jax and a squashed policy have it."""
    largest = float(np.finfo(np.float32).max)
    actions = drawn((-largest, -1e300, -2.0), (largest, 1e300, 2.0))
    assert np.abs(actions[:, :2]).max() < 6.0
    np.testing.assert_allclose(actions[:, :2].std(0), 1.0, atol=0.1)
    assert actions[:, 2].min() < -1.9
    assert actions[:, 2].max() > 1.9


def test_ordinary_bounds_have_the_numbers_they_had():
    low, high = np.array([-1.0, 0.0, -np.inf, -3.0]), np.array([1.0, 1e6, np.inf, np.inf])
    generator, bounded = keyed_generator(0, "random", 0), np.array([True, True, False, False])
    uniform, normal = generator.random((1000, 4)), generator.standard_normal((1000, 4))
    least, span = np.where(bounded, low, 0.0), np.where(bounded, high, 1.0) - np.where(bounded, low, 0.0)
    expected = np.where(bounded, least + span * uniform, normal).astype(np.float32)
    np.testing.assert_array_equal(drawn(tuple(low), tuple(high)), expected)


@pytest.mark.parametrize(
    ("choices", "mask"),
    [
        ((4,), (1, 0, 1, 0)),
        ((4,), (1, 1, 1, 0)),
        ((4,), (0, 1, 1, 1)),
        ((4,), (0, 0, 1, 0)),
        ((3, 1, 4), (1, 1, 1, 1, 1, 0, 1, 0)),
        ((3, 1, 4), (0, 1, 1, 1, 1, 1, 1, 0)),
    ],
)
def test_what_is_allowed_is_drawn_equally(choices, mask):
    """A forbidden draw says nothing of the action that is taken instead; an allowed one is kept."""
    count = 20_000
    kind, shape = ("discrete", ()) if len(choices) == 1 else ("multi_discrete", (len(choices),))
    action = ActionLayout(kind, choices, (0,) * len(choices), shape)
    layout = observation_layout(Box(-1.0, 1.0, (2,), np.float32), mask_size=sum(choices))
    rows = np.tile(layout.encode(np.zeros(2), np.array(mask)), (count, 1))
    actions = draw_actions(keyed_generator(0, "random", 0), action, (count,))
    replacements = draw_replacements(keyed_generator(0, "random/allowed", 0), action, (count,))
    taken = allowed_actions(layout, action, rows, actions, replacements).reshape(count, -1)
    for drawn_index, index, start, choice in zip(
        actions.reshape(count, -1).T, taken.T, action.starts, choices, strict=True
    ):
        allowed = np.array(mask[start : start + choice], bool)
        expected = allowed / allowed.sum()
        error = 4 * np.sqrt(expected * (1 - expected) / count)
        assert (abs(np.bincount(index, minlength=choice) / count - expected) <= error).all()
        assert np.array_equal(index[allowed[drawn_index]], drawn_index[allowed[drawn_index]])
