"""Numbers of steps in a few words."""

import pytest

from lockstep.doctor.watch.boundaries import Boundaries, numbers_of


@pytest.mark.parametrize(
    "numbers",
    [[], [3], [0, 4, 8, 12], [1, 2, 3, 5, 7, 20], [4, 8, 9, 13, 17, 18], list(range(1, 10_001))],
)
def test_all_numbers_come_back(numbers):
    boundaries, found = Boundaries(), []
    for number in numbers:
        for _ in range(2):  # phases without a step between them
            found += numbers_of(boundaries.add(number))
    assert found + numbers_of(boundaries.run) == numbers


def test_at_equal_distances_ten_thousand_are_one_run():
    boundaries = Boundaries()
    assert not any(boundaries.add(4 * number) for number in range(10_000))
    assert boundaries.run == [0, 4, 10_000]
