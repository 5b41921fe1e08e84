"""Environment variables that ranks on GPUs get unless the user set them, by class of machine, each with its source.

Only variables whose value follows from what is known here are set. Those that NVIDIA's guide lists under debugging, and
those that NCCL determines itself (topology, NVLink, GPUDirect, which repeatable algorithm), are left to NCCL.
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
LOOPBACK_INTERFACES = {
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""Variables by which gloo and NCCL meet over loopback alone."""
FAST = 100_000
"""Mbit/s of a link that one helper thread of NCCL can't fill."""


@dataclass(frozen=True)
class Setting:
    """An environment variable: its value, the reason for it, and its documentation."""

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
    """Returns what the ranks of a run meet over: one host's own links, InfiniBand (or RoCE), or Ethernet."""
    if topology.on_one_host or topology.loopback:
        return ONE_HOST
    return INFINIBAND if devices.is_dir() and any(devices.iterdir()) else ETHERNET


def link_speed(interface: str, interfaces: Path = INTERFACES) -> int:
    """Reads the speed of an interface's link, in Mbit/s; 0 if it isn't reported."""
    try:
        return max(0, int((interfaces / interface / "speed").read_text()))
    except (OSError, ValueError):
        return 0


def interface_settings(topology: Topology, kind: str) -> tuple[Setting, ...]:
    """Returns the interface over which ranks meet: loopback if they meet there, else the one that leads to rank 0.

    A launcher may name another address even on one host, and each rank may have its own network there. With InfiniBand
    NCCL chooses by itself, because it prefers those interfaces.
    """
    gloo, nccl = LOOPBACK_INTERFACES
    if topology.loopback:
        why = "all ranks are on this host, and nobody else is listened to"
        return tuple(Setting(name, value, why, NCCL_GUIDE) for name, value in LOOPBACK_INTERFACES.items())
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
    """Returns the settings of a rank on this ``device``; a single rank needs no interface."""
    out = REPEATABLE + COLLECTIVES if device == "cuda" else ()
    return out if topology.world_size == 1 else (*out, *interface_settings(topology, kind))


def settings_of_xla(device: str, topology: Topology, kind: str) -> tuple[Setting, ...]:
    """Returns the settings of a JAX process: those of NCCL, by which XLA's GPUs meet, even in a single process."""
    if device != "cuda":
        return ()
    return NO_SWITCH_SUMS, *(s for s in interface_settings(topology, kind) if s.name.startswith("NCCL_"))


def apply(settings: tuple[Setting, ...], environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets the variables that the user hasn't set."""
    for setting in settings:
        environ.setdefault(setting.name, setting.value)


def in_lines(settings: tuple[Setting, ...], kind: str, environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Formats the settings as a shell reads them, with reasons and sources as comments."""
    lines = [f"# {kind}"]
    for setting in settings:
        given = environ.get(setting.name)
        if given is None:
            lines.append(f"{setting.name}={setting.value}  # {setting.why}; {setting.source}")
        else:
            lines.append(f"{setting.name}={given}  # yours; else {setting.value}: {setting.why}; {setting.source}")
    return lines
