from benchmarks.cases import ARRAY_CARTPOLE, COPIES, J1, T1, WEAK, operations_per_step
from benchmarks.profile_split import PARTS
from benchmarks.report import Results, markdown


def results(*rows) -> Results:
    return Results({"date": "today"}, [T1], rows=list(rows))


def test_targets_are_judged_against_the_best_peer_of_the_run(row):
    text = markdown(results(row(10.0), row(20.0, label="faster peer"), row(61.0, ours=True, env=ARRAY_CARTPOLE)))
    assert "Target ≥ 3 × the best PyTorch peer (faster peer, 20): lockstep/CartPole-v1 exact 3.05 × **met**." in text


def test_a_missed_target_says_so(row):
    text = markdown(results(row(20.0), row(50.0, ours=True)))
    assert "2.50 × **missed**" in text
    assert "**met**" not in text


def test_a_faster_peer_in_jax_is_judged_too(row):
    text = markdown(results(row(10.0), row(15.0, framework="jax"), row(35.0, ours=True)))
    assert "best PyTorch peer (peer torch, 10): CartPole-v1 exact 3.50 × **met**" in text
    assert "best of all peers (peer jax, 15): CartPole-v1 exact 2.33 × **missed**" in text


def test_a_failed_peer_is_a_row_that_says_why(row):
    text = markdown(results(row(failures=["exit status 1: no module"], label="broken"), row(35.0, ours=True)))
    assert "| broken | CartPole-v1 | failed: exit status 1: no module |" in text
    assert "unknown, no PyTorch peer could be measured" in text


def test_quoted_figures_are_marked_and_no_base_of_a_ratio(row):
    text = markdown(results(row(10.0), row(35.0, ours=True)))
    assert "| CleanRL (quoted, not run here) | CartPole-v1 | 17,000 |" in text
    assert "3.50 × **met**" in text  # of the 10 that was measured, not of the 17,000 that was quoted


def test_fast_is_held_to_exact(row):
    exact, slower = row(50.0, ours=True), row(45.0, ours=True, reduction="fast")
    faster = row(55.0, ours=True, reduction="fast")
    assert "as `exact`: CartPole-v1 0.90 × **missed**." in markdown(results(row(10.0), exact, slower))
    assert "as `exact`: CartPole-v1 1.10 × **met**." in markdown(results(row(10.0), exact, faster))


def test_scaling_is_relative_to_the_same_program_on_one_rank(row):
    single, other = row(10.0, ours=True, env=ARRAY_CARTPOLE), row(100.0, ours=True)
    weak = row(19.0, ours=True, env=ARRAY_CARTPOLE, scaling=WEAK)
    copies = row(19.5, ours=True, env=ARRAY_CARTPOLE, scaling=COPIES)
    text = markdown(results(row(1.0), single, other, weak, copies))
    assert "| 1.90 × | ≥ 1.8 × met |" in text
    assert "| 1.95 × |  |" in text
    slower = row(17.0, ours=True, env=ARRAY_CARTPOLE, scaling=WEAK)
    assert "| 1.70 × | ≥ 1.8 × missed |" in markdown(results(row(1.0), single, slower))


def test_split_shows_shares_and_ceiling_or_why_not(row):
    found = results(row(10.0), row(35.0, ours=True))
    found.splits["T1", "CartPole-v1", "exact"] = dict.fromkeys(PARTS, 0.002)
    found.splits["T1", "CartPole-v1", "fast"] = "lockstep has no such function"
    found.ceilings["T1", "CartPole-v1"] = {"lockstep": 123_456.0, "gymnasium": 178_000.0}
    text = markdown(found)
    assert f"| 123,456 (178,000) | {2.0 * len(PARTS):.2f} | 2.00 ({100 / len(PARTS):.0f} %) |" in text
    assert "failed: lockstep has no such function" in text


def test_json_holds_every_repetition(row):
    out = results(row(10.0, 12.0), row(35.0, ours=True)).as_json()
    assert out["rows"][0]["rates"] == [10.0, 12.0]
    assert out["rows"][0]["median"] == 11.0


def jax_results(row, exact: float) -> Results:
    ours = [row(rate, ours=True, framework="jax", env=ARRAY_CARTPOLE) for rate in (exact, exact / 2)]
    rows = [row(100.0, framework="jax", label="rejax"), *ours]
    for one, devices in zip(rows, (None, 2, 1), strict=True):
        one.case, one.devices = "J1", devices
    return Results({"date": "today"}, [J1], rows=rows)


def test_with_jax_the_best_of_all_peers_is_the_measure_of_the_row_with_most_devices(row):
    text = markdown(jax_results(row, 171.0))
    assert "Target ≥ 1.7 × the best of all peers (rejax, 100): 2 devices exact 1.71 × **met**." in text
    assert "2 devices exact 1.69 × **missed**." in markdown(jax_results(row, 169.0))
    assert "best PyTorch peer (" not in text


def test_the_share_of_the_arithmetic_is_of_as_many_cores_as_devices(row):
    found = jax_results(row, 170.0)
    assert "ceiling" not in markdown(found).split("## Where")[0]
    found.product_rate = 850.0 * operations_per_step(J1)
    assert "850 steps/s a core would be the ceiling" in markdown(found)
    assert "2 devices exact 10 %; 1 device exact 10 %." in markdown(found)
    found.product_rate = "no jax"
    assert "could not be timed: no jax" in markdown(found)
