"""How many devices a process of the JAX engine uses: a rule of numbers, which starts no framework."""

from __future__ import annotations

from lockstep.core.shards import world_sizes


def default_devices(num_shards: int | None, processes_here: int, cores: int, processes: int | None = None) -> int:
    """CPU devices of each process where the user gives none: one a core, as far as the shards divide.

    XLA's CPU backend uses two cores better as two devices than as one, and the number can't change the result.

    Args:
        num_shards: of the run; None: they follow the devices, which must then be a power of two.
        processes_here: processes that share this machine's cores.
        cores: CPU cores of this machine that the run may use.
        processes: of the whole run, on all machines (default: ``processes_here``).

    Returns:
        The largest number for which ``processes * number`` devices can own the shards equally; at least 1.
    """
    processes = processes or processes_here
    most = max(1, cores // processes_here)
    if num_shards is None:
        return 1 << (most.bit_length() - 1)
    return max((n for n in range(1, most + 1) if num_shards % (processes * n) == 0), default=1)


def check_devices(devices: int, num_envs: int, num_shards: int) -> None:
    """Raise a one-line ``ValueError`` unless ``devices`` of all processes can share the environments equally."""
    if devices >= 1 and num_shards % devices == 0:
        return
    sizes = world_sizes(num_shards)
    below, above = [n for n in sizes if n < devices], [n for n in sizes if n > devices]
    fits = " or ".join(map(str, [*below[-1:], *above[:1]]))
    raise ValueError(
        f"devices: {devices} can't share {num_envs} environments in {num_shards} shards equally; nearest that work: "
        f"{fits} devices (num_shards is a power of two that the devices of all processes must divide)"
    )


def check_existing(devices: int, cores: int, processes: int = 1, num_shards: int | None = None) -> None:
    """Raise a one-line ``ValueError`` if a CPU is asked for more devices than it has cores and simulates none.

    It names as many simulated ones if those of all ``processes`` can own the shards equally.
    """
    if devices <= cores:
        return
    simulated = "" if num_shards and num_shards % (processes * devices) else f", or --simulate-devices {devices}"
    raise ValueError(
        f"devices: {devices} asked for and this machine's CPU has {cores} (one a core); use --devices {cores}"
        f"{simulated}"
    )
