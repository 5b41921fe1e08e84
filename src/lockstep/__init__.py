"""Lockstep trains one reinforcement-learning agent on many devices: any number of them gives the same bytes."""

from __future__ import annotations

import importlib
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.integrations.attach.attach import attach
    from lockstep.integrations.attach.companions import all_mean, normalize, shard_seed, stop_if
    from lockstep.integrations.attach.process_group import is_writer, join
    from lockstep.python.callbacks import BaseCallback
    from lockstep.python.loading import load_run
    from lockstep.python.policy import load_policy
    from lockstep.python.run import Run
    from lockstep.python.train import train
    from lockstep.training.losses import LossSample

__version__ = "0.1.0"
__all__ = [
    "BaseCallback",
    "LossSample",
    "Run",
    "__version__",
    "all_mean",
    "attach",
    "is_writer",
    "join",
    "load_policy",
    "load_run",
    "normalize",
    "shard_seed",
    "stop_if",
    "train",
]

_MODULES = {
    "lockstep.python.policy": ("load_policy",),
    "lockstep.python.callbacks": ("BaseCallback",),
    "lockstep.python.loading": ("load_run",),
    "lockstep.python.run": ("Run",),
    "lockstep.python.train": ("train",),
    "lockstep.training.losses": ("LossSample",),
    "lockstep.integrations.attach.attach": ("attach",),
    "lockstep.integrations.attach.companions": ("all_mean", "normalize", "shard_seed", "stop_if"),
    "lockstep.integrations.attach.process_group": ("is_writer", "join"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports a public function on first use, so that ``import lockstep`` loads no framework."""
    if name not in _HOME:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    drawn = random.getstate()
    try:
        value = getattr(importlib.import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise ImportError(f"lockstep.{name} needs PyTorch: pip install 'lockstep-rl[torch]'") from None
    finally:
        random.setstate(drawn)  # importing rich draws from `random`, which the caller may have seeded
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists all public names, including those that haven't been imported yet."""
    return sorted({*globals(), *__all__})
