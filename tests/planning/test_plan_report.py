"""Numbers of a plan as they are printed."""

import pytest

from lockstep.planning.report import duration


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (8.5e-4, "850 µs"),
        (9.996e-4, "1 ms"),
        (0.0123, "12.3 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (299.9, "5 min"),
        (4.56, "4.56 s"),
        (7560.0, "2.1 h"),
    ],
)
def test_a_duration_has_the_unit_that_its_rounded_number_fits(seconds, said):
    assert duration(seconds) == said
