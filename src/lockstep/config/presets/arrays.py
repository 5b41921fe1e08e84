"""Presets of array environments that have no counterpart in Gymnasium."""

from __future__ import annotations

from typing import Any

_PUSH: dict[str, Any] = {
    # Our own, from a dozen trials with the dense reward. With less exploration (no entropy bonus, a learning rate that
    # falls) some seeds push the cube away from the arm only, and stay at a success rate of 0.4.
    "total_steps": 300_000,
    "num_envs": 32,
    "num_steps": 128,
    "normalize": {"observations": True, "returns": True},
    "ppo": {
        "learning_rate": 1e-3,
        "schedule": "constant",
        "gamma": 0.98,
        "num_epochs": 10,
        "num_minibatches": 16,
        "entropy_coef": 0.005,
    },
}

_GRID: dict[str, Any] = {
    # [own] Goals are near, so that they are found at once; a high learning rate then does it in seconds.
    "total_steps": 150_000,
    "num_envs": 32,
    "num_steps": 64,
    "ppo": {"learning_rate": 2.5e-3, "entropy_coef": 0.01},
}

_GRID_PIXELS: dict[str, Any] = {
    # [own] One lit pixel in 36 is a weak signal: a high learning rate, that stays so. Few, small layers suffice.
    **_GRID,
    "total_steps": 100_000,
    "num_envs": 64,
    "num_steps": 32,
    "ppo": {"learning_rate": 3e-3, "schedule": "constant", "entropy_coef": 0.01},
    "network": {"activation": "relu", "shared": True, "image": {"width": 0.5, "depth": 1}},
}

_SNAKE: dict[str, Any] = {
    # [own] For two cores: one small network for both heads, rollouts of many short games. With 4 minibatches
    # in place of 16 it took twice the steps to learn as much.
    "total_steps": 8_000_000,
    "num_envs": 128,
    "num_steps": 64,
    "ppo": {
        "learning_rate": 1e-3,
        "num_epochs": 3,
        "num_minibatches": 16,
        "value_clip_range": None,
        "entropy_coef": 0.01,
    },
    "network": {
        "hidden_sizes": (),
        "activation": "relu",
        "shared": True,
        "image": {"kind": "simple", "width": 0.5, "depth": 2},
    },
}

ARRAYS: dict[str, dict[str, Any]] = {
    "lockstep/PushCube-v0": _PUSH,
    "lockstep/Snake-v0": _SNAKE,
    "lockstep/GridWorld-v0": _GRID,
    "lockstep/GridWorldPixels-v0": _GRID_PIXELS,
}
