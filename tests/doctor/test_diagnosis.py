"""From what ranks left to verdict, cause and fix: every fault alone, beside a story without one."""

from typing import Any

import pytest
from stories import Story, kinds

from lockstep.core.errors import OutOfStepError
from lockstep.doctor.judge.advice import CAUSES, FIXES
from lockstep.doctor.judge.diagnosis import diagnose
from lockstep.doctor.judge.report import screen
from lockstep.doctor.judge.traces import RankTrace, read_traces
from lockstep.doctor.watch.watcher import described


def by_rank(value, other):
    return lambda rank, step: other if rank else value


DRIFT: dict[str, Any] = {"parameters": lambda rank, step: 1.0 + step + 0.1 * rank}


def test_equal_ranks_with_different_data_are_in_sync(tmp_path):
    found = Story().diagnosis(tmp_path)
    assert (found.verdict, found.status, found.findings) == ("IN SYNC", 0, [])
    assert "2 ranks" in found.reason
    assert found.coverage["compared_steps"] == 4
    assert found.coverage["optimizer_steps"] == {"0": {"0": 4, "1": 4}}
    assert found.overhead["share"] == pytest.approx(0.2 / 9.8)
    assert "\noverhead   0.20 s beside the 9.8 s of the script, 2.0 %\n" in screen(found, "ppo.py")


@pytest.mark.parametrize(
    ("changes", "why", "words"),
    [
        ({"through": (), "everywhere": True}, "bypassed", "gradients are never reduced: "),
        (
            {"through": (), "everywhere": True, "libraries": ("stable_baselines3",)},
            "bypassed_sb3",
            "gradients are never reduced: ",
        ),
        ({"wrappers": (), "everywhere": True}, "unreduced", "gradients are never reduced: "),
        ({"everywhere": True}, "local_change", "gradients differ in spite of DDP: "),
        ({}, "partly_reduced", "some gradients are never reduced: "),
        (
            {"gradients": lambda rank, step: 1.0 + 1e-6 * rank, "everywhere": True},
            "rounding",
            "gradients are reduced but rounded differently: ",
        ),
        (
            {"gradients": lambda rank, step: 1.0 + rank * (step > 2), "everywhere": True},
            "local_change",
            "gradients are not reduced at every step: ",
        ),
    ],
)
def test_gradients_that_differ(tmp_path, changes, why, words):
    found = Story(**{"gradients": by_rank(0.5, 0.4)} | DRIFT | changes).diagnosis(tmp_path)
    first = found.findings[0]
    assert (found.verdict, found.status, first.details["why"]) == ("NOT IN SYNC", 1, why)
    assert found.reason.startswith(words)
    assert (first.cause, first.fix) == (CAUSES[why], FIXES[why])
    assert first.details["step"] == (3 if "not reduced at every step" in words else 1)
    assert first.details["ranks"] == [1]


def test_the_headline_names_ranks_step_tensors_and_size(tmp_path):
    found = Story(gradients=by_rank(0.5, 0.4), ranks=3, **DRIFT).diagnosis(tmp_path)
    expected = "ranks 0, 1 and 2 differ from optimiser step 1 in 1 of 2 tensors, first net.weight, "
    assert expected + "largest relative difference 2.0e-01" in found.reason


def test_gradients_that_differ_without_a_group_are_of_independent_agents(tmp_path):
    apart: dict[str, Any] = {"gradients": by_rank(0.5, 0.4), **DRIFT, "wrappers": ()}
    found = Story(**apart, world=0).diagnosis(tmp_path)
    assert kinds(found) == ["independent"]
    assert "no torch.distributed process group" in found.reason
    assert found.findings[0].fix == FIXES["independent"]
    sb3 = Story(**apart, world=0, libraries=("stable_baselines3",)).diagnosis(tmp_path / "sb3")
    assert "lockstep.integrations.sb3" in sb3.findings[0].fix
    alone = Story(**apart, world=1).diagnosis(tmp_path / "of one each")
    assert "a process group of one rank each" in alone.reason
    assert alone.status == 1
    same = Story(world=0, inputs=lambda rank, step: "data").diagnosis(tmp_path / "of the same data")
    assert kinds(same) == ["independent"]


def test_gradients_that_are_reduced_without_a_group_are_of_one_agent(tmp_path):
    found = Story(world=0, wrappers=()).diagnosis(tmp_path)
    assert (found.verdict, found.findings) == ("IN SYNC", [])
    second: dict[str, Any] = {"gradients": by_rank(0.5, 0.4), **DRIFT}
    partly = Story(world=0, wrappers=(), second=second).diagnosis(tmp_path / "partly")
    assert kinds(partly, "fault") == ["gradients"]


def test_one_rank_that_steps_without_a_group_is_judged_by_what_it_sends(tmp_path):
    taken = {"world": 0, "wrappers": (), "taken": lambda rank: 0 if rank else 4}
    seen = Story(**taken, models=lambda rank, phase: phase).diagnosis(tmp_path)
    assert (seen.verdict, kinds(seen)) == ("IN SYNC", ["server"])
    unseen = Story(**taken).diagnosis(tmp_path / "unseen")
    assert (unseen.verdict, kinds(unseen)) == ("UNDETERMINED", ["server"])


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"start": float}, "start"),
        ({"parameters": by_rank(1.0, 2.0)}, "parameters"),
        ({"moments": by_rank(1.0, 2.0)}, "moments"),
        ({"buffers": by_rank(1.0, 2.0)}, "buffers"),
        ({"normalizers": by_rank(1.0, 2.0)}, "normalizers"),
        ({"gathered": by_rank(1.0, 2.0), "sharded": 2}, "gathered"),
        ({"rates": lambda rank: [(0, [1e-3]), (2, [2e-3 if rank else 1e-3])]}, "learning_rate"),
        ({"boundaries": lambda rank: [1 + rank, 3 + rank], "taken": lambda rank: 4 + rank}, "steps"),
        ({"taken": lambda rank: 4 + rank}, "steps"),
    ],
)
def test_each_fault_alone_is_found_and_nothing_else(tmp_path, change, kind):
    found = Story(**change).diagnosis(tmp_path)
    assert found.status == 1
    assert kinds(found, "fault") == [kind]
    assert found.findings[0].cause
    assert found.findings[0].fix


def test_what_follows_from_a_learning_rate_is_no_finding_of_its_own(tmp_path):
    story = Story(
        rates=lambda rank: [(0, [1e-3]), (2, [2e-3 if rank else 1e-3])],
        parameters=lambda rank, step: 1.0 + step + (rank if step > 2 else 0),
    )
    found = story.diagnosis(tmp_path)
    assert kinds(found) == ["learning_rate"]
    assert "from optimiser step 3: 0.001 (rank 0), 0.002 (rank 1)" in found.reason
    assert "parameters of ranks 0 and 1 differ from optimiser step 3" in found.reason


def test_a_learning_rate_that_is_none_is_compared_as_well(tmp_path):
    assert Story(rates=lambda rank: [(0, [None])]).diagnosis(tmp_path / "alike").findings == []
    found = Story(rates=lambda rank: [(0, [1e-3 if rank else None])]).diagnosis(tmp_path / "unlike")
    assert "from optimiser step 1: none (rank 0), 0.001 (rank 1)" in found.reason


def test_gradients_that_were_never_seen_are_not_called_equal(tmp_path):
    found = Story(gradients=None, **DRIFT).diagnosis(tmp_path)
    assert kinds(found, "fault") == ["parameters"]
    assert found.findings[0].cause == CAUSES["gradients_unseen"]


def test_steps_per_phase_are_counted_while_parameters_stay_equal(tmp_path):
    found = Story(boundaries=lambda rank: [2, 3 + rank], steps=6, taken=lambda rank: 6 + rank).diagnosis(tmp_path)
    assert "1 (rank 0), 2 (rank 1) in rollout phase 2, while their parameters stay equal" in found.reason


@pytest.mark.parametrize("boundaries", [lambda rank: [1 + rank, 3 + rank], lambda rank: [2, 3 + rank]])
def test_phases_of_other_lengths_leave_it_open_though_ranks_took_equally_many_steps(tmp_path, boundaries):
    found = Story(boundaries=boundaries, steps=6).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("UNDETERMINED", ["phases"])


def test_a_rank_that_evaluates_in_between_takes_no_other_steps(tmp_path):
    found = Story(boundaries=lambda rank: [2, 4, 5, 6, 8] if rank else [2, 4, 6, 8], steps=9).diagnosis(tmp_path)
    assert found.verdict == "IN SYNC"


def test_a_rank_that_always_stops_early_may_meet_the_others_at_their_boundaries(tmp_path):
    """In the end the others wait for it: after as many rollouts it has taken fewer steps."""
    story = Story(boundaries=lambda rank: [2, 4, 6] if rank else [4], steps=8, taken=lambda rank: 8, ends={0: None})
    story.codes = {0: None}
    found = story.diagnosis(tmp_path)
    assert found.verdict == "NOT IN SYNC"
    assert "4 (rank 0), 2 (rank 1) in rollout phase 1" in found.reason


@pytest.mark.parametrize(
    ("source", "verdict"),
    [
        (lambda rank, step: {"collected": "all", "rows": [rank, step, 10 + step]}, "UNDETERMINED"),
        (lambda rank, step: {"collected": f"of {rank}", "rows": [rank, step, 10 + step]}, "IN SYNC"),
        (lambda rank, step: {"collected": "all", "rows": [100 * rank + step]}, "IN SYNC"),
        (lambda rank, step: {"collected": "all" if step < 3 else f"{rank}", "rows": [1, 2, 3, 4]}, "IN SYNC"),
        (lambda rank, step: {} if rank else {"collected": "all", "rows": [1, 2, 3, 4]}, "IN SYNC"),
        (lambda rank, step: {"collected": "", "rows": [1, 2, 3, 4]}, "IN SYNC"),
    ],
)
def test_rollouts_that_are_the_same_though_minibatches_differ_leave_it_open(tmp_path, source, verdict):
    found = Story(source=source).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == (verdict, ["identical_data"] if verdict == "UNDETERMINED" else [])


def test_the_same_data_everywhere_leave_it_open(tmp_path):
    found = Story(inputs=lambda rank, step: f"data at {step}").diagnosis(tmp_path)
    assert (found.verdict, found.status, kinds(found)) == ("UNDETERMINED", 2, ["identical_data"])
    assert "identical on every rank" in found.reason
    once = Story(inputs=lambda rank, step: f"{rank if step == 3 else 0}").diagnosis(tmp_path / "once")
    assert once.verdict == "IN SYNC"


def test_the_same_data_leave_it_open_though_the_step_makes_the_same_of_other_gradients(tmp_path):
    """As one does that takes the gradients' signs, which a scale of each rank's own leaves alone."""
    scaled = {"gradients": lambda rank, step: step * (1.0 + rank), "everywhere": True}
    found = Story(**scaled, inputs=lambda rank, step: f"data at {step}").diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("UNDETERMINED", ["identical_data"])
    assert kinds(Story(**scaled).diagnosis(tmp_path / "differ")) == ["reduced_in_step"]


def test_data_that_were_not_seen_leave_it_open(tmp_path):
    unseen: dict[str, Any] = {"inputs": lambda rank, step: ""}
    found = Story(**unseen).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("UNDETERMINED", ["inputs_unseen"])
    alike = Story(**unseen, own=lambda rank, step: step).diagnosis(tmp_path / "alike")
    assert (alike.verdict, kinds(alike)) == ("UNDETERMINED", ["inputs_unseen"])


def test_unless_gradients_that_differed_are_equal_at_the_step(tmp_path):
    unseen: dict[str, Any] = {"inputs": lambda rank, step: "", "own": lambda rank, step: step + rank}
    found = Story(**unseen).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("IN SYNC", [])
    assert "they are reduced" in found.reason
    apart: dict[str, Any] = {name: lambda rank, step: step + rank for name in ("gradients", "parameters")}
    never = Story(**unseen, **apart).diagnosis(tmp_path / "never")
    assert (never.verdict, kinds(never, "fault")) == ("NOT IN SYNC", ["gradients"])


def test_ranks_that_do_the_work_of_others_are_named(tmp_path):
    """Seeds by LOCAL_RANK on two hosts."""
    twice: dict[str, Any] = {"ranks": 4, "world": 4, "inputs": lambda rank, step: f"data of {rank % 2} at {step}"}
    found = Story(**twice).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("UNDETERMINED", ["identical_data"])
    assert "identical on ranks 0 and 2: inputs of the forward passes before all 4 compared steps" in found.reason
    later = {**twice, "inputs": lambda rank, step: f"data of {rank % 2 if step < 4 else rank} at {step}"}
    assert Story(**later).diagnosis(tmp_path / "later").verdict == "IN SYNC"
    own: dict[str, Any] = {"own": lambda rank, step: step + rank}  # of other targets, say
    assert Story(**twice, **own).diagnosis(tmp_path / "own").verdict == "IN SYNC"
    assert Story(**twice, sharded=2).diagnosis(tmp_path / "parts").verdict != "NOT IN SYNC"
    assert "identical_data" not in kinds(Story(**twice, sharded=2).diagnosis(tmp_path / "parts again"))


def test_gradients_of_zero_prove_nothing(tmp_path):
    found = Story(gradients=lambda rank, step: 0.0, everywhere=True).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("UNDETERMINED", ["no_gradients"])


def test_buffers_that_ddp_sends_are_a_note(tmp_path):
    story = {"buffers": by_rank(1.0, 2.0), "broadcast": ("norm.running_mean",)}
    found = Story(**story).diagnosis(tmp_path)
    assert (found.verdict, kinds(found, "note")) == ("IN SYNC", ["ddp_buffers"])
    names = ("norm.running_mean", "cache.keys")
    beside = Story(**story, buffer_names=names, everywhere=True).diagnosis(tmp_path / "beside")
    assert (beside.verdict, kinds(beside), kinds(beside, "note")) == (
        "UNDETERMINED",
        ["own_buffers", "ddp_buffers"],
        ["ddp_buffers"],
    )
    bypassed = Story(**story, through=(), gradients=by_rank(0.5, 0.4), **DRIFT).diagnosis(tmp_path / "bypassed")
    assert kinds(bypassed, "fault") == ["gradients", "buffers"]
    by_hand = Story(**story, through=()).diagnosis(tmp_path / "by_hand")  # reduced, but not by DDP
    assert kinds(by_hand) == ["buffers"]
    unseen = Story(**story, through=(), inputs=lambda rank, step: "").diagnosis(tmp_path / "unseen")
    assert kinds(unseen, "note") == ["ddp_buffers"]


@pytest.mark.parametrize(
    ("names", "drift"),
    [
        (("norm.running_mean", "norm.x"), True),
        (("mean", "x"), True),
        (("norm._M2", "norm.x"), True),
        (("obs_rms", "x"), True),
        (("book.embed_avg", "book.x"), True),
        (("norm.center", "norm.count"), True),
        (("norm.center", "other.count"), False),
        (("k_cache", "v_cache"), False),
        (("env.state", "env.step_count"), False),
        (("env.max_speed", "env.meaning"), False),
    ],
)
def test_buffers_that_may_be_a_rank_s_own_data_are_a_doubt_and_statistics_a_fault(tmp_path, names, drift):
    found = Story(buffers=by_rank(1.0, 2.0), buffer_names=names).diagnosis(tmp_path)
    assert kinds(found) == ["buffers" if drift else "own_buffers"]
    assert (found.verdict, found.findings[0].details["tensors"]) == (
        "NOT IN SYNC" if drift else "UNDETERMINED",
        [names[0]],
    )


def test_statistics_and_a_rank_s_own_data_are_told_apart_in_one_model(tmp_path):
    names = ("norm.running_mean", "cache.keys")
    found = Story(buffers=by_rank(1.0, 2.0), buffer_names=names, everywhere=True).diagnosis(tmp_path)
    assert [(f.kind, f.level, f.details["tensors"]) for f in found.findings] == [
        ("buffers", "fault", [names[0]]),
        ("own_buffers", "doubt", [names[1]]),
    ]


def test_sharded_parameters_are_judged_as_they_were_gathered(tmp_path):
    shards = {"sharded": 2, "parameters": by_rank(1.0, 2.0), "gradients": by_rank(1.0, 2.0), "wrappers": ("fsdp2",)}
    found = Story(gathered=lambda rank, step: 1.0, **shards).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("IN SYNC", ["sharded"])
    assert "not checked" in found.findings[0].text
    assert Story(**shards).diagnosis(tmp_path / "ungathered").verdict == "UNDETERMINED"


def test_every_optimizer_needs_evidence_of_its_own(tmp_path):
    same = {"inputs": lambda rank, step: "the same"}
    found = Story(second=same).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("UNDETERMINED", ["identical_data"])
    assert "the data of optimiser 2 are identical" in found.reason
    still = Story(second={"gradients": lambda rank, step: 0.0, "everywhere": True}).diagnosis(tmp_path / "still")
    assert (still.verdict, kinds(still)) == ("UNDETERMINED", ["no_gradients"])
    unseen = Story(second={"inputs": lambda rank, step: ""}).diagnosis(tmp_path / "unseen")
    assert (unseen.verdict, kinds(unseen)) == ("UNDETERMINED", ["inputs_unseen"])
    assert "gradients of optimiser 2 are equal" in unseen.reason
    assert Story(second={}).diagnosis(tmp_path / "both").verdict == "IN SYNC"


def test_one_of_two_optimizers_that_is_never_reduced_is_found(tmp_path):
    alone = {"gradients": by_rank(0.5, 0.4), "everywhere": True, "through": ()} | DRIFT
    found = Story(second=alone).diagnosis(tmp_path)
    assert found.reason.startswith("gradients are never reduced: ranks 0 and 1 differ from optimiser step 1 of optim")
    assert found.findings[0].details["why"] == "bypassed"
    assert found.coverage["tensors"]["parameters"] == 4
    by_hand = Story(second=alone, wrappers=()).diagnosis(tmp_path / "by hand")
    assert by_hand.reason.startswith("some gradients are never reduced: ")
    assert by_hand.findings[0].details["why"] == "others_reduced"


def test_gradients_that_are_zero_wherever_data_differ_prove_nothing(tmp_path):
    story = Story(
        inputs=lambda rank, step: f"{rank if step == 3 else 0}",
        gradients=lambda rank, step: 0.0 if step == 3 else 1.0,
        everywhere=True,
    )
    found = story.diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("UNDETERMINED", ["inputs_unseen"])
    assert "zero wherever the data differ" in found.reason


def test_optimizers_of_what_lives_for_some_steps_are_set_aside(tmp_path):
    found = Story(plans=3, gone=lambda plan: plan < 2).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("UNDETERMINED", ["passing"])
    assert "3 optimisers, each let go" in found.reason
    assert found.coverage["optimizer_steps"] == {"3": {"0": 4, "1": 4}}
    faulty = Story(plans=3, start=float).diagnosis(tmp_path / "faulty")
    assert kinds(faulty, "fault") == ["start"]


@pytest.mark.parametrize("story", [{"plans": 2}, {"plans": 3, "gone": lambda plan: plan < 1}])
def test_optimizers_of_tensors_outside_modules_that_stay_or_are_few_are_none_of_these(tmp_path, story):
    """Such as temperatures of several agents."""
    assert kinds(Story(**story).diagnosis(tmp_path), "fault") == ["gradients"]


def test_if_all_optimizers_pass_there_are_no_others_to_judge(tmp_path):
    traces = read_traces(Story(plans=3).tell(tmp_path), range(2))
    for trace in traces:
        trace.steps.pop(3)
        trace.checks = {moment: check for moment, check in trace.checks.items() if moment.optimizer < 3}
    assert kinds(diagnose(traces), "fault") == ["gradients"]


def test_an_optimizer_may_reduce_in_its_step(tmp_path):
    differing: dict[str, Any] = {"gradients": by_rank(0.5, 0.4), "everywhere": True, "wrappers": ()}
    found = Story(**differing).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("IN SYNC", ["reduced_in_step"])
    assert found.reason.endswith("they are reduced in the step")
    resting = Story(**differing, parameters=lambda rank, step: 1.0).diagnosis(tmp_path / "resting")
    assert (resting.verdict, kinds(resting)) == ("NOT IN SYNC", ["gradients"])
    partly: dict[str, Any] = {**differing, "everywhere": False, "parameters": lambda rank, step: 1.0 + step}
    half = Story(**partly).diagnosis(tmp_path / "half")
    assert half.verdict == "IN SYNC"  # the one whose gradients differ is the one that moves
    once = Story(**differing, parameters=lambda rank, step: 1.0 + step + rank * (step == 3)).diagnosis(
        tmp_path / "once"
    )
    assert kinds(once, "fault") == ["gradients"]


LEARNERS: dict[str, Any] = {"ranks": 4, "world": 4, "taken": lambda rank: 80 if rank < 2 else 0}


def test_several_learners_are_judged_among_themselves_and_actors_by_their_parameters(tmp_path):
    found = Story(**LEARNERS, models=lambda rank, phase: phase).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("IN SYNC", ["server"])
    assert "ranks 0 and 1 take all optimiser steps, and ranks 2 and 3 had their parameters" in found.findings[0].text
    assert "on 2 ranks" in found.reason
    late = Story(**LEARNERS, models=lambda rank, phase: phase - (rank == 3)).diagnosis(tmp_path / "late")
    assert (late.verdict, kinds(late, "fault")) == ("NOT IN SYNC", ["server"])
    assert "rank 3 differs from rank 0 when rollout phase 2 begins: in 1 of 1 tensors, first net.weight" in late.reason
    apart = Story(**LEARNERS, **DRIFT, models=lambda rank, phase: phase).diagnosis(tmp_path / "apart")
    assert kinds(apart, "fault") == ["parameters"]
    assert "ranks 0 and 1 differ" in apart.reason


def test_a_rank_that_never_steps_is_no_actor_unless_its_parameters_were_seen(tmp_path):
    story = Story(ranks=3, world=3, steps=100, boundaries=lambda rank: [], rates=lambda rank: [(0, [1e-3])])
    traces = read_traces(story.tell(tmp_path), range(3))
    still = RankTrace(2, state=traces[2].state, end=traces[2].end, exit_code=0)  # it made an optimiser, and left it
    for trace in traces:
        trace.settings[0], trace.loaded[0] = [{"betas": [0.9, 0.999]}], 4
    found = diagnose([*traces[:2], still])
    assert (found.verdict, kinds(found, "fault")) == ("NOT IN SYNC", ["steps"])
    assert found.reason.endswith("100 (rank 0), 100 (rank 1), 0 (rank 2) in all")
    assert "and whether rank 2 has their parameters wasn't seen" in found.findings[1].text
    still.state["made_optimizer"] = False
    actor = diagnose([*traces[:2], still])
    assert (actor.verdict, kinds(actor)) == ("UNDETERMINED", ["server"])
    bare = RankTrace(2, state={"torch": False}, end=still.end, exit_code=0)  # it acts without PyTorch
    actor = diagnose([*traces[:2], bare])
    assert (actor.verdict, kinds(actor)) == ("UNDETERMINED", ["server"])
    still.state["made_optimizer"] = True
    still.end = still.exit_code = None
    stopped = diagnose([*traces[:2], still], stopped=True)
    assert (stopped.verdict, kinds(stopped, "fault")) == ("UNDETERMINED", [])


# --- ends -------------------------------------------------------------------------------------------------------

COLLECTIVE = {"stack": ["/x/site-packages/torch/distributed/c10d.py:9 all_reduce", "train.py:41 update"]}


def test_a_rank_that_failed_in_a_collective_waited_for_one_that_had_ended(tmp_path):
    end = COLLECTIVE | {"error": "RuntimeError: Connection closed", "error_in_collective": True}
    found = Story(ends={1: end}, codes={1: 1}).diagnosis(tmp_path)
    assert kinds(found) == ["waiting"]
    assert "rank 1 waited in a collective while rank 0 had ended" in found.reason
    assert "all_reduce (c10d.py:9) ← update (train.py:41)" in found.reason
    assert found.findings[0].details["stacks"] == {"1": COLLECTIVE["stack"]}


def test_ranks_that_wait_for_one_another_are_a_deadlock(tmp_path):
    waiting = COLLECTIVE | {"waiting": 21.0, "certain": True}
    story = {"ends": {0: None, 1: None}, "codes": {0: None, 1: None}, "states": {0: waiting, 1: waiting}}
    found = Story(**story).diagnosis(tmp_path, deadlock=True)
    assert "ranks 0 and 1 waited in a collective for one another" in found.reason
    assert found.status == 1
    assert Story(**story).diagnosis(tmp_path / "on", deadlock=False).verdict == "IN SYNC"


def test_a_rank_that_only_stands_still_was_not_waiting_unless_it_was_ended_for_that(tmp_path):
    idle = {"stack": ["train.py:41 sleep"], "waiting": 21.0, "certain": False}
    story = {"ends": {1: None}, "codes": {1: None}, "states": {1: idle}}
    assert "waiting" not in kinds(Story(**story).diagnosis(tmp_path))
    ended = Story(**story).diagnosis(tmp_path / "ended", deadlock=True)
    assert (ended.verdict, kinds(ended)) == ("UNDETERMINED", ["still"])
    assert "rank 1 stood still for 21 s, rank 0 had ended: rank 1 in sleep (train.py:41)" in ended.reason
    waiting = COLLECTIVE | {"waiting": 25.0, "certain": True}
    both = {"ends": {0: None, 1: None}, "codes": {0: None, 1: None}, "states": {0: waiting, 1: idle}}
    found = Story(**both).diagnosis(tmp_path / "both", deadlock=True)
    assert "rank 1 stood still for 21 s, rank 0 waited in a collective: " in found.reason
    assert set(found.findings[0].details["stacks"]) == {"0", "1"}


def test_a_script_that_fails_is_not_in_sync_and_says_where(tmp_path):
    secondary = COLLECTIVE | {"error": "RuntimeError: Connection closed", "error_in_collective": True}
    own = {"error": "KeyError: 'x'", "error_at": "train.py:7 main", "error_in_collective": False}
    found = Story(ends={0: secondary, 1: own}, codes={0: 1, 1: 1}).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("UNDETERMINED", ["failure"])
    assert found.reason == "the script failed: rank 1 raised KeyError: 'x' — at train.py:7"


@pytest.mark.parametrize(
    ("certain", "verdict", "kind"), [(True, "NOT IN SYNC", "parted"), (False, "UNDETERMINED", "failure")]
)
def test_ranks_that_attach_found_apart_are_not_one_agent_if_that_is_certain(tmp_path, certain, verdict, kind):
    try:
        raise OutOfStepError("rank 0 came to one place and rank 1 to another", ranks_parted=certain)
    except OutOfStepError as error:
        end = described(error)
    found = Story(ends={0: end, 1: end}, codes={0: 1, 1: 1}).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == (verdict, [kind])
    assert "lockstep.stop_if" in found.findings[0].fix
    alone = Story(ends={0: end, 1: end | {"ranks_parted": None}}, codes={0: 1, 1: 1}).diagnosis(tmp_path / "other")
    assert (alone.verdict, alone.findings[0].fix) == ("UNDETERMINED", "")


def test_learning_rates_that_attach_found_apart_are_the_cause(tmp_path):
    end = described(OutOfStepError("rank 0 steps with learning rate 0.2 and rank 1 with 0.3", ranks_parted="rates"))
    found = Story(ends={0: end, 1: end}, codes={0: 1, 1: 1}).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("NOT IN SYNC", ["parted"])
    assert "adapts its learning rate" in found.findings[0].cause


def test_a_long_error_is_told_whole_and_a_huge_one_says_that_it_goes_on():
    assert described(ValueError("x" * 900))["error"] == "ValueError: " + "x" * 900
    assert described(ValueError("x" * 9000))["error"].endswith("xxx …")


SECONDARY = {"error": "RuntimeError: Connection reset by peer", "error_in_collective": True}
MISMATCHED = {"error": "RuntimeError: Is there a distributed collective mismatch in your code?"}


@pytest.mark.parametrize(
    ("ends", "codes", "said"),
    [
        ({0: None, 1: SECONDARY}, {0: -6, 1: 1}, "rank 0 was killed by SIGABRT, while rank 1 was in a collective"),
        ({0: MISMATCHED, 1: SECONDARY}, {0: 1, 1: 1}, "mismatch in your code?, while rank 1 was in a collective"),
    ],
)
def test_ranks_that_gloo_found_at_different_collectives_are_told_why(tmp_path, ends, codes, said):
    found = Story(ends=ends, codes=codes).diagnosis(tmp_path)
    assert (found.verdict, kinds(found)) == ("UNDETERMINED", ["failure"])
    assert found.reason.endswith(said)
    assert "different collectives" in found.findings[0].cause
    assert "lockstep.stop_if" in found.findings[0].fix


@pytest.mark.parametrize(
    ("ends", "codes"),
    [
        ({0: None, 1: {"error": "KeyError: 'x'", "error_in_collective": False}}, {0: -6, 1: 1}),
        ({0: None, 1: SECONDARY}, {0: -11, 1: 1}),
        ({0: None}, {0: -6, 1: 0}),
    ],
)
def test_a_rank_that_died_in_another_way_is_not_said_to_be_at_another_collective(tmp_path, ends, codes):
    found = Story(ends=ends, codes=codes).diagnosis(tmp_path)
    assert "failure" in kinds(found)
    assert all("different collectives" not in finding.cause for finding in found.findings)


def test_a_rank_that_was_killed_is_named(tmp_path):
    found = Story(ends={1: None}, codes={1: -9}).diagnosis(tmp_path)
    assert found.reason == "the script failed: rank 1 was killed by SIGKILL"


def test_a_signal_without_a_name_is_told_by_its_number(tmp_path):
    found = Story(ends={1: None}, codes={1: -40}).diagnosis(tmp_path)
    assert "rank 1 was killed by signal 40" in found.reason


@pytest.mark.parametrize("how", ["no end", "said so", "a broken line"])
def test_ranks_in_sync_of_which_not_all_was_written_leave_it_open(tmp_path, how):
    story = Story(ends={1: None} if how == "no end" else {}, states={1: {"lost": True}} if how == "said so" else {})
    story.tell(tmp_path)
    if how == "a broken line":
        with (tmp_path / "rank_1" / "events.jsonl").open("a") as file:
            file.write('{"kind": "ch\n')
    found = diagnose(read_traces(tmp_path, range(2)))
    assert (found.verdict, kinds(found)) == ("UNDETERMINED", ["lost"])
    assert "the evidence of rank 1 is incomplete" in found.reason


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        (DRIFT, "NOT IN SYNC"),
        ({"rates": lambda rank: [(0, [1e-3])] + [(3, [5e-4])] * (rank == 0)}, "UNDETERMINED"),  # a change not written
        ({"boundaries": lambda rank: [2 - rank]}, "UNDETERMINED"),
    ],
)
def test_what_was_compared_stands_though_not_all_was_written(tmp_path, changes, verdict):
    found = Story(**changes, ends={1: None}).diagnosis(tmp_path)
    assert found.verdict == verdict
    assert "lost" in kinds(found, "doubt")


def test_ranks_that_said_nothing_are_named(tmp_path):
    Story().tell(tmp_path)
    found = diagnose(read_traces(tmp_path, range(3)))
    assert (found.verdict, kinds(found)) == ("UNDETERMINED", ["unheard"])
    assert "rank 2" in found.reason


def test_no_steps_and_one_rank_leave_it_open(tmp_path):
    none = Story(steps=0, boundaries=lambda rank: []).diagnosis(tmp_path / "none")
    assert (none.verdict, kinds(none)) == ("UNDETERMINED", ["no_steps"])
    one = Story(ranks=1, world=1).diagnosis(tmp_path / "one")
    assert (one.verdict, kinds(one)) == ("UNDETERMINED", ["one_rank"])
    stopped = Story().diagnosis(tmp_path / "stopped", interrupted=True)
    assert (stopped.verdict, kinds(stopped)) == ("UNDETERMINED", ["interrupted"])


def test_models_that_no_optimiser_updates_are_compared(tmp_path):
    found = Story(frozen=by_rank(1.0, 2.0)).diagnosis(tmp_path)
    assert (found.verdict, kinds(found, "fault")) == ("NOT IN SYNC", ["frozen"])
    assert found.findings[0].details["step"] == 1


def test_ones_that_differ_only_later_may_be_opponents(tmp_path):
    found = Story(frozen=lambda rank, step: 1.0 + rank * (step > 2)).diagnosis(tmp_path)
    assert (found.verdict, kinds(found, "doubt")) == ("UNDETERMINED", ["frozen"])
    assert "opponents" in found.findings[0].cause


def test_parameters_that_are_trained_where_no_step_is_seen_are_compared(tmp_path):
    apart = Story(unstepped=lambda rank, step: step + rank * (step > 1)).diagnosis(tmp_path / "apart")
    assert (apart.verdict, kinds(apart)) == ("UNDETERMINED", ["unstepped"])
    assert "differ from optimiser step 2 in 1 of 2 tensors, first net.weight" in apart.reason
    assert "torch.compile" in apart.findings[0].cause
    alike = Story(unstepped=lambda rank, step: step).diagnosis(tmp_path / "alike")
    assert (alike.verdict, kinds(alike)) == ("IN SYNC", ["unstepped"])
    resting = Story(unstepped=lambda rank, step: rank).diagnosis(tmp_path / "resting")
    assert resting.findings == []


def test_without_steps_compiled_code_is_named_as_the_cause(tmp_path):
    story: dict[str, Any] = {"steps": 0, "boundaries": lambda rank: []}
    plain = Story(**story).diagnosis(tmp_path / "plain")
    assert plain.findings[0].cause == CAUSES["no_steps"]
    compiled = Story(**story, states={rank: {"compiled": True} for rank in (0, 1)}).diagnosis(tmp_path / "compiled")
    assert compiled.findings[0].cause == CAUSES["no_steps_compiled"]


def test_uneven_steps_explain_what_differs_after_them(tmp_path):
    uneven: dict[str, Any] = {"boundaries": lambda rank: [2 - rank, 4 - rank], "taken": lambda rank: 4}
    later = Story(**uneven, parameters=lambda rank, step: step + 0.1 * rank * (step > 2)).diagnosis(tmp_path / "later")
    assert kinds(later, "fault") == ["steps"]
    before = Story(**uneven, parameters=lambda rank, step: step + 0.1 * rank).diagnosis(tmp_path / "before")
    assert kinds(before, "fault") == ["steps", "parameters"]


def test_an_optimiser_of_which_each_rank_loads_its_part_is_no_fault(tmp_path):
    """As ZeRO's: some ranks hold more of the state than others. One that has loaded nothing at all has forgotten to."""
    before: dict[str, Any] = {"loaded": lambda rank: 6 + 6 * rank}
    assert Story(**before).diagnosis(tmp_path).verdict == "IN SYNC"
    none = Story(loaded=lambda rank: 6 * rank).diagnosis(tmp_path / "none")
    assert (none.verdict, kinds(none, "fault")) == ("NOT IN SYNC", ["moments"])


def test_an_optimisers_own_rest_of_what_it_sends_is_a_doubt(tmp_path):
    """Error feedback: gradients are reduced within the step, so that parameters stay equal."""
    own: dict[str, Any] = {"gradients": lambda rank, step: step + rank, "moments": lambda rank, step: step + 0.1 * rank}
    found = Story(**own, wrappers=(), through=()).diagnosis(tmp_path)
    assert (found.verdict, kinds(found, "doubt")) == ("UNDETERMINED", ["own_state"])
    moments: dict[str, Any] = {"moments": own["moments"]}
    reduced = Story(**moments).diagnosis(tmp_path / "reduced")
    assert (reduced.verdict, kinds(reduced, "fault")) == ("NOT IN SYNC", ["moments"])
