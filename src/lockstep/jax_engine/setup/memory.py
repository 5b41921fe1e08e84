"""Memory that this process holds, of the host and of its devices."""

from __future__ import annotations

from typing import Any

import jax

from lockstep.core.machine import peak_resident

MIB = 2**20


def memory_in_use(devices: list[Any]) -> dict[Any, int]:
    """Returns the bytes in use on each device: as it says itself, or on a CPU of JAX's arrays that lie there."""
    stats = {device: (device.memory_stats() or {}).get("bytes_in_use") for device in devices}
    if None not in stats.values():
        return {device: int(used or 0) for device, used in stats.items()}
    out = dict.fromkeys(devices, 0)
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            if shard.device in out:
                out[shard.device] += shard.data.nbytes
    return out


def peak_memory() -> dict[str, list[float]]:
    """Returns the most MiB held so far: of the host (worker processes apart), and of this process's accelerators."""
    stats = [device.memory_stats() or {} for device in jax.local_devices() if device.platform != "cpu"]
    most = max((int(each.get("peak_bytes_in_use", 0)) for each in stats), default=0)
    return {"peak_memory_mb": [peak_resident()], "peak_gpu_memory_mb": [most / MIB]}
