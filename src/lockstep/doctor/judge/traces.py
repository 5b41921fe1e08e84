"""Reads what the ranks recorded: one trace per rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.doctor.watch.boundaries import Run, numbers_of
from lockstep.doctor.watch.side_store import BROKEN, SideReader, array_at, rank_directory


class Kept(NamedTuple):
    """What is kept of a tensor: all its numbers, or a sample of them and a digest of all.

    ``shards`` is the number of ranks it is sharded over, 1 if unknown; 0 if every rank holds all of it.
    """

    numbers: np.ndarray
    elements: int
    shards: int
    digest: str

    def thinned(self, most: int) -> np.ndarray:
        """Returns at most so many of the numbers, at equal distances.

        How many are kept depends on how many tensors a rank holds and on the step. The distances are powers of two, so
        that the rarer sample is a part of the denser one.
        """
        step = 1
        while -(-len(self.numbers) // step) > max(1, most):
            step *= 2
        return self.numbers[::step]


Part = Mapping[str, Kept]
"""Tensors of one kind at one step of one rank: by place in the optimiser (``0.2``, ``0.2.exp_avg``) or by name."""


def fewest_numbers(parts: Iterable[Part]) -> dict[int, int]:
    """Returns by a tensor's number of elements how many numbers are kept of such a one at least."""
    found: dict[int, int] = {}
    for kept in (kept for part in parts for kept in part.values()):
        found[kept.elements] = min(found.get(kept.elements, len(kept.numbers)), len(kept.numbers))
    return found


class Moment(NamedTuple):
    """A moment at which tensors were recorded: ``when`` is ``before`` or ``after`` a step (from 1), or ``end``."""

    optimizer: int
    step: int
    when: str


@dataclass(frozen=True)
class Check:
    """What one rank recorded at one moment: its tensors, and other facts."""

    parts: Mapping[str, Part]
    facts: Mapping[str, Any]


@dataclass
class RankTrace:
    """All that one rank recorded; dictionaries with int keys are by optimiser, except ``models``.

    Attributes:
        rates: learning rates of the groups, None for no number, with the number of steps taken when they were set.
        boundaries: numbers of steps taken when each rollout phase began.
        steps: numbers of steps taken in the end.
        names: names of parameters in their modules, by place ``group.number`` in the optimiser.
        held: where the script held these parameters at the last look, by place in the optimiser; only of modules that a
            variable leads to.
        tensors: numbers of the parameters, by place; a tensor has the same one in all of the rank's optimisers.
        wrapped: places of the parameters that DDP was given.
        by_parts: optimisers that held the rank's part of a model's parameters.
        gone: optimisers that the script had let go in the end, with all that they updated.
        settings: settings of the groups, except learning rates.
        loaded: how many tensors the state held before the first step.
        sizes: numbers of elements of all its tensors.
        made: such sizes of every optimiser that was found, whether or not it ever made a step, with how many there were
            at once.
        untrained: numbers of elements of the parameters in modules that no optimiser updated at the last look.
        models: digests of all models' parameters by name, by the phase (from 1) at whose beginning they were taken.
        unplaced: names of normalisers that can't be matched with other ranks'.
        unknown: classes of objects that may keep statistics and weren't compared.
        failures: errors of the doctor's own.
        broken: number of lines that were written only in part.
        wrappers: DDP and FSDP, as found in the process.
        libraries: libraries whose models are trained.
        state: the rank's last state, updated by the script's end.
        end: how the script ended: exception, seconds; None if it didn't.
        exit_code: the process's exit code, negative for a signal; None if unknown.
        ended_at: when the process ended, in seconds of the epoch; None if it was ended.
    """

    rank: int
    checks: dict[Moment, Check] = field(default_factory=dict)
    rates: dict[int, list[tuple[int, list[float | None]]]] = field(default_factory=dict)
    boundaries: dict[int, list[int]] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    names: dict[int, dict[str, str]] = field(default_factory=dict)
    held: dict[int, dict[str, str]] = field(default_factory=dict)
    tensors: dict[int, dict[str, int]] = field(default_factory=dict)
    wrapped: dict[int, set[str]] = field(default_factory=dict)
    by_parts: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    settings: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    loaded: dict[int, int] = field(default_factory=dict)
    sizes: dict[int, list[int]] = field(default_factory=dict)
    made: Counter[tuple[int, ...]] = field(default_factory=Counter)
    untrained: list[int] = field(default_factory=list)
    models: dict[int, dict[str, str]] = field(default_factory=dict)
    unplaced: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)
    broken: int = 0
    wrappers: set[str] = field(default_factory=set)
    libraries: set[str] = field(default_factory=set)
    state: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] | None = None
    exit_code: int | None = None
    ended_at: float | None = None

    @property
    def finished(self) -> bool:
        """Whether the script ended by itself and without an error, even if its process was killed afterwards."""
        return self.end is not None and "error" not in self.end and self.exit_code in (0, None)

    @property
    def acts(self) -> bool:
        """Whether the rank can't step: it made no optimiser, or hasn't loaded PyTorch."""
        return not self.state.get("made_optimizer", self.state.get("torch", True))

    @property
    def lost(self) -> bool:
        """Whether something that the rank saw wasn't written, even if its process ended well."""
        unended = self.exit_code == 0 and self.end is None and bool(self.state or self.checks)
        return unended or bool(self.broken or self.state.get("lost"))

    def numbered(self, number: Mapping[int, int]) -> RankTrace:
        """Returns the trace of those optimisers alone that have a new ``number``, under that one."""

        def left(held: Mapping[int, Any]) -> dict[int, Any]:
            return {number[optimizer]: value for optimizer, value in held.items() if optimizer in number}

        checks = {
            moment._replace(optimizer=number[moment.optimizer]): check
            for moment, check in self.checks.items()
            if moment.optimizer in number
        }
        tables = {name: left(getattr(self, name)) for name in BY_OPTIMIZER}
        sets = {name: {number[each] for each in getattr(self, name) if each in number} for name in ("by_parts", "gone")}
        return replace(self, checks=checks, **tables, **sets)


BY_OPTIMIZER = ("rates", "boundaries", "steps", "names", "held", "tensors", "wrapped", "settings", "loaded", "sizes")
"""The dictionaries of a trace that are by optimiser, but for its checks."""


def read_traces(directory: Path, ranks: Sequence[int]) -> list[RankTrace]:
    """Reads what each rank recorded; a rank that recorded nothing has an empty trace."""
    return [_read_trace(SideReader(rank_directory(directory, rank)), rank) for rank in ranks]


def _read_trace(reader: SideReader, rank: int) -> RankTrace:
    trace, values = RankTrace(rank, state=reader.state()), reader.values()
    for event in reader.events():
        kind, optimizer = event["kind"], event.get("optimizer", 0)
        if kind == "check":
            parts = {name: _part(part, values) for name, part in event["parts"].items()}
            trace.checks[Moment(optimizer, event["step"], event["when"])] = Check(parts, event)
        elif kind == "rates":
            trace.rates.setdefault(optimizer, []).append((event["step"], event["rates"]))
        elif kind == "boundaries":
            _add_run(trace, optimizer, event["run"])
        elif kind == "phases":
            _add_run(trace, optimizer, event["run"])
            trace.steps[optimizer] = event["steps"]
            trace.gone |= {optimizer} if event.get("gone") else set()
        elif kind == "optimizer":
            trace.wrappers |= set(event["wrappers"])
            trace.libraries |= set(event["libraries"])
            trace.names[optimizer] = event["names"]
            trace.tensors[optimizer] = event.get("tensors", {})
            trace.wrapped[optimizer] = set(event.get("wrapped", event["names"]))
            trace.by_parts |= {optimizer} if event.get("by_parts") else set()
            trace.settings[optimizer] = event.get("settings", [])
            trace.loaded[optimizer] = event.get("state", 0)
            trace.sizes[optimizer] = event.get("sizes", [])
            trace.made |= Counter(map(tuple, event.get("made", [])))
            trace.untrained = event.get("untrained", trace.untrained)
            trace.unknown |= set(event.get("unknown", ()))
            trace.unplaced |= set(event.get("unplaced", ()))
        elif kind == "held":
            trace.held[optimizer] = event["held"]
        elif kind == "models":
            trace.models[event["phase"]] = event["digests"]
        elif kind == "failure":
            trace.failures.append(event["error"])
        elif kind == BROKEN:
            trace.broken += 1
        elif kind == "end":
            trace.end = event
            trace.state |= event
    for index, counts in enumerate(trace.state.get("optimizers", [])):
        trace.steps.setdefault(index, counts["steps"])
        _add_run(trace, index, counts["run"])
    ended = reader.ended() or {}
    trace.exit_code, trace.ended_at = ended.get("code"), ended.get("at")
    return trace


def _add_run(trace: RankTrace, optimizer: int, run: Run) -> None:
    """Adds the numbers of a run that are new: a run may be written again when it has grown."""
    known = trace.boundaries.setdefault(optimizer, [])
    known += [number for number in numbers_of(run) if not known or number > known[-1]]


def _part(part: dict[str, Any], values: np.ndarray) -> Part:
    numbers, at, out = array_at(part, values), 0, {}
    for name, kept, elements, shards, digest in part["tensors"]:
        out[name] = Kept(numbers[at : at + kept], elements, shards, digest)
        at += kept
    return out
