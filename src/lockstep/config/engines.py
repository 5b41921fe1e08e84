"""The two engines: loading one, the settings that only one has, and the devices of a process of the JAX engine.

Settings that only the other engine has are refused in one line, never ignored. Nothing here loads a framework.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

from lockstep.config.run import Config, RunOptions
from lockstep.core.shards import nearest_divisors

VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
"""Variables that list the devices of a kind that a process sees, by number or name."""
CHIPS = "TPU_VISIBLE_CHIPS"
"""The same for a host's TPU chips: the first process to use them takes all, unless a launcher gives each its own."""
MOST_STEPS = 2**31 - 1
"""Longest episode that the JAX engine can step inside its program."""


class MissingPackageError(ValueError):
    """An engine needs a package that isn't installed; ``package`` is its name."""

    def __init__(self, engine: str, package: str) -> None:
        super().__init__(f"engine: {engine} needs {package}; pip install 'lockstep-rl[{engine}]'")
        self.package = package


def engine_module(engine: str) -> Any:
    """Loads ``lockstep.<engine>_engine.engine``, which imports its framework only when it is called.

    Raises:
        MissingPackageError: a package of the engine isn't installed.
    """
    door = importlib.import_module(f"lockstep.{engine}_engine.engine")
    for package in door.PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(engine, package)
    return door


def is_installed(engine: str) -> bool:
    """Tells whether an engine can be loaded."""
    try:
        engine_module(engine)
    except MissingPackageError:
        return False
    return True


def check_engine(config: Config) -> None:
    """Raises a one-line ``ValueError``, with what to use instead, if the config's engine lacks a setting."""
    (_check_torch if config.engine == "torch" else _check_jax)(config)


def check_kind_of_device(config: Config) -> None:
    """Raises a one-line ``ValueError``, with what to use instead, if the config's engine runs on no such devices."""
    if config.engine == "torch" and config.device == "tpu":
        raise ValueError("device: tpu is for engine jax; use --engine jax, or device cpu, cuda or xpu")
    if config.engine == "jax" and config.device == "xpu":
        raise ValueError("device: xpu is for engine torch; use --engine torch, or device cpu, cuda or tpu")


def _check_torch(config: Config) -> None:
    if config.env.jax_only:
        raise ValueError(f"env.id: {config.env.id} is stepped by JAX, which engine torch can't do; use --engine jax")
    check_kind_of_device(config)
    if config.ppo.drop_remainder:
        raise ValueError(
            "ppo.drop_remainder: true is for engine jax; give ppo.num_minibatches that divides a shard's samples, or "
            "--engine jax"
        )
    if config.network.remat:
        raise ValueError(
            "network.remat: true is for engine jax; use ppo.gradient_accumulation to save memory, or --engine jax"
        )


def _check_jax(config: Config) -> None:
    check_kind_of_device(config)
    if config.compile:
        raise ValueError("compile: true is for engine torch; engine jax compiles the whole iteration anyway")
    if config.cuda_graphs is True:
        raise ValueError("cuda_graphs: true is for engine torch; engine jax launches an iteration as one program")
    if config.threads != 1:
        raise ValueError(
            f"threads: {config.threads} is for engine torch; engine jax takes more cores as devices: --devices "
            f"{config.threads}"
        )
    if config.backend == "nccl" or (config.backend == "gloo" and config.device != "cpu"):
        raise ValueError(
            f"backend: {config.backend} is for engine torch; XLA chooses by the device, so use backend auto"
        )
    if config.collectives == "shared" and (config.device != "cpu" or config.fsdp):
        what = "fsdp" if config.device == "cpu" else f"device {config.device}"
        raise ValueError(f"collectives: shared, but with {what} devices meet by XLA's own; use collectives auto")
    backend, limit = config.env.backend, config.env.max_episode_steps
    inside = config.env.jax_only or (config.env.id.startswith("lockstep/") and backend == "auto")
    if inside and limit is not None and limit > MOST_STEPS:
        raise ValueError(
            f"env.max_episode_steps: {limit}, but the compiled program counts an episode's steps by 32 bits; give at "
            f"most {MOST_STEPS}"
        )
    if backend == "envpool":
        raise ValueError(
            "env.backend: envpool is for engine torch; use env.backend auto, with env.workers for slow environments"
        )
    if backend == "tensor":
        raise ValueError(
            "env.backend: tensor is for engine torch; engine jax steps array environments on its devices by itself, "
            "so use env.backend auto"
        )


def check_engine_options(options: RunOptions, config: Config) -> None:
    """Raises a one-line ``ValueError``, with what to use instead, if the config's engine lacks an option."""
    if options.nproc_range is not None and (config.reduction == "fast" or config.sync_period > 1):
        raise ValueError(
            f"nproc: {options.nproc}, but with reduction {config.reduction} and sync_period {config.sync_period} "
            "another number of ranks is another run; give one number, or --reduction exact"
        )
    if config.engine == "torch":
        _check_torch_options(options)
        return
    if not isinstance(options.nproc, int):
        raise ValueError(
            f"nproc: {options.nproc} is for engine torch; in engine jax one process uses every core: leave it out"
        )
    if options.simulate_devices is not None and config.device != "cpu":
        raise ValueError(
            f"simulate_devices: {options.simulate_devices} makes devices of a CPU, and device is {config.device}; use "
            "--devices"
        )
    if options.fsdp_devices is not None and not config.fsdp:
        raise ValueError(f"fsdp_devices: {options.fsdp_devices}, but nothing is sharded; add --fsdp --reduction fast")


def _check_torch_options(options: RunOptions) -> None:
    instead = {
        "devices": "--nproc starts one rank for each device",
        "simulate_devices": "use --nproc",
        "fsdp_devices": "fsdp shards over all ranks",
        "coordinator": "start its ranks with torchrun --nnodes",
    }
    for name, what in instead.items():
        value = getattr(options, name)
        if value is not None:
            raise ValueError(f"{name}: {value} is for engine jax; with engine torch {what}, or add --engine jax")


def check_fsdp_devices(options: RunOptions, devices: int) -> None:
    """Raises a one-line ``ValueError`` unless ``fsdp_devices`` divides ``devices``, those of all processes together."""
    wanted = options.fsdp_devices
    if wanted is not None and devices % wanted:
        raise ValueError(
            f"fsdp_devices: {wanted} doesn't divide the run's {devices} devices; nearest that work: "
            f"{nearest_divisors(devices, wanted)}"
        )


def check_processes_here(device: str, processes: int, launched: bool = False) -> None:
    """Raises a one-line ``ValueError`` if several ``processes`` of this host need its TPU chips, which only one holds.

    It doesn't if a launcher that ``launched`` them gave each its own chips by :data:`CHIPS`.
    """
    if device == "tpu" and processes > 1 and not (launched and CHIPS in os.environ):
        raise ValueError(
            f"device: tpu with {processes} processes on this host, where one process holds all chips; start one a host"
        )


def default_devices(num_shards: int | None, cores: int, processes: int) -> int:
    """Returns the number of CPU devices of each process if the user gives none: one per core, at most one per shard.

    XLA's CPU backend uses two cores better as two devices than as one, and the number can't change the result. It is
    the smallest that leaves no device with more shards than the largest would. Without ``num_shards``, which then
    follows from the devices, it is one per core.

    Args:
        num_shards: of the run.
        cores: of one process; 0 if processes outnumber cores.
        processes: of the run, on all machines.
    """
    if num_shards is None:
        return max(1, cores)
    most = max(1, min(cores, num_shards // processes))
    turns = -(-num_shards // (processes * most))
    return next(n for n in range(1, most + 1) if -(-num_shards // (processes * n)) == turns)


def check_existing(devices: int, cores: int, processes: int = 1, num_shards: int | None = None) -> None:
    """Raises a one-line ``ValueError`` if more CPU devices are asked for than there are cores, and none are simulated.

    It suggests simulated devices if those of all ``processes`` can own a shard each.
    """
    if devices <= cores:
        return
    simulated = "" if num_shards and num_shards < processes * devices else f", or --simulate-devices {devices}"
    raise ValueError(
        f"devices: {devices} asked for and this machine's CPU has {cores} (one a core); use --devices {cores}"
        f"{simulated}"
    )
