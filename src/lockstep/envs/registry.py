"""Makes a rank's environments with the back end that the config names, and checks what is asked of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lockstep.config.engines import engine_module
from lockstep.config.run import Config, EnvConfig
from lockstep.envs.batched.array_envs import ArrayEnvs
from lockstep.envs.batched.envpool import EnvPoolEnvs, check_envpool_options
from lockstep.envs.description import EnvDescription
from lockstep.envs.gymnasium.in_process import InProcessEnvs
from lockstep.envs.gymnasium.workers import WorkerEnvs
from lockstep.envs.host_envs import HostEnvs, WantedEnvs
from lockstep.envs.tensor import check_tensor_options


def check_environment_options(config: Config) -> None:
    """Checks that the back end of a resolved config can do what the config asks of it.

    Raises:
        ValueError: it can't; one line.
    """
    check_tensor_options(config)
    check_envpool_options(config)


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
    in_parts: bool = False,
    overlapped: bool = False,
) -> HostEnvs:
    """Makes the environments that :class:`~lockstep.envs.host_envs.WantedEnvs` describes.

    ``fail`` is called with a message if an environment in this process hangs, and ends the process.
    """
    wanted = WantedEnvs(
        config=config,
        description=description,
        seed=seed,
        env_ids=env_ids,
        purpose=purpose,
        group_size=group_size,
        device=device,
        shard_size=shard_size,
        in_parts=in_parts,
        overlapped=overlapped,
    )
    if config.jax_only:
        return engine_module("jax").make_jax_envs(wanted)
    if config.backend == "tensor" and not (description.is_array and purpose == "eval"):
        return engine_module("torch").make_tensor_envs(wanted)
    if config.backend == "envpool":
        return EnvPoolEnvs(wanted)
    if description.is_array:
        return ArrayEnvs(wanted)
    if config.workers in (0, "auto"):  # nobody has chosen: see training.worker_processes
        return InProcessEnvs(wanted, fail)
    return WorkerEnvs(wanted, config.workers)
