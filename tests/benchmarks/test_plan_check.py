"""The table that holds plans to measurements: what an error is, when it is too large, and where the table goes."""

import pytest

from benchmarks import plan_check
from benchmarks.network_hosts import NoHostsError
from benchmarks.plan_check import CASES, KEPT, PAGE, ROOT, TITLE, Row, into_page, kept, misses, table
from benchmarks.plan_published import ROWS, efficiency, overlapped

GOOD = Row("good", 2, [1.0, 1.1, 3.0], [0.9] * 3, [1.2] * 3, [1.0, 1.0, 1.0], [0.8] * 3)


def row(error, name="case"):
    return Row(name, 2, [1.0 + error], [0.5], [0.9], [1.0], [0.4])


def test_an_error_is_the_median_of_distances():
    assert GOOD.error == pytest.approx(0.1)
    assert GOOD.worst == pytest.approx(2)
    assert GOOD.within == 3
    assert row(-0.2).error == pytest.approx(0.2)
    assert row(-0.2).worst == pytest.approx(-0.2)
    assert row(-0.2).within == 0


def test_errors_of_both_signs_dont_cancel():
    swings = Row("swings", 2, [1.6, 0.9, 1.0, 1.1, 0.9], [0.9] * 5, [1.2] * 5, [1.0] * 5, [0.8] * 5)
    assert swings.error == pytest.approx(0.1)
    assert swings.worst == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("errors", "missed"),
    [((0.1, -0.14, 0.29), False), ((0.1, 0.1, 0.31), True), ((0.16, -0.2, 0.05), True), ((), False)],
)
def test_what_is_aimed_at(errors, missed):
    assert misses([row(error) for error in errors]) == missed


def test_the_table_has_every_case_and_says_what_was_left_out():
    left_out = Row("two hosts", 2, skipped="needs iproute2")
    text = table([GOOD, row(-0.25), left_out], "2026-01-31, commit abc1234.")
    assert text.startswith("2026-01-31, commit abc1234. Milliseconds of an iteration")
    assert "| good | 800.0 | 1100.0 | 900.0 – 1200.0 | 1000.0 | 10% | +200% | 3 of 3 |" in text
    assert "| case | 400.0 | 750.0 | 500.0 – 900.0 | 1000.0 | 25% | -25% | 0 of 1 |" in text
    assert "| two hosts | | | | | left out: needs iproute2 | | |" in text
    assert "Errors of the cases: median 18%, largest 25%. Worst single repeat: +200%." in text


def test_the_kept_tables_are_those_of_the_kept_repeats():
    measured, rows = kept(KEPT)
    text = table(rows, measured)
    assert f"{TITLE}\n\n{text}" == KEPT.read_text()
    assert into_page(PAGE.read_text(), text) == PAGE.read_text()


def test_a_case_of_hosts_that_cant_be_had_is_left_out_with_the_reason(monkeypatch):
    def none(*_):
        raise NoHostsError("needs ip and tc of iproute2")

    monkeypatch.setattr(plan_check, "_once", none)
    (found,) = plan_check.check([CASES[0]], 3, 1, 1, print)
    assert (found.skipped, found.measured) == ("needs ip and tc of iproute2", [])


def test_it_goes_between_the_marks_of_the_page():
    page = (ROOT / "docs" / "plan.md").read_text()
    once = into_page(page, "THE TABLE\n")
    assert once.count("THE TABLE") == 1
    assert into_page(once, "THE TABLE\n") == once
    assert len(once.splitlines()) >= 50
    with pytest.raises(ValueError, match="the page has no <!-- plan_check: begin -->"):
        into_page("nothing", "THE TABLE\n")


def test_cases_are_told_apart():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) >= 9


def test_published_rows_are_predicted_by_one_rule():
    cartpole, g1, llama = ROWS
    for one in ROWS:
        assert efficiency(one, "worst") < efficiency(one, "likely") < efficiency(one, "best") < 1
        assert efficiency(one, "likely") <= overlapped(one) <= 1
    assert cartpole.seconds == pytest.approx(0.504, abs=1e-3)
    assert g1.seconds == pytest.approx(1.585, abs=1e-3)
    assert llama.seconds == pytest.approx(2.843, abs=1e-3)
    # 8 bytes of each parameter in rings: of 16 hosts by eight cards of 50 GB/s each, of one by NVLink, at 70 %
    added = 8 * 8.03e9 * (127 / 128 / 400e9 - 7 / 8 / 450e9) / 0.7
    assert efficiency(llama, "likely") == pytest.approx(llama.seconds / (llama.seconds + added), rel=1e-3)
