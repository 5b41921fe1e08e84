"""Makes observations with which a user's own network is tried."""

from __future__ import annotations

import numpy as np

from lockstep.core.shards import keyed_generator
from lockstep.core.spaces import ObservationLayout


def trial_rows(layout: ObservationLayout) -> tuple[np.ndarray, np.ndarray]:
    """Returns two batches of two rows each, ``[2, width]``, the same ones each time, whose masks allow every action.

    Numbers, indices and pixels of the first batch are 0 or 1, which nearly every space allows. The second has normal
    deviates times 3, and any indices and pixels; an environment needn't be able to observe such numbers.
    """
    draw = keyed_generator(0, "trial")
    bits, large = layout.zeros(2), layout.zeros(2)
    for leaf in layout.leaves:
        where, shape = slice(leaf.start, leaf.start + leaf.size), (2, leaf.size)
        if leaf.kind == "image":
            bits[:, where] = draw.integers(0, 2, shape)
            large[:, where] = draw.integers(0, int(leaf.high) + 1, shape)
        elif leaf.kind == "one_hot":
            layout.floats(bits)[:, where] = draw.integers(0, np.minimum(leaf.choices, 2), shape)
            layout.floats(large)[:, where] = draw.integers(0, leaf.choices, shape)
        elif leaf.kind == "vector":
            layout.floats(bits)[:, where] = draw.integers(0, 2, shape)
            layout.floats(large)[:, where] = 3.0 * draw.standard_normal(shape)
    return bits, large
