"""When something is due."""

import pytest

from lockstep.config.run import Config
from lockstep.training.due import comes_due, evaluation_due


@pytest.mark.parametrize(("interval", "due"), [(0, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4]), (7, [])])
def test_every_so_many_iterations(interval, due):
    assert [n for n in range(1, 6) if comes_due(interval, n)] == due


@pytest.mark.parametrize(("interval", "due"), [(0, []), (2, [2, 4, 5]), (5, [5]), (7, [5])])
def test_an_evaluation_is_due_at_the_end_too_unless_there_are_none(interval, due):
    values = {"num_envs": 8, "num_steps": 16, "total_steps": 5 * 128, "eval": {"interval": interval}}
    config = Config.model_validate(values)
    assert [n for n in range(1, 6) if evaluation_due(config, n)] == due
