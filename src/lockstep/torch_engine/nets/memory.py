"""Whose memory a tensor lies in, the host's or a device's: what NumPy may work on, and what mustn't be looked at."""

from __future__ import annotations

import torch

HOST = {"cpu"}
"""PyTorch's types of devices whose tensors are the host's; tests take the CPU out, which then plays an accelerator."""


def on_host(device: torch.device) -> bool:
    """Tells whether tensors of a device lie in the host's memory, where reading a value costs no wait."""
    return device.type in HOST
