"""Says where the names live that other layers load from the PyTorch engine; the JAX engine has the same file.

Importing it imports no framework: a name's module is imported when the name is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

PACKAGES = ("torch",)
"""Packages that the engine needs."""
_HOME = {
    "check_device": "setup.devices",
    "chosen_device": "setup.devices",
    "count_accelerators": "setup.devices",
    "device_memory": "setup.devices",
    "name_ranks": "setup.devices",
    "set_up_device": "setup.devices",
    "check_networks": "state",
    "check_own_loss": "start.own_loss",
    "train": "train",
    "check_recording": "cloning",
    "learnt_episodes": "cloning",
    "train_clone": "cloning",
    "serve_store": "distributed.store",
    "PolicyFunction": "policy",
    "PolicyModule": "export.module",
    "write_onnx": "export.onnx",
    "write_program": "export.program",
    "can_compile": "planning.costs",
    "start_compiler": "planning.costs",
    "costs": "planning.costs",
    "make_tensor_envs": "envs.tensor_envs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"lockstep.torch_engine.{_HOME[name]}"), name)
