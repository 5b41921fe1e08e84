"""Rows of a policy, as its environment takes them."""

import numpy as np
import pytest

from lockstep.core.spaces import ActionLayout
from lockstep.policies.rows import native_batch


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
