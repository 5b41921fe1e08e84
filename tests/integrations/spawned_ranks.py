"""Rank processes of a module of the tests, as torchrun would start them, and what each of them said."""

import json
import socket
import subprocess
import sys
import uuid
from typing import Any

from command_line import MODULES, surroundings

TIMEOUT = 150


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def spawn_ranks(module: str, world_size: int, *words: str) -> list[dict[str, Any]]:
    """Run ``module.py WORDS`` as ranks that must end well; for each rank, by name, what it said in JSON lines."""
    common = surroundings(uuid.uuid4().hex) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    processes = []
    try:
        for rank in range(world_size):
            env = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, str(MODULES / f"{module}.py"), *words]
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            processes.append(subprocess.Popen(command, env=env, **pipes))
        outputs = [process.communicate(timeout=TIMEOUT) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * world_size, outputs
    return [_by_name(out) for out, _ in outputs]


def _by_name(output: str) -> dict[str, Any]:
    facts = [json.loads(line) for line in output.splitlines()]
    return {one.pop("what"): one for one in facts}
