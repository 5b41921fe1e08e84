"""Lists what ``lockstep train … --print-environment`` shows: the variables that ranks get here, and why."""

from __future__ import annotations

import dataclasses

from lockstep.config.run import Config, RunOptions
from lockstep.core.rank_variables import Setting, in_lines, machine_class, settings_of, settings_of_xla
from lockstep.launch.spawn import threads_of
from lockstep.launch.world import topology_of, world_of

WITHIN_JAX = "# engine jax: each process sets PJRT_NPROC and adds to XLA_FLAGS by itself, before JAX starts"


def variable_lines(config: Config, options: RunOptions) -> list[str]:
    """Lists the variables of a request's ranks on this machine, as a shell reads them; users' own values stay.

    Under a launcher, they are this rank's; otherwise those of the ranks that would be started here.
    """
    topology = topology_of(options)
    if config.engine == "jax":
        kind = machine_class(topology)
        settings = settings_of_xla(config.device, topology, kind)
        return [*(in_lines(settings, kind) if settings else ()), WITHIN_JAX]
    if not topology.launched:
        world = world_of(options, config, topology)
        topology = dataclasses.replace(
            topology, world_size=world.processes, local_world_size=world.processes_here, launched=True
        )
    kind = machine_class(topology)
    threads = next(iter(threads_of(config.threads).items()))
    settings = settings_of(config.device, topology, kind)
    if topology.world_size > 1:
        settings = (Setting(*threads, "threads of a rank", "docs/running.md"), *settings)
    return in_lines(settings, kind)
