"""``lockstep doctor`` runs any PyTorch script, watches its ranks, and says whether they train one agent."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lockstep.commands.parser import CommandParser, add_script_arguments, from_home
from lockstep.commands.run import script_of
from lockstep.core.files import try_json, why_unwritten, write_json
from lockstep.core.process import flush_output, report_failure, say
from lockstep.core.topology import from_environment
from lockstep.doctor.examination import Examination, examine, examine_as_rank
from lockstep.doctor.judge.diagnosis import Diagnosis
from lockstep.doctor.judge.report import screen
from lockstep.launch.script import Script, check_nproc
from lockstep.runs.directory import is_writer

DEFAULT_RANKS = 2
WAIT_LIMIT = 20.0
EXIT_UNWRITTEN = 3
"""The exit status if there is a verdict and its file can't be written: none of a verdict's own."""


def main(argv: Sequence[str]) -> int:
    """Runs ``lockstep doctor ARGV``: exit status 0 IN SYNC, 1 NOT IN SYNC, 2 UNDETERMINED or bad input.

    It is 3 if the verdict was printed, but couldn't be written to the file of ``--json``.
    """
    options = _parser().parse_args(list(argv))
    script = script_of(options, "doctor")
    _check(options)
    directory = None if options.directory is None else Path(options.directory)
    wanted = Examination(script, directory, options.first, options.interval, options.time_limit, options.seconds)
    topology = from_environment()
    if options.json not in (None, "-") and is_writer(topology):
        _try_report_file(Path(options.json))
    if not topology.launched:
        nproc = DEFAULT_RANKS if options.nproc is None else options.nproc
        check_nproc(nproc)
        return _tell(options, script, examine(wanted, nproc))
    if options.nproc not in (None, topology.world_size):
        raise ValueError(f"nproc: {options.nproc}, but the launcher started {topology.world_size} ranks; leave it out")
    return examine_as_rank(wanted, topology, partial(_tell, options, script))


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
    parser.add_argument(
        "--json",
        type=from_home,
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the report as JSON; - or nothing prints it instead of the screen",
    )
    parser.add_argument(
        "--directory",
        type=from_home,
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
    if options.json not in (None, "-"):
        _check_report_file(Path(options.json))
    if options.directory is not None and not Path(options.directory).is_dir():
        raise ValueError(f"directory: there is no directory {options.directory}")


def _check_report_file(path: Path) -> None:
    """Raises a one-line ``ValueError`` if no report can be written there, or if it would overwrite something else."""
    if path.suffix != ".json":
        raise ValueError(f"json: {path} doesn't end in .json; give --json FILE.json, or -- before the script")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"json: there is no directory {path.absolute().parent}")
    if path.exists() and not _holds_report(path):
        raise ValueError(f"json: {path} exists and is no report of the doctor's; give another name, or remove it")


def _try_report_file(path: Path) -> None:
    """Raises a one-line ``ValueError`` if nothing can be written beside a report's file, which it will replace."""
    try:
        try_json(path.resolve(), {})
    except OSError as error:
        raise ValueError(f"json: {path} can't be written: {why_unwritten(error)}; give another directory") from None


def _holds_report(path: Path) -> bool:
    """Returns whether a file is empty, or holds what ``lockstep doctor --json FILE`` wrote."""
    try:
        text = path.read_text()
        return not text or {"verdict", "findings", "coverage"} <= dict(json.loads(text)).keys()
    except (OSError, ValueError, TypeError):
        return False


def _tell(options: argparse.Namespace, script: Script, diagnosis: Diagnosis) -> int:
    """Prints the report and then writes it; returns the exit status."""
    flush_output()
    if options.json == "-":
        say(json.dumps(diagnosis.to_json()), sys.stdout)
        return diagnosis.status
    say(screen(diagnosis, " ".join(script.words[:2] if script.is_module else script.words[:1])), sys.stdout)
    try:
        if options.json is not None:
            write_json(Path(options.json).resolve(), diagnosis.to_json())
    except OSError as error:
        report_failure(f"json: {options.json} can't be written: {why_unwritten(error)}")
        return EXIT_UNWRITTEN
    return diagnosis.status
