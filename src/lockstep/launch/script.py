"""``lockstep run``: anybody's script on several ranks of this machine, with torchrun's environment variables."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.commands.parser import CommandParser
from lockstep.core.process import end_with_parent
from lockstep.core.topology import from_environment
from lockstep.launch.spawn import RankServer
from lockstep.launch.supervise import Ranks, supervise

MODULE = "lockstep.launch.script"
THREADS = 1
LOOPBACK_INTERFACE = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo", "NCCL_SOCKET_IFNAME": "lo"}
STOPPED = "stopped by a signal"


@dataclass(frozen=True)
class Script:
    """A program as ``python`` takes it.

    Attributes:
        target: a file, or with ``is_module`` a module's dotted name.
        arguments: its own.
        is_module: whether it was given as ``-m MODULE``.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def words(self) -> list[str]:
        """What follows ``python``."""
        return [*(["-m"] if self.is_module else []), self.target, *self.arguments]

    def check(self) -> None:
        """See that there is such a program.

        Raises:
            ValueError: there is none; one line.
        """
        if self.is_module:
            top = self.target.partition(".")[0]
            if not top.isidentifier() or importlib.util.find_spec(top) is None:
                raise ValueError(f"module: {self.target!r} isn't importable from {os.getcwd()}; a file goes without -m")
        elif not Path(self.target).exists():
            raise ValueError(f"script: there is no file {self.target!r} in {os.getcwd()}; a module needs -m")


def add_script_arguments(parser: argparse.ArgumentParser) -> None:
    """Let a command take ``[-m] SCRIPT ARGS``, with or without ``--`` before."""
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name, as with python -m")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS", help="the program and its arguments")


def script_of(options: argparse.Namespace, command: str) -> Script:
    """The program that :func:`add_script_arguments` found.

    Raises:
        ValueError: none was given, or it doesn't exist; one line.
    """
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


def check_nproc(nproc: int) -> None:
    """See that ranks can be started here.

    Raises:
        ValueError: there are none to start, or a launcher started this process as one of its ranks; one line.
    """
    if nproc < 1:
        raise ValueError(f"nproc: {nproc} is below 1")
    topology = from_environment()
    if topology.launched:
        raise ValueError(
            f"nproc: {nproc}, but a launcher started this process as rank {topology.rank} of {topology.world_size}; "
            "let it start the script itself, or unset RANK and WORLD_SIZE"
        )


def start_script(words: Sequence[str], nproc: int, log_dir: Path) -> Ranks:
    """Start ``nproc`` ranks of ``python WORDS``, which meet on loopback and end with this process.

    Where PyTorch is installed, the store in which ranks meet lives in the process that starts them, as it does under
    torchrun: no rank has to listen, and the store outlives each of them.
    """
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(THREADS))}
    if nproc > 1:
        environment |= {name: os.environ.get(name, value) for name, value in LOOPBACK_INTERFACE.items()}
    server = RankServer(store=importlib.util.find_spec("torch") is not None)
    try:
        return server.start(nproc, log_dir, arguments=["-m", MODULE, *words], environment=environment)
    except BaseException:
        server.close()
        raise


def run_command(argv: Sequence[str]) -> int:
    """``lockstep run [--nproc N] [-m] SCRIPT ARGS``: exit status 0, 1 (a rank failed), 2 (bad input), 128 + signal."""
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


def main() -> None:
    """Become the script: ``python -m lockstep.launch.script WORDS``, in a rank."""
    end_with_parent()  # holds for the program that takes this process over, too
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


if __name__ == "__main__":
    main()
