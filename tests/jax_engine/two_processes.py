"""What the processes of a run do with a mesh of all their devices; ``test_mesh_processes.py`` starts them."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.topology import from_environment
from lockstep.jax_engine.distributed import mesh as meshes
from lockstep.jax_engine.distributed import placement, processes, reductions
from lockstep.jax_engine.distributed.mesh import REPLICATED, SHARDED


def error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return None


def reduced(jax, mesh, rank, world_size):
    """The tree over shards of a product, with each process's rows made by itself."""
    random = np.random.default_rng(0)
    x, y = (random.normal(size=(8, 500)).astype(np.float32).reshape(world_size, -1, 500)[rank] for _ in range(2))
    arrays = [placement.shard_rows(a, mesh) for a in (x, y)]
    program = meshes.over_mesh(
        lambda x, y: (reductions.sum_shards(x * y), x + reductions.device_index()), mesh, SHARDED, (REPLICATED, SHARDED)
    )
    total, own = jax.jit(program)(*arrays)
    return {
        "sum": placement.fetch(total).tobytes().hex(),
        "own": placement.fetch_rows(own).shape,
        "not whole": error_of(placement.fetch, own),
        "gathered": placement.gathered(own).shape,
    }


def placed(jax, mesh, rank):
    """What the public functions make of arrays of two processes."""
    jnp = jax.numpy
    rows = placement.shard_pytree(
        {"x": np.full((4, 3), rank, np.float32), "k": jax.random.split(jax.random.key(rank), 4)}, mesh
    )
    whole = placement.replicate_on_mesh({"w": np.arange(6.0), "k": jax.random.key(1), "d": jnp.ones((2, 2))}, mesh)
    copies = placement.replicate({"w": np.arange(3.0)}, mesh)
    keys = placement.split_key_across_devices(jax.random.key(7), mesh.size)
    expected = jax.random.split(jax.random.key(7), mesh.size).reshape(jax.process_count(), -1)[rank]
    mine = np.concatenate([np.asarray(jax.random.key_data(s.data)) for s in keys.addressable_shards])
    on_all = [placement.fetch(whole["w"]).tolist(), whole["k"].is_fully_replicated, placement.fetch(whole["d"]).shape]
    big = np.arange(16.0, dtype=np.float32).reshape(4, 4)
    sharding = meshes.fsdp_sharding({"m": big}, mesh, min_size_mbytes=0)["m"]
    return {
        "rows": [rows["x"].shape, placement.gathered(rows["x"])[:, 0].tolist(), rows["k"].shape],
        "whole": on_all,
        "copies": [copies["w"].shape, placement.unreplicate(copies)["w"].tolist()],
        "keys": np.array_equal(mine, jax.random.key_data(expected)),
        "fsdp": np.array_equal(placement.gathered(placement.place(big, sharding)), big),
        "10 rows": error_of(placement.shard_pytree, np.zeros((5, 2)), mesh),
        "3 devices": error_of(meshes.make_mesh, 1, 3),
        "too many": error_of(meshes.make_mesh, 1, 6),
    }


def compiled_again(jax, mesh, rank):
    """How many programs are compiled by what processes do again and again, and by what is new."""
    names = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: names.append(name))

    def compiled(function):
        names.clear()
        function()
        return sum(name.endswith("backend_compile_duration") for name in names)

    rows = placement.shard_rows(np.full((2, 7), rank, np.float32), mesh)
    first = compiled(lambda: placement.gathered(rows))
    again = [compiled(lambda: placement.gathered(rows)) for _ in range(2)]
    longer = [compiled(lambda n=n: processes.gather_json("x" * n)) for n in (30 * (rank + 1), 90, 200)]
    return {"first": first, "again": again, "longer": longer}


def saved(mesh, rank, directory):
    """One checkpoint, written once, read by all; a part of the array lies in each process."""
    from lockstep.jax.checkpoints.pytrees import load_checkpoint, save_checkpoint

    state = {"m": placement.shard_pytree(np.full((4, 2), rank, np.float32), mesh), "step": 3}
    save_checkpoint(directory, state)
    occupied = directory.with_name("occupied")
    occupied.mkdir(exist_ok=True)
    (occupied / f"file_{rank}").touch()
    refused = error_of(save_checkpoint, occupied, state)
    back = load_checkpoint(directory, state)
    same = np.array_equal(placement.fetch_rows(back["m"]), np.full((4, 2), rank))
    return {
        "same": same,
        "sharded": back["m"].sharding == state["m"].sharding,
        "step": back["step"],
        "refused": refused,
    }


def resumed(rank, directory):
    """What a runner goes on from that all processes see, and where each has a directory of its own."""
    from lockstep.jax.checkpoints.folder import CheckpointFolder
    from lockstep.jax.config import RunnerConfig
    from lockstep.jax.history import PPOMetricsHistory
    from lockstep.runs.checkpoint import MANIFEST

    state: Any = {"x": np.arange(3)}  # any pytree will do
    history, out = PPOMetricsHistory(total_loss=np.ones(1)), {}

    def runner_of(place):
        return RunnerConfig(total_timesteps=8, checkpoint_dir=place, resume=True)

    for name, own in (("shared", directory / "runner"), ("own", directory / f"runner_{rank}")):
        folder = CheckpointFolder(runner_of(own), {})
        folder.save(state, history, 1, 8)  # the first process writes
        out[name] = error_of(folder.find, state)
        folder.close()
    out["updates"] = getattr(CheckpointFolder(runner_of(directory / "runner"), {}).find(state), "updates", None)
    if rank:  # each has some now, from two sessions
        shutil.copytree(directory / "runner", directory / "runner_1")
        manifest = directory / "runner_1" / "step_8" / MANIFEST
        manifest.write_text(manifest.read_text() + "\n")
    out["another"] = error_of(folder.find, state)
    return out


def listening():
    """Local addresses (hexadecimal) on which the machine's processes listen."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A"]


def main():
    directory, devices = Path(sys.argv[1]), int(sys.argv[2])
    if sys.platform == "linux":
        processes.LOOPBACK_ADDRESS = "127.0.0.77"  # to tell it from the address of the host's name
    topology = from_environment()
    processes.set_up_jax(1, "cpu", devices, topology)
    import jax

    mesh = meshes.make_mesh(num_fsdp_devices=2)
    report = {
        "devices": [meshes.get_num_devices(), jax.local_device_count()],
        "order": [device.process_index for device in mesh.devices.flat],
        "json": processes.gather_json({"rank": topology.rank, "text": "ä" * (topology.rank + 1)}),
        "reduced": reduced(jax, mesh, topology.rank, topology.world_size),
    }
    if topology.world_size > 1:
        report |= placed(jax, mesh, topology.rank) | {"saved": saved(mesh, topology.rank, directory / "checkpoint")}
        report["resumed"] = resumed(topology.rank, directory)
        processes.check_ranks_alike({"config": "the same"})
        report["compiled"] = compiled_again(jax, mesh, topology.rank)
        report["programs kept"] = len(list(Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).glob("jit_*")))
        report["mismatch"] = error_of(processes.check_ranks_alike, {"config": f"config {topology.rank}"})
        report["listening"] = listening() if sys.platform == "linux" else None
    (directory / f"report_{topology.world_size}_{topology.rank}.json").write_text(json.dumps(report))
    processes.leave_processes()


if __name__ == "__main__":
    main()
