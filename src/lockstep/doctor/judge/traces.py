"""Reads back what the ranks left: one trace per rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.doctor.watch.boundaries import Run, numbers_of
from lockstep.doctor.watch.side_store import BROKEN, SideReader, array_at, rank_directory


class Kept(NamedTuple):
    """Keeps some numbers of a tensor's elements: all, or a sample and a digest of all.

    ``shards`` is the number of ranks it is sharded over, 0 for one that every rank holds wholly.
    """

    numbers: np.ndarray
    elements: int
    shards: int
    digest: str


Part = Mapping[str, Kept]
"""Tensors of one kind at one step of one rank: an optimiser's by place (``0.2``, ``0.2.exp_avg``), others by name."""


class Moment(NamedTuple):
    """Names when something was looked at: ``when`` is ``before`` or ``after`` a step (from 1), or ``end``."""

    optimizer: int
    step: int
    when: str


@dataclass(frozen=True)
class Check:
    """One rank at one moment: its tensors, and what else was noted."""

    parts: Mapping[str, Part]
    facts: Mapping[str, Any]


@dataclass
class RankTrace:
    """Tells one rank's whole story.

    Attributes:
        rates: learning rates of an optimiser's groups, with the number of steps taken when they came to be.
        boundaries: numbers of steps an optimiser had taken when each rollout phase began; ``steps`` in the end.
        names: of an optimiser's parameters in their modules, by their places ``group.number`` in the optimiser.
        wrapped: places in the optimiser of parameters that DDP was given.
        by_parts: optimisers that held the rank's part of a model's parameters.
        settings: of an optimiser's groups, but for the learning rate.
        loaded: tensors that an optimiser's state held before its first step.
        models: digests of all models' parameters by name, by the phase (from 1) at whose beginning they were taken.
        unplaced: names of normalisers that can't be matched with other ranks'.
        unknown: classes of objects that may keep statistics and weren't compared.
        failures: errors of the doctor's own.
        broken: lines that were written in part.
        wrappers: DDP, FSDP as found in the process; ``libraries`` whose models are trained.
        state: how the rank fared when it last said so, or when its script ended.
        end: what the script's end was: exception, seconds; None if it never came to one.
        exit_code: of the process, negative for a signal; None if unknown.
        ended_at: when the process ended, in seconds of the epoch; None for one that was ended.
    """

    rank: int
    checks: dict[Moment, Check] = field(default_factory=dict)
    rates: dict[int, list[tuple[int, list[float]]]] = field(default_factory=dict)
    boundaries: dict[int, list[int]] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    names: dict[int, dict[str, str]] = field(default_factory=dict)
    wrapped: dict[int, set[str]] = field(default_factory=dict)
    by_parts: set[int] = field(default_factory=set)
    settings: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    loaded: dict[int, int] = field(default_factory=dict)
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
        """Whether the script came to its end by itself and without an error; its process may have been ended then."""
        return self.end is not None and "error" not in self.end and self.exit_code in (0, None)

    @property
    def acts(self) -> bool:
        """Whether the rank could never step: it made no optimiser, or has no PyTorch."""
        return not self.state.get("made_optimizer", self.state.get("torch", True))

    @property
    def lost(self) -> bool:
        """Whether something that the rank saw wasn't written; its process may have ended well all the same."""
        unended = self.exit_code == 0 and self.end is None and bool(self.state or self.checks)
        return unended or bool(self.broken or self.state.get("lost"))


def read_traces(directory: Path, ranks: Sequence[int]) -> list[RankTrace]:
    """Reads what each rank left; a rank that left nothing has an empty trace."""
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
        elif kind == "optimizer":
            trace.wrappers |= set(event["wrappers"])
            trace.libraries |= set(event["libraries"])
            trace.names[optimizer] = event["names"]
            trace.wrapped[optimizer] = set(event.get("wrapped", event["names"]))
            trace.by_parts |= {optimizer} if event.get("by_parts") else set()
            trace.settings[optimizer] = event.get("settings", [])
            trace.loaded[optimizer] = event.get("state", 0)
            trace.unknown |= set(event.get("unknown", ()))
            trace.unplaced |= set(event.get("unplaced", ()))
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
    """Add what is new of a run: the newest may have been written before it was complete, and again."""
    known = trace.boundaries.setdefault(optimizer, [])
    known += [number for number in numbers_of(run) if not known or number > known[-1]]


def _part(part: dict[str, Any], values: np.ndarray) -> Part:
    numbers, at, out = array_at(part, values), 0, {}
    for name, kept, elements, shards, digest in part["tensors"]:
        out[name] = Kept(numbers[at : at + kept], elements, shards, digest)
        at += kept
    return out
