"""The two engines: how one is loaded, which settings each has, how many devices a process of the JAX engine uses.

Settings that only the other engine has are refused in one line, never ignored. Nothing here starts a framework.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

from lockstep.config.run import Config, RunOptions
from lockstep.core.shards import nearest_divisors

VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
"""The variable that says which devices of a kind a process sees, by number or name."""
CHIPS = "TPU_VISIBLE_CHIPS"
"""The same of a host's TPU chips, which all are the first process's that asks, unless a launcher gives each its own."""
MOST_STEPS = 2**31 - 1
"""Of an episode that engine jax steps inside the program."""


class MissingPackageError(ValueError):
    """An engine needs a package that isn't installed; ``package`` names it."""

    def __init__(self, engine: str, package: str) -> None:
        super().__init__(f"engine: {engine} needs {package}; pip install 'lockstep-rl[{engine}]'")
        self.package = package


def engine_module(engine: str) -> Any:
    """Loads an engine's door, ``lockstep.<engine>_engine.engine``, which imports its framework only when it is asked.

    Raises:
        MissingPackageError: a package of the engine isn't installed.
    """
    door = importlib.import_module(f"lockstep.{engine}_engine.engine")
    for package in door.PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(engine, package)
    return door


def check_engine(config: Config) -> None:
    """Raise a one-line ``ValueError``, with what to use instead, for a setting that the config's engine hasn't."""
    (_check_torch if config.engine == "torch" else _check_jax)(config)


def _check_torch(config: Config) -> None:
    if config.env.jax_only:
        raise ValueError(f"env.id: {config.env.id} is stepped by JAX, which engine torch can't do; use --engine jax")
    if config.device == "tpu":
        raise ValueError("device: tpu is for engine jax; use --engine jax, or device cpu, cuda or xpu")
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
    if config.device == "xpu":
        raise ValueError("device: xpu is for engine torch; use --engine torch, or device cpu, cuda or tpu")
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
    """Raise a one-line ``ValueError``, with what to use instead, for an option that the config's engine hasn't."""
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
    """Raise a one-line ``ValueError`` unless the fsdp axis divides the ``devices`` of all processes together."""
    wanted = options.fsdp_devices
    if wanted is not None and devices % wanted:
        raise ValueError(
            f"fsdp_devices: {wanted} doesn't divide the run's {devices} devices; nearest that work: "
            f"{nearest_divisors(devices, wanted)}"
        )


def check_processes_here(device: str, processes: int, launched: bool = False) -> None:
    """Raise a one-line ``ValueError`` if several ``processes`` of this host want its TPU chips, which one holds.

    A launcher that ``launched`` them may have given each chips of its own, by :data:`CHIPS`.
    """
    if device == "tpu" and processes > 1 and not (launched and CHIPS in os.environ):
        raise ValueError(
            f"device: tpu with {processes} processes on this host, where one process holds all chips; start one a host"
        )


def default_devices(num_shards: int | None, processes_here: int, cores: int, processes: int | None = None) -> int:
    """CPU devices of each process where the user gives none: one a core, as far as shards go.

    XLA's CPU backend uses two cores better as two devices than as one, and the number can't change the result. Fewer
    are taken where that leaves nobody more shards. Without ``num_shards`` those follow the devices.
    """
    processes = processes or processes_here
    most = max(1, cores // processes_here)
    if num_shards is None:
        return most
    most = max(1, min(most, num_shards // processes))
    turns = -(-num_shards // (processes * most))
    return next(n for n in range(1, most + 1) if -(-num_shards // (processes * n)) == turns)


def check_existing(devices: int, cores: int, processes: int = 1, num_shards: int | None = None) -> None:
    """Raise a one-line ``ValueError`` if a CPU is asked for more devices than it has cores and simulates none.

    It names as many simulated ones if those of all ``processes`` can own a shard each.
    """
    if devices <= cores:
        return
    simulated = "" if num_shards and num_shards < processes * devices else f", or --simulate-devices {devices}"
    raise ValueError(
        f"devices: {devices} asked for and this machine's CPU has {cores} (one a core); use --devices {cores}"
        f"{simulated}"
    )
