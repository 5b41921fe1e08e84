"""JAX is set up before the first look at an environment of its own, for to look at one is to start JAX."""

from __future__ import annotations

import importlib
import os

from lockstep.config import EnvConfig, RunOptions
from lockstep.launch.world import topology_of
from lockstep.topology import available_cores
from lockstep.videos import has_screen

MOST_CPU_DEVICES = 64


def start_jax(env: EnvConfig, device: str, options: RunOptions, draws: bool = False) -> None:
    """Set JAX up for a run, unless its environment needs no JAX to be looked at; a second call does nothing.

    How many devices the run will use is known only when its environment is: a CPU becomes as many as could be meant,
    and the run takes the first ones. A launcher's processes meet here, which must be before JAX starts.

    Args:
        env: the environment.
        device: of the run.
        options: the user's.
        draws: whether pictures of the environment will be asked for, for which MuJoCo chooses a library when it is
            imported.

    Raises:
        ValueError: this machine has no such device; one line.
    """
    if not env.jax_only:
        return
    if draws and not has_screen():
        os.environ.setdefault("MUJOCO_GL", "egl")
    try:
        engine = importlib.import_module("lockstep.jax_engine.mesh")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("lockstep"):
            raise
        return  # whoever looks at the environment says what is missing
    wanted = max(options.simulate_devices or 0, options.devices or 0, available_cores())
    engine.set_up_jax(1, device, min(wanted, MOST_CPU_DEVICES) if device == "cpu" else None, topology_of(options))
