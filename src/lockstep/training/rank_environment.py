"""Environment variables that ranks on GPUs get where the user set none: by class of machine, each with its source.

They are those whose value follows from what is known here. What NVIDIA's guide files under debugging, and what NCCL
finds out by itself (topology, NVLink, GPUDirect, which algorithm of those that repeat), is left to NCCL.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.core.host.network import interface_of, own_address
from lockstep.core.topology import Topology

NCCL_GUIDE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
PYTORCH_NCCL = "https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html"
PYTORCH_REPEATABLE = "https://docs.pytorch.org/docs/stable/notes/randomness.html"
ONE_HOST, INFINIBAND, ETHERNET = "one host", "several hosts, InfiniBand", "several hosts, Ethernet"
INFINIBAND_DEVICES, INTERFACES = Path("/sys/class/infiniband"), Path("/sys/class/net")
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
FAST = 100_000
"""Mbit/s of a link that one helper thread of NCCL's doesn't fill."""


@dataclass(frozen=True)
class Setting:
    """One variable: its value, why it has it, and where that is documented."""

    name: str
    value: str
    why: str
    source: str


REPEATABLE = (Setting("CUBLAS_WORKSPACE_CONFIG", ":4096:8", "cuBLAS repeats its bits", PYTORCH_REPEATABLE),)
NO_SWITCH_SUMS = Setting("NCCL_ALGO", "^NVLS,NVLSTree", "sums inside an NVSwitch may not repeat", NCCL_GUIDE)
COLLECTIVES = (
    NO_SWITCH_SUMS,
    Setting("NCCL_DEBUG", "WARN", "errors say what they are", NCCL_GUIDE),
    Setting("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", "torchrun's store keeps errors of ranks that are no more", PYTORCH_NCCL),
    Setting("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "500", "a rank without its peers ends soon", PYTORCH_NCCL),
)

FAST_ETHERNET = Setting("NCCL_SOCKET_NTHREADS", "4", "for generic 100G networks", NCCL_GUIDE)


def machine_class(topology: Topology, devices: Path = INFINIBAND_DEVICES) -> str:
    """Tells what the ranks of a run meet over: one host's own links, InfiniBand (or RoCE), or Ethernet."""
    if topology.on_one_host or topology.loopback:
        return ONE_HOST
    return INFINIBAND if devices.is_dir() and any(devices.iterdir()) else ETHERNET


def link_speed(interface: str, interfaces: Path = INTERFACES) -> int:
    """Reads what an interface's link carries, in Mbit/s; 0 where it doesn't say."""
    try:
        return max(0, int((interfaces / interface / "speed").read_text()))
    except (OSError, ValueError):
        return 0


def interface_settings(topology: Topology, kind: str) -> tuple[Setting, ...]:
    """Says over which interface ranks meet: loopback where they meet there, else the one that leads to rank 0's host.

    A launcher may name another address on one host as well, and each rank may have a network of its own there. With
    InfiniBand NCCL chooses by itself, for it favours those interfaces.
    """
    gloo, nccl = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
    if topology.loopback:
        why = "all ranks are on this host, and nobody else is listened to"
        return Setting(gloo, LOOPBACK, why, NCCL_GUIDE), Setting(nccl, "lo", why, NCCL_GUIDE)
    interface = interface_of(own_address(topology.master_addr) or "")
    if interface is None:
        return ()
    why = f"the interface that leads to {topology.master_addr}"
    found = (Setting(gloo, interface, why, NCCL_GUIDE),)
    if kind == INFINIBAND:
        return found
    found = (*found, Setting(nccl, f"={interface}", why, NCCL_GUIDE))
    return (*found, FAST_ETHERNET) if link_speed(interface) >= FAST else found


def settings_of(device: str, topology: Topology, kind: str) -> tuple[Setting, ...]:
    """Collects what a rank on this ``device`` gets; a single rank meets nobody."""
    out = REPEATABLE + COLLECTIVES if device == "cuda" else ()
    return out if topology.world_size == 1 else (*out, *interface_settings(topology, kind))


def settings_of_xla(device: str, topology: Topology, kind: str) -> tuple[Setting, ...]:
    """Collects what a process of engine jax gets: of NCCL, by which XLA's GPUs meet, those of a single process too."""
    if device != "cuda":
        return ()
    return NO_SWITCH_SUMS, *(s for s in interface_settings(topology, kind) if s.name.startswith("NCCL_"))


def apply(settings: tuple[Setting, ...], environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets what is not set; what the user set stays."""
    for setting in settings:
        environ.setdefault(setting.name, setting.value)


def in_lines(settings: tuple[Setting, ...], kind: str, environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Shows the settings as a shell would read them, with reasons and sources as comments."""
    lines = [f"# {kind}"]
    for setting in settings:
        given = environ.get(setting.name)
        if given is None:
            lines.append(f"{setting.name}={setting.value}  # {setting.why}; {setting.source}")
        else:
            lines.append(f"{setting.name}={given}  # yours; else {setting.value}: {setting.why}; {setting.source}")
    return lines
