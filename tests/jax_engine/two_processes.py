"""What the processes of a run do with a mesh of all their devices; ``test_mesh_processes.py`` starts them."""

import json
import sys
from pathlib import Path

import numpy as np

from lockstep.jax_engine import mesh as meshes
from lockstep.jax_engine.mesh import REPLICATED, SHARDED
from lockstep.topology import from_environment


def error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return None


def reduced(jax, mesh, rank, world_size):
    """The tree over shards of a product, with each process's rows made by itself."""
    random = np.random.default_rng(0)
    x, y = (random.normal(size=(8, 500)).astype(np.float32)[meshes.local_rows(mesh, 8)] for _ in range(2))
    arrays = [meshes.shard_rows(a, mesh) for a in (x, y)]
    program = meshes.over_mesh(
        lambda x, y: (meshes.gather_tree(x * y), x + meshes.shard_index()), mesh, SHARDED, (REPLICATED, SHARDED)
    )
    total, own = jax.jit(program)(*arrays)
    return {
        "sum": meshes.fetch(total).tobytes().hex(),
        "own": meshes.fetch_rows(own).shape,
        "not whole": error_of(meshes.fetch, own),
        "gathered": meshes.gathered(own).shape,
    }


def placed(jax, mesh, rank):
    """What the public functions make of arrays of two processes."""
    jnp = jax.numpy
    rows = meshes.shard_pytree(
        {"x": np.full((4, 3), rank, np.float32), "k": jax.random.split(jax.random.key(rank), 4)}, mesh
    )
    whole = meshes.replicate_on_mesh({"w": np.arange(6.0), "k": jax.random.key(1), "d": jnp.ones((2, 2))}, mesh)
    copies = meshes.replicate({"w": np.arange(3.0)}, mesh)
    keys = meshes.split_key_across_devices(jax.random.key(7), mesh.size)
    expected = jax.random.split(jax.random.key(7), mesh.size)[meshes.local_rows(mesh, mesh.size)]
    mine = np.concatenate([np.asarray(jax.random.key_data(s.data)) for s in keys.addressable_shards])
    on_all = [meshes.fetch(whole["w"]).tolist(), whole["k"].is_fully_replicated, meshes.fetch(whole["d"]).shape]
    big = np.arange(16.0, dtype=np.float32).reshape(4, 4)
    sharding = meshes.fsdp_sharding({"m": big}, mesh, min_size_mbytes=0)["m"]
    return {
        "rows": [rows["x"].shape, meshes.gathered(rows["x"])[:, 0].tolist(), rows["k"].shape],
        "whole": on_all,
        "copies": [copies["w"].shape, meshes.unreplicate(copies)["w"].tolist()],
        "keys": np.array_equal(mine, jax.random.key_data(expected)),
        "fsdp": np.array_equal(meshes.gathered(meshes.place(big, sharding)), big),
        "10 rows": error_of(meshes.shard_pytree, np.zeros((5, 2)), mesh),
        "3 devices": error_of(meshes.make_mesh, 1, 3),
        "too many": error_of(meshes.make_mesh, 1, 6),
    }


def saved(mesh, rank, directory):
    """One checkpoint, written once, read by all; a part of the array lies in each process."""
    from lockstep.jax_engine.pytree_checkpoint import load_checkpoint, save_checkpoint

    state = {"m": meshes.shard_pytree(np.full((4, 2), rank, np.float32), mesh), "step": 3}
    save_checkpoint(directory, state)
    back = load_checkpoint(directory, state)
    same = np.array_equal(meshes.fetch_rows(back["m"]), np.full((4, 2), rank))
    return {"same": same, "sharded": back["m"].sharding == state["m"].sharding, "step": back["step"]}


def listening():
    """Local addresses (hexadecimal) on which the machine's processes listen."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A"]


def main():
    directory, devices = Path(sys.argv[1]), int(sys.argv[2])
    if sys.platform == "linux":
        meshes.LOOPBACK_ADDRESS = "127.0.0.77"  # to tell it from the address of the host's name
    topology = from_environment()
    meshes.set_up_jax(1, "cpu", devices, topology)
    import jax

    mesh = meshes.make_mesh(num_fsdp_devices=2)
    report = {
        "devices": [meshes.get_num_devices(), jax.local_device_count()],
        "order": [device.process_index for device in mesh.devices.flat],
        "json": meshes.gather_json({"rank": topology.rank, "text": "ä" * (topology.rank + 1)}),
        "reduced": reduced(jax, mesh, topology.rank, topology.world_size),
    }
    if topology.world_size > 1:
        report |= placed(jax, mesh, topology.rank) | {"saved": saved(mesh, topology.rank, directory / "checkpoint")}
        meshes.check_ranks_alike("the same")
        report["mismatch"] = error_of(meshes.check_ranks_alike, f"config {topology.rank}")
        report["listening"] = listening() if sys.platform == "linux" else None
    (directory / f"report_{topology.world_size}_{topology.rank}.json").write_text(json.dumps(report))
    meshes.leave_processes()


if __name__ == "__main__":
    main()
