"""A program of one's own over a mesh, as users of functional trainers write it."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from lockstep.jax import (
    BATCH_AXIS,
    DATA_AXIS,
    FSDP_AXIS,
    data_sharding,
    fsdp_sharding,
    get_num_devices,
    make_mesh,
    named_sharding,
    replicate,
    replicate_on_mesh,
    replicate_sharding,
    set_mesh,
    shard_pytree,
    split_key_across_devices,
    unreplicate,
)


def loss(params, batch):
    return jnp.mean((params["act"](batch["x"] @ params["w"]) - batch["y"]) ** 2)


def main() -> dict:
    """Take a step of gradient descent, cut over the devices."""
    made_before = jnp.arange(64.0).reshape(16, 4) / 64
    on_the_host = np.ones((16, 2), np.float32)
    results = {}
    for name, context in (("plain", set_mesh()), ("fsdp", set_mesh(num_fsdp_devices=2))):
        with context as mesh:
            double = jax.jit(lambda x: 2 * x, in_shardings=data_sharding(mesh), out_shardings=data_sharding(mesh))
            results[name] = float(double(made_before).sum()), float(double(on_the_host).sum())
            inside = jnp.ones((16, 4))
            assert double(inside).sharding.shard_shape((16, 4)) == (16 // get_num_devices(), 4)
    mesh = make_mesh(num_fsdp_devices=2, num_devices=4)
    assert mesh.axis_names == (BATCH_AXIS, FSDP_AXIS) == DATA_AXIS

    shapes = {"large": jax.ShapeDtypeStruct((2048, 512), jnp.float32), "bias": jax.ShapeDtypeStruct((8,), jnp.float32)}
    shardings = fsdp_sharding(shapes, mesh, min_size_mbytes=4)
    assert shardings["large"].spec == PartitionSpec(FSDP_AXIS, None)
    assert tuple(shardings["large"].spec) == ("fsdp", None)
    assert shardings["bias"].spec == replicate_sharding(mesh).spec
    assert named_sharding(mesh, ("fsdp", None)) == shardings["large"]

    params = {"w": jnp.full((4, 2), 0.1), "act": jax.nn.tanh}
    whole = replicate_on_mesh(params, mesh)
    batch = shard_pytree({"x": made_before, "y": on_the_host}, mesh)
    assert whole["act"] is jax.nn.tanh
    gradient = jax.jit(jax.grad(lambda w, batch: loss({"w": w, "act": whole["act"]}, batch)))
    results["gradient"] = np.asarray(gradient(whole["w"], batch))

    copies = replicate(params, n_devices=4)
    assert copies["w"].shape == (4, 4, 2)
    assert copies["act"] is jax.nn.tanh
    assert unreplicate(copies)["w"].shape == (4, 2)
    keys = split_key_across_devices(jax.random.PRNGKey(0), n_devices=4)
    assert keys.shape == (4, 2)
    return results


if __name__ == "__main__":
    print(main())
