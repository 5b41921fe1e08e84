"""The only place that makes meshes and shardings and uses `jax.distributed`."""
