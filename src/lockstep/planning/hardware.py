"""Reads chips, links and assumptions from ``chips.json``, and parses the devices that ``--on`` names."""

from __future__ import annotations

import difflib
import json
import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

TABLE = Path(__file__).with_name("chips.json")
GIGA, MICRO, NANO = 1e9, 1e-6, 1e-9
MOST_DEVICES = 16384
THIS_MACHINE = "cpu"

Case = Literal["best", "likely", "worst"]
CASES: tuple[Case, ...] = ("best", "likely", "worst")


@dataclass(frozen=True)
class Chip:
    """One kind of device as its maker specifies it; ``chips.json`` explains the numbers and gives the sources.

    Attributes:
        key: its name for ``--on``.
        platform: ``cuda`` or ``tpu``.
        memory: bytes.
        memory_rate: bytes per second.
        peaks: operations per second by precision, ``fp32`` and ``bf16``.
        link_rate: bytes per second of a device in one direction, to devices of its host or slice.
        host_link_rate: the same, to its host.
        network_rate: the same, to devices of other hosts.
        shapes: topologies of a TPU's slices; empty for GPUs.
    """

    key: str
    name: str
    platform: str
    memory: float
    memory_rate: float
    peaks: dict[str, float]
    link: str
    link_rate: float
    host_link_rate: float
    network_rate: float
    devices_per_host: int
    host: str
    host_cores: int
    sources: tuple[str, ...]
    shapes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Assumptions:
    """What data sheets don't say, in one of the cases ``best``, ``likely`` and ``worst``.

    Attributes:
        compute: share of the peak that matrix products reach.
        memory: share of the memory's rate that is reached.
        link: share of a link's rate that is reached.
        kernel: the least seconds that a kernel takes, by ``engine:platform``.
        latency: seconds of an empty collective, by platform, and between hosts (``network``).
        host_step: seconds per step between host and device, besides kernels and bytes.
        iteration: seconds of the host's work once per iteration, by engine.
        drawn_index: seconds for the host to draw one minibatch index.
        counted_step: seconds for the host to check one step for ended episodes.
        processor: speed of a core of the host, relative to this machine's.
    """

    compute: float
    memory: float
    link: float
    kernel: dict[str, float]
    latency: dict[str, float]
    host_step: float
    iteration: dict[str, float]
    drawn_index: float
    counted_step: float
    processor: float


@dataclass(frozen=True)
class Target:
    """The devices that a run is planned for.

    Attributes:
        text: the target as it was given.
        chip: the kind of device; None: this machine's processor.
        devices: number of devices on all hosts.
        per_host: number of devices per host.
        shape: the topology of a TPU slice, as its compiler names it (``v5e:16x16``); else None.
    """

    text: str
    chip: Chip | None
    devices: int
    per_host: int
    shape: str | None = None

    @property
    def platform(self) -> str:
        """The config's ``device``: ``cpu``, ``cuda`` or ``tpu``."""
        return THIS_MACHINE if self.chip is None else self.chip.platform

    @property
    def unit(self) -> str:
        """What the target counts: ``ranks`` on this machine, else ``devices``."""
        return "ranks" if self.chip is None else "devices"

    def shape_of(self, devices: int) -> str | None:
        """Returns the topology of so many devices as XLA's compiler names it; None if it has none."""
        if self.chip is None:
            return None
        if self.platform == "cuda":
            hosts = -(-devices // self.per_host)
            whole = devices % hosts == 0
            return f"{hosts}x{devices // hosts}x1" if whole and self.chip.key in ("h100", "h200") else None
        kind = self.chip.key.removeprefix("tpu:")
        if devices == self.devices:
            return self.shape
        fits = [x for x in self.chip.shapes if math.prod(map(int, x.split("x"))) == devices]
        if devices == 1:
            fits = list(self.chip.shapes[:1])
        return f"{kind}:{fits[0]}" if fits else None


@cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())


@cache
def chips() -> dict[str, Chip]:
    """Returns the table of chips, by their names for ``--on``."""
    return {key: _chip(key, row) for key, row in _table()["chips"].items()}


def _chip(key: str, row: dict[str, Any]) -> Chip:
    return Chip(
        key=key,
        name=row["name"],
        platform=row["platform"],
        memory=row["memory_gb"] * GIGA,
        memory_rate=row["memory_gbs"] * GIGA,
        peaks={name: value * 1e12 for name, value in row["tflops"].items()},
        link=row["link"],
        link_rate=row["link_gbs"] * GIGA,
        host_link_rate=row["host_link_gbs"] * GIGA,
        network_rate=row["network_gbs"] * GIGA,
        devices_per_host=row["devices_per_host"],
        host=row["host"],
        host_cores=row["host_cores"],
        sources=tuple(row["sources"]),
        shapes=tuple(row.get("shapes", ())),
    )


@cache
def assumptions(case: Case) -> Assumptions:
    """Returns what is assumed in a case."""
    row = _table()["assumptions"][case]
    return Assumptions(
        compute=row["compute"],
        memory=row["memory"],
        link=row["link"],
        kernel={name: value * MICRO for name, value in row["kernel_us"].items()},
        latency={name: value * MICRO for name, value in row["latency_us"].items()},
        host_step=row["host_step_us"] * MICRO,
        iteration={name: value * MICRO for name, value in row["iteration_us"].items()},
        drawn_index=row["drawn_index_ns"] * NANO,
        counted_step=row["counted_step_ns"] * NANO,
        processor=row["processor"],
    )


def runtime_bytes(platform: str) -> float:
    """Returns the bytes of a device's memory that drivers and libraries are assumed to take."""
    return _table()["runtime_gb"][platform] * GIGA


def parse_target(text: str) -> Target:
    """Parses a target of ``--on``: ``h100:8``, ``tpu:v5e:16x16``, ``cpu:2``, ``cpu:2x1`` (hosts x ranks).

    Raises:
        ValueError: one line, if there is no such chip, number or topology; it says which there are.
    """
    text = text.strip().lower()
    name, _, size = text.rpartition(":")
    if name == THIS_MACHINE:
        return _this_machine(text, size)
    chip = chips().get(name)
    if chip is None:
        raise ValueError(_no_chip(text, name, size))
    if chip.shapes:
        if size not in chip.shapes:
            raise ValueError(f"on: {text}: {chip.name} has no slice {size}; there are {', '.join(chip.shapes)}")
        devices = math.prod(map(int, size.split("x")))
        kind = name.removeprefix("tpu:")
        return Target(text, chip, devices, min(devices, chip.devices_per_host), f"{kind}:{size}")
    devices = _count(text, size)
    if devices > chip.devices_per_host and devices % chip.devices_per_host:
        below = devices // chip.devices_per_host * chip.devices_per_host
        raise ValueError(
            f"on: {text}: hosts have {chip.devices_per_host} {chip.name} each; use {name}:{below} or "
            f"{name}:{below + chip.devices_per_host}"
        )
    return Target(text, chip, devices, min(devices, chip.devices_per_host))


def _this_machine(text: str, size: str) -> Target:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", size)
    if match:
        hosts, ranks = int(match[1]), int(match[2])
        _count(text, str(hosts * ranks))
        return Target(text, None, hosts * ranks, ranks)
    ranks = _count(text, size)
    return Target(text, None, ranks, ranks)


def _count(text: str, size: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,6}", size) or int(size) > MOST_DEVICES:
        raise ValueError(f"on: {text}: {size!r} is no number of devices from 1 to {MOST_DEVICES}, such as h100:8")
    return int(size)


def _no_chip(text: str, name: str, size: str) -> str:
    known = [*chips(), THIS_MACHINE]
    if size in known:
        return f"on: {text}: give a number of devices too, such as {size}:8"
    if f"{name}:{size}" in known:
        shape = chips()[f"{name}:{size}"].shapes[-1]
        return f"on: {text}: give the slice's topology too, such as {text}:{shape}"
    name = name or size
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"on: {name!r} is no chip of the table; {hint}there are {', '.join(known)}"


def parse_rate(text: str) -> float:
    """Parses a network's rate, such as ``100Mbit`` or ``25Gbit``, into bytes per second.

    Raises:
        ValueError: one line, if it isn't a rate.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg])bit(?:/s)?", text.strip().lower())
    if match is None or not float(match[1]):
        raise ValueError(f"link: {text!r} is no rate such as 100Mbit or 25Gbit")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]] / 8
