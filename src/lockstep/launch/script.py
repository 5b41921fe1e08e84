"""Starts a user's script on several ranks of this machine, with torchrun's environment variables."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.core.process import end_with_parent
from lockstep.core.rank_variables import LOOPBACK_INTERFACES
from lockstep.core.topology import from_environment
from lockstep.launch.serving.channel import PORT, STORE
from lockstep.launch.spawn import RankServer, threads_of
from lockstep.launch.supervise import RestartableRanks

MODULE = "lockstep.launch.script"
THREADS = 1


@dataclass(frozen=True)
class Script:
    """A program for ``python`` to run: a file, or with ``is_module`` a module's dotted name, and its arguments."""

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def words(self) -> list[str]:
        """The words after ``python``."""
        return [*(["-m"] if self.is_module else []), self.target, *self.arguments]

    def check(self) -> None:
        """Raises a one-line ``ValueError`` if there is no such program."""
        if self.is_module:
            top = self.target.partition(".")[0]
            if not top.isidentifier() or importlib.util.find_spec(top) is None:
                raise ValueError(f"module: {self.target!r} isn't importable from {os.getcwd()}; a file goes without -m")
        elif not Path(self.target).exists():
            raise ValueError(f"script: there is no file {self.target!r} in {os.getcwd()}; a module needs -m")


def check_nproc(nproc: int) -> None:
    """Raises a one-line ``ValueError`` if there are no ranks to start, or this process is one of a launcher's."""
    if nproc < 1:
        raise ValueError(f"nproc: {nproc} is below 1")
    topology = from_environment()
    if topology.launched:
        raise ValueError(
            f"nproc: {nproc}, but a launcher started this process as rank {topology.rank} of {topology.world_size}; "
            "let it start the script itself, or unset the variables by which it says so (RANK, WORLD_SIZE, …)"
        )


def start_script(words: Sequence[str], nproc: int, log_dir: Path) -> RestartableRanks:
    """Starts ``nproc`` ranks of ``python WORDS``, which meet on loopback and end with this process.

    If PyTorch is installed, the store in which ranks meet is in the process that starts them, as under torchrun: no
    rank has to listen, and the store outlives each of them.
    """
    environment = threads_of(THREADS)
    if nproc > 1:
        environment |= {name: os.environ.get(name, value) for name, value in LOOPBACK_INTERFACES.items()}
    meeting = PORT if importlib.util.find_spec("torch") is None else STORE
    server = RankServer(meeting=meeting, stdin=None)
    try:
        return server.start(nproc, log_dir, arguments=["-m", MODULE, *words], environment=environment)
    except BaseException:
        server.close()
        raise


def main() -> None:
    """Replaces this process by ``python WORDS``, in a rank: ``python -m lockstep.launch.script WORDS``."""
    end_with_parent()  # also applies to the program that replaces this process
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


if __name__ == "__main__":
    main()
