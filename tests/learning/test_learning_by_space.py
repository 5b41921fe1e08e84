"""Observations and actions of every kind: each task is learnt, and isn't where what it needs is hidden.

All tasks have 16 steps (``tests/modules/tasks.py``), so the best return is 16.
"""

import pytest
from learned import SMALL, asked_at_once, hidden, learned, played
from variants import variants

from lockstep import load_policy

__all__ = ["learned"]

SMALL_EYES = ("--network.image.width", 0.25, "--ppo.learning-rate", 2e-3)
CORNER = ("tasks:Corner-v0", *SMALL, *SMALL_EYES, "--total-steps", 6144, "--network.shared", "true")
PARTS = (
    *("tasks:Parts-v0", *SMALL, "--total-steps", 8192, "--network.shared", "true"),
    *("--network.image.width", 0.125, "--network.image.depth", 1),
)


@pytest.mark.parametrize("kwargs", ['{"first": false}', '{"first": true}'], ids=["channels last", "channels first"])
def test_an_image_is_seen(learned, kwargs):
    assert learned(*CORNER, "--env.kwargs", kwargs)["final_return"] > 14


def test_separate_convolutions_see_it_too(learned):
    assert learned(*CORNER, "--network.shared", "false", "--total-steps", 4096)["final_return"] > 12


def test_residual_convolutions_see_it_too(learned):
    residual = ("--network.image.kind", "impala", "--network.image.depth", 1, "--total-steps", 4096)
    assert learned(*CORNER, *residual)["final_return"] > 12


def test_a_large_image_goes_through_the_strided_convolutions(learned):
    nature = ("--network.image.kind", "nature", "--env.kwargs", '{"size": 36}', "--total-steps", 4096)
    assert learned(*CORNER, *nature)["final_return"] > 12


def test_a_blank_image_leaves_only_guessing(learned):
    assert 3 < learned(*CORNER, *hidden())["final_return"] < 5


def test_a_network_by_import_path_sees_an_image(learned):
    own = ("--network.shared", "false", "--network.custom", "learned_nets:Eyes")
    assert learned(*CORNER, *own)["final_return"] > 14


def test_a_network_by_import_path_gets_its_arguments(learned):
    own = ("--network.shared", "false", "--network.custom", "learned_nets:Eyes")
    blind = ("--network.custom-kwargs", '{"blind": true, "channels": 2}', "--total-steps", 4096)
    assert learned(*CORNER, *own, *blind)["final_return"] < 5


def test_what_is_allowed_is_known_from_the_mask_only(learned):
    words = ("tasks:Allowed-v0", *SMALL, "--total-steps", 8192)
    assert learned(*words, "--env.action-mask", "info")["final_return"] > 14
    assert played("run", masked=True) > 15
    assert played("run") < 0
    assert learned(*words, name="unmasked")["final_return"] < -4


def test_every_part_of_a_nested_dict_is_read(learned):
    assert learned(*PARTS)["final_return"] > 15
    assert played("run") > 15
    together, alone = asked_at_once(load_policy("run"))
    assert together.tolist() == [action.tolist() for action in alone]
    assert len({tuple(action) for action in together.tolist()}) > 3


@pytest.mark.parametrize(
    ("part", "guessed"),
    variants(
        [("colour", 1 / 3), ("dials", 1 / 2), ("speed", 1 / 2), ("bits", 1 / 2), ("camera", 1 / 2)],
        [("colour", 1 / 3)],
    ),
)
def test_a_part_that_is_hidden_is_missed(learned, part, guessed):
    """Its index, a fifth of the reward, is guessed then; the four others are learnt."""
    expected = 16 * (4 + guessed) / 5
    assert expected - 1 < learned(*PARTS, *hidden(part))["final_return"] < expected + 0.4


def test_binary_actions_answer_binary_observations(learned):
    words = ("tasks:Switches-v0", *SMALL, "--total-steps", 6144)
    assert learned(*words)["final_return"] > 15
    assert 7 < learned(*words, *hidden(), name="hidden")["final_return"] < 9
