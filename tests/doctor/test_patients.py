"""Scripts of many styles on two ranks: who is right is never accused, who isn't is told the cause and the mend."""

from pathlib import Path

import pytest
from doctored import doctor
from variants import variants

SCRIPT = Path(__file__).parents[1] / "modules" / "patients.py"
IN_SYNC, NOT_IN_SYNC, UNDETERMINED = ("IN SYNC", 0), ("NOT IN SYNC", 1), ("UNDETERMINED", 2)
CORRECT = (
    *("reduced_by_hand", "reduced_in_one_buffer", "parameter_server", "merged_normalizers_and_a_writer_between"),
    *("evaluated_on_one_rank", "target_network", "old_policy_made_before_the_broadcast", "actor_and_critic_apart"),
    *("attached_as_ddp_left_it", "accumulated", "saved_and_continued", "always_clipped"),
    *("average_on_rank_0", "reduced_by_hand_and_averaged_on_rank_0", "updated_by_parts"),
    *("updated_by_parts_in_groups", "parts_of_one_rollout", "parts_of_one_rollout_of_few_states"),
    "taught_and_judged_on_rank_0",
)
FAULTY = {  # kinds of all faults, words of the reason, the cause and the fix of the first
    "critic_outside_ddp": (
        ["gradients"],
        ("4 of 8 tensors, first critic_outside_ddp.critic.0.weight", "never given to DDP", "[actor, critic]"),
    ),
    "loop_that_skips_a_tensor": (
        ["gradients"],
        ("1 of 6 tensors, first critic.bias", "leaves these tensors out", "every parameter of the optimiser"),
    ),
    "frozen_on_one_rank": (["gradients"], ("on some ranks only", "requires_grad differs", "alike on every rank")),
    "optimizer_loaded_on_one_rank": (
        ["moments"],
        ("18 (rank 0), none (rank 1)", "loaded on some ranks only", "on every rank from the same file"),
    ),
    "weight_decay_of_its_own": (
        ["settings"],
        ("weight_decay differs between ranks: 0.0 (rank 0), 0.01 (rank 1)", "built from values", "same configuration"),
    ),
    "betas_of_its_own": (["settings"], ("betas differs", "built from values", "same configuration")),
    "target_copied_too_early": (
        ["frozen"],
        ("first target_copied_too_early.target.0.weight", "copied before", "copy it from the trained model after"),
    ),
    "frozen_critic_of_another_seed": (
        ["frozen"],
        ("4 of 4 tensors, first frozen_critic_of_another_seed.critic", "initialised by each", "broadcast it"),
    ),
    "reference_of_its_own": (
        ["frozen"],
        ("first reference_of_its_own.trainer.reference.0.weight", "a reference", "broadcast it from rank 0"),
    ),
    "average_of_its_own": (["frozen"], ("averages['ema'].0.weight", "an average", "broadcast it from rank 0")),
    "server_that_sends_nothing": (
        ["server"],
        ("rank 0 takes all optimiser steps, and rank 1 differs", "doesn't send all parameters", "after each step"),
    ),
    "parts_that_stay_where_they_are": (
        ["gathered"],
        ("ranks 0 and 1 differ from optimiser step 2 in 6 of 6 tensors", "not all parts come to", "gather the parts"),
    ),
    "groups_of_parts_of_which_one_stays_where_it_is": (
        ["gathered"],
        ("optimiser step 2 of optimiser 1 in 3 of 6 tensors", "not all parts come to", "gather the parts"),
    ),
    "local_stop": (["steps"], ("4 (rank 0), 3 (rank 1) in rollout phase 1", "ends its epochs", "decide together")),
    "extractor_of_a_library_bypassed": (
        ["gradients"],
        ("never reduced", "methods of the wrapped module", "lockstep.attach(agent.module, optimizer)"),
    ),
    "noise_of_its_own": (
        ["gradients"],
        ("differ in spite of DDP", "each rank then changes its own", "clip after backward()"),
    ),
    "no_process_group": (["independent"], ("an agent of its own", "never joins", "init_process_group")),
    "another_start": (["start"], ("before the first step", "another seed", "broadcast from rank 0")),
    "one_of_two_normalizers_is_local": (
        ["normalizers"],
        ("1 of 6 tensors, first RunningMeanStd (one_of_two_normalizers_is_local.ret_rms).mean", "its own", "merge"),
    ),
    "batch_norm": (["buffers"], ("first 1.running_mean", "never combined", "SyncBatchNorm")),
    "batch_norm_and_an_average_on_rank_0": (
        ["buffers"],
        ("first 1.running_mean", "never combined", "SyncBatchNorm"),
    ),
    "reduced_copies": (
        ["gradients"],
        ("gradients are never reduced", "isn't written to p.grad", "reduce p.grad itself"),
    ),
    "reduced_every_second_step": (
        ["gradients"],
        ("not reduced at every step: ranks 0 and 1 differ from optimiser step 2", "before some steps", "every step"),
    ),
}
KEPT = ("always_clipped", "critic_outside_ddp")


def examined(name, tmp_path, ranks=2):
    return doctor("--nproc", ranks, "--", SCRIPT, name, cwd=tmp_path)


@pytest.mark.parametrize("name", variants(CORRECT, KEPT[:1]))
def test_who_is_right_is_not_accused(name, tmp_path):
    found = examined(name, tmp_path)
    assert (found.json["verdict"], found.json["status"]) == IN_SYNC, found.json
    assert not [finding for finding in found.json["findings"] if finding["level"] != "note"]
    assert "summed" not in [finding["kind"] for finding in found.json["findings"]]
    if name in ("reduced_by_hand", "always_clipped"):
        assert ("averaged or only summed" in " ".join(found.ended.stdout.split())) == (name == "always_clipped")


def test_gradients_that_are_summed_are_a_note(tmp_path):
    found = examined("summed", tmp_path)
    assert (found.json["verdict"], found.json["status"]) == IN_SYNC
    (note,) = found.json["findings"]
    assert (note["kind"], note["level"], note["details"]["optimizer"]) == ("summed", "note", 0)
    assert "the sum over ranks, 2 times their mean" in note["text"]
    assert "divide by the number of ranks" in note["fix"]
    assert "averaged or only summed" not in " ".join(found.ended.stdout.split())


def test_a_gradient_that_one_rank_sends_is_not_called_reduced(tmp_path):
    found = examined("sent_by_one_rank", tmp_path)
    assert found.json["verdict"] == "UNDETERMINED"
    (doubt,) = [finding for finding in found.json["findings"] if finding["level"] == "doubt"]
    assert (doubt["kind"], doubt["details"]["optimizer"], doubt["details"]["rank"]) == ("alone", 0, 1)
    assert "gradients are those of rank 1 alone, on every rank" in doubt["text"]
    assert "all_reduce" in doubt["fix"]


@pytest.mark.long
def test_whether_hooks_within_backward_sum_or_average_was_not_seen(tmp_path):
    found = examined("summed_in_hooks", tmp_path)
    assert (found.json["verdict"], found.json["status"]) == IN_SYNC
    assert "averaged or only summed" in " ".join(found.ended.stdout.split())


@pytest.mark.parametrize("name", variants(FAULTY, KEPT[1:]))
def test_who_is_not_is_told_what_and_why_and_how_to_mend_it(name, tmp_path):
    kinds, (reason, cause, fix) = FAULTY[name]
    found = examined(name, tmp_path)
    assert (found.json["verdict"], found.json["status"]) == NOT_IN_SYNC
    faults = [finding for finding in found.json["findings"] if finding["level"] == "fault"]
    assert [finding["kind"] for finding in faults] == kinds
    assert reason in found.json["reason"]
    assert cause in faults[0]["cause"]
    assert fix in faults[0]["fix"]


@pytest.mark.long
def test_the_rank_that_failed_first_is_named(tmp_path):
    found = examined("second_rank_fails", tmp_path)
    assert (found.json["verdict"], found.json["status"]) == UNDETERMINED
    assert found.json["reason"].startswith("the script failed: rank 1 raised ValueError: the motor is gone")


@pytest.mark.long
def test_an_actor_that_was_sent_parameters_took_no_other_steps_than_the_learners(tmp_path):
    found = examined("learners_and_an_actor", tmp_path, ranks=3)
    assert (found.json["verdict"], found.kinds) == ("UNDETERMINED", ["server"])
    assert "ranks 0 and 1 take all optimiser steps, and whether rank 2 has their parameters" in found.json["reason"]


@pytest.mark.long
def test_what_one_rank_alone_draws_makes_equal_data_no_other_ones(tmp_path):
    found = examined("same_seed_and_a_graph_on_rank_0", tmp_path)
    assert (found.json["verdict"], found.kinds) == ("UNDETERMINED", ["identical_data"])


def test_the_same_rollouts_in_another_order_are_the_same_data(tmp_path):
    found = examined("same_rollouts_in_another_order", tmp_path)
    assert (found.json["verdict"], found.kinds) == ("UNDETERMINED", ["identical_data"])
    assert "only in another order" in found.json["reason"]


@pytest.mark.long
def test_statistics_that_could_not_be_known_are_counted_as_unseen(tmp_path):
    found = examined("statistics_by_other_names", tmp_path)
    (note,) = found.json["findings"]
    assert (note["kind"], note["level"]) == ("unseen_statistics", "note")
    assert "objects of Whitening may keep running statistics" in note["text"]


def test_there_are_enough_of_them():
    assert len(CORRECT) >= 10
    assert len(FAULTY) + 6 >= 20  # with those of examples/doctor
