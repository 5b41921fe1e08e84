"""Advantages normalised by each rank's own samples, as CleanRL's ppo_atari_multigpu: one agent a number of ranks."""

import pytest
from command_line import CARTPOLE, error_line, lockstep
from device_runs import JAX, devices

FAST = (*CARTPOLE, "--reduction", "fast", "--total-steps", 512)
BY = "--ppo.advantage-normalization"
TWO = pytest.mark.parametrize(
    "two", [("--nproc", 2), pytest.param((*JAX, *devices(2)), marks=pytest.mark.long)], ids=["torch", "jax"]
)


def engine_of(two):
    return () if two[0] == "--nproc" else (*JAX, *devices(1))


def loss(run):
    return [record["train/policy_loss"] for record in run.metrics]


@TWO
def test_one_rank_is_all_and_two_are_themselves(trained, two):
    one, both = (trained(*FAST, BY, by, *engine_of(two)) for by in ("rank", "global"))
    assert one.agent == both.agent
    apart, together = (trained(*FAST, BY, by, *two) for by in ("rank", "global"))
    assert loss(together) == pytest.approx(loss(one), rel=1e-2, abs=1e-4)
    assert abs(loss(apart)[0] - loss(one)[0]) > 10 * abs(loss(together)[0] - loss(one)[0])


def test_exact_knows_no_ranks(tmp_path):
    line = error_line(lockstep("train", *CARTPOLE, BY, "rank", cwd=tmp_path))
    assert "makes the agent depend on the number of ranks, which reduction exact doesn't allow" in line
