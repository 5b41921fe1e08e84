"""More scripts on two ranks: what one rank does alone or by turns, whose parameters an optimiser holds, which data."""

from pathlib import Path

import pytest
from doctored import doctor
from variants import variants

SCRIPT = Path(__file__).parents[1] / "modules" / "later_patients.py"
CORRECT = ("evaluated_by_turns",)
FAULTY = {  # the kind and words of the first fault
    "evaluated_by_turns_and_unreduced": ("gradients", "differ from optimiser step 7 in 6 of 6 tensors"),
}


def examined(name, tmp_path):
    return doctor("--", SCRIPT, name, cwd=tmp_path)


@pytest.mark.parametrize("name", variants(CORRECT, ("evaluated_by_turns",)))
def test_who_is_right_is_in_sync(name, tmp_path):
    found = examined(name, tmp_path)
    assert found.json["verdict"] == "IN SYNC", found.json
    assert not [finding for finding in found.json["findings"] if finding["level"] != "note"]


@pytest.mark.parametrize("name", variants(FAULTY, ("evaluated_by_turns_and_unreduced",)))
def test_who_is_not_is_told_what(name, tmp_path):
    found = examined(name, tmp_path)
    assert found.json["verdict"] == "NOT IN SYNC", found.json
    kind, words = FAULTY[name]
    assert found.kinds[0] == kind
    assert words in found.json["reason"]
