"""Sets JAX up before a JAX environment is first made, because making one starts JAX."""

from __future__ import annotations

import contextlib

from lockstep.config.engines import MissingPackageError, check_kind_of_device, check_processes_here, engine_module
from lockstep.config.run import Config, RunOptions
from lockstep.core.shards import MAX_DEFAULT_SHARDS
from lockstep.core.topology import Topology, available_cores
from lockstep.envs.batched.twins import with_array_twin
from lockstep.envs.graphics import choose_mujoco_graphics, has_screen
from lockstep.launch.one_program import why_not_one_program
from lockstep.launch.world import cores_of_process, wait_for_master


def start_jax(config: Config, options: RunOptions, topology: Topology, starts_others: bool = False) -> None:
    """Sets JAX up for a run whose checks need it, or that runs on accelerators; a second call does nothing.

    The number of devices that the run will use is known only once its environment is. So a CPU becomes as many devices
    as the run could use, and the run takes the first ones. A launcher's processes meet here, because they must before
    JAX starts. If videos are wanted, MuJoCo's graphics library is chosen here too, before MuJoCo is imported.

    Args:
        config: not resolved.
        options: of the run.
        topology: this process's; of one process if it doesn't train, as a second process with a rank's number would end
            the run.
        starts_others: whether this process only starts others: then it calls :func:`look_with_cpu`, since a process
            that starts JAX on a GPU holds its memory.

    Raises:
        ValueError: JAX or this machine has no such device, or not for so many processes; one line.
        RankMismatchError: a launcher's processes can't meet; one line.
    """
    if starts_others or _is_of_groups(config, options):
        look_with_cpu(config)
        return
    device, by_jax = config.device, config.engine == "jax"
    if not (config.env.jax_only or (by_jax and (config.network.custom or config.ppo.loss or device != "cpu"))):
        return
    _choose_graphics(config)
    try:
        engine = engine_module("jax")
    except MissingPackageError:
        return  # making the environment raises this again
    check_kind_of_device(config)
    check_processes_here(device, topology.local_world_size, topology.launched)
    devices = min(engine.MOST_DEVICES, _most_devices(config, options, topology)) if device == "cpu" else None
    accelerators = None if device == "cpu" else options.devices
    if (
        device != "cpu"
        and not topology.launched
        and (options.nproc != 1 or options.max_restarts or options.launcher == "ray")
    ):
        device = "cpu"
    pool = engine.roomy_pool(max(devices or 1, engine.pool_devices(config.num_shards)))
    wait_for_master(topology)
    engine.set_up_jax(1, device, devices, topology, pool, accelerators, config.silence)


def look_with_cpu(config: Config) -> None:
    """Starts JAX on the CPU alone, if it has not started and this environment needs it.

    For processes that start others, which will need all of a GPU's memory.
    """
    if config.env.jax_only:
        _choose_graphics(config)
        with contextlib.suppress(MissingPackageError):  # making the environment raises this again
            engine_module("jax").look_with_cpu()


def _is_of_groups(config: Config, options: RunOptions) -> bool:
    """Tells whether a request is for a new group of seeds, each in its own process."""
    if not options.is_group or options.resume is not None:
        return False
    processes = options.nproc if isinstance(options.nproc, int) else 1
    return why_not_one_program(options, with_array_twin(config)[0], processes) is not None


def _choose_graphics(config: Config) -> None:
    if config.eval.record_video and not has_screen():
        choose_mujoco_graphics()


def _most_devices(config: Config, options: RunOptions, topology: Topology) -> int:
    """Returns the most CPU devices that this process may use.

    It is the number asked for, or as many as its cores and its share of the run's shards allow.
    """
    if options.simulate_devices or options.devices:
        return options.simulate_devices or options.devices or 1
    cores = max(1, cores_of_process(available_cores(), topology.local_world_size, topology.cores))
    if config.num_shards is None and config.num_envs_per_rank:
        return cores
    return max(1, min(cores, (config.num_shards or MAX_DEFAULT_SHARDS) // topology.world_size))
