"""``lockstep.jax``: training as functions, and meshes, sharding, keys and checkpoints for your own programs.

JAX is loaded only when something here is used: ``import lockstep.jax`` is as cheap as ``import lockstep``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.jax.checkpoints.pytrees import load_checkpoint as load_checkpoint
    from lockstep.jax.checkpoints.pytrees import load_metadata as load_metadata
    from lockstep.jax.checkpoints.pytrees import save_checkpoint as save_checkpoint
    from lockstep.jax.config import PPOConfig as PPOConfig
    from lockstep.jax.config import RunnerConfig as RunnerConfig
    from lockstep.jax.copies import replicate as replicate
    from lockstep.jax.copies import set_mesh as set_mesh
    from lockstep.jax.copies import split_key_across_devices as split_key_across_devices
    from lockstep.jax.history import PPOMetricsHistory as PPOMetricsHistory
    from lockstep.jax.pmap.rewards import Reward as Reward
    from lockstep.jax.pmap.rollouts import Trajectory as Trajectory
    from lockstep.jax.pmap.task import DistributedPPOConfig as DistributedPPOConfig
    from lockstep.jax.pmap.task import DistributedPPOTask as DistributedPPOTask
    from lockstep.jax.ppo import PPO as PPO
    from lockstep.jax.ppo import PPOTrainState as PPOTrainState
    from lockstep.jax.report import DeviceMetrics as DeviceMetrics
    from lockstep.jax.report import DistributedSetup as DistributedSetup
    from lockstep.jax.reward_terms import Transition as Transition
    from lockstep.jax.task import Task as Task
    from lockstep.jax.training import train_ppo_multigpu as train_ppo_multigpu
    from lockstep.jax.wrappers import AutoResetWrapper as AutoResetWrapper
    from lockstep.jax.wrappers import ClipActionWrapper as ClipActionWrapper
    from lockstep.jax.wrappers import EpisodeStatisticsWrapper as EpisodeStatisticsWrapper
    from lockstep.jax.wrappers import FrameStackWrapper as FrameStackWrapper
    from lockstep.jax.wrappers import ObservationNormalizationWrapper as ObservationNormalizationWrapper
    from lockstep.jax.wrappers import RescaleActionWrapper as RescaleActionWrapper
    from lockstep.jax.wrappers import RewardNormalizationWrapper as RewardNormalizationWrapper
    from lockstep.jax.wrappers import VmapWrapper as VmapWrapper
    from lockstep.jax_engine.distributed.mesh import activation_sharding_constraint as activation_sharding_constraint
    from lockstep.jax_engine.distributed.mesh import active_mesh as active_mesh
    from lockstep.jax_engine.distributed.mesh import data_sharding as data_sharding
    from lockstep.jax_engine.distributed.mesh import fsdp_sharding as fsdp_sharding
    from lockstep.jax_engine.distributed.mesh import get_num_devices as get_num_devices
    from lockstep.jax_engine.distributed.mesh import make_mesh as make_mesh
    from lockstep.jax_engine.distributed.mesh import named_sharding as named_sharding
    from lockstep.jax_engine.distributed.mesh import replicate_sharding as replicate_sharding
    from lockstep.jax_engine.distributed.placement import replicate_on_mesh as replicate_on_mesh
    from lockstep.jax_engine.distributed.placement import shard_pytree as shard_pytree
    from lockstep.jax_engine.distributed.placement import unreplicate as unreplicate
    from lockstep.jax_engine.distributed.reductions import BATCH_AXIS as BATCH_AXIS
    from lockstep.jax_engine.distributed.reductions import DATA_AXIS as DATA_AXIS
    from lockstep.jax_engine.distributed.reductions import FSDP_AXIS as FSDP_AXIS
    from lockstep.jax_engine.envs.adapter import FunctionalAdapter as FunctionalAdapter
    from lockstep.jax_engine.envs.functional import Environment as Environment
    from lockstep.jax_engine.envs.functional import EnvParams as EnvParams
    from lockstep.jax_engine.envs.registry import make as make
    from lockstep.jax_engine.setup.set_up import prepare_jax as prepare_jax

__all__ = [
    "BATCH_AXIS",
    "DATA_AXIS",
    "FSDP_AXIS",
    "PPO",
    "AutoResetWrapper",
    "ClipActionWrapper",
    "DeviceMetrics",
    "DistributedPPOConfig",
    "DistributedPPOTask",
    "DistributedSetup",
    "EnvParams",
    "Environment",
    "EpisodeStatisticsWrapper",
    "FrameStackWrapper",
    "FunctionalAdapter",
    "ObservationNormalizationWrapper",
    "PPOConfig",
    "PPOMetricsHistory",
    "PPOTrainState",
    "RescaleActionWrapper",
    "Reward",
    "RewardNormalizationWrapper",
    "RunnerConfig",
    "Task",
    "Trajectory",
    "Transition",
    "VmapWrapper",
    "activation_sharding_constraint",
    "active_mesh",
    "data_sharding",
    "fsdp_sharding",
    "get_num_devices",
    "load_checkpoint",
    "load_metadata",
    "make",
    "make_mesh",
    "named_sharding",
    "prepare_jax",
    "replicate",
    "replicate_on_mesh",
    "replicate_sharding",
    "save_checkpoint",
    "set_mesh",
    "shard_pytree",
    "split_key_across_devices",
    "train_ppo_multigpu",
    "unreplicate",
]

_MODULES = {
    "lockstep.jax_engine.distributed.mesh": (
        "activation_sharding_constraint",
        "active_mesh",
        "data_sharding",
        "fsdp_sharding",
        "get_num_devices",
        "make_mesh",
        "named_sharding",
        "replicate_sharding",
    ),
    "lockstep.jax_engine.distributed.placement": (
        "replicate_on_mesh",
        "shard_pytree",
        "unreplicate",
    ),
    "lockstep.jax_engine.distributed.reductions": ("BATCH_AXIS", "DATA_AXIS", "FSDP_AXIS"),
    "lockstep.jax.copies": ("replicate", "set_mesh", "split_key_across_devices"),
    "lockstep.jax.checkpoints.pytrees": ("load_checkpoint", "load_metadata", "save_checkpoint"),
    "lockstep.jax.history": ("PPOMetricsHistory",),
    "lockstep.jax_engine.envs.adapter": ("FunctionalAdapter",),
    "lockstep.jax_engine.envs.functional": ("Environment", "EnvParams"),
    "lockstep.jax_engine.envs.registry": ("make",),
    "lockstep.jax.training": ("train_ppo_multigpu",),
    "lockstep.jax.config": ("PPOConfig", "RunnerConfig"),
    "lockstep.jax.ppo": ("PPO", "PPOTrainState"),
    "lockstep.jax.task": ("Task",),
    "lockstep.jax.pmap.task": ("DistributedPPOConfig", "DistributedPPOTask"),
    "lockstep.jax.pmap.rewards": ("Reward",),
    "lockstep.jax.pmap.rollouts": ("Trajectory",),
    "lockstep.jax.reward_terms": ("Transition",),
    "lockstep.jax.report": ("DeviceMetrics", "DistributedSetup"),
    "lockstep.jax_engine.setup.set_up": ("prepare_jax",),
    "lockstep.jax.wrappers": (
        "AutoResetWrapper",
        "ClipActionWrapper",
        "EpisodeStatisticsWrapper",
        "FrameStackWrapper",
        "ObservationNormalizationWrapper",
        "RescaleActionWrapper",
        "RewardNormalizationWrapper",
        "VmapWrapper",
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'lockstep.jax' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("jax", "jaxlib"):
            raise
        raise ImportError(f"lockstep.jax.{name} needs JAX: pip install 'lockstep-rl[jax]'") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names."""
    return sorted(_HOME)
