"""Two hosts, as two network namespaces of this machine joined by a virtual switch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import wait_until
from network_hosts import joined_hosts

from benchmarks.network_hosts import Host

ARGUMENTS = [
    "-m",
    "lockstep",
    "train",
    "CartPole-v1",
    "--num-steps",
    "16",
    "--total-steps",
    "1024",
    "--ppo.num-epochs",
    "2",
]


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with joined_hosts(2) as joined:
        yield joined


def _start(hosts: list[Host], number: int, directory: Path, *more: str, here: int = 1) -> subprocess.Popen[str]:
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number)]
    torchrun += ["--nproc-per-node", str(here)]
    torchrun += ["--master-addr", hosts[0].address, "--master-port", "29477"]
    return subprocess.Popen(
        hosts[number].command(sys.executable, *torchrun, *ARGUMENTS, *more, "--name", "two"),
        cwd=directory,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _summary(directory: Path, name: str) -> dict:
    return json.loads((directory / "runs" / name / "summary.json").read_text())


UNEVEN = ("--num-envs", "12", "--num-shards", "4", "--network.hidden-sizes", "512", "512")
"""On a host with two ranks and one with one: 2, 1 and 1 shards, of more parameters than a gather would bring."""
CASES = {
    "torch": (("--engine", "torch"), (1, 1), "gather"),
    "torch, uneven": (("--engine", "torch", *UNEVEN), (2, 1), "slices"),
    "jax": (("--engine", "jax", "--devices", "1"), (1, 1), "gather"),
    "jax, uneven": (("--engine", "jax", "--devices", "1", "--num-envs", "12", "--num-shards", "3"), (1, 1), "gather"),
}


@pytest.mark.parametrize(
    "case", ["torch", *(pytest.param(case, marks=pytest.mark.long) for case in list(CASES)[1:])], ids=str
)
def test_ranks_of_two_hosts_give_the_same_agent(hosts: list[Host], tmp_path: Path, case: str) -> None:
    words, ranks, sums = CASES[case]
    processes = [_start(hosts, n, tmp_path, *words, here=ranks[n]) for n in range(2)]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    subprocess.run(
        [sys.executable, *ARGUMENTS, *words, "--name", "one", "--quiet"], cwd=tmp_path, check=True, timeout=600
    )
    two, one = _summary(tmp_path, "two"), _summary(tmp_path, "one")
    assert (two["world_size"], one["world_size"]) == (sum(ranks), 1)
    assert (two["collectives"], two["sums"]) == ({"torch": "gloo", "jax": "xla"}[words[1]], sums)
    assert two["state_sha256"] == one["state_sha256"]


SLOW = "20mbit"


@pytest.mark.long
@pytest.mark.parametrize("case", ["torch, uneven", "jax"])
def test_a_slow_cable_changes_the_clock_and_nothing_else(hosts: list[Host], tmp_path: Path, case: str) -> None:
    for host in hosts:
        host.slow_down(SLOW)
    test_ranks_of_two_hosts_give_the_same_agent(hosts, tmp_path, case)


LIMIT = 15
"""Seconds without progress: more than anything takes here on a busy machine, also to compile."""


@pytest.mark.long
@pytest.mark.parametrize("words", [("--engine", "torch"), ("--engine", "jax", "--devices", "1")], ids=lambda w: w[1])
def test_a_cable_that_is_cut_ends_both_hosts_in_time_and_in_words(
    hosts: list[Host], tmp_path: Path, words: tuple[str, ...]
) -> None:
    words = (*words, "--total-steps", "100000000", "--collective-timeout", str(LIMIT), "--name", "cut")
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    place |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29478"}
    processes = [
        subprocess.Popen(
            host.command(sys.executable, *ARGUMENTS, *words),
            cwd=tmp_path,
            env=os.environ | place | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(hosts)
    ]
    metrics = tmp_path / "runs" / "cut" / "metrics.jsonl"
    try:
        wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n") > 3, "nothing is logged")
        hosts[1].cut()
        cut = time.monotonic()
        said = [process.communicate(timeout=600)[1] for process in processes]
        seconds = time.monotonic() - cut
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [1, 1], said
    for rank, errors in enumerate(said):
        (line,) = [line for line in errors.splitlines() if line.startswith("lockstep: error: ")]
        assert line.startswith(
            f"lockstep: error: rank {rank} lost its peers: nobody has made progress for {LIMIT} s"
        ), line
        assert f"rank {1 - rank} was last heard of" in line
    assert seconds > LIMIT * 0.9
    assert not (tmp_path / "runs" / "cut" / ".lock").exists()


@pytest.mark.long
def test_two_hosts_that_are_told_to_share_memory_say_that_they_cannot(hosts: list[Host], tmp_path: Path) -> None:
    processes = [_start(hosts, number, tmp_path, "--collectives", "shared") for number in range(2)]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode for process in processes), outputs
    said = [line for output in outputs for line in output.splitlines() if line.startswith("lockstep: error: ")]
    (line,) = said
    assert line.startswith("lockstep: error: collectives: shared can't be had: ranks run on several hosts")
