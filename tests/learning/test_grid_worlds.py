"""A grid world's preset finds the goal in a third of its length; a policy that doesn't change doesn't."""

from learned import learned

__all__ = ["learned"]

GRID = ("lockstep/GridWorld-v0", "--total-steps", 51200)


def test_the_way_to_the_goal_is_found(learned):
    assert learned(*GRID)["final_success_rate"] > 0.9
    assert learned(*GRID, "--total-steps", 16384, "--ppo.learning-rate", 1e-9, name="still")["final_success_rate"] < 0.4
