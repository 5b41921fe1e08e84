"""Says where the names live that other layers load from the JAX engine; the PyTorch engine has the same file.

Importing it imports no framework: a name's module is imported when the name is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

PACKAGES = ("jax", "equinox", "optax")
"""Packages that the engine needs."""
_HOME = {
    "set_up_jax": "distributed.processes",
    "look_with_cpu": "setup.set_up",
    "settle_numbers": "setup.set_up",
    "MOST_DEVICES": "setup.set_up",
    "pool_devices": "setup.set_up",
    "roomy_pool": "setup.set_up",
    "check_device": "distributed.devices",
    "chosen_device": "setup.accelerators",
    "count_accelerators": "distributed.devices",
    "device_memory": "distributed.devices",
    "name_ranks": "distributed.devices",
    "check_networks": "state",
    "check_own_loss": "start.own_loss",
    "train": "seeds.train",  # which hands runs of one seed to train.py
    "PolicyFunction": "policy",
    "environment_spaces": "envs.environments",
    "can_draw": "envs.environments",
    "make_jax_envs": "envs.for_host",
    "can_compile": "planning.costs",
    "start_compiler": "planning.costs",
    "costs": "planning.costs",
    "DrawnEnvironment": "envs.picture",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"lockstep.jax_engine.{_HOME[name]}"), name)
