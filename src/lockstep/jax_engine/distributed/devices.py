"""Answers the command line's questions about this machine's devices before a run starts."""

from __future__ import annotations

import jax

from lockstep.config.run import Config
from lockstep.core.topology import Topology
from lockstep.jax_engine.distributed.mesh import device_line, make_mesh
from lockstep.jax_engine.distributed.processes import processes_here, set_up_jax
from lockstep.jax_engine.setup import set_up
from lockstep.jax_engine.setup.accelerators import Accelerators, in_this_process, on_this_machine


def check_device(device: str, ranks_here: int) -> None:
    """Raises a one-line ``ValueError`` if this machine has fewer devices of that kind than the run uses here."""
    if device == "cpu":
        return
    present = _accelerators(device)
    if ranks_here > present.count:
        raise ValueError(
            f"devices: {ranks_here} asked for and this machine has {present.count} ({present.kind}); use at most "
            f"{present.count}"
        )


def count_accelerators(device: str) -> int:
    """Counts this machine's accelerators that the run's processes can share; 0 if there are none."""
    try:
        return _accelerators(device).count
    except ValueError:
        return 0


def device_memory(device: str) -> int:
    """Returns the bytes that a program can use on this machine's smallest accelerator."""
    return _accelerators(device).memory


def name_ranks(config: Config, ranks: int, processes: int) -> tuple[str, list[str]]:
    """Returns a run's mesh in words, and its devices in order, which processes share equally; starts JAX.

    Raises:
        ValueError: if this machine has fewer devices; the message is one line.
    """
    set_up_jax(config.threads, config.device, ranks if config.device == "cpu" else None, Topology())
    mesh = make_mesh(ranks if config.fsdp else 1, ranks)
    shape = " × ".join(f"{name} {length}" for name, length in mesh.shape.items())
    each = ranks // processes
    names = [f"process {i // each}, {device}" for i, device in enumerate(mesh.devices.flat)]
    return f"{device_line(mesh)}, mesh {shape}", names


def _accelerators(device: str) -> Accelerators:
    """Counts this machine's accelerators: from this process's share if JAX runs on them, else in another process."""
    if not set_up.has_started() or jax.default_backend() == "cpu":
        return on_this_machine(device)
    own = in_this_process()
    return Accelerators(own.count * processes_here(), own.kind, own.memory)
