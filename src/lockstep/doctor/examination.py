"""Examines a script: runs its ranks with the doctor inside, waits for them to end, and diagnoses what they recorded."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.core.temporary import temporary_directory
from lockstep.core.topology import Topology
from lockstep.doctor.judge.diagnosis import Diagnosis, diagnose
from lockstep.doctor.judge.traces import read_traces
from lockstep.doctor.meeting import common_store
from lockstep.doctor.supervisor import OneRank, Supervisor, await_leaving, await_verdict
from lockstep.doctor.watch.side_store import VERDICT, write_json
from lockstep.doctor.watch.watched import MODULE
from lockstep.launch.script import Script, start_script
from lockstep.launch.supervise import Ranks
from lockstep.runs.directory import is_writer


@dataclass(frozen=True)
class Examination:
    """The script to examine, and how closely.

    Attributes:
        script: the program that every rank runs.
        directory: where ranks record what is compared; None: the directory for temporary files.
        first: the number of first optimiser steps that are all compared.
        interval: of later steps, every ``interval``-th is compared.
        wait_limit: seconds that ranks may wait for others.
        run_limit: seconds after which the script is stopped; None: never.
    """

    script: Script
    directory: Path | None
    first: int
    interval: int
    wait_limit: float
    run_limit: float | None

    def words(self, store: Path) -> list[str]:
        """Returns the arguments of ``python`` for a rank that records in ``store``."""
        return ["-m", MODULE, json.dumps([str(store), self.first, self.interval]), *self.script.words]

    def supervisor(self, ranks: Ranks, store: Path, world_size: int, *, judges: bool) -> Supervisor:
        """Returns the supervisor of the ranks that this process started."""
        limits = {"wait_limit": self.wait_limit, "run_limit": self.run_limit}
        return Supervisor(ranks, store, world_size, judges=judges, **limits)


def examine(wanted: Examination, nproc: int) -> Diagnosis:
    """Starts ``nproc`` ranks on this machine, waits until they have ended, and returns their diagnosis."""
    with temporary_directory(within=wanted.directory) as directory:
        store, logs = directory / "store", directory / "logs"
        logs.mkdir()
        ranks = start_script(wanted.words(store), nproc, logs)
        outcome = wanted.supervisor(ranks, store, nproc, judges=True).wait()
        return diagnose(read_traces(store, range(nproc)), **asdict(outcome))


def examine_as_rank(wanted: Examination, topology: Topology, tell: Callable[[Diagnosis], int]) -> int:
    """Examines this rank of a script whose ranks another launcher started.

    Rank 0's process judges and reports by ``tell``, which returns the exit status.

    Returns:
        The exit status, the same on every rank; 1 on a rank that got no verdict from rank 0.

    Raises:
        ValueError: one line, if ranks on several hosts share no directory, or some never come there.
    """
    if wanted.directory is None and not topology.on_one_host:
        raise ValueError(
            f"directory: {topology.world_size} ranks are on several hosts; give --directory DIR on a file system that "
            "all of them share"
        )
    with common_store(wanted.directory, topology) as store:
        ranks = OneRank([sys.executable, *wanted.words(store)], topology.rank)
        judges = is_writer(topology)
        outcome = wanted.supervisor(ranks, store, topology.world_size, judges=judges).wait()
        if not judges:
            return await_verdict(store, topology.rank)
        traces = read_traces(store, range(topology.world_size))
        status = tell(diagnose(traces, **asdict(outcome)))
        write_json(store / VERDICT, {"status": status})
        await_leaving(store, range(1, topology.world_size))
        return status
