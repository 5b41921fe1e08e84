"""What is wanted, and what counts as reached."""

import pytest

from benchmarks.cases import A1, A1_BOTH, ARRAY_CARTPOLE, CASES, J1, ONE_THREAD, T1, T2
from benchmarks.comparison import Row
from benchmarks.programs import COPIES, WEAK, programs_of, scaling_programs
from benchmarks.targets import PEERS, RANKS, REDUCTIONS, TARGETS, judge, twin, verdict_on


def verdicts(rows, case, over=None) -> dict[str, tuple[float | None, str]]:
    """Reached and verdict by target: what is compared, and the multiple."""
    found = [one for one in judge(rows, [case]) if over is None or one.over.startswith(over)]
    return {f"{one.what} {one.factor:g}": (one.reached and round(one.reached, 3), one.verdict) for one in found}


def test_every_case_has_a_target():
    assert {target.case for target in TARGETS} == {case.name for case in CASES}


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"{t.case}-{t.env}-{t.reduction}-{t.over}")
def test_every_target_means_a_row_and_a_peer(target):
    case = next(case for case in CASES if case.name == target.case)
    rows = [Row.of(program) for program in programs_of(case)]
    for row in rows:
        row.rates = [100.0]
    found = [
        one for one in judge(rows, [case.name]) if one.over.startswith(target.over) and one.factor == target.factor
    ]
    assert [one.reached for one in found] == [1.0] * len(found)
    assert found


def test_targets_are_judged_against_the_best_peer_of_the_run(row):
    rows = [row(10.0), row(20.0, label="faster"), row(61.0, ours=True)]
    (torch, _), found = [one for one in judge(rows, ["T1"]) if one.what.startswith("CartPole")], judge(rows, ["T1"])
    assert (torch.over, torch.reached, torch.verdict) == ("the best PyTorch peer with objects, faster", 3.05, "met")
    assert [one.verdict for one in found if one.what.startswith(ARRAY_CARTPOLE)] == ["unknown", "unknown"]
    assert verdicts([row(20.0), row(59.0, ours=True)], "T1")["CartPole-v1, exact 3"] == (2.95, "missed")


def test_a_faster_peer_in_jax_counts_among_all(row):
    rows = [row(10.0), row(15.0, framework="jax"), row(35.0, ours=True)]
    assert verdicts(rows, "T1", "the best PyTorch")["CartPole-v1, exact 3"] == (3.5, "met")
    assert verdicts(rows, "T1", "the best of all")["CartPole-v1, exact 2.7"] == (2.333, "missed")


def test_arrays_are_held_to_all_peers_and_objects_to_those_that_step_objects(row):
    rows = [row(10.0, label="objects"), row(14.0, label="arrays", batched=True)]
    mine = [row(50.0, ours=True, env=ARRAY_CARTPOLE), row(31.0, ours=True)]
    found = {one.what: one for one in judge([*rows, *mine], ["T1"]) if one.factor in (3.7, 3.0)}
    array, objects = found[f"{ARRAY_CARTPOLE}, exact"], found["CartPole-v1, exact"]
    assert (array.over, array.verdict) == ("the best PyTorch peer, arrays", "missed")
    assert (objects.over, objects.verdict) == ("the best PyTorch peer with objects, objects", "met")


def test_elsewhere_peers_that_step_all_environments_at_once_count(row):
    rows = [row(100.0, case="A1"), row(110.0, case="A1", batched=True, label="pool"), row(120.0, case="A1", ours=True)]
    assert verdicts(rows, A1.name, "the best") == {
        "CartPole-v1, exact 1.1": (1.091, "missed"),
        "ours, fast 1.25": (None, "unknown"),
    }


def test_a_peer_without_a_figure_may_be_the_best_so_nothing_is_known_to_be_met(row):
    good, mine = row(10.0, label="good"), row(35.0, ours=True)
    for broken in (row(9.0, label="broken", failures=["killed"]), row(label="broken")):
        (torch, every) = [one for one in judge([good, broken, mine], ["T1"]) if one.what.startswith("CartPole")]
        assert (torch.verdict, torch.reached) == ("unknown", 3.5)
        assert torch.over == "the best PyTorch peer with objects, good (no figure of broken)"
        assert every.verdict == "unknown"
        slow = [one.verdict for one in judge([good, broken, row(20.0, ours=True)], ["T1"])]
        assert slow == ["unknown", "unknown", "missed", "missed"]  # a better peer wouldn't change that
    of_jax = row(label="broken", framework="jax", failures=["no jax"])
    assert verdicts([good, of_jax, mine], "T1", "the best PyTorch")["CartPole-v1, exact 3"] == (3.5, "met")
    assert verdicts([good, of_jax, mine], "T1", "the best of all")["CartPole-v1, exact 2.7"] == (3.5, "unknown")
    of_arrays = row(label="broken", batched=True, failures=["no envpool"])
    assert verdicts([good, of_arrays, mine], "T1", "the best PyTorch")["CartPole-v1, exact 3"] == (3.5, "met")


def test_what_is_unknown_is_not_met(row):
    broken = row(failures=["exit status 1"])
    assert verdicts([broken, row(35.0, ours=True)], "T1")["CartPole-v1, exact 3"] == (None, "unknown")
    mine = row(99.0, ours=True, failures=["killed"])
    assert set(verdicts([row(10.0), mine], "T1").values()) == {(None, "unknown")}


def test_with_jax_rejax_is_the_measure_and_pure_jax_rl_is_not(row):
    jax = {"case": "J1", "framework": "jax"}
    mine = row(301.0, ours=True, env=ARRAY_CARTPOLE, devices=2, **jax)
    rows = [row(100.0, label="rejax", **jax), row(250.0, label="PureJaxRL", **jax), mine]
    rows.append(row(900.0, ours=True, env=ARRAY_CARTPOLE, devices=1, label="Lockstep, exact, 1 device", **jax))
    assert verdicts(rows, J1.name) == {"lockstep/CartPole-v1, exact 3": (3.01, "met")}


def test_on_both_cores_the_peers_with_one_thread_count(row):
    rows = [row(90.0, case=A1_BOTH.name), row(150.0, case=A1_BOTH.name, ours=True)]
    assert verdicts(rows, A1_BOTH.name) == {"CartPole-v1, exact 1.4": (1.667, "met")}
    one = row(110.0, case=A1.name, label="one thread")
    (found,) = judge([*rows, one], [A1_BOTH.name])
    assert (found.over, found.verdict) == ("the best PyTorch peer, one thread (A1)", "missed")
    one.failures, rows[0].rates = ["killed"], [100.0]
    (found,) = judge([*rows, one], [A1_BOTH.name])
    assert found.over == "the best PyTorch peer, peer torch (no figure of one thread (A1))"
    assert found.verdict == "unknown"


def test_every_case_on_both_cores_is_one_of_one_thread_otherwise():
    known = {case.name: case for case in CASES}
    same = ("env", "num_envs", "num_steps", "num_epochs", "num_minibatches", "normalize", "images", "lstm")
    assert set(ONE_THREAD) == {case.name for case in CASES if case.cores > 1 and case.engine == "torch"}
    for both, one in ONE_THREAD.items():
        assert known[one].cores == 1
        assert all(getattr(known[both], name) == getattr(known[one], name) for name in same)


def test_on_both_cores_our_fastest_way_counts(row):
    rows = [row(100.0, case=A1_BOTH.name), row(180.0, case=A1_BOTH.name, ours=True, label="Lockstep, exact, 2 ranks")]
    slower = row(90.0, case=A1_BOTH.name, ours=True, label="Lockstep, exact, 2 workers")
    assert verdicts([*rows, slower], A1_BOTH.name) == {"CartPole-v1, exact, 2 ranks 1.4": (1.8, "met")}


def test_fast_has_a_target_of_its_own_with_images(row):
    rows = [row(100.0, case="A1"), row(115.0, case="A1", ours=True)]
    rows.append(row(120.0, case="A1", ours=True, reduction="fast", label="Lockstep, fast"))
    found = verdicts(rows, A1.name, "the best")
    assert found == {"CartPole-v1, exact 1.1": (1.15, "met"), "CartPole-v1, fast 1.25": (1.2, "missed")}


def pair(row, exact: list[float], fast: list[float]) -> list[str]:
    rows = [row(*exact, ours=True), row(*fast, ours=True, reduction="fast", label="Lockstep, fast")]
    return [one.verdict for one in judge(rows, [])]


def test_fast_is_held_to_exact_and_exact_to_fast(row):
    assert pair(row, [100.0], [101.0]) == ["met", "met"]
    assert pair(row, [100.0], [98.0]) == ["missed", "met"]
    assert pair(row, [89.0], [100.0]) == ["met", "missed"]


def test_noise_is_told_on_both_sides_and_only_near_the_target():
    assert verdict_on([0.98, 1.01, 1.02], 1.0) == "met within noise"
    assert verdict_on([0.97, 0.98, 1.02], 1.0) == "missed within noise"
    assert verdict_on([1.0, 1.01, 1.02], 1.0) == "met"
    assert verdict_on([0.97, 0.98, 0.99], 1.0) == "missed"
    assert verdict_on([0.5, 1.06, 1.07], 1.0) == "met"
    assert verdict_on([0.9, 0.94, 1.5], 1.0) == "missed"
    assert verdict_on([2.9, 3.1, 3.2], 3.0) == "met within noise"
    assert verdict_on([], 1.0) == "unknown"


def test_noise_is_of_repetitions_that_stood_together(row):
    assert pair(row, [96.0, 100.0, 101.0], [95.0, 98.0, 102.0]) == ["missed within noise", "met"]
    assert pair(row, [50.0, 100.0, 101.0], [49.0, 98.0, 99.0]) == ["missed", "met"]  # though the ranges overlap
    assert pair(row, [100.0, 100.0, 100.0], [110.0, 111.0, 112.0]) == ["met", "met within noise"]


def test_scaling_is_relative_to_the_same_program_on_one_rank(row):
    single, other = row(10.0, ours=True, env=ARRAY_CARTPOLE), row(100.0, ours=True)
    weak = row(19.0, ours=True, env=ARRAY_CARTPOLE, scaling=WEAK)
    copies = row(30.0, ours=True, env=ARRAY_CARTPOLE, scaling=COPIES)
    (found,) = judge([single, other, weak, copies], [])
    assert (found.over, found.factor, found.reached, found.verdict) == ("one rank", 1.9, 1.9, "met")
    assert found.beside == "0.63 × two independent runs"
    assert judge([single, weak], [])[0].beside == ""
    weak.rates = [18.0]
    assert judge([single, other, weak, copies], [])[0].verdict == "missed"
    assert judge([other, weak], [])[0].verdict == "unknown"


def test_scaling_is_judged_repetition_by_repetition(row):
    single, weak = (row(*rates, ours=True, scaling=what) for rates, what in (([10, 5, 20], None), ([19, 10, 36], WEAK)))
    (found,) = judge([single, weak], [])
    assert (found.reached, found.verdict) == (1.9, "met within noise")  # 1.8 in the last


def test_targets_are_of_three_groups(row):
    rows = [row(10.0), row(30.0, ours=True), row(31.0, ours=True, reduction="fast", label="Lockstep, fast")]
    rows.append(row(57.0, ours=True, scaling=WEAK))
    assert [one.group for one in judge(rows, ["T1"])] == [PEERS] * 4 + [RANKS] + [REDUCTIONS] * 2


def test_every_row_with_a_twin_is_held_to_it():
    rows = [Row.of(p) for case in CASES for p in programs_of(case)] + [Row.of(p) for p in scaling_programs(T2)]
    pairs = [(exact, twin(rows, exact)) for exact in rows if exact.reduction == "exact"]
    fasts = [row for row in rows if row.reduction == "fast"]
    assert [fast for _, fast in pairs if fast is not None] == fasts
    assert T1.name in {fast.case for fast in fasts}
