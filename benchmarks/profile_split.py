"""Where the time of a single-rank run goes: ``python -m benchmarks.profile_split CONFIG.json OUT.json``.

The real ``lockstep train`` runs in this process, on one rank (so without collectives), with stopwatches around the
engine's functions. They are found by name; one that has been renamed or moved is an error that says so, never a
silent zero.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

SKIPPED_SHARE = 0.25
ENVIRONMENT, INFERENCE, ROLLOUT = "environment", "inference", "rollout, rest"
BATCH, GRADIENT, OPTIMISER, UPDATE = "values, advantages", "forward/backward", "optimiser", "update, rest"
LOGGING, OTHER = "logging, checkpoints", "other"
PARTS = (ENVIRONMENT, INFERENCE, ROLLOUT, BATCH, GRADIENT, OPTIMISER, UPDATE, LOGGING, OTHER)

# What is timed: module, attribute (of a class, where there is a dot), the part that its own time counts for.
TIMED = (
    ("lockstep.envs.batched.array_envs", "ArrayEnvs.step", ENVIRONMENT),
    ("lockstep.envs.gymnasium.in_process", "InProcessEnvs.end_step", ENVIRONMENT),
    ("lockstep.torch_engine.plain.functions", "PlainActor.__call__", INFERENCE),
    ("lockstep.torch_engine.plain.functions", "RecurrentPlainActor.__call__", INFERENCE),
    ("lockstep.torch_engine.nets.autograd", "NetActor.__call__", INFERENCE),
    ("lockstep.torch_engine.rollout", "collect", ROLLOUT),
    ("lockstep.torch_engine.rollout", "action_noise", ROLLOUT),
    ("lockstep.torch_engine.train", "record_replay", ROLLOUT),
    ("lockstep.torch_engine.train", "make_batch", BATCH),
    ("lockstep.torch_engine.train", "minibatch_indices", UPDATE),
    ("lockstep.torch_engine.train", "advantage_moments", UPDATE),
    ("lockstep.torch_engine.train", "share", UPDATE),
    ("lockstep.torch_engine.train", "update", UPDATE),
    ("lockstep.torch_engine.train", "merge_normalizers", UPDATE),
    ("lockstep.torch_engine.update", "clip_and_step", OPTIMISER),
    ("lockstep.training.recorder", "Recorder.log", LOGGING),
    ("lockstep.training.recorder", "Recorder.save_checkpoint", LOGGING),
)


class Stopwatch:
    """Seconds spent in parts of a program; a part that is called by another counts for itself alone."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.marks: list[tuple[float, dict[str, float]]] = []
        self._clock = clock
        self._inner = [0.0]

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, its own time counted for ``part``."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            started = self._clock()
            try:
                return function(*args, **kwargs)
            finally:
                spent = self._clock() - started
                self.seconds[part] += spent - self._inner.pop()
                self._inner[-1] += spent

        return wrapper

    def mark(self) -> None:
        """An iteration begins."""
        self.marks.append((self._clock(), dict(self.seconds)))

    def split(self) -> dict[str, float]:
        """Seconds of a mean iteration by part, the first quarter left out; what no part holds is ``other``.

        Raises:
            ValueError: there are too few iterations, or a part was never entered.
        """
        if len(self.marks) < 3:
            raise ValueError(f"{len(self.marks)} iterations are too few to split; at least 3")
        first = max(1, int(len(self.marks) * SKIPPED_SHARE))
        (begin, before), (end, after) = self.marks[first], self.marks[-1]
        count = len(self.marks) - 1 - first
        out = {part: (after.get(part, 0.0) - before.get(part, 0.0)) / count for part in PARTS}
        if silent := [part for part in PARTS if part != OTHER and out[part] == 0.0]:
            raise ValueError(f"no time was counted for {', '.join(silent)}: the engine no longer goes that way")
        out[OTHER] = (end - begin) / count - sum(out.values())
        return out


def replace_function(module: str, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put ``change(function)`` where a function is now.

    Raises:
        ValueError: there is no such function (any more).
    """
    owner: Any = importlib.import_module(module)
    *classes, attribute = name.split(".")
    try:
        for part in classes:
            owner = getattr(owner, part)
        function = owner.__dict__[attribute]
    except (AttributeError, KeyError):
        raise ValueError(
            f"{module} has no {name} of its own; say in benchmarks/profile_split.py what is timed"
        ) from None
    setattr(owner, attribute, change(function))


def install(watch: Stopwatch) -> None:
    """Time the engine's functions, the session's gradient, and mark every iteration."""
    for module, name, part in TIMED:
        replace_function(module, name, functools.partial(watch.timed, part))

    def with_timed_gradient(open_session: Callable[..., Any]) -> Callable[..., Any]:
        def opened(*args: Any, **kwargs: Any) -> Any:
            session = open_session(*args, **kwargs)
            session.source = watch.timed(GRADIENT, session.source)
            return session

        return opened

    def marking(iterate: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*args: Any, **kwargs: Any) -> Any:
            watch.mark()
            return iterate(*args, **kwargs)

        return marked

    replace_function("lockstep.torch_engine.train", "open_session", with_timed_gradient)
    replace_function("lockstep.torch_engine.train", "Trainer.iterate", marking)


def main() -> int:
    """Profile one config; the split goes to the second argument as JSON."""
    from lockstep.cli import main as lockstep

    config, out = sys.argv[1:]
    watch = Stopwatch()
    install(watch)
    with tempfile.TemporaryDirectory(prefix="lockstep-profile-") as runs:
        code = lockstep(["train", config, "--runs-dir", runs, "--quiet"])
    if code == 0:
        Path(out).write_text(json.dumps(watch.split(), indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
