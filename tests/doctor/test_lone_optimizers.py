"""Optimisers that one rank alone has: a probe for a plot, or a part of the agent that the others don't train."""

from dataclasses import replace
from typing import Any

import pytest
from stories import Story, kinds

from lockstep.doctor.judge.diagnosis import diagnose
from lockstep.doctor.judge.traces import read_traces

PROBE: dict[str, Any] = {"second": {"sizes": (4, 1)}, "second_on": (0,)}


def test_an_optimiser_that_one_rank_alone_made_is_set_aside(tmp_path):
    found = Story(**PROBE).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("UNDETERMINED", ["lone_optimizer"])
    assert found.reason == "rank 0 alone has optimiser 2 (2 tensors, first net.weight), which took 4 steps: set aside"
    assert found.coverage["optimizer_steps"] == {"0": {"0": 4, "1": 4}}


def test_the_others_are_compared_though_it_stepped_first(tmp_path):
    first, other = read_traces(Story(**PROBE).tell(tmp_path), range(2))
    swapped = {
        name: {1 - number: value for number, value in getattr(first, name).items()}
        for name in ("rates", "boundaries", "steps", "names", "settings", "loaded", "wrapped", "sizes")
    }
    checks = {moment._replace(optimizer=1 - moment.optimizer): check for moment, check in first.checks.items()}
    found = diagnose([replace(first, checks=checks, **swapped), other])
    assert kinds(found) == ["lone_optimizer"]
    assert found.coverage["compared_steps"] == 4


def test_a_fault_beside_it_stays_one(tmp_path):
    apart: dict[str, Any] = {
        "gradients": lambda rank, step: 0.5 + rank,
        "parameters": lambda rank, step: step + 0.1 * rank,
    }
    found = Story(**PROBE, **apart, everywhere=True).diagnosis(tmp_path)
    assert found.verdict == "NOT IN SYNC"
    assert kinds(found, "fault")[0] == "gradients"


@pytest.mark.parametrize(
    "others",
    [
        {"made": lambda rank: [[1, 2], [4, 1]]},
        {"untrained": lambda rank: [1, 3, 4]},
        {"second": {"sizes": (1, 2)}},
        {"second": {"sizes": ()}},
    ],
)
def test_what_other_ranks_have_and_never_step_is_a_fault(tmp_path, others):
    found = Story(**PROBE | others).diagnosis(tmp_path)
    assert (found.verdict, kinds(found, "fault")) == ("NOT IN SYNC", ["steps"])
    assert "numbers of optimiser steps of optimiser 2: 4 (rank 0), 0 (rank 1) in all" in found.reason


def test_optimisers_of_which_each_rank_has_its_own_are_compared(tmp_path):
    first, other = read_traces(Story().tell(tmp_path), range(2))
    found = diagnose([replace(first, sizes={0: [5]}), replace(other, sizes={0: [6]})])
    assert found.verdict == "IN SYNC"
