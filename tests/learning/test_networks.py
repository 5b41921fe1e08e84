"""Networks beyond multilayer perceptrons: each on a task that it solves and that one without it doesn't."""

import pytest
from learned import SMALL, hidden, learned, played
from variants import variants

__all__ = ["learned"]

RECALL = ("tasks:Recall-v0", *SMALL, "--ppo.gamma", 1, "--total-steps", 16384)
AIM = ("tasks:Aim-v0", *SMALL, "--network.log-std-init", -1, "--total-steps", 12288)
NERVES = ("tasks:Nerves-v0", *SMALL, "--network.log-std-init", -1, "--total-steps", 12288)


@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize("shared", variants(["true", "false"], ["true"]))
def test_a_recurrent_policy_remembers(learned, core, shared):
    recurrent = ("--network.recurrent", core, "--network.recurrent-size", 16, "--network.sequence-length", 8)
    assert learned(*RECALL, *recurrent, "--network.shared", shared)["final_return"] > 0.9
    assert played("run") == 1


def test_a_policy_without_memory_only_guesses(learned):
    assert abs(learned(*RECALL)["final_return"]) < 0.4


def test_a_squashed_gaussian_reaches_all_of_uneven_bounds(learned):
    assert learned(*AIM, "--network.squash", "true")["final_return"] > 15
    assert played("run") > 15


def test_a_squashed_gaussian_that_sees_no_mark_misses_it(learned):
    assert learned(*AIM, "--network.squash", "true", *hidden())["final_return"] < 13


def test_noise_by_state_is_there_where_it_pays_and_nowhere_else(learned):
    """One standard deviation for all states can only be small (``tests/modules/tasks.py`` says why)."""
    assert learned(*NERVES, "--network.state-dependent-std", "true")["final_return"] > 5
    assert learned(*NERVES, name="one")["final_return"] < 1
