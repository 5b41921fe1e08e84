"""One rank's part of a run, from a prepared run directory to an exit code; ``python -m lockstep.launch.rank``."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from lockstep.config.engines import engine_module
from lockstep.config.run import Config, RunOptions
from lockstep.core.done import DoneFile
from lockstep.core.errors import PeerFailureError, RunError, device_failed, memory_full
from lockstep.core.life import Part, life
from lockstep.core.machine import collect_as_usual, collect_seldom, keep_freed_memory, steady_products
from lockstep.core.process import (
    EXIT_FAILURE,
    EXIT_USER_ERROR,
    end_with_parent,
    leave_at_once,
    look_here_last,
    name_process,
    no_silent_exit,
    open_closed_streams,
    report_failure,
    stays_here,
    tell_of_faults,
)
from lockstep.core.topology import MEMORY_VARIABLE, STORE_VARIABLE, Topology, from_environment
from lockstep.launch.native_errors import write_natively_elsewhere
from lockstep.runs.checkpoint import CheckpointError, find_checkpoint
from lockstep.runs.directory import CHECKPOINTS, RunDirectory, is_writer

LARGE_ROLLOUT = 1 << 17
"""Samples of an iteration from which on XLA's arrays are large, and threads seldom wait for each other's ``malloc``."""


@dataclass(frozen=True)
class Assignment:
    """What a rank is to do, by a resolved config.

    On a rank that doesn't write and starts anew the run's directory may not exist.

    Attributes:
        resume_from: ``latest`` or ``step_<n>`` of the run's checkpoints, or of ``states``; None: it starts anew.
        states: another directory of states, which the launcher has in memory.
        memory: where states are kept for it, if it starts ranks again.
        restarts: how often it has, a row each.
        audience: where somebody listens to the run's records; None: nobody does.
        started: when the launcher began, ISO 8601 in UTC.
        command: the words of its command line; None: it had none.
        commit: of the git repository that it was started in; None: it was in none.
        commands: of the seeds of a group that is one program, the words that train each by itself.
    """

    config: Config
    path: Path
    options: RunOptions
    resume_from: str | None = None
    states: Path | None = None
    memory: Path | None = None
    restarts: tuple[dict[str, Any], ...] = ()
    audience: str | None = None
    started: str | None = None
    command: tuple[str, ...] | None = None
    commit: str | None = None
    commands: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def to_json(self) -> str:
        """As text."""
        return TypeAdapter(Assignment).dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Assignment:
        """The reverse of :meth:`to_json`."""
        return TypeAdapter(Assignment).validate_json(text)


def wants_one_heap(config: Config) -> bool:
    """Tells whether XLA's arrays of a run lie in the host's memory and are large."""
    return config.engine == "jax" and config.device == "cpu" and config.steps_per_iteration >= LARGE_ROLLOUT


def run_rank(assignment: Assignment, topology: Topology) -> int:
    """Train this rank's part; every failure becomes one report and an exit code."""
    if topology.world_size == 1:  # of several, the launcher names the one that ended
        tell_of_faults()
    life.trains = False
    done = DoneFile.of_this_rank()
    try:
        config = assignment.config
        if config.engine == "jax":  # until its first iteration: large programs are traced before
            collect_seldom()
        else:
            collect_as_usual()
        engine = engine_module(config.engine)
        path = assignment.path.absolute()  # environments may change the working directory
        run = RunDirectory(
            path,
            is_writer=is_writer(topology),
            quiet=assignment.options.quiet,
            memory=assignment.memory,
            restarts=assignment.restarts,
            audience=assignment.audience,
            started=assignment.started,
            command=assignment.command,
            commit=assignment.commit,
            commands=assignment.commands,
        )
        run.take_over()
        life.inherit(topology)
        for name in (MEMORY_VARIABLE, STORE_VARIABLE):
            os.environ.pop(name, None)  # for this process alone, not for what it starts
        life.begin(Part.START)
        checkpoint = None
        if assignment.resume_from is not None:
            states = assignment.states or run.path / CHECKPOINTS
            with contextlib.nullcontext() if run.is_writer else contextlib.suppress(CheckpointError):
                checkpoint = find_checkpoint(states, assignment.resume_from, warn=run.is_writer)
        keep_freed_memory(one_heap=wants_one_heap(config))
        with no_silent_exit(), stays_here():
            result = engine.train(config, run, topology, assignment.options, checkpoint)
        if "ale_py" in sys.modules:
            gc.unfreeze()
            gc.collect()  # environments lie in cycles, and ale-py complains at the end of those that are left
    except PeerFailureError as error:
        report_failure(str(error), secondary=True)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        report_failure("interrupted at once; --resume goes on from the last checkpoint, if there is one")
        return 130
    except SystemExit:
        report_failure("an environment or a network called sys.exit before the run was done")
        return EXIT_FAILURE
    except Exception as error:
        return _failed(error, assignment.config.device, is_writer(topology))
    done.tell()
    return 128 + result.signal if result.signal is not None and _says_signal(topology) else 0


def _says_signal(topology: Topology) -> bool:
    """Tells whether this rank's exit status is to say that a signal stopped the run.

    Under torchrun with restarts each says so: 0 would be the run's end, while one host is told to leave and the others
    start again. Where srun or mpirun would end the one that writes yet, that one alone does.
    """
    if topology.restarts:
        return topology.starts_again
    return is_writer(topology) or not topology.ends_all


def _failed(error: Exception, device: str, writer: bool) -> int:
    """Reports an error that is being handled: in a line, or with its traceback if nobody foresaw it."""
    foreseen = isinstance(error, RunError | OSError) or _is_bad_input(error)
    line = " ".join(str(error).split()) if foreseen else memory_full(error, device) or device_failed(error)
    if line is None:
        report_failure("this is a bug in lockstep or in a custom part\n" + traceback.format_exc())
        return EXIT_FAILURE
    if os.environ.get("LOCKSTEP_TRACEBACK"):
        traceback.print_exc()
    report_failure(line, secondary=getattr(error, "everywhere", False) and not writer)
    return EXIT_USER_ERROR if _is_bad_input(error) and not isinstance(error, CheckpointError) else EXIT_FAILURE


def _is_bad_input(error: Exception) -> bool:
    """Whether an error refuses what was asked for: each that does until training begins, then ours of that kind."""
    ours = type(error).__module__.partition(".")[0] == "lockstep"
    return isinstance(error, ValueError) and (ours or not life.trains)


def main() -> int:
    """Entry of a rank that ``lockstep train --nproc`` started: a file that holds the assignment is its argument."""
    open_closed_streams()
    end_with_parent()
    steady_products()
    look_here_last()
    write_natively_elsewhere()
    topology = from_environment()
    name_process(f"lockstep rank {topology.rank}")
    return run_rank(Assignment.from_json(Path(sys.argv[1]).read_text(encoding="utf-8")), topology)


if __name__ == "__main__":
    leave_at_once(main())
