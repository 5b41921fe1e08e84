"""Named starting points: hyperparameters of published, tuned baselines, by environment id.

Sources: [zoo] RL Baselines3 Zoo, ``hyperparams/ppo.yml`` (Raffin 2020); [cleanrl] CleanRL,
``ppo_continuous_action.py`` (Huang et al. 2022). Where a value departs from its source the preset says so.
``value_coef`` follows CleanRL's convention (weight of half the squared error): SB3's ``vf_coef`` 0.5 is 1.0 here.
"""

from __future__ import annotations

import copy
import re
from typing import Any

ATARI_IDS = re.compile(r"ALE/.+|\w+NoFrameskip-v\d+$")
"""Ids of Atari games, as ale-py registers them."""

_CARTPOLE: dict[str, Any] = {
    # [zoo] CartPole-v1: n_steps 32, batch 256, 20 epochs, gamma 0.98, lambda 0.8, lr 1e-3 linear. 8 environments there.
    "total_steps": 100_000,
    "num_envs": 8,
    "num_steps": 32,
    "ppo": {
        "learning_rate": 1e-3,
        "gamma": 0.98,
        "gae_lambda": 0.8,
        "num_epochs": 20,
        "num_minibatches": 1,
        "value_coef": 1.0,
    },
}

_ACROBOT: dict[str, Any] = {
    # [zoo] Acrobot-v1: 16 environments, normalised, n_steps 256, batch 64, 4 epochs, gamma 0.99, lambda 0.94.
    "total_steps": 1_000_000,
    "num_envs": 16,
    "num_steps": 256,
    "normalize": {"observations": True, "returns": True},
    "ppo": {
        "learning_rate": 3e-4,
        "schedule": "constant",
        "gae_lambda": 0.94,
        "num_epochs": 4,
        "num_minibatches": 64,
        "value_coef": 1.0,
    },
}

_PENDULUM: dict[str, Any] = {
    # [zoo] Pendulum-v1: 4 environments, n_steps 1024, batch 64, 10 epochs, gamma 0.9, lambda 0.95, lr 1e-3.
    # Without the source's state-dependent exploration.
    "total_steps": 100_000,
    "num_envs": 4,
    "num_steps": 1024,
    "ppo": {
        "learning_rate": 1e-3,
        "schedule": "constant",
        "gamma": 0.9,
        "num_epochs": 10,
        "num_minibatches": 64,
        "value_coef": 1.0,
    },
}

_MUJOCO: dict[str, Any] = {
    # [cleanrl] 2,048 steps an iteration (1 environment there, 8 x 256 here), 32 minibatches, 10 epochs.
    "total_steps": 1_000_000,
    "num_envs": 8,
    "num_steps": 256,
    "normalize": {"observations": True, "returns": True},
    "ppo": {
        "learning_rate": 3e-4,
        "num_epochs": 10,
        "num_minibatches": 32,
        "value_clip_range": 0.2,
    },
}

_ATARI: dict[str, Any] = {
    # [cleanrl] ppo_atari.py: 8 environments, 128 steps, 4 minibatches, 4 epochs, lr 2.5e-4 linear, clip 0.1 (value's
    # change too), entropy 0.01; one network for actor and critic. Sticky actions are the id's own there and here.
    "env": {"atari": {"enabled": True}, "frame_stack": 4, "reward_sign": True},
    "total_steps": 10_000_000,
    "num_envs": 8,
    "num_steps": 128,
    "network": {"hidden_sizes": (), "activation": "relu", "shared": True, "image": {"kind": "nature"}},
    "ppo": {"learning_rate": 2.5e-4, "clip_range": 0.1, "value_clip_range": 0.1, "entropy_coef": 0.01},
}

PRESETS: dict[str, dict[str, Any]] = {
    "CartPole-v1": _CARTPOLE,
    "lockstep/CartPole-v1": _CARTPOLE,
    "Acrobot-v1": _ACROBOT,
    "Pendulum-v1": _PENDULUM,
    "lockstep/Pendulum-v1": _PENDULUM,
    "HalfCheetah-v5": _MUJOCO,
    "Hopper-v5": _MUJOCO,
}


def preset_for(env_id: str) -> dict[str, Any]:
    """Settings (nested, as in a config file) to start from for an environment; just its id when there is no preset.

    ``module:Id-v0`` takes the preset of ``Id-v0``. All Atari games have one.
    """
    name = env_id.rpartition(":")[2]
    settings = copy.deepcopy(PRESETS.get(name, _ATARI if ATARI_IDS.match(name) else {}))
    settings["env"] = {"id": env_id, **settings.get("env", {})}
    return settings
