"""``lockstep run`` starts any script on several ranks, with torchrun's environment variables."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lockstep.commands.parser import CommandParser, add_script_arguments
from lockstep.launch.script import Script, check_nproc, start_script
from lockstep.launch.supervise import supervise

STOPPED = "stopped by a signal"


def main(argv: Sequence[str]) -> int:
    """Runs ``lockstep run [--nproc N] [-m] SCRIPT ARGS``: exit status 0, 1 (a rank failed) or 128 + signal."""
    parser = CommandParser(
        prog="lockstep run",
        description="Start several ranks of a script on this machine, as torchrun does: RANK, WORLD_SIZE, LOCAL_RANK, "
        "LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and OMP_NUM_THREADS (1, unless it is set) tell each its place. "
        "Signals go to all ranks; a rank that fails ends all.",
        allow_abbrev=False,
    )
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="number of ranks (default: 1)")
    add_script_arguments(parser)
    options = parser.parse_args(list(argv))
    script = script_of(options, "run")
    check_nproc(options.nproc)
    return supervise(lambda logs: start_script(script.words, options.nproc, logs), STOPPED, STOPPED)


def script_of(options: argparse.Namespace, command: str) -> Script:
    """Returns the script to run; raises a one-line ``ValueError`` if none is given or it doesn't exist."""
    words, is_module = list(options.script), options.module
    if words[:1] == ["--"]:
        words = words[1:]
        if words[:1] == ["-m"]:
            words, is_module = words[1:], True
    if not words:
        raise ValueError(f"no script given; lockstep {command} --nproc 2 script.py ARGS")
    script = Script(words[0], tuple(words[1:]), is_module)
    script.check()
    return script
