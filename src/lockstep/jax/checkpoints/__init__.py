"""The checkpoints of ``lockstep.jax``: of any pytree, and the folder of those of a training."""
