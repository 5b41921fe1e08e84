"""Ranks begin where rank 0 does, or say why they can't before they train."""

import json

import numpy as np
import pytest

from lockstep.core.errors import RankMismatchError
from lockstep.runs.checkpoint import Checkpoint
from lockstep.training.beginning import agreed_beginning, from_bytes, to_bytes

ARRAYS = {"policy/w": np.arange(6, dtype=np.float32).reshape(2, 3), "optimizer/step": np.array([3.0], np.float32)}


def at(step):
    shards = {0: {"x": np.array([[1, 2]], np.int64)}, 1: {"x": np.array([[3, 4]], np.int64)}}
    return Checkpoint(ARRAYS, shards, {"global_step": step, "score": 1.5})


def agreed(*found):
    """What each of several ranks goes on from, that found these on their hosts."""
    steps = [-1 if checkpoint is None else checkpoint.state["global_step"] for checkpoint in found]
    sent = []

    def broadcast(payload):
        sent.append(payload)
        return sent[0]

    return [agreed_beginning(c, rank, lambda _: steps, broadcast) for rank, c in enumerate(found)]


def test_ranks_that_found_the_same_keep_it():
    found = [at(128), at(128)]
    assert all(a is b for a, b in zip(agreed(*found), found, strict=True))
    assert agreed(None, None) == [None, None]


@pytest.mark.parametrize("other", [None, at(64)])
def test_a_rank_whose_host_lacks_the_checkpoint_gets_it_from_rank_0(other, capsys):
    first, second = agreed(at(128), other)
    assert first is not None
    assert second is not None
    assert second.state == first.state == {"global_step": 128, "score": 1.5}
    assert {name: a.tolist() for name, a in second.arrays.items()} == {n: a.tolist() for n, a in ARRAYS.items()}
    assert second.env_shards[1]["x"].tolist() == [[3, 4]]
    assert second.env_shards[1]["x"].dtype == np.int64
    assert capsys.readouterr().err == ""


def test_a_rank_with_a_newer_one_says_that_it_is_not_taken(capsys):
    _, second = agreed(at(128), at(256))
    assert second is not None
    assert second.state["global_step"] == 128
    assert "rank 1 goes on from step 128 with rank 0, not from step 256" in capsys.readouterr().err


def test_rank_0_does_not_begin_anew_over_what_another_host_has():
    with pytest.raises(RankMismatchError, match="rank 1 has a checkpoint of step 128 on its host, and rank 0 has none"):
        agreed(None, at(128))


def test_what_is_sent_comes_back():
    assert json.dumps(from_bytes(to_bytes(at(7))).state) == json.dumps(at(7).state)
