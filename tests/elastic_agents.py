"""Agents of torchrun that come and leave, for tests: one a host, or several on this one."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from command_line import TIMEOUT, marked, surroundings, wait_until
from free_ports import free_port

from benchmarks.network_hosts import Host

NUMBER = "LOCKSTEP_TEST_AGENT"
ROWS = 2
"""Rows that a number of ranks must have logged to count as training."""
SOON = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
"""What torchrun waits for hosts that may come yet, and until one that is silent counts as lost: 30 s and 15 s else."""


class Agents:
    """The agents of one run, by number; the first holds the store in which they meet, and must stay.

    Args:
        run: the run directory, whose parent's parent they work in.
        mark: that their processes carry, see ``command_line``.
        most: agents at most.
        hosts: where each of them runs; None: all on this one.
        ranks: of each.
        own_store: whether they meet in a process that is none of them, so that the first may leave too.
        variables: more of the environment.
    """

    def __init__(
        self,
        run: Path,
        mark: str,
        most: int,
        hosts: list[Host] | None = None,
        ranks: int = 1,
        own_store: bool = False,
        **variables: str,
    ) -> None:
        self._run, self.mark, self._most, self._hosts, self._ranks = run, mark, most, hosts, ranks
        self._address = "127.0.0.1" if hosts is None else hosts[0].address
        self._port = free_port()
        self._variables = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **variables}
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._store: subprocess.Popen[bytes] | None = None
        if own_store:
            store = f"TCPStore({self._address!r}, {self._port}, is_master=True, wait_for_workers=False)"
            lines = f"import signal; from torch.distributed import TCPStore; store = {store}; signal.pause()"
            self._store = subprocess.Popen([sys.executable, "-c", lines])

    def start(self, number: int, *words: Any) -> None:
        """Start an agent of ``lockstep WORDS``."""
        own = self._address if self._hosts is None else self._hosts[number].address
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{self._most}"]
        torchrun += ["--nproc-per-node", str(self._ranks), "--max-restarts", "100", "--monitor-interval", "0.1"]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-id", "run", "--local-addr", own]
        torchrun += ["--rdzv-endpoint", f"{self._address}:{self._port}"]
        torchrun += ["--rdzv-conf", f"is_host={int(number == 0 and self._store is None)},{SOON}"]
        command = [*torchrun, "-m", "lockstep", *map(str, words)]
        if self._hosts is not None:
            command = self._hosts[number].command(*command)
        variables = surroundings(self.mark, {NUMBER: str(number), **self._variables})
        with (self._directory / f"agent_{number}.txt").open("ab") as said:
            process = subprocess.Popen(command, cwd=self._directory, env=variables, stdout=said, stderr=said)
        self._agents[number] = process

    def kill(self, number: int, only_agent: bool = False) -> None:
        """Kill an agent, and with it its ranks at the same moment."""
        process = self._agents.pop(number)
        process.kill()
        if not only_agent:
            self._send(signal.SIGKILL, f"{NUMBER}={number}")
        process.wait()

    def terminate(self, number: int) -> int:
        """Ask an agent to end, as before its host goes away; returns its exit code."""
        process = self._agents.pop(number)
        process.terminate()
        return process.wait(TIMEOUT)

    def reach(self, world_size: int) -> None:
        """Wait until so many ranks train."""
        wait_until(lambda: self._worlds()[-ROWS:] == [world_size] * ROWS, f"{world_size} ranks don't train")
        assert not (self._run / "summary.json").exists(), "the run was over before the test was"

    def end(self) -> list[int]:
        """Exit codes, once all agents have ended."""
        return [process.wait(TIMEOUT) for _, process in sorted(self._agents.items())]

    def close(self) -> None:
        """Kill whatever is left."""
        self._send(signal.SIGKILL)
        if self._store is not None:
            self._store.kill()
            self._store.wait()

    def said(self) -> str:
        """The last that each agent and its ranks said."""
        files = sorted(self._directory.glob("agent_*.txt"))
        return "\n".join(f"{file.name}: {file.read_text(errors='replace')[-2000:]}" for file in files)

    def _worlds(self) -> list[int]:
        file = self._run / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line)["time/world_size"] for line in lines[-ROWS:] if line.endswith("\n")]

    def _send(self, number: signal.Signals, *variables: str) -> None:
        for pid in marked(self.mark, *variables):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    @property
    def _directory(self) -> Path:
        return self._run.parent.parent
