"""Makes the environments of a rank, of the back end that its config names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lockstep.config.engines import engine_module
from lockstep.config.run import EnvConfig
from lockstep.envs.batched.array_envs import ArrayEnvs
from lockstep.envs.batched.envpool import EnvPoolEnvs
from lockstep.envs.description import EnvDescription
from lockstep.envs.gymnasium.in_process import InProcessEnvs
from lockstep.envs.gymnasium.workers import WorkerEnvs
from lockstep.envs.host_envs import HostEnvs


def make_envs(
    config: EnvConfig,
    description: EnvDescription,
    seed: int,
    env_ids: Sequence[int],
    fail: Callable[[str], None],
    purpose: str = "reset",
    group_size: int = 1,
    device: str = "cpu",
    shard_size: int | None = None,
) -> HostEnvs:
    """Makes the environments with these global ids.

    Args:
        config: which environment, and in how many worker processes.
        description: its spaces.
        seed: the run's seed.
        env_ids: global ids.
        fail: ends the process with a message, for an environment in this process that hangs.
        purpose: ``"reset"`` for training, ``"eval"`` for evaluation.
        group_size: environments that share the keys of their resets, and so their starts.
        device: of the policy; tensor environments and JAX's live there.
        shard_size: environments of a shard; None: all are one.
    """
    keys = [env_id // group_size for env_id in env_ids]
    if config.jax_only:
        make = engine_module("jax").make_jax_envs
        return make(config, description, seed, env_ids, purpose, keys, shard_size or len(env_ids), device)
    if config.backend == "tensor" and not (description.is_array and purpose == "eval"):
        make = engine_module("torch").make_tensor_envs
        return make(config, description, seed, env_ids, purpose, keys, shard_size or len(env_ids), device)
    if config.backend == "envpool":
        return EnvPoolEnvs(config, description, seed, env_ids, purpose, shard_size or len(env_ids))
    if description.is_array:
        return ArrayEnvs(config, description, seed, env_ids, purpose, keys)
    if config.workers:
        return WorkerEnvs(config, description, seed, env_ids, purpose, keys)
    return InProcessEnvs(config, description, seed, env_ids, purpose, fail, keys)
