"""Reads the limits of this process's control groups: those of a container, a Slurm job or a systemd slice.

A limit holds for a group and all groups below it, so the process's own group and each of its parents count. Inside a
container, the path of its group may be the host's path, of which the container sees only the end; directories that
don't exist are skipped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cpu_limit() -> int | None:
    """Returns the CPU cores that the groups allow, rounded up; None if they set no limit."""
    limits = []
    for group in _groups("cpu"):
        for quota, period in (_quota(group / "cpu.max"), _quota_of_version_1(group)):
            if quota is not None and period and quota > 0:
                limits.append(-(-quota // period))
    return min(limits, default=None)


def memory_left() -> int | None:
    """Returns the bytes that the groups still allow; None if they set no limit.

    Pages of files that haven't been read lately count as free, because the kernel drops them first.
    """
    left = []
    for group, most, use, files in _memory_limits():
        held = (_number(group / use) or 0) - _statistic(group / "memory.stat", files)
        left.append(max(0, most - max(0, held)))
    return min(left, default=None)


def memory_limit() -> int | None:
    """Returns the bytes that the groups allow in all, including those in use; None if they set no limit."""
    return min((most for _, most, *_ in _memory_limits()), default=None)


def _memory_limits() -> Iterator[tuple[Path, int, str, str]]:
    """Yields each group that limits memory, its limit, its file of usage, and its statistic of unread file pages."""
    for group in _groups("memory"):
        for limit, use, files in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most = _number(group / limit)
            if most is not None:
                yield group, most, use, files


def _groups(controller: str) -> Iterator[Path]:
    """Yields the directories, of both versions, of this process's groups and parents that limit ``controller``."""
    paths = {ROOT: PurePosixPath("/"), ROOT / controller: PurePosixPath("/")}  # if OWN can't be read
    with contextlib.suppress(OSError):
        for line in OWN.read_text().splitlines():
            number, names, path = line.split(":", 2)
            if number == "0":
                paths[ROOT] = PurePosixPath(path)
            elif controller in names.split(","):
                paths[ROOT / controller] = PurePosixPath(path)  # a link, where controllers share a hierarchy
    for mount, path in paths.items():
        parts = () if ".." in path.parts else path.parts[1:]  # a `..` leads outside of what is visible
        for depth in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:depth])


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # no such file; no limit
        return int(path.read_text())
    return None


def _quota(path: Path) -> tuple[int | None, int]:
    """Reads the microseconds of CPU time per period, None without a limit, and the length of the period."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = path.read_text().split()
        return int(quota), int(period)
    return None, 0


def _quota_of_version_1(group: Path) -> tuple[int | None, int]:
    quota = _number(group / "cpu.cfs_quota_us")
    return quota, 0 if quota is None else _number(group / "cpu.cfs_period_us") or 0


def _statistic(path: Path, name: str) -> int:
    """Reads one of the numbers of ``memory.stat``; 0 if it isn't there."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
