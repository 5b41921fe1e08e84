"""``lockstep verify --engine jax`` passes what is in lockstep, and catches what makes agents depend on devices."""

import json

import pytest
from command_line import lockstep
from device_runs import CARTPOLE, inside

SHORT = ("--iterations", 2, "--network.hidden-sizes", 8)


def verify(cwd, words, *more):
    return lockstep("verify", *words, *SHORT, *more, cwd=cwd)


def rows(ended):
    return {row["world_size"]: row for row in json.loads(ended.stdout)}


@pytest.fixture
def folder(tmp_path):
    yield tmp_path
    assert not any(tmp_path.iterdir()), "verify leaves nothing behind"


def test_one_device_and_two_are_the_same(folder):
    ended = verify(folder, CARTPOLE, "--world-sizes", "1,2")
    assert ended.code == 0, ended.stdout
    assert ended.stderr == ""
    title = "lockstep/CartPole-v1, seed 0, 2 iterations, reduction exact"  # it is wider than the table
    assert title in " ".join(ended.stdout.split())
    table = [line.split("│") for line in ended.stdout.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row[1:-1]] for row in table]
    assert cells == [["1", "yes", cells[0][2], ""], ["2", "yes", cells[0][2], ""]]
    assert int(cells[0][2]) == 25  # 8 parameters, two moments of each, Adam's step
    assert ended.stdout.endswith("verified: every tensor and every metric has the same bytes at every iteration\n")


def test_devices_that_keep_their_gradients_to_themselves_are_caught(folder):
    ended = verify(folder, inside("unreduced"), "--world-sizes", "1,2", "--json")
    assert ended.code == 1
    assert ended.stderr == ""
    assert rows(ended)[1] == {"world_size": 1, "equal": True, "difference": "", "processes": 1}
    row = rows(ended)[2]
    assert row["equal"] is False
    assert "out of sync after iteration 1" in row["difference"]
    assert "policy/actor.0.weight" in row["difference"]


@pytest.mark.long
def test_samples_that_cross_devices_are_caught(folder):
    """What they cost is counted in ``tests/jax_engine/test_training_on_devices.py``, by the same mistake."""
    ended = verify(folder, inside("shuffled"), "--world-sizes", "1,2", "--json")
    assert ended.code == 1
    assert rows(ended)[1]["equal"] is True
    row = rows(ended)[2]
    assert row["equal"] is False
    assert row["difference"].startswith("iteration 1: ")
    assert "first policy/actor.0.weight" in row["difference"]
    assert "metric train/loss: " in row["difference"]


@pytest.mark.long
def test_without_a_mistake_the_same_class_is_verified(folder):
    ended = verify(folder, inside("cart_pole"), "--world-sizes", "2,1")
    assert ended.code == 0, ended.stdout
