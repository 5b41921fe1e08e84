"""Which optimiser of a rank is which of another: by what they update; and those that one rank alone has."""

from dataclasses import replace
from typing import Any

import pytest
from stories import Story, kinds

from lockstep.doctor.judge.advice import CAUSES
from lockstep.doctor.judge.diagnosis import diagnose
from lockstep.doctor.judge.traces import read_traces

APART: dict[str, Any] = {name: lambda rank, step: step + 0.1 * rank for name in ("gradients", "parameters", "moments")}
PARTS: dict[str, Any] = APART | {
    "start": float,
    "everywhere": True,
    "held": lambda rank: {"0.0": "net.bias" if rank else "net.weight"},
    "whole": lambda rank, step: float(step),
}
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
        {"second": {"sizes": (1, 2)}, "made": lambda rank: [[1, 2], [1, 2]]},
        {"second": {"sizes": ()}},
    ],
)
def test_what_other_ranks_have_and_never_step_is_a_fault(tmp_path, others):
    found = Story(**PROBE | others).diagnosis(tmp_path)
    assert (found.verdict, kinds(found, "fault")) == ("NOT IN SYNC", ["steps"])
    assert "numbers of optimiser steps of optimiser 2: 4 (rank 0), 0 (rank 1) in all" in found.reason


def test_an_optimiser_that_all_ranks_step_is_none_that_they_never_step(tmp_path):
    """A copy of the model, say: it has tensors of the same sizes."""
    copied: dict[str, Any] = PROBE | {"second": {"sizes": (1, 2)}, "made": lambda rank: [[1, 2]]}
    found = Story(**copied).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("UNDETERMINED", ["lone_optimizer"])


def test_optimisers_of_which_each_rank_has_its_own_are_compared(tmp_path):
    first, other = read_traces(Story().tell(tmp_path), range(2))
    found = diagnose([replace(first, sizes={0: [5]}), replace(other, sizes={0: [6]})])
    assert found.verdict == "IN SYNC"


def test_ranks_whose_optimisers_hold_other_parameters_of_one_model_each_update_a_part(tmp_path):
    found = Story(**PARTS).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("IN SYNC", ["sharded"])
    assert "each rank's optimiser holds a part of the model's parameters" in found.findings[0].text


def test_parts_that_do_not_come_to_all_ranks_are_a_fault(tmp_path):
    unsent: dict[str, Any] = PARTS | {"whole": lambda rank, step: step + rank * (step > 2)}
    found = Story(**unsent).diagnosis(tmp_path)
    assert (found.verdict, kinds(found, "fault")) == ("NOT IN SYNC", ["gathered"])
    assert "from optimiser step 3 in 2 of 2 tensors, first net.weight" in found.reason


@pytest.mark.parametrize(
    "more",
    [
        {"held": lambda rank: {"0.0": "net.weight"}},
        {"held": lambda rank: {"0.0": "net.weight"} if rank else {}},
        {"held": lambda rank: {"0.0": "another.weight" if rank else "net.weight"}},
        {"whole": None},
    ],
)
def test_optimisers_are_no_parts_unless_every_rank_has_all(tmp_path, more):
    story: dict[str, Any] = PARTS | more
    found = Story(**story).diagnosis(tmp_path)
    assert (found.verdict, kinds(found, "fault")[0]) == ("NOT IN SYNC", "gradients")


def test_parts_that_are_stepped_with_the_rank_s_own_gradient_leave_it_open(tmp_path):
    own: dict[str, Any] = {name: lambda rank, step: step + 0.5 * rank for name in ("own", "stepped")}
    found = Story(**PARTS, **own).diagnosis(tmp_path / "own")
    assert (found.verdict, kinds(found, "doubt")) == ("UNDETERMINED", ["alone"])
    assert "of its own data alone" in found.reason
    reduced: dict[str, Any] = own | {"stepped": lambda rank, step: step + 0.25}
    assert Story(**PARTS, **reduced).diagnosis(tmp_path / "reduced").verdict == "IN SYNC"
    assert Story(**PARTS, **own, hooked=True).diagnosis(tmp_path / "in hooks").verdict == "IN SYNC"


def test_optimisers_are_matched_though_ranks_step_them_first_in_another_order(tmp_path):
    first, other = read_traces(Story(second={"sizes": (4, 1)}).tell(tmp_path), range(2))
    found = diagnose([first, other.numbered({0: 1, 1: 0})])
    assert (found.verdict, kinds(found)) == ("IN SYNC", [])
    assert found.coverage["optimizer_steps"] == {"0": {"0": 4, "1": 4}, "1": {"0": 4, "1": 4}}


TRAINED: dict[str, Any] = {"second_on": (0,), "tensors": lambda rank: {"0.0": 0, "0.1": 1}}


def trained_alone(more, **others):
    """Rank 0 alone has a second optimiser, of two tensors that the first one doesn't have."""
    second: dict[str, Any] = {"sizes": (1, 2), "tensors": lambda rank: {"0.0": 2, "0.1": 3}, "end": lambda rank: 7.0}
    held = {"held": lambda rank: {"0.0": "net.weight", "0.1": "net.bias"}}
    first: dict[str, Any] = TRAINED | {"untrained": lambda rank: [1, 2]} | others
    return Story(second=second | held | more, **first)


SHARED: dict[str, Any] = {"tensors": lambda rank: {"0.0": 0, "0.1": 1}}


@pytest.mark.parametrize("left", [5.0, 7.0])
def test_what_one_rank_alone_trained_last_must_be_what_all_have_in_the_end(tmp_path, left):
    others: dict[str, Any] = {"untrained": lambda rank: [], "end": lambda rank: 5.0}
    found = trained_alone(SHARED | {"end": lambda rank: left}, **others).diagnosis(tmp_path)
    if left == 5.0:
        assert (found.verdict, kinds(found)) == ("IN SYNC", ["lone_optimizer"])
        assert found.findings[0].text.endswith("set aside, as all ranks have what it trained")
    else:
        assert (found.verdict, kinds(found, "fault")) == ("NOT IN SYNC", ["steps"])
        assert found.findings[0].cause == CAUSES["steps_alone"]


def test_what_one_rank_alone_trained_and_all_train_since_is_a_note(tmp_path):
    first, other = read_traces(trained_alone(SHARED).tell(tmp_path), range(2))
    checks = dict(sorted(first.checks.items(), key=lambda item: item[0].optimizer == 0))  # the lone one's come first
    found = diagnose([replace(first, checks=checks), other])
    assert (found.verdict, kinds(found)) == ("IN SYNC", ["lone_optimizer"])
    assert diagnose([first, other]).verdict == "NOT IN SYNC"


@pytest.mark.parametrize("kind", ["frozen", "unstepped"])
def test_what_one_rank_alone_trained_and_sent_is_a_note(tmp_path, kind):
    sent = {kind: lambda rank, step: 7.0}
    found = trained_alone({}, **sent).diagnosis(tmp_path / "sent")
    assert (found.verdict, kinds(found, "fault")) == ("IN SYNC", [])
    assert kinds(found)[0] == "lone_optimizer"
    kept = {kind: lambda rank, step: 7.0 if rank == 0 else 6.0}
    own = trained_alone({}, **kept).diagnosis(tmp_path / "not sent")
    assert own.verdict == "NOT IN SYNC"
    (steps,) = [finding for finding in own.findings if finding.kind == "steps"]
    assert steps.cause == CAUSES["steps_alone"]


def test_what_no_other_rank_uses_need_not_be_sent(tmp_path):
    heads: dict[str, Any] = {"unstepped": lambda rank, step: 7.0 - rank, "unused": ("net.weight",)}
    held = {"held": lambda rank: {"0.0": "net.weight", "0.1": "elsewhere"}}
    both = held | {"tensors": lambda rank: {"0.0": 2, "0.1": 1}}
    assert "steps" not in kinds(trained_alone(both, **heads).diagnosis(tmp_path / "unused"))
    used = trained_alone(both, **heads | {"unused": ()}).diagnosis(tmp_path / "used")
    assert "steps" in kinds(used, "fault")
