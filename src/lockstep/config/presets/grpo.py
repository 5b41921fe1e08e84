"""Presets of GRPO."""

from __future__ import annotations

from typing import Any

GRPO: dict[str, Any] = {  # [own] sizes: groups of 8 environments, an episode of each in an iteration
    "num_envs": 64,
    "num_steps": 128,
    "ppo": {"learning_rate": 2e-3, "num_epochs": 4, "num_minibatches": 4},
}

_CARTPOLE_GRPO: dict[str, Any] = {
    # [own] Rollouts as long as its longest episodes.
    **GRPO,
    "total_steps": 800_000,
    "num_steps": 500,
    "ppo": {**GRPO["ppo"], "learning_rate": 5e-3},
}

_PUSH_GRPO: dict[str, Any] = {
    # [own] With groups of 16, so half as many starts an iteration, half of the trials stayed at a success rate of 0.4.
    **GRPO,
    "total_steps": 3_000_000,
    "num_envs": 128,
    "num_steps": 100,
    "normalize": {"observations": True},
    "ppo": {**GRPO["ppo"], "learning_rate": 3e-3},
}

GRPO_PRESETS: dict[str, dict[str, Any]] = {
    "CartPole-v1": _CARTPOLE_GRPO,
    "lockstep/CartPole-v1": _CARTPOLE_GRPO,
    "lockstep/PushCube-v0": _PUSH_GRPO,
}
