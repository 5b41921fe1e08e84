"""Reports devices, mesh and environments of a run, and what each device did in an update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from lockstep.jax_engine.distributed.mesh import device_line
from lockstep.jax_engine.distributed.placement import fetch_rows
from lockstep.jax_engine.program.calls import Pending
from lockstep.jax_engine.program.iterations import Iteration
from lockstep.jax_engine.program.program import Program

WRONG = 0.1
"""Gradients that are further off the mean over devices were not merely compressed."""


@dataclass(frozen=True)
class DistributedSetup:
    """The layout of a run on its devices, as found after one update.

    Attributes:
        devices: JAX's names of the devices, in the order of the mesh.
        mesh: length of each axis by name.
        environments: global ids of each device's environments, in the order of devices.
        fingerprints: each device's digest of parameters, moments and normalisers, 16 hex digits.
        in_sync: whether all fingerprints are equal.
        gradient_error: greatest difference of ``sync_gradients`` from the mean over devices, relative to its largest
            component, for known numbers; 0 if the engine's own reduction is used.
        summary: all this as lines of text.
    """

    devices: tuple[str, ...]
    mesh: dict[str, int]
    environments: tuple[range, ...]
    fingerprints: tuple[str, ...]
    in_sync: bool
    gradient_error: float
    summary: str

    def __str__(self) -> str:
        return self.summary


def distributed_setup(program: Program, fingerprints: np.ndarray, gradient_error: float) -> DistributedSetup:
    """Returns the report of a program, from fingerprints of every device's arrays, int64 ``[devices, arrays]``."""
    devices = tuple(str(device) for device in program.mesh.devices.flat)
    digests, rows = tuple(map(_digest, fingerprints)), program.blocks.rows
    environments = tuple(range(own.start * rows, own.stop * rows) for own in program.tree.owned)
    mesh = {str(name): int(length) for name, length in program.mesh.shape.items()}
    lines = [
        device_line(program.mesh),
        "mesh " + " × ".join(f"{name} {length}" for name, length in mesh.items()),
        *(
            f"{device}: environments {ids.start} to {ids.stop - 1} ({len(ids)}), fingerprint {digest}"
            for device, ids, digest in zip(devices, environments, digests, strict=True)
        ),
        f"copies after an update: {'equal' if len(set(digests)) == 1 else 'DIFFERENT'}",
    ]
    if program.layout.synchronize is not None:
        hint = " (is it a sum? lax.pmean is the mean)" if gradient_error > WRONG else ""
        lines.append(f"sync_gradients: {gradient_error:.1e} off the mean over devices{hint}")
    summary = "\n".join(lines)
    return DistributedSetup(devices, mesh, environments, digests, len(set(digests)) == 1, gradient_error, summary)


def _digest(row: np.ndarray) -> str:
    """Mixes the words of a row, in order, into one digest, so that equal sums don't hide differences."""
    total = 0
    for word in row.astype(np.uint64).tolist():
        total = (total * 6364136223846793005 + word + 1442695040888963407) % 2**64
    return f"{total:016x}"


@dataclass(frozen=True)
class DeviceMetrics:
    """What one device did in an update.

    Attributes:
        update: number of the update, from 1.
        device: JAX's name of the device.
        num_envs: number of environments that it steps.
        steps_per_second: steps of those per second.
        memory_bytes: bytes in use on it, as the device reports them; on a CPU those of JAX's arrays.
        episode_return: mean over its episodes that ended in the update; NaN if none did.
    """

    update: int
    device: str
    num_envs: int
    steps_per_second: float
    memory_bytes: int
    episode_return: float

    def __str__(self) -> str:
        parts = (
            f"update {self.update}",
            self.device,
            f"{self.num_envs} environments",
            f"{self.steps_per_second:,.0f} steps/s",
            f"{self.memory_bytes / 2**20:.1f} MiB",
            f"return {self.episode_return:.2f}",
        )
        return " · ".join(parts)


def device_metrics(program: Program, iteration: Iteration, call: Pending) -> list[DeviceMetrics]:
    """Returns the metrics of this process's devices, in the order of the mesh."""
    number, mesh = iteration.number - call.first, program.mesh
    returns, marks = (fetch_rows(x, axis=1)[number] for x in (call.outputs.returns, call.outputs.marks))
    mine = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    first = list(mesh.devices.flat).index(mine[0])
    if program.everywhere:  # the shards of all processes
        start, stop = program.tree.owned[first].start, program.tree.owned[first + len(mine) - 1].stop
        returns, marks = (
            program.rows.laid_out(x[start:stop], range(first, first + len(mine))) for x in (returns, marks)
        )
    memory = _memory_in_use(mine)
    out = []
    for i, device in enumerate(mine):
        each = len(program.tree.owned[first + i]) * program.blocks.rows
        part = slice(i * program.blocks.shards, (i + 1) * program.blocks.shards)
        ended = marks[part] != 0
        mean = float(returns[part][ended].mean()) if ended.any() else float("nan")
        rate = each * program.config.num_steps / iteration.seconds if iteration.seconds else 0.0
        out.append(DeviceMetrics(iteration.number + 1, str(device), each, rate, memory[device], mean))
    return out


def _memory_in_use(devices: list[Any]) -> dict[Any, int]:
    """Returns the bytes in use on each device, as it reports them; on a CPU those of JAX's arrays there."""
    stats = {device: (device.memory_stats() or {}).get("bytes_in_use") for device in devices}
    if None not in stats.values():
        return {device: int(used or 0) for device, used in stats.items()}
    out = dict.fromkeys(devices, 0)
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            if shard.device in out:
                out[shard.device] += shard.data.nbytes
    return out
