"""Processes that a launcher started on a host with GPUs: they meet before JAX starts, and each takes its own."""

import subprocess
import sys

import pytest
from command_line import MODULES, TIMEOUT, Ended, Run, surroundings
from free_ports import free_port

pytestmark = pytest.mark.quick

WORDS = (
    *("lockstep/CartPole-v1", "--engine", "jax", "--device", "cuda", "--num-envs", "8", "--num-steps", "16"),
    *("--total-steps", "256", "--ppo.num-minibatches", "2", "--name", "run"),
)


def started(folder, rank, port):
    place = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": port}
    words = [sys.executable, str(MODULES / "cpu_plays_cuda.py"), "train", *WORDS]
    environment = surroundings("launched", place | {"MASTER_ADDR": "127.0.0.1"})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, cwd=folder, env=environment, **pipes)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The run of two launched processes, and what they printed."""
    folder = tmp_path_factory.mktemp("launched")
    port = str(free_port())
    processes = [started(folder, str(rank), port) for rank in range(2)]
    try:
        ended = [process.communicate(timeout=TIMEOUT) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], ended
    return Run(folder / "runs" / "run", Ended(0, "", "", "")), [out for out, _ in ended]


@pytest.mark.long
def test_launched_processes_join_before_jax_starts(launched):
    run, _ = launched
    assert (run.summary["status"], run.summary["processes"], run.summary["world_size"]) == ("finished", 2, 2)


def test_what_gloo_says_of_connections_is_not_shown(launched):
    _, printed = launched
    assert "Gloo" not in "".join(printed)


def test_each_takes_its_own_share_of_the_hosts_gpus(launched):
    _, printed = launched
    assert [[line for line in out.splitlines() if line.startswith("takes")] for out in printed] == [
        ["takes [0]"],
        ["takes [1]"],
    ]
