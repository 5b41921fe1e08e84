"""Numbers on a page say what they are."""

import pytest

pytest.importorskip("markupsafe")

from lockstep.report.words import in_digits, percent


@pytest.mark.parametrize(("value", "shown"), [(1e15, "1e+15"), (-1e30, "-1e+30"), (64e12, "64,000,000,000,000")])
def test_a_huge_number_is_short(value, shown):
    assert in_digits(value) == shown


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        (0.0, "0 %"),
        (0.0004, "0.04 %"),
        (0.052, "5.2 %"),
        (0.5, "50 %"),
        (0.994, "99 %"),
        (0.996, "99.6 %"),
        (0.99999, ">99.99 %"),
        (1.0, "100 %"),
    ],
)
def test_a_share_on_a_page_is_all_or_nothing_only_if_it_is(share, shown):
    assert percent(share) == shown
