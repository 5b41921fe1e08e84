"""What ranks might have left, told without ranks."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lockstep.doctor.judge.diagnosis import diagnose
from lockstep.doctor.judge.traces import read_traces
from lockstep.doctor.watch.boundaries import Boundaries
from lockstep.doctor.watch.side_store import ENDED, OPTIMIZED, SideWriter, write_json

PARTS = ("parameters", "gradients", "moments", "frozen", "buffers", "normalizers", "gathered")
PLACES = {"net.weight": "0.0", "net.bias": "0.1"}
WHEN = {
    "before": ("gradients", "gathered", "whole", "own", "stepped"),
    "after": ("parameters", "moments", "frozen", "unstepped", "buffers", "normalizers"),
    "end": ("parameters", "moments"),
}


@dataclass
class Story:
    """Two ranks, in sync unless a test says otherwise: what they hold are functions of (rank, step) or of rank.

    There are two tensors; the second one is always equal, unless what is told is so ``everywhere``. With ``second``
    there is another optimiser, ``second_on`` these ranks, of which the same holds but for what is told there. Before
    all that there may be some ``plans``: optimisers of tensors of each rank's own, of which some are ``gone``.
    """

    ranks: int = 2
    steps: int = 4
    world: int = 2
    wrappers: tuple = ("ddp",)
    libraries: tuple = ()
    through: tuple = ("ddp",)
    broadcast: tuple = ()
    start: Callable[..., Any] = lambda rank: 1.0
    parameters: Callable[..., Any] = lambda rank, step: 1.0 + step
    gradients: Callable[..., Any] | None = lambda rank, step: 0.5 * step
    moments: Callable[..., Any] = lambda rank, step: 0.1 * step
    frozen: Callable[..., Any] = lambda rank, step: 4.0
    unstepped: Callable[..., Any] | None = None
    buffers: Callable[..., Any] = lambda rank, step: 3.0
    buffer_names: tuple = ("norm.running_mean", "norm.running_var")
    normalizers: Callable[..., Any] = lambda rank, step: 2.0
    gathered: Callable[..., Any] | None = None
    whole: Callable[..., Any] | None = None
    own: Callable[..., Any] | None = None
    stepped: Callable[..., Any] | None = None
    hooked: bool = False
    inputs: Callable[..., Any] = lambda rank, step: f"data of rank {rank} at {step}"
    source: Callable[..., Any] = lambda rank, step: {}
    rates: Callable[..., Any] = lambda rank: [(0, [1e-3])]
    boundaries: Callable[..., Any] = lambda rank: [2]
    taken: Callable[..., Any] | None = None
    models: Callable[..., Any] | None = None
    end: Callable[..., Any] | None = None
    everywhere: bool = False
    sharded: int = 0
    second: dict | None = None
    second_on: tuple = (0, 1, 2)
    sizes: tuple = (1, 2)
    made: Callable[..., Any] = lambda rank: []
    untrained: Callable[..., Any] = lambda rank: []
    loaded: Callable[..., Any] = lambda rank: 0
    held: Callable[..., Any] = lambda rank: {}
    tensors: Callable[..., Any] = lambda rank: {}
    unused: tuple = ()
    plans: int = 0
    gone: Callable[..., Any] = lambda plan: True
    ends: dict = field(default_factory=dict)
    codes: dict = field(default_factory=dict)
    states: dict = field(default_factory=dict)
    failures: dict = field(default_factory=dict)

    def tell(self, directory):
        """Write it all, as ranks do."""
        for rank in range(self.ranks):
            writer = SideWriter(directory, rank)
            apart: dict[str, Any] = {name: lambda rank, step: step + 0.1 * rank for name in ("gradients", "parameters")}
            for plan in range(self.plans):
                replace(self, **apart)._train(writer, rank, plan, named=False)
            self._train(writer, rank, self.plans)
            for error in self.failures.get(rank, ()):
                writer.add({"kind": "failure", "error": error})
            if self.second is not None and rank in self.second_on:
                replace(self, second=None, **self.second)._train(writer, rank, self.plans + 1)
            world = {"size": self.world} if self.world else {}
            state = {"world": world, "torch": True, "seconds": 10.0, "own_seconds": 0.2} | self.states.get(rank, {})
            if self.ends.get(rank, {}) is not None:
                writer.add({"kind": "end"} | state | self.ends.get(rank, {}))
            writer.flush()
            writer.state(state)
            code = self.codes.get(rank, 0)
            if code is not None:
                write_json(writer.path / ENDED, {"code": code, "at": float(rank)})
        return directory

    def _train(self, writer, rank, optimizer, named=True):
        facts: dict[str, Any] = {"wrappers": list(self.wrappers), "libraries": list(self.libraries)}
        facts |= {"sizes": list(self.sizes), "made": self.made(rank), "untrained": self.untrained(rank)}
        facts |= {"state": self.loaded(rank), "tensors": self.tensors(rank)}
        names = {place: name for name, place in PLACES.items()} if named else {}
        writer.add({"kind": "optimizer", "optimizer": optimizer, "names": names} | facts)
        writer.add({"kind": "held", "optimizer": optimizer, "held": self.held(rank)})
        for step, rates in self.rates(rank):
            writer.add({"kind": "rates", "optimizer": optimizer, "step": step, "rates": rates})
        for step in range(1, self.steps + 1):
            inputs = {"inputs": self.inputs(rank, step), "through": list(self.through), "hooked": self.hooked}
            inputs |= self.source(rank, step)
            self._check(writer, rank, (optimizer, step, "before"), inputs)
            self._check(
                writer,
                rank,
                (optimizer, step, "after"),
                {"broadcast": list(self.broadcast), "unused": list(self.unused)},
            )
        words = [] if self.models is None else [str(self.models(rank, phase)) for phase in (1, 2, 3)]
        for phase, word in enumerate(words, 1):
            digests = {"net.weight": word, "fixed.weight": f"of rank {rank}"}
            writer.add({"kind": "models", "phase": phase, "digests": digests})
        taken = self.steps if self.taken is None else self.taken(rank)
        phases, runs = Boundaries(), []
        for boundary in self.boundaries(rank):
            runs += [run] if (run := phases.add(boundary)) else []
        gone = {"gone": not named and self.gone(optimizer)}
        for run in runs:
            writer.add({"kind": "boundaries", "optimizer": optimizer, "run": run})
        writer.add({"kind": "phases", "optimizer": optimizer, "run": phases.run, "steps": taken} | gone)
        if self.end is not None:
            self._check(writer, rank, (optimizer, taken, "end"), {})

    def _check(self, writer, rank, moment, facts):
        optimizer, step, when = moment
        parts, arrays = {}, []
        kinds = (*WHEN[when], "parameters") if (step, when) == (1, "before") else WHEN[when]
        for kind in kinds:
            value = getattr(self, kind)
            if value is None:
                continue
            number: Any = value(rank, step)
            if kind == "parameters" and when != "after":
                number = self.start(rank) if self.end is None or when == "before" else self.end(rank)
            values = np.atleast_1d(np.float32(number))
            second = np.full(2, number, np.float32) if self.everywhere else np.ones(2, np.float32)
            values = np.concatenate([values, second])
            shards = 0 if kind == "gathered" else self.sharded
            names = (
                PLACES.values()
                if kind in (*OPTIMIZED, "own", "stepped")
                else self.buffer_names
                if kind == "buffers"
                else PLACES
            )
            entries = [[name, size, size, shards, ""] for name, size in zip(names, (1, 2), strict=True)]
            parts[kind] = {"tensors": entries}
            arrays.append((parts[kind], values))
        writer.add(
            {"kind": "check", "optimizer": optimizer, "step": step, "when": when, "parts": parts} | facts, arrays
        )

    def diagnosis(self, directory, **how):
        found = diagnose(read_traces(self.tell(directory), range(self.ranks)), **how)
        json.dumps(found.to_json())
        return found


def kinds(diagnosis, level=None):
    return [finding.kind for finding in diagnosis.findings if level in (None, finding.level)]
