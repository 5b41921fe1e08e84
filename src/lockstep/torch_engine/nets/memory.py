"""Tells host memory from a device's: what NumPy may work on, and what the host shouldn't wait for."""

from __future__ import annotations

import torch

HOST = {"cpu"}
"""PyTorch's device types whose tensors are the host's; tests remove the CPU, which then plays an accelerator."""


def on_host(device: torch.device) -> bool:
    """Returns whether tensors of a device lie in the host's memory, where reading a value costs no wait."""
    return device.type in HOST
