"""Presets of Gymnasium's classic control and toy text; our array versions of classic control share them."""

from __future__ import annotations

from typing import Any

_CARTPOLE: dict[str, Any] = {
    # [zoo] CartPole-v1: n_steps 32, batch 256, 20 epochs, gamma 0.98, lambda 0.8, lr 1e-3 linear. 8 environments there.
    # The clip range, which falls to 0 there as well, stays as it is here.
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
    # [zoo] Pendulum-v1: 4 environments x 1024 (8 x 512 here), batch 64, 10 epochs, gamma 0.9, lambda 0.95, lr 1e-3.
    # Without the source's state-dependent exploration.
    "total_steps": 100_000,
    "num_envs": 8,
    "num_steps": 512,
    "ppo": {
        "learning_rate": 1e-3,
        "schedule": "constant",
        "gamma": 0.9,
        "num_epochs": 10,
        "num_minibatches": 64,
        "value_coef": 1.0,
    },
}

_MOUNTAIN_CAR: dict[str, Any] = {
    # [zoo] MountainCar-v0: 16 environments, normalised, n_steps 16, batch 64, 4 epochs, gamma 0.99, lambda 0.98.
    "total_steps": 1_000_000,
    "num_envs": 16,
    "num_steps": 16,
    "normalize": {"observations": True, "returns": True},
    "ppo": {
        "learning_rate": 3e-4,
        "schedule": "constant",
        "gae_lambda": 0.98,
        "num_epochs": 4,
        "num_minibatches": 4,
        "value_coef": 1.0,
    },
}

_MOUNTAIN_CAR_CONTINUOUS: dict[str, Any] = {
    # [own] The zoo's values (1 environment, lr 7.77e-5, standard deviation 0.04) rest on state-dependent exploration.
    # From it: normalised, gamma 0.9999, lambda 0.9, 10 epochs, clipping 0.1, gradient norm 5, vf_coef 0.19.
    "total_steps": 200_000,
    "num_envs": 8,
    "num_steps": 256,
    "normalize": {"observations": True, "returns": True},
    "ppo": {
        "learning_rate": 3e-4,
        "schedule": "constant",
        "gamma": 0.9999,
        "gae_lambda": 0.9,
        "num_epochs": 10,
        "num_minibatches": 8,
        "clip_range": 0.1,
        "entropy_coef": 0.00429,
        "value_coef": 0.38,
        "max_grad_norm": 5.0,
    },
}

_TOY_TEXT: dict[str, Any] = {
    # [own] Small tables as one-hot observations: a high learning rate, and entropy so that sparse rewards are found.
    "total_steps": 200_000,
    "num_envs": 16,
    "num_steps": 128,
    "ppo": {"learning_rate": 2.5e-3, "entropy_coef": 0.02},
}

_FROZEN_LAKE_8X8: dict[str, Any] = {**_TOY_TEXT, "total_steps": 500_000}

_TAXI: dict[str, Any] = {
    # [own] Fewer steps or less entropy end in never picking anybody up.
    "total_steps": 1_000_000,
    "num_envs": 64,
    "num_steps": 64,
    "normalize": {"returns": True},
    "ppo": {"learning_rate": 2.5e-3, "entropy_coef": 0.1},
}

_CLIFF_WALKING: dict[str, Any] = {
    # [own] The environment itself has no time limit, and a policy that knows nothing hardly ever ends an episode.
    **_TOY_TEXT,
    "env": {"max_episode_steps": 200},
    "normalize": {"returns": True},
}

_BLACKJACK: dict[str, Any] = {**_TOY_TEXT, "ppo": {"learning_rate": 1e-3, "entropy_coef": 0.01}}

CLASSIC: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("CartPole-v1", "lockstep/CartPole-v1"), _CARTPOLE),
    **dict.fromkeys(("Acrobot-v1", "lockstep/Acrobot-v1"), _ACROBOT),
    **dict.fromkeys(("MountainCar-v0", "lockstep/MountainCar-v0"), _MOUNTAIN_CAR),
    **dict.fromkeys(("MountainCarContinuous-v0", "lockstep/MountainCarContinuous-v0"), _MOUNTAIN_CAR_CONTINUOUS),
    **dict.fromkeys(("Pendulum-v1", "lockstep/Pendulum-v1"), _PENDULUM),
    "FrozenLake-v1": _TOY_TEXT,
    "FrozenLake8x8-v1": _FROZEN_LAKE_8X8,
    "CliffWalking-v1": _CLIFF_WALKING,
    "CliffWalkingSlippery-v1": _CLIFF_WALKING,
    "Taxi-v4": _TAXI,
    "Blackjack-v1": _BLACKJACK,
}
