"""``lockstep`` on a machine whose CPU plays two GPUs: what must come before JAX starts comes before."""

import sys

from lockstep.cli import main
from lockstep.jax_engine.distributed import devices, processes
from lockstep.jax_engine.setup import accelerators, set_up

set_up.PLATFORMS["cuda"] = "cpu"
really = set_up.check_device


def check(platform):
    really("cpu" if platform == "cuda" else platform)


def two(device):
    return accelerators.Accelerators(2, "GPU", 1)


def joining(*args, **kwargs):
    print("takes", kwargs["local_device_ids"], flush=True)
    return initialize(*args, **kwargs)


initialize = processes.jax.distributed.initialize
processes.jax.distributed.initialize = joining
set_up.check_device = processes.check_device = check
devices.on_this_machine = two
processes.gpus_of_this_host = lambda: [0, 1]
sys.exit(main(sys.argv[1:]))
