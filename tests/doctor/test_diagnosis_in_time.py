"""What differs at some times only: at the end, between steps, and after ranks took different numbers of steps."""

from typing import Any

import pytest
from stories import Story, kinds

from lockstep.doctor.judge.advice import CAUSES

ANNEALED: dict[str, Any] = {"rates": lambda rank: [(0, [4e-3]), (2 - rank, [3e-3]), (4 - rank, [2e-3])], "steps": 6}
LOGGED: dict[str, Any] = {"boundaries": lambda rank: [4, 8] if rank else [1, 2, 3, 4, 5, 6, 7, 8], "steps": 9}
CROSSING: dict[str, Any] = {"boundaries": lambda rank: [4, 8] if rank else [3, 7], "steps": 9}
VARYING: dict[str, Any] = {"boundaries": lambda rank: [4, 6, 8] if rank else [1, 3, 6, 7], "steps": 9}
TRAINED_ON: dict[str, Any] = {"source": lambda rank, step: {"collected": f"of {rank}", "rows": [100 * rank + step]}}
SEEN: dict[str, Any] = {"source": lambda rank, step: {"collected": "all", "rows": [100 * rank]} if step == 1 else {}}
STOPPED: dict[str, Any] = {"ends": {0: None, 1: None}, "codes": {0: None, 1: None}}


def test_what_one_rank_loads_after_its_last_compared_step_is_no_fault(tmp_path):
    found = Story(end=float, taken=lambda rank: 80).diagnosis(tmp_path)
    assert (found.verdict, found.status, kinds(found, "doubt")) == ("UNDETERMINED", 2, ["end"])
    assert "equal after step 4, the last compared one of 80: ranks 0 and 1 differ at the end in 1 of 2" in found.reason
    assert found.findings[0].cause == CAUSES["end"]
    assert "--interval" in found.findings[0].fix


def test_what_one_rank_loads_after_all_steps_were_compared_is_a_note(tmp_path):
    found = Story(end=float).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("IN SYNC", ["end"])
    assert Story(end=lambda rank: 1.0).diagnosis(tmp_path / "equal").findings == []


def test_what_differs_at_a_compared_step_too_stays_a_fault(tmp_path):
    found = Story(end=float, parameters=lambda rank, step: step + rank * (step > 2)).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("NOT IN SYNC", ["parameters"])
    other = {"parameters": lambda rank, step: step + rank * (step > 3), "steps": 4, "end": None}
    both = Story(end=float, taken=lambda rank: 3, steps=3, second=other).diagnosis(tmp_path / "of another optimiser")
    assert kinds(both, "fault") == ["parameters"]


def test_a_rank_that_looks_in_between_takes_the_same_steps(tmp_path):
    found = Story(**LOGGED).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("IN SYNC", ["phases"])
    assert "rank 0 makes forward passes without gradients" in found.findings[0].text
    assert "took equally many steps" in found.findings[0].text


def test_nor_is_a_rank_whose_process_was_ended_after_its_script(tmp_path):
    found = Story(**LOGGED, codes={0: None}).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("IN SYNC", ["phases"])
    other: dict[str, Any] = LOGGED | {"taken": lambda rank: 9 + rank, "codes": {0: None}}
    assert "steps" in kinds(Story(**other).diagnosis(tmp_path / "other"), "fault")


def test_it_is_not_accused_when_somebody_stops_the_ranks(tmp_path):
    ends: dict[str, Any] = {"ends": {0: None, 1: None}, "codes": {0: -2, 1: -2}}
    found = Story(**LOGGED, **ends).diagnosis(tmp_path, interrupted=True)
    assert (found.verdict, kinds(found)) == ("UNDETERMINED", ["interrupted", "phases"])


def test_nor_when_its_time_is_over(tmp_path):
    ends: dict[str, Any] = {"ends": {0: None, 1: None}, "codes": {0: None, 1: None}}
    found = Story(**LOGGED, **ends).diagnosis(tmp_path, stopped=True)
    assert (found.verdict, kinds(found)) == ("UNDETERMINED", ["phases"])
    assert "were stopped, or failed, before they showed anything else" in found.findings[0].text
    assert "let the script come to its end" in found.findings[0].fix
    assert Story(boundaries=lambda rank: [2], **ends).diagnosis(tmp_path / "alike", stopped=True).verdict == "IN SYNC"


OWN = {"error": "KeyError: 'x'", "error_at": "train.py:7 main", "error_in_collective": False}
HELD = {"stack": ["/x/site-packages/torch/distributed/c10d.py:9 all_reduce"], "waiting": 21.0, "certain": True}


@pytest.mark.parametrize(
    "ends",
    [
        {"ends": {1: OWN}, "codes": {1: 1}},
        {"ends": {0: None, 1: OWN}, "codes": {0: -15, 1: 1}, "taken": lambda rank: 9 - rank, "states": {0: HELD}},
        {"ends": {0: None, 1: None}, "codes": {0: -9, 1: -9}},
        {"codes": {0: -6, 1: -6}},  # in what a library does when the script has ended
    ],
)
def test_nor_when_the_script_fails(tmp_path, ends):
    found = Story(**LOGGED | ends).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("UNDETERMINED", ["failure", "phases"])
    assert found.reason.startswith("the script failed: rank ")


def test_ranks_that_fail_because_they_wait_are_accused(tmp_path):
    end = HELD | {"error": "RuntimeError: Connection closed", "error_in_collective": True}
    ends: dict[str, Any] = {"ends": {0: end}, "codes": {0: 1}, "taken": lambda rank: 9 + rank}
    found = Story(**LOGGED | ends).diagnosis(tmp_path)
    assert kinds(found, "fault") == ["steps", "waiting"]


@pytest.mark.parametrize("story", [LOGGED, CROSSING])
def test_it_is_accused_of_other_steps_if_it_took_fewer(tmp_path, story):
    found = Story(**story, taken=lambda rank: 9 + rank).diagnosis(tmp_path)
    assert (found.verdict, kinds(found, "fault")) == ("NOT IN SYNC", ["steps"])


@pytest.mark.parametrize(("story", "times"), [(CROSSING, (2, 2)), (VARYING, (4, 3))])
def test_ranks_that_look_by_turns_take_the_same_steps(tmp_path, story, times):
    found = Story(**story, **SEEN).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("IN SYNC", ["phases"])
    said = f"between different optimiser steps, {times[0]} (rank 0), {times[1]} (rank 1) times in all"
    assert f"{said}, as ranks took equally many steps" in found.findings[0].text


@pytest.mark.parametrize("story", [CROSSING, VARYING])
def test_unless_they_train_on_what_they_were_given_then(tmp_path, story):
    found = Story(**story, **TRAINED_ON).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("UNDETERMINED", ["phases"])
    assert "in all, and train on what they were given" in found.reason
    assert found.findings[0].cause == CAUSES["varying_phases"]


LONG: dict[str, Any] = {"steps": 9, "taken": lambda rank: 900}
COMMON = [100, 200, 300, 400, 500, 600]


@pytest.mark.parametrize(
    ("story", "verdict"),
    [
        (CROSSING, "UNDETERMINED"),
        (CROSSING | {"source": lambda rank, step: {} if rank else SEEN["source"](rank, step)}, "UNDETERMINED"),
        (LONG | SEEN | {"boundaries": lambda rank: [500 + rank, 600 + rank]}, "UNDETERMINED"),
        (LONG | SEEN | {"boundaries": lambda rank: sorted([*COMMON, 250 + rank, 350 + rank])}, "IN SYNC"),
        (LONG | {"boundaries": lambda rank: sorted([*COMMON, 250 + rank, 350 + rank])}, "UNDETERMINED"),
    ],
)
def test_it_is_left_open_if_what_they_train_on_was_not_seen(tmp_path, story, verdict):
    """On some rank, or just after a phase of its own, unless such phases are rare."""
    found = Story(**story).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == (verdict, ["phases"])
    assert ("whether they train on what they were given wasn't seen" in found.reason) == (verdict == "UNDETERMINED")


@pytest.mark.parametrize("story", [CROSSING, VARYING])
def test_ranks_that_look_by_turns_are_not_accused_when_they_are_stopped(tmp_path, story):
    found = Story(**story, **STOPPED).diagnosis(tmp_path / "stopped", stopped=True)
    assert (found.verdict, kinds(found)) == ("UNDETERMINED", ["phases"])
    assert "let the script come to its end" in found.findings[0].fix
    trained = Story(**story, **STOPPED, **TRAINED_ON).diagnosis(tmp_path / "trained on", stopped=True)
    assert (trained.verdict, kinds(trained)) == ("NOT IN SYNC", ["steps"])


@pytest.mark.parametrize(
    "story",
    [{"taken": lambda rank: 9 + rank}, STOPPED, {"parameters": lambda rank, step: 1.0 + step + rank * (step > 5)}],
)
def test_but_only_if_what_follows_agrees(tmp_path, story):
    assert "steps" in kinds(Story(**VARYING | story).diagnosis(tmp_path), "fault")


@pytest.mark.parametrize(
    ("story", "verdict", "kind"),
    [
        ({"inputs": lambda rank, step: f"data at {step}"}, "UNDETERMINED", "identical_data"),
        (
            {name: lambda rank, step: step + rank * (step > 5) for name in ("gradients", "parameters")},
            "NOT IN SYNC",
            "gradients",
        ),
    ],
)
def test_what_else_is_wrong_with_ranks_that_look_by_turns_is_told(tmp_path, story, verdict, kind):
    found = Story(**VARYING | story).diagnosis(tmp_path)
    assert (found.verdict, found.findings[0].kind) == (verdict, kind)
    assert "steps" not in kinds(found)


def test_learning_rates_of_other_steps_are_not_compared(tmp_path):
    """An annealed rate, of ranks of which one ended its first epochs a step early: it changes a step early since."""
    found = Story(**ANNEALED, boundaries=lambda rank: [2 - rank, 4 - rank]).diagnosis(tmp_path)
    assert kinds(found, "fault") == ["steps"]
    alone = Story(**ANNEALED).diagnosis(tmp_path / "alone")
    assert kinds(alone, "fault") == ["learning_rate"]


def test_learning_rates_that_differ_before_are(tmp_path):
    rates: dict[str, Any] = {"rates": lambda rank: [(0, [4e-3 + rank])]}
    found = Story(**ANNEALED | rates, boundaries=lambda rank: [2 - rank, 4 - rank]).diagnosis(tmp_path)
    assert sorted(kinds(found, "fault")) == ["learning_rate", "steps"]
