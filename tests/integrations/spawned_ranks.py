"""Rank processes of a module of the tests, as torchrun would start them, and what each of them said."""

import json
import subprocess
import sys
import uuid
from typing import Any

from command_line import MODULES, surroundings
from free_ports import free_port

TIMEOUT = 600


def run_script(words: list[str], world_size: int) -> list[str]:
    """Run ``python WORDS`` as ranks that must end well, or without a launcher where there is one; what each printed."""
    common = surroundings(uuid.uuid4().hex) | {"OMP_NUM_THREADS": "1"}
    if world_size > 1:
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        common |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    processes = []
    try:
        for rank in range(world_size):
            env = common | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if world_size > 1 else {})
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            processes.append(subprocess.Popen([sys.executable, *words], env=env, **pipes))
        outputs = [process.communicate(timeout=TIMEOUT) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * world_size, outputs
    return [out for out, _ in outputs]


def spawn_ranks(module: str, world_size: int, *words: str) -> list[dict[str, Any]]:
    """Run ``module.py WORDS`` as ranks; for each rank, by name, what it said in JSON lines."""
    return [_by_name(out) for out in run_script([str(MODULES / f"{module}.py"), *words], world_size)]


def _by_name(output: str) -> dict[str, Any]:
    facts = [json.loads(line) for line in output.splitlines()]
    return {one.pop("what"): one for one in facts}
