"""Which rank's normaliser is compared with which of another."""

import numpy as np

from lockstep.doctor.judge.normalizers import match_normalizers
from lockstep.doctor.judge.traces import Kept


def part(**normalizers):
    """Statistics by name; a number for each normaliser's mean, and a count of 3."""
    kept = {}
    for name, mean in normalizers.items():
        for statistic, value in (("count", 3.0), ("mean", mean)):
            kept[f"{name}.{statistic}"] = Kept(np.array([value]), 1, 0, "")
    return kept


def matched(*parts, unplaced=()):
    ranks = dict(enumerate(parts))
    found, unknown = match_normalizers(ranks, {rank: set(unplaced) for rank in ranks})
    shared = set.intersection(*(set(each) for each in found.values()))
    return sorted({name.rpartition(".")[0] for name in shared}), unknown


def test_one_of_its_kind_is_matched_wherever_it_is_held():
    one, other = part(**{"Rms (main.a)": 1.0}), part(**{"Rms (main.b.c)": 2.0})
    assert matched(one, other) == (["Rms"], [])
    assert matched(part(Rms=1.0), part(Rms=2.0), unplaced=["Rms"]) == (["Rms"], [])


def test_two_of_a_kind_are_matched_by_their_places():
    one = part(**{"Rms (main.a)": 1.0, "Rms (main.b)": 2.0})
    other = part(**{"Rms (main.b)": 2.0, "Rms (main.a)": 5.0})
    assert matched(one, other) == (["Rms (main.a)", "Rms (main.b)"], [])


def test_without_places_the_same_numbers_in_any_order_are_no_difference():
    names = {"Rms", "Rms#2"}
    one, other = part(**{"Rms": 1.0, "Rms#2": 2.0}), part(**{"Rms": 2.0, "Rms#2": 1.0})
    assert matched(one, other, unplaced=names) == ([], [])


def test_without_places_other_numbers_cannot_be_told():
    names = {"Rms", "Rms#2"}
    one, other = part(**{"Rms": 1.0, "Rms#2": 2.0}), part(**{"Rms": 2.0, "Rms#2": 3.0})
    assert matched(one, other, unplaced=names) == ([], ["Rms"])


def test_what_one_rank_alone_has_is_its_own():
    one = part(**{"Rms (main.a)": 1.0, "Rms (main.evaluation)": 9.0})
    assert matched(one, part(**{"Rms (main.a)": 1.0})) == (["Rms (main.a)"], [])
