"""Evaluation during training: the same episodes and the same numbers on every number of ranks."""

import pytest
from command_line import EVALUATED, SMALL

KEYS = {f"eval/{name}" for name in ("episodes", "return_mean", "return_std", "return_min", "return_max", "length_mean")}


def evaluations(run):
    rows = {m["iteration"]: {k: v for k, v in m.items() if k.startswith("eval/")} for m in run.metrics}
    return {iteration: row for iteration, row in rows.items() if row}


@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_ranks_share_an_evaluation_without_changing_it(trained, nproc):
    one, many = evaluations(trained(*EVALUATED)), evaluations(trained(*EVALUATED, "--nproc", nproc))
    assert one == many
    assert list(one) == [4, 8]
    assert all(set(row) == KEYS and row["eval/episodes"] == 16 for row in one.values())


def test_an_evaluation_is_of_the_policy_and_of_the_seed(trained):
    first, last = evaluations(trained(*EVALUATED)).values()
    other, _ = evaluations(trained(*EVALUATED, "--seed", 1)).values()
    assert first != last
    assert first != other


def test_cartpole_returns_are_its_lengths(trained):
    for row in evaluations(trained(*EVALUATED)).values():
        assert row["eval/return_mean"] == row["eval/length_mean"]
        assert row["eval/return_min"] <= row["eval/return_mean"] <= row["eval/return_max"]


@pytest.mark.parametrize("more", [("--nproc", 2), ("--env.workers", 2)], ids=["ranks", "workers"])
def test_what_environments_remember_doesnt_depend_on_how_long_those_beside_them_play(trained, more):
    words = ("tiring:Tiring-v0", *SMALL, "--eval.interval", 2)
    assert evaluations(trained(*words)) == evaluations(trained(*words, *more))
