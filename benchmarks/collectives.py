"""Measures sums over shards between ranks of one host: in memory and over gloo, by one gather and by slices.

``python -m benchmarks.collectives --ranks 2,3,4,8 --repeats 9 [--out FILE]``: medians of the seconds that the slowest
rank takes for a sum of 8 shards, of all ways in turn, beside gloo's own all-reduce.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.commit import short_commit
from lockstep import __version__
from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.core import tree as core_tree
from lockstep.core.machine import cpu_model
from lockstep.core.shards import ShardPlan
from lockstep.core.topology import from_environment
from lockstep.torch_engine.distributed.communicator import Communicator
from lockstep.torch_engine.distributed.process_group import close_process_group
from lockstep.torch_engine.distributed.shared_memory import SharedSlots, open_shared_slots

ROOT = Path(__file__).parents[1]
SIZES = (2_500, 10_000, 65_536, 262_144, 1_000_000, 2_097_152, 10_000_000)
ROUTES = ("memory, gather", "memory, slices", "gloo, gather", "gloo, slices", "gloo's all-reduce")
SHARDS = 8
SECONDS = 0.15
"""Of each way and size in a turn, about."""


class Ways:
    """What one rank can do with the gradients of its shards."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        topology = from_environment()
        plan = ShardPlan(SHARDS, SHARDS, topology.world_size, topology.rank)
        config = resolve(Config(num_envs=SHARDS, num_steps=16, collectives="backend"), topology.world_size)
        self.rank, self.shards = topology.rank, plan.local_num_shards
        self.backend = Communicator(topology, plan, torch.device("cpu"))
        self.backend.join(config)
        self.memory = Communicator(topology, plan, torch.device("cpu"))
        slots = open_shared_slots(topology.rank, topology.world_size, self.backend.gather_json, 600.0)
        assert isinstance(slots, SharedSlots), slots
        self.memory.slots = slots

    def way(self, route: str, size: int) -> Callable[[], object]:
        """A call of one way with a vector of ``size`` floats a node: every rank's own shards are added beforehand."""
        if route == "gloo's all-reduce":
            x = torch.ones(size)
            return lambda: dist.all_reduce(x)
        core_tree.SLICED_BYTES = 1 if route.endswith("slices") else 1 << 60
        communicator = self.memory if route.startswith("memory") else self.backend
        assert communicator.plan is not None
        tree = communicator.plan.tree
        nodes = torch.ones((tree.counts[self.rank], size))
        return lambda: communicator._sum(nodes, tree, reused=True)

    def seconds(self, route: str, size: int) -> float:
        """Seconds of one call, of the slowest rank."""
        call = self.way(route, size)
        call()
        started = time.perf_counter()
        call()
        once = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
        dist.all_reduce(once, dist.ReduceOp.MAX)
        count = max(1, min(1000, int(SECONDS / once.item())))
        started = time.perf_counter()
        for _ in range(count):
            call()
        spent = torch.tensor([(time.perf_counter() - started) / count], dtype=torch.float64)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        return spent.item()


def worker(repeats: int, sizes: list[int]) -> None:
    """Measures every way in turn; rank 0 prints the median seconds."""
    ways = Ways()
    routes = [r for r in ROUTES if ways.backend.topology.world_size >= 3 or not r.endswith("slices")]
    for size in sizes:
        taken: dict[str, list[float]] = {route: [] for route in routes}
        for _ in range(repeats):
            for route, found in taken.items():
                found.append(ways.seconds(route, size))
        if ways.rank == 0:
            print(json.dumps({"size": size} | {r: statistics.median(x) for r, x in taken.items()}), flush=True)
    ways.backend.close()
    close_process_group()


def measure(ranks: int, repeats: int, sizes: list[int]) -> list[dict[str, float]]:
    """Starts so many ranks; the rows that they found."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": str(port), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.collectives", "--worker", "--repeats", str(repeats)]
    command += ["--sizes", ",".join(map(str, sizes))]
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **place, "RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for r in range(ranks)
    ]
    out = [process.communicate()[0] for process in processes]
    return [json.loads(line) for line in out[0].splitlines()]


def report(found: dict[int, list[dict[str, float]]], repeats: int, commit: str) -> str:
    """The table as Markdown, in microseconds."""
    lines = [
        "# Sums over shards between ranks of one host",
        "",
        f"{datetime.date.today()}, Lockstep {__version__} ({commit}), PyTorch {torch.__version__}, {cpu_model()}, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}. Microseconds of one sum of {SHARDS} shards, of "
        f"the slowest rank; medians of {repeats} turns over all ways. `python -m benchmarks.collectives`.",
        "",
        "| ranks | floats | " + " | ".join(ROUTES) + " |",
        "|---" * (2 + len(ROUTES)) + "|",
    ]
    for ranks, rows in found.items():
        for row in rows:
            cells = [f"{1e6 * row[r]:,.0f}" if r in row else "" for r in ROUTES]
            lines.append(f"| {ranks} | {row['size']:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures as the command line says, and prints or writes the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", default="2,3,4,8")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    if options.worker:
        worker(options.repeats, sizes)
        return
    found = {int(n): measure(int(n), options.repeats, sizes) for n in options.ranks.split(",")}
    text = report(found, options.repeats, short_commit())
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
