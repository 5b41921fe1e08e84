"""Runs one rank's part of a run, from a prepared directory to an exit code; ``python -m lockstep.launch.rank``."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from lockstep.config.engines import engine_module
from lockstep.config.run import Config, RunOptions
from lockstep.core.done import UNSTOPPED, DoneFile
from lockstep.core.errors import PeerFailureError, RunError, device_failed, memory_full, one_line
from lockstep.core.life import Part, life
from lockstep.core.machine import fix_mkl_mode, keep_freed_memory, restore_gc, slow_down_gc
from lockstep.core.process import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    enable_fault_handler,
    end_with_parent,
    interrupted_at_once,
    leave_at_once,
    name_process,
    no_silent_exit,
    open_closed_streams,
    report_failure,
)
from lockstep.core.topology import MEMORY_VARIABLE, STORE_VARIABLE, Topology, from_environment
from lockstep.core.user_code.search_path import search_working_directory_last
from lockstep.core.user_code.working_directory import keep_working_directory
from lockstep.launch.native_errors import write_natively_elsewhere
from lockstep.launch.supervise import INTERRUPTED
from lockstep.runs.checkpoint import CheckpointError, find_checkpoint
from lockstep.runs.directory import CHECKPOINTS, RunDirectory, is_writer
from lockstep.runs.session_facts import SessionFacts

LARGE_ROLLOUT = 1 << 17
"""Samples per iteration from which on XLA's arrays are large, and threads seldom wait for each other's ``malloc``."""


@dataclass(frozen=True)
class Assignment:
    """What a rank has to do.

    Attributes:
        config: resolved.
        path: the run's directory, which may not exist on a rank that doesn't write and starts anew.
        options: of the run.
        resume_from: ``latest`` or ``step_<n>`` in the run's checkpoints, or in ``states``; None: the run starts anew.
        states: another directory of states, which the launcher has in memory.
        memory: where states are kept for the launcher, if it restarts ranks.
        begun: by which file it learns that nothing is left on disk of what came after the state they began with.
        facts: about the session.
    """

    config: Config
    path: Path
    options: RunOptions
    resume_from: str | None = None
    states: Path | None = None
    memory: Path | None = None
    begun: Path | None = None
    facts: SessionFacts = field(default_factory=SessionFacts)

    def to_json(self) -> str:
        """Returns the assignment as JSON."""
        return TypeAdapter(Assignment).dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Assignment:
        """Parses what :meth:`to_json` returns."""
        return TypeAdapter(Assignment).validate_json(text)


def wants_one_heap(config: Config) -> bool:
    """Tells whether a run's XLA arrays are large and in the host's memory."""
    return config.engine == "jax" and config.device == "cpu" and config.steps_per_iteration >= LARGE_ROLLOUT


def run_rank(assignment: Assignment, topology: Topology) -> int:
    """Trains this rank's part and returns the exit code; reports any failure."""
    if topology.world_size == 1:  # else the launcher names the rank that ended
        enable_fault_handler()
    life.trains = False
    done = DoneFile.of_this_rank()
    try:
        config = assignment.config
        if config.engine == "jax":  # until the first iteration, because large programs are traced before it
            slow_down_gc()
        else:
            restore_gc()
        engine = engine_module(config.engine)
        path = assignment.path.absolute()  # environments may change the working directory
        run = RunDirectory(
            path,
            is_writer=is_writer(topology),
            quiet=assignment.options.quiet,
            memory=assignment.memory,
            begun=assignment.begun,
            facts=assignment.facts,
        )
        run.take_over()
        life.inherit(topology)
        for name in (MEMORY_VARIABLE, STORE_VARIABLE):
            os.environ.pop(name, None)  # not meant for processes that this one starts
        life.begin(Part.START)
        checkpoint = None
        if assignment.resume_from is not None:
            states = assignment.states or run.path / CHECKPOINTS
            with contextlib.nullcontext() if run.is_writer else contextlib.suppress(CheckpointError):
                checkpoint = find_checkpoint(states, assignment.resume_from, warn=run.is_writer)
        keep_freed_memory(one_heap=wants_one_heap(config))
        with no_silent_exit(), keep_working_directory():
            result = engine.train(config, run, topology, assignment.options, checkpoint)
        if "ale_py" in sys.modules:
            gc.unfreeze()
            gc.collect()  # environments are in reference cycles, and ale-py complains at exit of those that are left
    except PeerFailureError as error:
        report_failure(str(error), secondary=True)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        report_failure(INTERRUPTED)
        if assignment.config.engine == "jax":
            interrupted_at_once.set()
        return EXIT_INTERRUPTED
    except SystemExit:
        report_failure("an environment or a network called sys.exit before the run was done")
        return EXIT_FAILURE
    except Exception as error:
        return _failed(error, assignment.config.device, is_writer(topology))
    stopped = 0 if result.signal is None else 128 + result.signal
    done.tell(stopped or UNSTOPPED)
    return stopped if _says_signal(topology) else 0


def _says_signal(topology: Topology) -> bool:
    """Tells whether this rank's exit status should say that a signal stopped the run.

    Under torchrun with restarts, every rank says so: 0 would end the run, although only one host may have been told to
    leave, and the others start again. Without restarts, and under our own launcher, none does. If the launcher ends all
    ranks at the first such status, as srun and mpirun do, only the rank that writes says so.
    """
    if topology.restarts:
        return topology.starts_again
    return is_writer(topology) or not topology.ends_all


def _failed(error: Exception, device: str, writer: bool) -> int:
    """Reports the error being handled, in a line, or with its traceback if it is unforeseen; returns the exit code."""
    foreseen = isinstance(error, RunError | OSError) or _is_bad_input(error)
    line = one_line(error) if foreseen else memory_full(error, device) or device_failed(error)
    if line is None:
        report_failure("this is a bug in lockstep or in a custom part\n" + traceback.format_exc())
        return EXIT_FAILURE
    if os.environ.get("LOCKSTEP_TRACEBACK"):
        traceback.print_exc()
    report_failure(line, secondary=getattr(error, "everywhere", False) and not writer)
    return EXIT_USER_ERROR if _is_bad_input(error) and not isinstance(error, CheckpointError) else EXIT_FAILURE


def _is_bad_input(error: Exception) -> bool:
    """Tells whether an error refuses the user's input: any ``ValueError`` before training begins, then only ours."""
    ours = type(error).__module__.partition(".")[0] == "lockstep"
    return isinstance(error, ValueError) and (ours or not life.trains)


def main() -> int:
    """Runs a rank that ``lockstep train --nproc`` started, whose argument is a file with the assignment."""
    open_closed_streams()
    end_with_parent()
    fix_mkl_mode()
    search_working_directory_last()
    write_natively_elsewhere()
    topology = from_environment()
    name_process(f"lockstep rank {topology.rank}")
    return run_rank(Assignment.from_json(Path(sys.argv[1]).read_text(encoding="utf-8")), topology)


if __name__ == "__main__":
    leave_at_once(main())
