"""What the command line asks of this machine's devices, before a run starts."""

from __future__ import annotations

import jax

from lockstep.jax_engine import set_up


def check_device(device: str, ranks_here: int) -> None:
    """Raise a one-line ``ValueError`` if this machine lacks what ``device`` asks for.

    Args:
        device: ``cpu``, ``cuda`` or ``tpu``.
        ranks_here: devices that the run uses on this machine.
    """
    if device == "cpu":
        return
    set_up.configure(1, device, None)
    set_up.check_device(device)
    present = jax.local_device_count()
    if ranks_here > present:
        raise ValueError(
            f"devices: {ranks_here} asked for and this machine has {present} ({jax.devices()[0].device_kind}); use at "
            f"most {present}"
        )


def visible_gpus() -> int:
    """Accelerators of this machine, 0 without."""
    return 0 if jax.default_backend() == "cpu" else jax.local_device_count()


def device_memory() -> int:
    """Bytes of the smallest accelerator of this machine that a program can use."""
    return min(int((d.memory_stats() or {}).get("bytes_limit", 0)) for d in jax.local_devices())
