"""Determines how many ranks a run has, and where: processes, and with engine jax the devices of each."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config.checks import envs_and_shards
from lockstep.config.engines import (
    check_existing,
    check_fsdp_devices,
    check_processes_here,
    default_devices,
    engine_module,
)
from lockstep.config.run import Config, RunOptions
from lockstep.core.host.network import wait_for_name
from lockstep.core.process import say
from lockstep.core.topology import Topology, available_cores, bound_cores, from_environment, from_flags


@dataclass(frozen=True)
class World:
    """The ranks of a run: processes, or with engine jax the devices of each process.

    Attributes:
        processes: of the run.
        processes_here: of the run on this machine.
        devices: of each process with engine jax; None with engine torch.
        process_cores: that the launcher gave each process; None if processes here share all cores.
    """

    processes: int
    processes_here: int
    devices: int | None = None
    process_cores: int | None = None

    @property
    def ranks(self) -> int:
        """The world size."""
        return self.processes * (self.devices or 1)

    @property
    def ranks_here(self) -> int:
        """The number of ranks on this machine."""
        return self.processes_here * (self.devices or 1)

    def cores_of_rank(self, cores: int) -> int:
        """Returns the CPU cores of each rank, at least one, if this process may use ``cores``."""
        each = cores_of_process(cores, self.processes_here, self.process_cores)
        return max(1, each // (self.devices or 1))


def cores_of_process(cores: int, processes_here: int, given: int | None) -> int:
    """Returns the cores of one process here: its share of ``cores``, or those that the launcher has ``given`` it."""
    return cores // processes_here if given is None else min(cores, given)


def topology_of(options: RunOptions) -> Topology:
    """Returns this process's place, from the coordinator flags, else from the launcher; raises as those readers do."""
    if options.coordinator is None or options.num_processes is None or options.process_id is None:
        return from_environment()
    return from_flags(options.coordinator, options.num_processes, options.process_id)


def wait_for_master(topology: Topology) -> None:
    """Waits until the name of rank 0's host resolves, and says so; raises a ``RankMismatchError`` if it doesn't."""
    if topology.launched and not topology.loopback:
        wait_for_name(topology.master_addr, say)


def world_of(options: RunOptions, config: Config, topology: Topology, places: int | None = None) -> World:
    """Returns the ranks that a request asks for.

    ``places``: the number of processes that there are places for; None: as many as this machine has.

    Raises:
        ValueError: the request contradicts the launcher or itself; one line.
    """
    processes = number_of_processes(options, config, topology, places)
    here = topology.local_world_size if topology.launched else processes
    if config.engine == "torch":
        return World(processes, here, process_cores=topology.cores)
    check_processes_here(config.device, here, topology.launched)
    devices = _devices(options, config, processes, here, topology.cores)
    world = World(processes, here, devices, topology.cores)
    check_fsdp_devices(options, world.ranks)
    return world


def number_of_processes(options: RunOptions, config: Config, topology: Topology, places: int | None = None) -> int:
    """Returns the launcher's number of processes, or ``nproc``, or as many as cores, GPUs or ``places`` allow."""
    if topology.launched:
        if options.coordinator is None and options.nproc not in (1, "auto", topology.world_size):
            raise ValueError(
                f"nproc: {options.nproc}, but the launcher started {topology.world_size} ranks; leave it out"
            )
        if options.max_restarts:
            raise ValueError(
                f"max_restarts: {options.max_restarts}, but another launcher started this rank, and starts it again: "
                "give it to torchrun, and --name NAME --resume auto here"
            )
        return topology.world_size
    if isinstance(options.nproc, int):
        return options.nproc
    limit = available_processes(config, places)
    if options.nproc_range is not None:
        least, most = options.nproc_range
        return max(least, min(limit, most))
    return limit


def available_processes(config: Config, places: int | None = None) -> int:
    """Returns as many ranks as there are ``places`` for (default: by this machine's cores or GPUs), up to the shards.

    A rank on a CPU takes as many cores as it has threads.
    """
    limit = places
    if limit is None and config.device == "cpu":
        limit = max(1, available_cores() // config.threads)
    elif limit is None:
        limit = max(1, engine_module(config.engine).count_accelerators(config.device))
    num_shards = _num_shards(config)
    return limit if num_shards is None else min(limit, num_shards)


def world_words(config: Config, ranks: int, processes: int = 1) -> list[str]:
    """Returns options of ``lockstep train`` for so many ranks: processes of engine torch, devices of engine jax."""
    if config.engine == "torch":
        return ["--nproc", str(ranks)]
    option = "--simulate-devices" if config.device == "cpu" else "--devices"
    return ["--nproc", str(processes), option, str(ranks // processes)]


def _num_shards(config: Config) -> int | None:
    """Returns the number of shards of a config that isn't resolved; None if it follows the world size."""
    if config.num_envs_per_rank is None:
        return envs_and_shards(config, 1)[1]
    return config.num_shards


def _devices(
    options: RunOptions, config: Config, processes: int, processes_here: int, process_cores: int | None
) -> int:
    """Returns the number of devices of each process of engine jax."""
    if options.simulate_devices is not None:
        return options.devices or options.simulate_devices
    shards = _num_shards(config)
    if config.device != "cpu":
        return options.devices or _accelerators(config, shards, processes, processes_here)
    if options.devices is None:
        cores = cores_of_process(available_cores(), processes_here, process_cores)
        return default_devices(shards, cores, processes)
    check_existing(options.devices, bound_cores(), processes, shards)  # a container's limit makes them slow, not wrong
    return options.devices


def _accelerators(config: Config, num_shards: int | None, processes: int, processes_here: int) -> int:
    """Returns a process's accelerators if the user gives no number: its share of this machine's, up to its shards."""
    most = engine_module(config.engine).count_accelerators(config.device) // processes_here
    return max(1, most if num_shards is None else min(most, num_shards // processes))
