"""Starting ranks on this machine with PyTorch's elastic launcher, used as a library."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SubprocessContext, start_processes

from lockstep.core.topology import LAUNCHER_VARIABLE


class ElasticRanks:
    """The rank processes of one run, and the store where they meet: on loopback, on a port that the kernel chose.

    Args:
        arguments: of ``python``, the same for every rank.
        nproc: number of ranks.
        threads: CPU threads per rank.
        log_dir: where failing ranks leave their messages.
    """

    def __init__(self, arguments: Sequence[str], nproc: int, threads: int, log_dir: Path) -> None:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        self._store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        common = {
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "lockstep",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            LAUNCHER_VARIABLE: "1",
        }
        context = start_processes(
            name="lockstep",
            entrypoint=sys.executable,
            args={rank: tuple(arguments) for rank in range(nproc)},
            envs={rank: common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(nproc)},
            logs_specs=DefaultLogsSpecs(log_dir=str(log_dir)),
        )
        assert isinstance(context, SubprocessContext)
        self._context = context

    def exit_codes(self) -> dict[int, int | None]:
        """Exit code of each rank, None while it runs, ``-n`` if signal ``n`` killed it."""
        return {rank: handler.proc.poll() for rank, handler in self._context.subprocess_handlers.items()}

    def message_file(self, rank: int) -> str:
        """Where a failing rank leaves its message."""
        return self._context.error_files[rank]

    def send(self, number: int) -> None:
        """Send a signal to every rank that runs."""
        for handler in self._context.subprocess_handlers.values():
            if handler.proc.poll() is None:
                handler.proc.send_signal(number)

    def kill(self) -> None:
        """End every rank, and whatever it started, at once."""
        self._context.close(signal.SIGKILL, timeout=5)


def start_ranks(arguments: Sequence[str], nproc: int, threads: int, log_dir: Path) -> ElasticRanks:
    """Start ``nproc`` ranks of ``python ARGUMENTS``; see :class:`ElasticRanks`."""
    return ElasticRanks(arguments, nproc, threads, log_dir)
