"""Presets of physics simulations: MuJoCo, Brax, MuJoCo Playground and Box2D."""

from __future__ import annotations

from typing import Any

MUJOCO: dict[str, Any] = {
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

_HUMANOID: dict[str, Any] = {**MUJOCO, "total_steps": 10_000_000}  # [zoo] has this length for both humanoids

_WALKING: dict[str, Any] = {
    # MuJoCo Playground's settings for the DeepMind control suite, for GPUs: 2,048 environments, unrolls of 30, 16
    # epochs of 32 minibatches, discount 0.995, reward x 10. It collects 16 unrolls for an update, this takes one.
    "engine": "jax",
    "total_steps": 60_000_000,
    "num_envs": 2048,
    "num_steps": 30,
    "env": {"reward_scale": 10.0},
    "normalize": {"observations": True},
    "network": {"hidden_sizes": (256, 256, 256), "activation": "silu"},
    "ppo": {
        "learning_rate": 1e-3,
        "schedule": "constant",
        "gamma": 0.995,
        "num_epochs": 16,
        "num_minibatches": 32,
        "clip_range": 0.3,
        "entropy_coef": 1e-2,
        "max_grad_norm": None,
    },
}

_SWIMMER: dict[str, Any] = {
    # [zoo] Swimmer-v4: 4 environments x 1024 (8 x 512 here), batch 256, lr 6e-4, gamma 0.9999, lambda 0.98, normalised.
    "total_steps": 1_000_000,
    "num_envs": 8,
    "num_steps": 512,
    "normalize": {"observations": True, "returns": True},
    "ppo": {
        "learning_rate": 6e-4,
        "schedule": "constant",
        "gamma": 0.9999,
        "gae_lambda": 0.98,
        "num_epochs": 10,
        "num_minibatches": 16,
        "value_coef": 1.0,
    },
}

_LUNAR_LANDER: dict[str, Any] = {
    # [zoo] LunarLander-v2 and LunarLanderContinuous-v2: 16 environments x 1024, batch 64, 4 epochs, gamma 0.999, lambda
    # 0.98, entropy 0.01.
    "total_steps": 1_000_000,
    "num_envs": 16,
    "num_steps": 1024,
    "ppo": {
        "learning_rate": 3e-4,
        "schedule": "constant",
        "gamma": 0.999,
        "gae_lambda": 0.98,
        "num_epochs": 4,
        "num_minibatches": 256,
        "entropy_coef": 0.01,
        "value_coef": 1.0,
    },
}

_BIPEDAL_WALKER: dict[str, Any] = {
    # [zoo] BipedalWalker-v3: 32 environments x 2048, normalised, batch 64, 10 epochs, gamma 0.999, clipping 0.18.
    "total_steps": 5_000_000,
    "num_envs": 32,
    "num_steps": 2048,
    "normalize": {"observations": True, "returns": True},
    "ppo": {
        "learning_rate": 3e-4,
        "schedule": "constant",
        "gamma": 0.999,
        "num_epochs": 10,
        "num_minibatches": 1024,
        "clip_range": 0.18,
        "value_coef": 1.0,
    },
}

PHYSICS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Pusher-v5", "Reacher-v5", "Walker2d-v5"), MUJOCO),
    **dict.fromkeys(("InvertedDoublePendulum-v5", "InvertedPendulum-v5"), MUJOCO),
    "Humanoid-v5": _HUMANOID,
    "HumanoidStandup-v5": _HUMANOID,
    "brax/humanoid": {**_WALKING, "env": {"reward_scale": 0.1}},
    "playground/HumanoidWalk": _WALKING,
    "Swimmer-v5": _SWIMMER,
    **dict.fromkeys(("LunarLander-v3", "LunarLanderContinuous-v3"), _LUNAR_LANDER),
    "BipedalWalker-v3": _BIPEDAL_WALKER,
}
