"""The only place that touches meshes, shardings and `jax.distributed`."""
