"""``lockstep.jax``: training as functions, and meshes, sharding, keys and checkpoints for programs of one's own.

Nothing here loads JAX until it is used: ``import lockstep.jax`` is as cheap as ``import lockstep``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.jax_engine.device_report import DeviceMetrics as DeviceMetrics
    from lockstep.jax_engine.device_report import DistributedSetup as DistributedSetup
    from lockstep.jax_engine.functional import Environment as Environment
    from lockstep.jax_engine.functional import EnvParams as EnvParams
    from lockstep.jax_engine.functional import FunctionalAdapter as FunctionalAdapter
    from lockstep.jax_engine.library import train_ppo_multigpu as train_ppo_multigpu
    from lockstep.jax_engine.library_config import PPOConfig as PPOConfig
    from lockstep.jax_engine.library_config import RunnerConfig as RunnerConfig
    from lockstep.jax_engine.mesh import activation_sharding_constraint as activation_sharding_constraint
    from lockstep.jax_engine.mesh import active_mesh as active_mesh
    from lockstep.jax_engine.mesh import data_sharding as data_sharding
    from lockstep.jax_engine.mesh import fsdp_sharding as fsdp_sharding
    from lockstep.jax_engine.mesh import get_num_devices as get_num_devices
    from lockstep.jax_engine.mesh import make_mesh as make_mesh
    from lockstep.jax_engine.mesh import replicate_sharding as replicate_sharding
    from lockstep.jax_engine.mesh import set_mesh as set_mesh
    from lockstep.jax_engine.placement import replicate as replicate
    from lockstep.jax_engine.placement import replicate_on_mesh as replicate_on_mesh
    from lockstep.jax_engine.placement import shard_pytree as shard_pytree
    from lockstep.jax_engine.placement import split_key_across_devices as split_key_across_devices
    from lockstep.jax_engine.placement import unreplicate as unreplicate
    from lockstep.jax_engine.ppo import PPO as PPO
    from lockstep.jax_engine.ppo import PPOTrainState as PPOTrainState
    from lockstep.jax_engine.pytree_checkpoint import load_checkpoint as load_checkpoint
    from lockstep.jax_engine.pytree_checkpoint import save_checkpoint as save_checkpoint
    from lockstep.jax_engine.registry import make as make
    from lockstep.jax_engine.reward_terms import Transition as Transition
    from lockstep.jax_engine.set_up import prepare_jax as prepare_jax
    from lockstep.jax_engine.task import Task as Task
    from lockstep.jax_engine.wrappers import AutoResetWrapper as AutoResetWrapper
    from lockstep.jax_engine.wrappers import ClipActionWrapper as ClipActionWrapper
    from lockstep.jax_engine.wrappers import EpisodeStatisticsWrapper as EpisodeStatisticsWrapper
    from lockstep.jax_engine.wrappers import FrameStackWrapper as FrameStackWrapper
    from lockstep.jax_engine.wrappers import ObservationNormalizationWrapper as ObservationNormalizationWrapper
    from lockstep.jax_engine.wrappers import RescaleActionWrapper as RescaleActionWrapper
    from lockstep.jax_engine.wrappers import RewardNormalizationWrapper as RewardNormalizationWrapper
    from lockstep.jax_engine.wrappers import VmapWrapper as VmapWrapper

_MODULES = {
    "lockstep.jax_engine.mesh": (
        "activation_sharding_constraint",
        "active_mesh",
        "data_sharding",
        "fsdp_sharding",
        "get_num_devices",
        "make_mesh",
        "replicate_sharding",
        "set_mesh",
    ),
    "lockstep.jax_engine.placement": (
        "replicate",
        "replicate_on_mesh",
        "shard_pytree",
        "split_key_across_devices",
        "unreplicate",
    ),
    "lockstep.jax_engine.pytree_checkpoint": ("load_checkpoint", "save_checkpoint"),
    "lockstep.jax_engine.functional": (
        "Environment",
        "EnvParams",
        "FunctionalAdapter",
    ),
    "lockstep.jax_engine.registry": ("make",),
    "lockstep.jax_engine.library": ("train_ppo_multigpu",),
    "lockstep.jax_engine.library_config": ("PPOConfig", "RunnerConfig"),
    "lockstep.jax_engine.ppo": ("PPO", "PPOTrainState"),
    "lockstep.jax_engine.task": ("Task",),
    "lockstep.jax_engine.reward_terms": ("Transition",),
    "lockstep.jax_engine.device_report": ("DeviceMetrics", "DistributedSetup"),
    "lockstep.jax_engine.set_up": ("prepare_jax",),
    "lockstep.jax_engine.wrappers": (
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
    """Import a public name from the engine on first use."""
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
    """The public names."""
    return sorted(_HOME)
