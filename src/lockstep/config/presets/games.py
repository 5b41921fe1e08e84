"""Presets of MiniGrid's rooms and of Atari games, which all share one."""

from __future__ import annotations

import re
from typing import Any

_MINIGRID: dict[str, Any] = {
    # [starter] 16 environments x 128, batch 256, 4 epochs, lr 1e-3, gamma 0.99, lambda 0.95, entropy 0.01, values
    # clipped by 0.2. Where it has convolutions there is a multilayer perceptron on one-hot cells here.
    "total_steps": 100_000,
    "num_envs": 16,
    "num_steps": 128,
    "ppo": {
        "learning_rate": 1e-3,
        "schedule": "constant",
        "num_epochs": 4,
        "num_minibatches": 8,
        "value_clip_range": 0.2,
        "entropy_coef": 0.01,
        "value_coef": 1.0,
    },
}

IMAGES: dict[str, Any] = {
    # [cleanrl] ppo_atari.py: 8 x 128, 4 epochs of 4 minibatches, clipping 0.1 (values too), entropy 0.01.
    "total_steps": 10_000_000,
    "num_envs": 8,
    "num_steps": 128,
    "ppo": {
        "learning_rate": 2.5e-4,
        "num_epochs": 4,
        "num_minibatches": 4,
        "clip_range": 0.1,
        "value_clip_range": 0.1,
        "entropy_coef": 0.01,
    },
}

ATARI: dict[str, Any] = {  # [cleanrl] too: its wrappers, one network for actor and critic; sticky actions are the id's
    **IMAGES,
    "env": {"atari": {"enabled": True}, "frame_stack": 4, "reward_sign": True},
    "network": {"hidden_sizes": (), "activation": "relu", "shared": True, "image": {"kind": "nature"}},
}

ATARI_ID = re.compile(r"ALE/\w+-v5|\w+NoFrameskip-v4")
"""Ids of Atari games, as ale-py registers them."""

GAMES: dict[str, dict[str, Any]] = {
    **dict.fromkeys((f"MiniGrid-Empty-{size}-v0" for size in ("5x5", "6x6", "8x8")), _MINIGRID),
    **dict.fromkeys(("MiniGrid-Empty-Random-5x5-v0", "MiniGrid-Empty-Random-6x6-v0"), _MINIGRID),
    "MiniGrid-DoorKey-5x5-v0": _MINIGRID,
    "MiniGrid-DoorKey-6x6-v0": {**_MINIGRID, "total_steps": 300_000},
    "MiniGrid-DoorKey-8x8-v0": {**_MINIGRID, "total_steps": 1_000_000},
}
