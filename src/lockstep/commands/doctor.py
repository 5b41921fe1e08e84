"""``lockstep doctor``: run anybody's PyTorch script, watch its ranks, say whether they are one agent."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lockstep.commands.parser import CommandParser
from lockstep.core.topology import Topology, from_environment
from lockstep.doctor.judge.diagnosis import Diagnosis, diagnose
from lockstep.doctor.judge.report import screen
from lockstep.doctor.judge.traces import read_traces
from lockstep.doctor.supervisor import OneRank, Outcome, Supervisor, await_leaving, await_verdict
from lockstep.doctor.watch.side_store import VERDICT, write_json
from lockstep.doctor.watch.watched import MODULE, Assignment
from lockstep.launch.script import Script, add_script_arguments, check_nproc, script_of, start_script
from lockstep.launch.supervise import Ranks
from lockstep.runs.directory import is_writer

DEFAULT_RANKS = 2
WAIT_LIMIT = 20.0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="lockstep doctor",
        description="Run a PyTorch training script and say whether its ranks are one agent: IN SYNC (exit status 0), "
        "NOT IN SYNC (1) or UNDETERMINED (2), with cause and fix. Under torchrun: torchrun … -m lockstep doctor -- "
        "script.py ARGS.",
        allow_abbrev=False,
    )
    parser.add_argument("--nproc", type=int, metavar="N", help=f"number of ranks (default: {DEFAULT_RANKS})")
    parser.add_argument(
        "--first", type=int, default=10, metavar="K", help="compare after each of the first K steps (default: 10)"
    )
    parser.add_argument(
        "--interval", type=int, default=100, metavar="M", help="and after every M-th; rarer in long runs (default: 100)"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=WAIT_LIMIT,
        metavar="SECONDS",
        help=f"end ranks that only wait for others after so long (default: {WAIT_LIMIT:g})",
    )
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="end the script after S seconds and judge what was seen"
    )
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; - prints it instead of the screen")
    parser.add_argument(
        "--directory",
        metavar="DIR",
        help="where ranks leave what is compared; ranks on several hosts need one they share",
    )
    add_script_arguments(parser)
    return parser


def _check(options: argparse.Namespace) -> None:
    for name in ("first", "interval"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name}: {getattr(options, name)} is below 1")
    for name in ("time_limit", "seconds"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name.replace('_', '-')}: {value:g} is not above 0")
    if options.json not in (None, "-") and not Path(options.json).absolute().parent.is_dir():
        raise ValueError(f"json: there is no directory {Path(options.json).absolute().parent}")
    if options.directory is not None and not Path(options.directory).is_dir():
        raise ValueError(f"directory: there is no directory {options.directory}")


def doctor_command(argv: Sequence[str]) -> int:
    """``lockstep doctor [options] -- SCRIPT ARGS``: exit status 0 IN SYNC, 1 NOT IN SYNC, 2 UNDETERMINED or bad input.

    Raises:
        ValueError: bad options; one line, before any process starts.
    """
    options = _parser().parse_args(list(argv))
    script = script_of(options, "doctor")
    _check(options)
    topology = from_environment()
    if topology.launched:
        return _one_of_many(options, script, topology)
    nproc = DEFAULT_RANKS if options.nproc is None else options.nproc
    check_nproc(nproc)
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-", dir=options.directory) as directory:
        store, logs = Path(directory, "store"), Path(directory, "logs")
        logs.mkdir()
        arguments = ["-m", MODULE, _assignment(options, store), *script.words]
        ranks = start_script(arguments, nproc, logs)
        outcome = _supervisor(options, ranks, store, nproc, judges=True).wait()
        return _tell(options, script, _diagnosis(store, nproc, outcome))


def _assignment(options: argparse.Namespace, store: Path) -> str:
    return Assignment(str(store), options.first, options.interval).to_json()


def _supervisor(options: argparse.Namespace, ranks: Ranks, store: Path, world_size: int, *, judges: bool) -> Supervisor:
    limits = {"wait_limit": options.time_limit, "run_limit": options.seconds}
    return Supervisor(ranks, store, world_size, judges=judges, **limits)


def _diagnosis(store: Path, world_size: int, outcome: Outcome) -> Diagnosis:
    traces = read_traces(store, range(world_size))
    return diagnose(traces, deadlock=outcome.deadlock, interrupted=outcome.interrupted)


def _tell(options: argparse.Namespace, script: Script, diagnosis: Diagnosis) -> int:
    """Print and write the report; returns the exit status."""
    sys.stderr.flush()
    if options.json == "-":
        print(json.dumps(diagnosis.to_json()), flush=True)
        return diagnosis.status
    if options.json is not None:
        Path(options.json).write_text(json.dumps(diagnosis.to_json(), indent=2) + "\n")
    print(screen(diagnosis, " ".join(script.words[:2] if script.is_module else script.words[:1])), flush=True)
    return diagnosis.status


# --- under another launcher ---------------------------------------------------------------------------------------


def _one_of_many(options: argparse.Namespace, script: Script, topology: Topology) -> int:
    """This rank's part, where every rank is a process of another launcher; rank 0's judges."""
    if options.nproc not in (None, topology.world_size):
        raise ValueError(f"nproc: {options.nproc}, but the launcher started {topology.world_size} ranks; leave it out")
    if options.directory is None and not topology.on_one_host:
        raise ValueError(
            f"directory: {topology.world_size} ranks are on several hosts; give --directory DIR on a file system that "
            "all of them share"
        )
    store = _common_store(options, topology)
    command = [sys.executable, "-m", MODULE, _assignment(options, store), *script.words]
    judges = is_writer(topology)
    ranks = OneRank(command, topology.rank)
    outcome = _supervisor(options, ranks, store, topology.world_size, judges=judges).wait()
    if not judges:
        return await_verdict(store, topology.rank)
    diagnosis = _diagnosis(store, topology.world_size, outcome)
    status = _tell(options, script, diagnosis)
    write_json(store / VERDICT, {"status": status})
    await_leaving(store, range(1, topology.world_size))
    shutil.rmtree(store, ignore_errors=True)
    return status


def _common_store(options: argparse.Namespace, topology: Topology) -> Path:
    """A directory that every rank of this run finds by itself, and no other run does."""
    run = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_STEP_ID")]
    run += [topology.master]
    if topology.on_one_host:
        run += [str(os.getppid()), _start_of(os.getppid())]
    name = hashlib.blake2b("|".join(run).encode(), digest_size=8).hexdigest()
    store = Path(options.directory or tempfile.gettempdir(), f"lockstep-doctor-{os.getuid()}-{name}")
    store.mkdir(mode=0o700, parents=True, exist_ok=True)
    if store.is_symlink() or store.stat().st_uid != os.getuid():
        raise ValueError(f"directory: {store} belongs to somebody else; give another --directory DIR")
    return store


def _start_of(pid: int) -> str:
    """When a process started, where the system says so: ids are used again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
