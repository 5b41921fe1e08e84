"""More scripts on two ranks: what one rank does alone or by turns, whose parameters an optimiser holds, which data."""

from pathlib import Path

import pytest
from doctored import doctor
from variants import variants

SCRIPT = Path(__file__).parents[1] / "modules" / "later_patients.py"
CORRECT = (
    *("evaluated_by_turns_between_rollouts", "zero_by_hand", "pretrained_on_rank_0", "pretrained_on_rank_0_and_frozen"),
    *("probed", "stepped_by_signs", "tuned_on_rank_0_and_sent"),
    *("zero_redundancy", "value_normalizer", "replicated_by_dtensor", "averaged_twice"),
)
FAULTY = {  # the kind and words of the first fault
    "evaluated_by_turns_and_unreduced": ("gradients", "differ from optimiser step 7 in 6 of 6 tensors"),
    "zero_by_hand_that_sends_nothing": ("gathered", "ranks 0 and 1 differ from optimiser step 2 in 6 of 6 tensors"),
    "tuned_on_rank_0": ("steps", "of optimiser 2: 5 (rank 0), 0 (rank 1) in all"),
    "pretrained_on_rank_0_and_not_sent": ("start", "before optimiser step 1 in 2 of 6 tensors, first 0.weight"),
    "value_normalizer_of_its_own": ("buffers", "first value_normalizer.normalizer.running_mean"),
    "critic_outside_fsdp": ("gradients", "some gradients are never reduced: "),
    "pretrained_on_rank_0_and_frozen_and_not_sent": ("steps", "of optimiser 2: 5 (rank 0), 0 (rank 1) in all"),
}
UNSEEN = ("phases", "and whether they train on what they were given wasn't seen")
STEPPED_ALONE = ("alone", "each parameter is stepped with the gradient of one rank alone, and then sent")
OPEN = {
    "evaluated_by_turns": UNSEEN,
    "epochs_of_its_own": ("phases", "times in all, and train on what they were given"),
    "epochs_of_its_own_on_normalized_states": UNSEEN,
    "epochs_of_its_own_on_whole_numbers": UNSEEN,
    "zero_by_hand_that_reduces_nothing": ("alone", "each rank's part of the gradients is of its own data alone"),
    "zero_redundancy_past_ddp": STEPPED_ALONE,
    "zero_redundancy_of_plain_steps_past_ddp": STEPPED_ALONE,
    "probed_with_one_seed": ("identical_data", "the data are identical on every rank"),
    "stepped_by_signs_with_one_seed": ("identical_data", "the data are identical on every rank"),
}


def examined(name, tmp_path):
    return doctor("--", SCRIPT, name, cwd=tmp_path)


@pytest.mark.parametrize("name", variants(CORRECT, ("zero_by_hand",)))
def test_who_is_right_is_in_sync(name, tmp_path):
    found = examined(name, tmp_path)
    assert found.json["verdict"] == "IN SYNC", found.json
    assert not [finding for finding in found.json["findings"] if finding["level"] != "note"]


def told(found, verdict, kind, words):
    assert found.json["verdict"] == verdict, found.json
    assert found.kinds[0] == kind
    assert words in found.json["reason"]


@pytest.mark.parametrize("name", variants(FAULTY, ("zero_by_hand_that_sends_nothing", "value_normalizer_of_its_own")))
def test_who_is_not_is_told_what(name, tmp_path):
    told(examined(name, tmp_path), "NOT IN SYNC", *FAULTY[name])


@pytest.mark.parametrize("name", variants(OPEN, ("probed_with_one_seed", "zero_redundancy_past_ddp")))
def test_what_can_not_be_told_is_left_open(name, tmp_path):
    told(examined(name, tmp_path), "UNDETERMINED", *OPEN[name])


def test_who_averages_twice_is_told_so(tmp_path):
    found = examined("averaged_twice", tmp_path)
    assert (found.json["verdict"], found.kinds) == ("IN SYNC", ["averaged_twice"])


def test_what_is_outside_of_fsdp_has_a_cause_that_knows_of_fsdp(tmp_path):
    found = examined("critic_outside_fsdp", tmp_path)
    assert "in no module that was given to FSDP" in found.causes
    assert [f["kind"] for f in found.json["findings"] if f["level"] == "fault"] == ["gradients"]
