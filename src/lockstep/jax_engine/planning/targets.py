"""Describes devices that needn't be present: XLA's compilers can compile for a TPU slice or a host of H100s."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

H100 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
 shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000
 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84978434048 shared_memory_per_block_optin: 232448
 cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3" """
"""XLA's description of an H100, for its CUDA compiler."""

VARIABLES = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TPU_SKIP_MDS_QUERY": "1"}
"""Variables that let the compilers start without their devices; must be set before JAX is imported."""
OPTIONS = {"tpu": None, "cuda": {"xla_gpu_autotune_level": 0}}
"""Compiler options: autotuning is off for GPUs, because it would run kernels on the device."""


class DescribedDevices(NamedTuple):
    """Devices that are only described, in a topology's order, and the kind that a compiler compiles for."""

    platform: str
    devices: list[Any]
    kind: str


def described_devices(platform: str, shape: str) -> DescribedDevices:
    """Returns described devices of a ``tpu`` (``v5e:2x4``) or of ``cuda`` (hosts x GPUs x 1, H100s).

    Raises:
        ValueError: if there is no compiler for them here, or no such topology; the message is one line.
    """
    from jax.experimental import topologies

    os.environ.update({name: value for name, value in VARIABLES.items() if name not in os.environ})
    try:
        if platform == "tpu":
            found = topologies.get_topology_desc(platform="tpu", topology_name=shape)
        else:
            found = topologies.get_topology_desc(
                platform="cuda", topology_name="h100", target_config=H100, topology=shape
            )
    except Exception as error:  # XLA's own exceptions, which differ by version
        raise ValueError(f"no compiler for {platform} {shape} here ({str(error).splitlines()[0]})") from None
    devices = list(found.devices)
    return DescribedDevices(platform, devices, str(devices[0].device_kind))
