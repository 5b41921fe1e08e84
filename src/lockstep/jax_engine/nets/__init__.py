"""Networks, distributions and custom modules in JAX."""
