"""Random actions of the host: uniform within bounds that float32 can span, standard normal elsewhere."""

import numpy as np

from lockstep.core.shards import keyed_generator
from lockstep.core.spaces import ActionLayout
from lockstep.envs.gymnasium.random_policy import draw_actions


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
