"""Trains as ``lockstep WORDS…`` does, in this process, and counts the graphs that are captured and their replays.

The words ask for one rank with CUDA graphs. The last line printed is ``graphs N replays M``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from lockstep.cli import main
from lockstep.torch_engine.accelerated import graphs as captures

graphs = replays = 0
original = captures.capture


def counted(*words: Any) -> Callable[[], None]:
    """Captures a graph; what is returned replays it, and counts."""
    global graphs
    replay = original(*words)
    graphs += 1

    def replayed() -> None:
        global replays
        replays += 1
        replay()

    return replayed


if __name__ == "__main__":
    captures.capture = counted
    code = main(sys.argv[1:])
    print("graphs", graphs, "replays", replays)
    sys.exit(code)
