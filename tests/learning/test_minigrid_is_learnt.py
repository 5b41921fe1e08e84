"""MiniGrid's preset reaches the goal in a quarter of its length; a policy that doesn't change doesn't."""

import pytest
from learned import learned

__all__ = ["learned"]

pytest.importorskip("minigrid")
EMPTY = ("MiniGrid-Empty-5x5-v0", "--total-steps", 28672)


@pytest.mark.long
def test_the_goal_is_reached_by_cells_and_direction(learned):
    assert learned(*EMPTY)["final_return"] > 0.9
    assert learned(*EMPTY, "--total-steps", 8192, "--ppo.learning-rate", 1e-9, name="still")["final_return"] < 0.4
