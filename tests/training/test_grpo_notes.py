"""What is said of GRPO's episodes before a run."""

import pytest

from lockstep.config.run import Config
from lockstep.training.announcement import grpo_notes


@pytest.mark.parametrize(
    ("algorithm", "limit", "said"),
    [("grpo", 500, "lets them last 500"), ("grpo", None, "has no time limit"), ("grpo", 64, None), ("ppo", 500, None)],
)
def test_episodes_that_may_last_longer_than_an_iteration_are_told(algorithm, limit, said):
    notes = grpo_notes(Config.model_validate({"algorithm": algorithm, "num_steps": 64}), limit)
    assert notes == (
        [] if said is None else [f"grpo: episodes count for num_steps (64) at most; the environment {said}"]
    )
