"""Limits of control groups of either version, in files as the kernel writes them."""

import os

import pytest

from lockstep.core import topology
from lockstep.core.host import cgroups
from lockstep.core.host.cgroups import cpu_limit, memory_left, memory_limit
from lockstep.core.topology import available_cores


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """Writes files of control groups, by their paths, and the groups that this process is in."""
    monkeypatch.setattr(cgroups, "ROOT", tmp_path / "root")
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "own")

    def write(own, files):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


def test_without_groups_there_is_no_limit(groups):
    assert (cpu_limit(), memory_left()) == (None, None)  # nobody tells in which they are
    groups("0::/\n", {"cpu.max": "max 100000\n", "memory.max": "max\n"})
    assert (cpu_limit(), memory_left(), memory_limit()) == (None, None, None)
    files = {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}
    groups("3:cpu,cpuacct:/\n0::/\n", files)
    assert cpu_limit() is None


@pytest.mark.parametrize(("quota", "cores"), [("200000", 2), ("150000", 2), ("10000", 1), ("6400000", 64)])
def test_a_part_of_a_core_counts_as_one(groups, quota, cores):
    groups("0::/\n", {"cpu.max": f"{quota} 100000\n"})
    assert cpu_limit() == cores


def test_the_groups_above_count_too(groups):
    files = {
        "system.slice/cpu.max": "300000 100000\n",
        "system.slice/memory.max": "5000\n",
        "system.slice/memory.current": "1000\n",
        "system.slice/job_7/cpu.max": "max 100000\n",
        "system.slice/job_7/step_0/cpu.max": "800000 100000\n",
        "system.slice/job_7/step_0/memory.max": "9000\n",
        "system.slice/job_7/step_0/memory.current": "600\n",
    }
    groups("0::/system.slice/job_7/step_0\n", files)
    assert (cpu_limit(), memory_left(), memory_limit()) == (3, 4000, 5000)
    groups("0::/system.slice/job_7/step_0\n", {"system.slice/memory.max": "20000\n"})
    assert (memory_left(), memory_limit()) == (8400, 9000)


def test_groups_of_version_1(groups):
    files = {
        "cpu/slurm/job_7/cpu.cfs_quota_us": "400000\n",
        "cpu/slurm/job_7/cpu.cfs_period_us": "100000\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/slurm/job_7/memory.limit_in_bytes": "8000\n",
        "memory/slurm/job_7/memory.usage_in_bytes": "5000\n",
        "memory/slurm/job_7/memory.stat": "inactive_file 1\ntotal_inactive_file 2000\n",
        "memory/slurm/other/memory.limit_in_bytes": "10\n",
    }
    groups("5:memory:/slurm/job_7/step_0\n4:cpuacct,cpu:/slurm/job_7\n1:name=systemd:/\n", files)
    assert (cpu_limit(), memory_left(), memory_limit()) == (4, 5000, 8000)


def test_a_container_sees_its_own_group_alone(groups):
    files = {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000", "memory/memory.limit_in_bytes": "70"}
    groups("4:cpu:/docker/1234\n5:memory:/docker/1234\n", files)
    assert (cpu_limit(), memory_left()) == (2, 70)
    groups("0::/../../other\n", {"memory.max": "60", "other/memory.max": "50"})
    assert memory_left() == 60


def test_files_that_were_read_are_no_memory_that_is_taken(groups):
    files = {"memory.max": "10000\n", "memory.current": "9900\n", "memory.stat": "anon 900\ninactive_file 8000\n"}
    groups("0::/\n", files)
    assert (memory_left(), memory_limit()) == (8100, 10000)


def test_cores_are_those_that_the_groups_allow(groups, monkeypatch):
    monkeypatch.setattr(topology.os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert available_cores() == 64
    groups("0::/\n", {"cpu.max": "200000 100000\n"})
    assert available_cores() == 2
    groups("0::/\n", {"cpu.max": "6500000 100000\n"})
    assert available_cores() == 64
    monkeypatch.delattr(topology.os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert available_cores() == 3
