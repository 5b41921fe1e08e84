"""What the PyTorch engine says of shards that run one after the other."""

import pytest

from lockstep.torch_engine.announcement import loop_notes


@pytest.mark.parametrize(
    ("convolutional", "custom", "why"),
    [
        (False, None, "self-check: batched, a shard's bits would change on this machine"),
        (True, None, "the bits of convolutions may depend on the size of a batch"),
        (True, "sees images", "the custom network sees images"),
    ],
)
def test_it_says_why_how_much_and_what_to_do(convolutional, custom, why):
    (line,) = loop_notes(4, convolutional, custom)
    assert line.startswith(f"{why}, so shards run one after the other: 4 calls of the networks instead of 1")
    assert "1 to 5 times as long" in line
    assert all(way in line for way in ("more ranks", "--num-shards", "--reduction fast"))


def test_one_shard_on_a_rank_costs_nothing():
    assert loop_notes(1, False) == loop_notes(1, True, "sees images") == []
