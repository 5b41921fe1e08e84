"""Networks of a user's own that raise an error: once, in the midst of training; or in every rank, before it begins."""

import os
from pathlib import Path

from users_nets import Tiny

AT = 150
"""Forward passes of a process, in the fourth or fifth iteration of 16 steps."""


class Faltering(Tiny):
    """Raises a ``ValueError``, unless the file ``$FALTERED`` is there, which it makes then."""

    _passes = 0

    def forward(self, observation):
        Faltering._passes += int(bool(observation.sum() > -1e9))  # which nothing can trace
        flag = Path(os.environ["FALTERED"])
        if Faltering._passes >= AT and not flag.exists():
            flag.touch()
            raise ValueError("the net\nhas lost its way")
        return super().forward(observation)


class Unranked(Tiny):
    """Can't be made in a rank."""

    def __init__(self, observation, outputs):
        if "RANK" in os.environ:
            raise ValueError("not among several")
        super().__init__(observation, outputs)
