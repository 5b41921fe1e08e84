from benchmarks.cases import A1, ARRAY_CARTPOLE, J1, T1, T2, T2_BOTH, operations_per_step
from benchmarks.profile_split import PARTS
from benchmarks.programs import COPIES, WEAK
from benchmarks.report import Results, markdown


def results(*rows) -> Results:
    return Results({"date": "today"}, [T1], rows=list(rows))


def test_every_target_is_said_to_be_met_or_missed(row):
    rows = [row(10.0), row(20.0, label="faster"), row(61.0, ours=True), row(50.0, ours=True, env=ARRAY_CARTPOLE)]
    text = markdown(results(*rows))
    best = "the best PyTorch peer with objects, faster"
    assert f"| T1 | CartPole-v1, exact | {best} | 3 × | 3.05 × | **met** |" in text
    assert "| T1 | lockstep/CartPole-v1, exact | the best PyTorch peer, faster | 3.7 × | 2.50 × | **missed** |" in text
    assert "| over peers | 4 | 2 | 0 | 0 | 2 | 0 |" in text


def test_targets_are_counted_by_group_and_verdict(row):
    near = row(*(11.2, 10.9, 11.1), case="A1", ours=True)
    rows = [row(10.0, 10.0, 10.0, case="A1"), near]
    rows.append(row(*(11.1, 11.2, 10.8), case="A1", ours=True, reduction="fast", label="Lockstep, fast"))
    text = markdown(Results({"date": "today"}, [A1], rows=rows))
    assert "| targets | all | met | met within noise | missed within noise | missed | unknown |" in text
    assert "| over peers | 2 | 0 | 1 | 0 | 1 | 0 |" in text
    assert "| two ranks over one | 0 | 0 | 0 | 0 | 0 | 0 |" in text
    assert "| our own `fast` and `exact` | 2 | 1 | 0 | 1 | 0 | 0 |" in text


def test_a_failed_peer_is_a_row_that_says_why(row):
    text = markdown(results(row(failures=["exit status 1: no module"], label="broken"), row(35.0, ours=True)))
    assert "| broken | CartPole-v1 | failed: exit status 1: no module |" in text
    assert "| the best PyTorch peer with objects (no figure of broken) | 3 × |  | **unknown** |" in text
    assert "| over peers | 4 | 0 | 0 | 0 | 0 | 4 |" in text


def test_seconds_counted_cpu_time_and_memory_stand_beside_the_speed(row):
    seen, unseen = row(10.0, label="seen"), row(12.0, label="unseen")
    seen.cpu, seen.memory = [90.0, 100.0, 400.0], [200_000_000, 300_000_000, 900_000_000]
    seen.seconds = [2.0, 2.5, 9.0]
    text = markdown(results(seen, unseen))
    assert "| min – max | seconds counted | CPU s a million steps |" in text
    assert "| seen | CartPole-v1 | 10 | 10 – 10 | 2.5 | 100.0 | 300 | 1.00 | 0.83 × | 0.83 × |" in text
    assert "| unseen | CartPole-v1 | 12 | 12 – 12 |  |  |  | 1.00 | 1.00 × | 1.00 × |" in text


def test_scaling_shows_multiples_of_one_rank(row):
    single = row(10.0, ours=True, env=ARRAY_CARTPOLE)
    weak, copies = (row(n, ours=True, env=ARRAY_CARTPOLE, scaling=what) for n, what in ((19.0, WEAK), (20.0, COPIES)))
    text = markdown(results(row(1.0), single, weak, copies))
    assert "| 1.9 × | 1.90 × (0.95 × two independent runs) | **met** |" in text
    text = text.split("## Two ranks")[1]
    assert f"| lockstep/CartPole-v1 | exact | {COPIES} | 20 | 20 – 20 |  |  |  | 1.00 | 2.00 × | 1.00 × |" in text
    assert f"| lockstep/CartPole-v1 | exact | {WEAK} | 19 | 19 – 19 |  |  |  | 1.00 | 1.90 × | 0.95 × |" in text


def test_on_both_cores_the_best_peer_with_one_thread_counts_and_is_shown(row):
    one = [row(50.0, case="T2", label="slow"), row(100.0, case="T2", label="alone", framework="jax")]
    both = [row(80.0, case="T2x2", label="together"), row(150.0, case="T2x2", ours=True)]
    text = markdown(Results({"date": "today"}, [T2, T2_BOTH], rows=[*one, *both]))
    text = text.split(f"## {T2_BOTH.title}")[1]
    assert f"{T2_BOTH.iterations} iterations of every program" in text
    assert "Peers of T2, with one thread, count among the peers here" in text
    assert "| alone (T2) | CartPole-v1 | 100 |" in text
    assert "| slow" not in text
    assert "| 1.88 × | 1.50 × |" in text
    text = markdown(Results({"date": "today"}, [T2_BOTH], rows=both))
    assert "weren't measured in this run" in text
    assert "| 1.88 × | 1.88 × |" in text


def test_ratios_over_all_cases_are_told_with_the_cases_that_they_are_of(row):
    rows = [row(10.0), row(12.0, ours=True), row(13.0, ours=True, reduction="fast", label="Lockstep, fast")]
    rows += [row(50.0, ours=True, env=ARRAY_CARTPOLE), row(100.0, case="A1"), row(166.0, case="A1", ours=True)]
    rows.append(row(case="A1", ours=True, failures=["killed"], reduction="fast", label="Lockstep, fast"))
    text = markdown(Results({"date": "today"}, [T1, A1], rows=rows)).split("## Over the best peer")[1].split("\n## ")[0]
    assert "| every row | 4 | 1.20 × (T1, CartPole-v1, exact) | 5.00 × (T1, lockstep/CartPole-v1, exact) |" in text
    assert "| every `exact` row | 3 | 1.20 × (T1, CartPole-v1, exact) | 5.00 ×" in text
    assert "where a row is there as both | 1 | 1.30 × (T1, CartPole-v1, fast) | 1.30 ×" in text
    assert "| the fastest row of each case and environment | 3 | 1.30 × (T1, CartPole-v1, fast) | 5.00 ×" in text
    assert "| the fastest row of each case | 2 | 1.66 × (A1, CartPole-v1, exact) | 5.00 ×" in text
    assert "Our rows that have no such ratio: A1, CartPole-v1, fast." in text
    none = markdown(Results({"date": "today"}, [T1], rows=[row(10.0)]))
    assert "| every row | 0 |  |  |" in none
    assert "no such ratio: none." in none


def test_split_shows_shares_or_why_not(row):
    found = results(row(10.0), row(35.0, ours=True))
    found.splits["T1", "CartPole-v1", "exact"] = dict.fromkeys(PARTS, 0.002)
    found.splits["T1", "CartPole-v1", "fast"] = "lockstep has no such function"
    text = markdown(found)
    assert f"| T1 | CartPole-v1 | exact | {2.0 * len(PARTS):.2f} | 2.00 ({100 / len(PARTS):.0f} %) |" in text
    assert "| T1 | CartPole-v1 | fast | failed: lockstep has no such function |" in text
    assert "## The environments alone" not in text


def test_an_environment_alone_is_shown_once_with_its_rounds(row):
    found = results(row(10.0), row(35.0, ours=True))
    found.ceilings["CartPole-v1", 8] = {"lockstep": [100_000.0, 123_456.0, 150_000.0], "gymnasium": [178_000.0]}
    found.ceilings[ARRAY_CARTPOLE, 8] = {"lockstep": [200_000.0]}
    found.ceilings["HalfCheetah-v5", 8] = "no mujoco"
    text = markdown(found).split("## The environments alone")[1]
    assert "| CartPole-v1 | 8 | 123,456 (100,000 – 150,000) | 178,000 (178,000 – 178,000) |" in text
    assert "| lockstep/CartPole-v1 | 8 | 200,000 (200,000 – 200,000) |  |" in text
    assert "| HalfCheetah-v5 | 8 | failed: no mujoco |  |" in text
    assert found.as_json()["ceilings"][2] == {"env": "HalfCheetah-v5", "num_envs": 8, "result": "no mujoco"}


def test_json_holds_every_repetition(row):
    out = results(row(10.0, 12.0), row(35.0, 42.0, ours=True)).as_json()
    assert out["rows"][0]["rates"] == [10.0, 12.0]
    assert out["rows"][0]["median"] == 11.0
    assert (out["titles"], out["iterations"]) == ({"T1": T1.title}, {"T1": T1.iterations})
    (reached,) = {one["reached"] for one in out["targets"] if one["what"].startswith("CartPole")}
    assert reached == 3.5


def jax_results(row, exact: float) -> Results:
    ours = [row(rate, ours=True, framework="jax", env=ARRAY_CARTPOLE) for rate in (exact, exact / 2)]
    rows = [row(100.0, framework="jax", label="rejax"), *ours]
    for one, devices, cpu in zip(rows, (None, 2, 1), ([], [10_000.0], [40_000.0]), strict=True):
        one.case, one.devices, one.cpu = "J1", devices, cpu
    return Results({"date": "today"}, [J1], rows=rows)


def test_the_share_of_the_arithmetic_is_of_as_many_cores_as_were_at_work(row):
    found = jax_results(row, 170.0)
    assert "ceiling" not in markdown(found).split("## Where")[0]
    found.product_rate = 850.0 * operations_per_step(J1)
    assert "850 steps/s a core would be the ceiling" in markdown(found)
    assert "2 devices exact 12 % of 1.70; 1 device exact 3 % of 3.40." in markdown(found)
    found.rows[1].cpu = []
    assert "so many cores as were at work: 1 device exact 3 % of 3.40." in markdown(found)
    found.rows[2].cpu = []
    assert "were at work: not seen." in markdown(found)
    found.product_rate = "no jax"
    assert "could not be timed: no jax" in markdown(found)
