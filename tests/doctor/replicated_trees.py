"""Trees whose copies agree, or don't; ``test_check_replicated.py`` runs this in one process and in two.

``python replicated_trees.py DEVICES`` prints a JSON object: of each tree how many leaves were compared, or the error.
"""

import json
import sys

from lockstep.core.errors import DesyncError
from lockstep.core.topology import from_environment
from lockstep.doctor import check_replicated
from lockstep.jax_engine.distributed import processes

processes.set_up_jax(threads=1, platform="cpu", simulate_devices=int(sys.argv[1]), topology=from_environment())

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from lockstep.jax_engine.distributed.placement import replicate_on_mesh  # noqa: E402

DEVICES = jax.devices()
MESH = jax.make_mesh((2, len(DEVICES) // 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
RANK = jax.process_index()


def array(spec, of_device, dtype=np.float32):
    """An array of 4 numbers of which every device holds what it says, whether or not that fits the sharding."""
    sharding = NamedSharding(MESH, spec)
    size = sharding.shard_shape((4,))[0]
    own = [jax.device_put(np.full(size, of_device(d), dtype), d) for d in MESH.devices.flat if d.process_index == RANK]
    return jax.make_array_from_single_device_arrays((4,), sharding, own)


def activation(x):
    """A function, as leaves of an Equinox module are: at another address in every process."""
    return x * RANK


def outcome(tree, **how):
    try:
        return check_replicated(tree, **how)
    except DesyncError as error:
        return str(error)


WHOLE, PARTLY, CUT = PartitionSpec(), PartitionSpec("a"), PartitionSpec(("a", "b"))
LAST = DEVICES[-1].id
TREES = {
    "equal": {"w": array(WHOLE, lambda d: 1.0), "key": replicate_on_mesh(jax.random.key(3), MESH), "n": 3},
    "one device": {"b": array(WHOLE, lambda d: 1.0), "w": [array(WHOLE, lambda d: float(d.id == LAST))]},
    "nan": array(WHOLE, lambda d: float("nan")),
    "parts": array(PARTLY, lambda d: float(d in MESH.devices[0])),
    "parts differ": array(PARTLY, lambda d: float(d.id == LAST)),
    "cut": array(CUT, lambda d: float(d.id)),
    "of processes": {"count": np.full(2, RANK)},
    "structure": {"x": 1} if RANK == 0 else {"x": 1, "y": 2},
    "empty": {},
    "half": {
        "w": array(WHOLE, lambda d: 1.0, jax.numpy.bfloat16),
        "scale": array(WHOLE, lambda d: 1.0, jax.numpy.float8_e4m3fn),
        "n": np.ones(2, jax.numpy.bfloat16),
    },
    "half differs": {"w": array(WHOLE, lambda d: float(d.id == LAST), jax.numpy.bfloat16)},
    "functions": {"activation": activation, "w": array(WHOLE, lambda d: 1.0)},
}
WITH_DEVICE_AXIS = {
    "pmap": {"w": array(CUT, lambda d: 1.0), "host": np.ones((4, 2)), "n": 3},
    "pmap differs": {"b": array(CUT, lambda d: 1.0), "w": array(CUT, lambda d: float(d.id == LAST))},
    "pmap of several a device": array(PARTLY, lambda d: 1.0),
    "slices differ on the host": np.arange(4),
}
found = {name: outcome(tree) for name, tree in TREES.items()}
found |= {name: outcome(tree, device_axis=True) for name, tree in WITH_DEVICE_AXIS.items()}
print(json.dumps(found | {"pmap without its axis": outcome(WITH_DEVICE_AXIS["pmap differs"])}))
processes.leave_processes()
