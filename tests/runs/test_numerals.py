"""Numbers for people have the digits that their size takes, whatever it is."""

import math

import pytest

from lockstep.runs.shown.numerals import format_number, format_points, spec_of


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ((0.0, 0.0), "0.00 0.00"),
        ((187.254, 12.3), "187.25 12.30"),
        ((-1234567.891, 1.0), "-1,234,567.89 1.00"),
        ((0.003, 0.0547), "0.0030 0.0547"),
        ((6.13e-5, 5.2e-6), "6.13e-05 5.20e-06"),
        ((1.4e-14, 0.25), "0.00 0.25"),  # what rounding leaves of equal means
        ((6.1e19, 1.0), "6.10e+19 1.00e+00"),
        ((math.nan, 2.0), "nan 2.00"),
        ((math.inf, 0.5), "inf 0.50"),
    ],
)
def test_numbers_that_stand_together_have_one_format(values, shown):
    assert " ".join(format(value, spec_of(*values)) for value in values) == shown


@pytest.mark.parametrize("value", [1e15, -1e30, 9e299])
def test_a_huge_number_is_short(value):
    assert float(format_number(value)) == value
    assert len(format_number(value)) < 10


@pytest.mark.parametrize(
    ("value", "shown"),
    [(21, "21"), (21.0, "21"), (1234, "1,234"), (0.65, "0.65"), (0.004, "0.00400"), (1e20, "1.00e+20")],
)
def test_a_score_is_whole_or_has_its_decimals(value, shown):
    assert format_points(value) == shown
