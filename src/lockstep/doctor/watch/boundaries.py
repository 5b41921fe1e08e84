"""Keeps the numbers of steps at which phases began in a few words: those at equal distances are one run."""

from __future__ import annotations

Run = list[int]
"""The first number of a run, the distance of two of them, and how many they are."""


class Boundaries:
    """Growing numbers, of which only the newest run is kept: older ones are given away.

    Attributes:
        run: the newest; empty while there is no number.
        last: the last number; 0 while there is none.
    """

    def __init__(self) -> None:
        self.run: Run = []
        self.last = 0

    def add(self, number: int) -> Run:
        """Add a number if it isn't the last one; gives the run that it ended, if any."""
        ended: Run = []
        if not self.run:
            self.run = [number, 0, 1]
        elif number == self.last:
            return ended
        elif self.run[2] == 1 or number - self.last == self.run[1]:
            self.run = [self.run[0], number - self.last, self.run[2] + 1]
        else:
            ended, self.run = self.run, [number, 0, 1]
        self.last = number
        return ended


def numbers_of(run: Run) -> list[int]:
    """All numbers of a run."""
    if not run:
        return []
    first, distance, count = run
    return [first + distance * number for number in range(count)]
