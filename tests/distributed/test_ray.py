"""Ranks on a Ray cluster of two nodes, which are two sets of Ray's processes on this machine."""

import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import (
    CARTPOLE,
    GATED,
    NEEDS_PROC,
    Run,
    assert_no_orphans,
    ending,
    error_line,
    lockstep,
    marked,
    metrics_of,
    ranks_of,
    run_words,
    running,
    same,
    surroundings,
    wait_until,
)

pytest.importorskip("ray")
pytestmark = [NEEDS_PROC, pytest.mark.xdist_group("ray")]
OTHER = "127.0.0.2"
NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}


@pytest.fixture(scope="module")
def cluster() -> Iterator[SimpleNamespace]:
    """Two nodes with two CPUs each; ranks on the second have the environment of ``gate``, and of ``mark``."""
    from ray.cluster_utils import Cluster

    directory, mark, before = Path(tempfile.mkdtemp(prefix="ray-")), uuid.uuid4().hex, dict(os.environ)
    os.environ.update(surroundings(mark, {"RAY_TMPDIR": str(directory), "RAY_USAGE_STATS_ENABLED": "0"}))
    os.environ["GATE"] = str(directory / "gate")
    made = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        second = made.add_node(**NODE, node_ip_address=OTHER)
        found = SimpleNamespace(made=made, address=made.address, second=second, mark=mark, gate=directory / "gate")
        found.variables = {"RAY_ADDRESS": made.address, "RAY_TMPDIR": str(directory), "GATE": str(found.gate)}
        yield found
    finally:
        made.shutdown()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(directory, ignore_errors=True)


def actors(cluster) -> list[int]:
    """Processes of actors that hold ranks."""
    return [pid for pid in marked(cluster.mark) if b"RankActor" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def lose(cluster) -> None:
    """Kills the second node: its raylet, and what that has started; returns once its ranks are dead."""
    raylet = cluster.second.all_processes["raylet"][0].process.pid
    children = [pid for pid in marked(cluster.mark) if f"PPid:\t{raylet}\n" in Path(f"/proc/{pid}/status").read_text()]
    for pid in (raylet, *children):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(ranks_of(cluster.mark, rank) for rank in range(4)), "ranks outlive their node")


def nothing_left(cluster, ended) -> None:
    assert_no_orphans(ended)
    wait_until(lambda: not actors(cluster), "actors are left")
    assert [rank for rank in range(4) if ranks_of(cluster.mark, rank)] == []


@pytest.mark.long
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_ranks_on_two_nodes_give_the_agent_of_one_rank(cluster, trained, tmp_path, engine):
    words = (*CARTPOLE, "--engine", "jax") if engine == "jax" else CARTPOLE
    asked = ("--launcher", "ray", "--nproc", 4, "--collectives", "backend", "--name", "run")
    ended = lockstep("train", *words, *asked, cwd=tmp_path, **cluster.variables)
    assert ended.code == 0, ended.stderr
    assert "RankActor" not in ended.stdout + ended.stderr
    run = Run(tmp_path / "runs" / "run", ended)
    assert (run.summary["world_size"], run.summary["collectives"]) == (4, {"torch": "gloo", "jax": "xla"}[engine])
    same(trained(*words), run)
    nothing_left(cluster, ended)


GROUPS = """
import ray
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
from ray.util.placement_group import placement_group_table
print(sorted(group["state"] for group in placement_group_table().values()))
"""


@pytest.mark.long
def test_a_stopped_run_goes_on_on_two_nodes(cluster, trained, tmp_path):
    path = tmp_path / "runs" / "run"
    cluster.gate.touch()
    words = ("train", *GATED, "--launcher", "ray", "--nproc", 3, "--quiet")
    with running(*words, "--name", "run", cwd=tmp_path, **cluster.variables) as (process, mark):
        wait_until(lambda: len(metrics_of(path)) >= 4, "the gate isn't reached")
        assert actors(cluster)
        process.send_signal(signal.SIGTERM)
        cluster.gate.unlink()
        ended = ending(process, mark)
    assert ended.code == 143, ended.stderr
    assert ended.stderr.splitlines() == ["lockstep: stopped by a signal, with a checkpoint"]
    nothing_left(cluster, ended)
    again = lockstep("train", "--resume", path, "--launcher", "ray", "--nproc", 4, cwd=tmp_path, **cluster.variables)
    assert again.code == 0, again.stderr
    same(trained(*CARTPOLE), Run(path, again))


@pytest.mark.long
def test_nothing_is_left_of_a_run_whose_launcher_is_killed(cluster, tmp_path):
    path = tmp_path / "runs" / "run"
    cluster.gate.touch()
    words = ("train", *GATED, "--launcher", "ray", "--nproc", 4, "--name", "run", "--quiet")
    with running(*words, cwd=tmp_path, **cluster.variables) as (process, mark):
        wait_until(lambda: len(metrics_of(path)) >= 4, "the gate isn't reached")
        assert len(actors(cluster)) == 4
        process.send_signal(signal.SIGKILL)
        ended = ending(process, mark)
        nothing_left(cluster, ended)
    cluster.gate.unlink()
    told = run_words([sys.executable, "-c", GROUPS], cwd=tmp_path, **cluster.variables)
    assert "REMOVED" in told.stdout
    assert "CREATED" not in told.stdout


@pytest.mark.long
def test_a_cluster_of_its_own_ends_with_the_run(trained, tmp_path):
    words = ("--launcher", "ray", "--nproc", 1, "--name", "run")
    ended = lockstep("train", *CARTPOLE, *words, cwd=tmp_path, RAY_ADDRESS="local")
    assert ended.code == 0, ended.stderr
    same(trained(*CARTPOLE), Run(tmp_path / "runs" / "run", ended))
    assert_no_orphans(ended)


def test_what_the_cluster_hasnt_is_one_line(cluster, tmp_path):
    def told(*words, **more):
        return error_line(lockstep("train", *CARTPOLE, "--launcher", "ray", *words, cwd=tmp_path, **more))

    assert told("--nproc", 6, **cluster.variables) == (
        "lockstep: error: nproc: 6 ranks need 6 CPUs, and the Ray cluster has 4; use --nproc 4, or add nodes"
    )
    assert "which has 0 of Ray's GPUs" in told("--device", "cuda", **cluster.variables)
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_a_lost_node_is_answered_by_fewer_ranks(cluster, trained, tmp_path):
    path = tmp_path / "runs" / "run"
    cluster.gate.touch()
    words = ("train", *GATED, "--launcher", "ray", "--nproc", "1:4", "--name", "run", "--max-restarts", 5, "--quiet")
    with running(*words, cwd=tmp_path, **cluster.variables) as (process, mark):
        wait_until(lambda: len(metrics_of(path)) >= 4, "the gate isn't reached")
        assert [len(ranks_of(mark, rank)) for rank in range(4)] == [1, 1, 0, 0]
        assert [len(ranks_of(cluster.mark, rank)) for rank in range(4)] == [0, 0, 1, 1]
        lose(cluster)
        cluster.gate.unlink()
        ended = ending(process, mark)
    assert ended.code == 0, ended.stderr
    run = Run(path, ended)
    same(trained(*CARTPOLE), run)
    (row,) = run.summary["restarts"]
    assert row["why"] in [f"rank {rank} was lost with its Ray node {OTHER}" for rank in (2, 3)]
    assert (row["ranks_before"], row["ranks_after"]) == (4, 2)
    nothing_left(cluster, ended)
