"""Which rank's normaliser is compared with which of another, and what it means if they differ."""

import numpy as np
import pytest

from lockstep.doctor.judge.drifts import normalizer_findings
from lockstep.doctor.judge.evidence import gather_evidence
from lockstep.doctor.judge.normalizers import match_normalizers
from lockstep.doctor.judge.traces import Check, Kept, Moment, RankTrace


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


# --- what a difference means --------------------------------------------------------------------------------------


def found(*ranks):
    """Kinds and levels of what is found in ``ranks[rank][step]``, each a dict of means by normaliser."""
    traces = []
    for rank, steps in enumerate(ranks):
        checks = {Moment(0, n, "after"): Check({"normalizers": part(**means)}, {}) for n, means in enumerate(steps, 1)}
        traces.append(RankTrace(rank, checks=checks))
    return [(finding.kind, finding.level) for finding in normalizer_findings(gather_evidence(traces))]


def of_two(container, first, second, base="NormEnv.rms", attribute=".rms"):
    return {f"{base} ({container}[{n}]{attribute})": mean for n, mean in enumerate((first, second))}


@pytest.mark.parametrize(
    "how",
    [
        {"container": "envs.envs"},
        {"container": "main.env_list", "attribute": ".wrapped.rms"},
        {"container": "held", "base": "NormalizeReward.return_rms"},
    ],
)
def test_statistics_of_each_environment_are_a_doubt(how):
    assert found([of_two(first=1.0, second=2.0, **how)], [of_two(first=3.0, second=4.0, **how)]) == [
        ("environment_normalizers", "doubt")
    ]


@pytest.mark.parametrize(
    "how", [{"container": "agents"}, {"container": "normalizers", "attribute": ""}, {"container": "critics"}]
)
def test_statistics_of_other_things_in_a_list_are_a_fault(how):
    assert found([of_two(first=1.0, second=2.0, **how)], [of_two(first=3.0, second=4.0, **how)]) == [
        ("normalizers", "fault")
    ]


def test_statistics_that_environments_of_a_rank_share_are_a_fault_between_ranks():
    assert found([of_two("envs.envs", 1.0, 1.0)], [of_two("envs.envs", 2.0, 2.0)]) == [("normalizers", "fault")]
    assert found([{"NormEnv.rms (envs.envs[0].rms)": 1.0}], [{"NormEnv.rms (envs.envs[0].rms)": 2.0}]) == [
        ("normalizers", "fault")
    ]


def beside(evaluations, merged=(1.0, 2.0, 3.0), base="Rms"):
    return [{"Rms (envs.rms)": m, f"{base} (evaluation.rms)": e} for m, e in zip(merged, evaluations, strict=True)]


def test_what_one_rank_alone_uses_beside_merged_statistics_is_a_doubt():
    for base in ("Rms", "Other"):
        ranks = beside((0.0, 1.0, 1.0), base=base), beside((0.0, 0.0, 0.0), base=base), beside((0.0,) * 3, base=base)
        assert found(*ranks) == [("lone_normalizer", "doubt")]


def test_what_one_rank_alone_updates_is_a_fault_if_nothing_is_merged():
    assert found([{"Rms": 1.0}, {"Rms": 2.0}], [{"Rms": 1.0}, {"Rms": 1.0}]) == [("normalizers", "fault")]


def test_what_several_ranks_update_is_a_fault_beside_merged_statistics():
    assert found(beside((1.0, 2.0, 3.0)), beside((0.0, 1.0, 2.0))) == [("normalizers", "fault")]


def test_what_no_rank_updates_while_none_is_merged_is_a_fault():
    still = (1.0, 1.0, 1.0)
    assert found(beside((1.0, 1.0, 1.0), still), beside((2.0, 2.0, 2.0), still)) == [("normalizers", "fault")]


def test_what_one_rank_alone_updates_by_itself_is_a_fault_beside_merged_statistics():
    own = beside((0.0, 1.5, 2.5))
    assert found(own, beside((0.0, 0.0, 0.0))) == [("normalizers", "fault")]
    assert found(own, *[beside((0.0, 0.0, 0.0))] * 2) == [("normalizers", "fault")]


def test_what_one_rank_alone_updates_is_no_copy_because_both_began_alike():
    merged = (0.0, 1.0, 2.0)
    assert found(beside((0.5, 1.5, 2.5), merged), beside((0.0,) * 3, merged)) == [("normalizers", "fault")]
    assert found(beside((0.0, 1.5, 2.5), merged), beside((0.0,) * 3, merged)) == [("normalizers", "fault")]


def test_what_is_merged_later_is_no_source_of_what_one_rank_alone_holds():
    assert found(beside((2.0, 3.0, 3.0), (0.5, 1.0, 2.0)), beside((0.0,) * 3, (0.5, 1.0, 2.0))) == [
        ("normalizers", "fault")
    ]


def test_one_copy_that_stays_is_a_doubt():
    assert found(beside((1.0, 1.0, 1.0)), beside((0.0, 0.0, 0.0))) == [("lone_normalizer", "doubt")]
