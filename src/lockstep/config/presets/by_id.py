"""Named starting points: hyperparameters of published, tuned baselines, by environment id.

Sources: [zoo] RL Baselines3 Zoo, ``hyperparams/ppo.yml`` (Raffin 2020); [cleanrl] CleanRL,
``ppo_continuous_action.py`` and ``ppo_atari.py`` (Huang et al. 2022); [starter] RL Starter Files, ``scripts/train.py``
(Willems); [own] found here, where none of them has values.
Where a value departs from its source the preset says so. All have 8 shards, so that 1 to 8 ranks share them.
``value_coef`` follows CleanRL's convention (weight of half the squared error): SB3's ``vf_coef`` 0.5 is 1.0 here.
"""

from __future__ import annotations

import copy
import re
from typing import Any

from lockstep.config.sections import SHORT_IDS

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

_HUMANOID: dict[str, Any] = {**_MUJOCO, "total_steps": 10_000_000}  # [zoo] has this length for both humanoids

_WALKING: dict[str, Any] = {
    # MuJoCo Playground's settings for the DeepMind control suite, for GPUs: 2,048 environments, unrolls of 30, 16
    # epochs of 32 minibatches, discount 0.995, reward x 10. It collects 16 unrolls for an update, this takes one.
    "engine": "jax",
    "total_steps": 60_000_000,
    "num_envs": 2048,
    "num_shards": 8,
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

_IMAGES: dict[str, Any] = {
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

_ATARI: dict[str, Any] = {  # [cleanrl] too: its wrappers, one network for actor and critic; sticky actions are the id's
    **_IMAGES,
    "env": {"atari": {"enabled": True}, "frame_stack": 4, "reward_sign": True},
    "network": {"hidden_sizes": (), "activation": "relu", "shared": True, "image": {"kind": "nature"}},
}

_DISCRETE: dict[str, Any] = {  # the config's own defaults, spelled out
    "num_envs": 8,
    "num_steps": 128,
    "ppo": {"learning_rate": 3e-4, "num_epochs": 4, "num_minibatches": 4},
}

_GRPO: dict[str, Any] = {  # [own] sizes: groups of 8 environments, an episode of each in an iteration
    "num_envs": 64,
    "num_steps": 128,
    "ppo": {"learning_rate": 2e-3, "num_epochs": 4, "num_minibatches": 4},
}

_CARTPOLE_GRPO: dict[str, Any] = {
    # [own] Rollouts as long as its longest episodes.
    **_GRPO,
    "total_steps": 800_000,
    "num_steps": 500,
    "ppo": {**_GRPO["ppo"], "learning_rate": 5e-3},
}

_PUSH_GRPO: dict[str, Any] = {
    # [own] With groups of 16, so half as many starts an iteration, half of the trials stayed at a success rate of 0.4.
    **_GRPO,
    "total_steps": 3_000_000,
    "num_envs": 128,
    "num_steps": 100,
    "normalize": {"observations": True},
    "ppo": {**_GRPO["ppo"], "learning_rate": 3e-3},
}

GRPO_PRESETS = {
    "CartPole-v1": _CARTPOLE_GRPO,
    "lockstep/CartPole-v1": _CARTPOLE_GRPO,
    "lockstep/PushCube-v0": _PUSH_GRPO,
}

ATARI_ID = re.compile(r"ALE/\w+-v5|\w+NoFrameskip-v4")
"""Ids of Atari games, as ale-py registers them; all take one preset."""

PRESETS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("CartPole-v1", "lockstep/CartPole-v1"), _CARTPOLE),
    **dict.fromkeys(("Acrobot-v1", "lockstep/Acrobot-v1"), _ACROBOT),
    **dict.fromkeys(("MountainCar-v0", "lockstep/MountainCar-v0"), _MOUNTAIN_CAR),
    **dict.fromkeys(("MountainCarContinuous-v0", "lockstep/MountainCarContinuous-v0"), _MOUNTAIN_CAR_CONTINUOUS),
    **dict.fromkeys(("Pendulum-v1", "lockstep/Pendulum-v1"), _PENDULUM),
    "lockstep/PushCube-v0": _PUSH,
    "lockstep/Snake-v0": _SNAKE,
    "lockstep/GridWorld-v0": _GRID,
    "lockstep/GridWorldPixels-v0": _GRID_PIXELS,
    "FrozenLake-v1": _TOY_TEXT,
    "FrozenLake8x8-v1": _FROZEN_LAKE_8X8,
    "CliffWalking-v1": _CLIFF_WALKING,
    "CliffWalkingSlippery-v1": _CLIFF_WALKING,
    "Taxi-v4": _TAXI,
    "Blackjack-v1": _BLACKJACK,
    **dict.fromkeys(("Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Pusher-v5", "Reacher-v5", "Walker2d-v5"), _MUJOCO),
    **dict.fromkeys(("InvertedDoublePendulum-v5", "InvertedPendulum-v5"), _MUJOCO),
    "Humanoid-v5": _HUMANOID,
    "HumanoidStandup-v5": _HUMANOID,
    "brax/humanoid": {**_WALKING, "env": {"reward_scale": 0.1}},
    "playground/HumanoidWalk": _WALKING,
    "Swimmer-v5": _SWIMMER,
    **dict.fromkeys(("LunarLander-v3", "LunarLanderContinuous-v3"), _LUNAR_LANDER),
    "BipedalWalker-v3": _BIPEDAL_WALKER,
    **dict.fromkeys((f"MiniGrid-Empty-{size}-v0" for size in ("5x5", "6x6", "8x8")), _MINIGRID),
    **dict.fromkeys(("MiniGrid-Empty-Random-5x5-v0", "MiniGrid-Empty-Random-6x6-v0"), _MINIGRID),
    "MiniGrid-DoorKey-5x5-v0": _MINIGRID,
    "MiniGrid-DoorKey-6x6-v0": {**_MINIGRID, "total_steps": 300_000},
    "MiniGrid-DoorKey-8x8-v0": {**_MINIGRID, "total_steps": 1_000_000},
}


def with_version(env_id: str) -> str:
    """Completes an id without a version to its newest, as Gymnasium does; one that isn't known stays."""
    if re.search(r"-v\d+$", env_id) or ":" in env_id or env_id in PRESETS:
        return env_id
    import gymnasium  # what it has registered costs a tenth of a second, which other ids needn't wait for

    known = (name.rpartition("-v") for name in {*gymnasium.registry, *SHORT_IDS, *PRESETS})
    versions = [int(version) for name, _, version in known if name == env_id and version.isdigit()]
    return f"{env_id}-v{max(versions)}" if versions else env_id


def has_preset(env_id: str) -> bool:
    """Whether an environment has a preset of its own; ``module:Id-v0`` has that of ``Id-v0``."""
    return _preset(env_id) is not None


def _preset(env_id: str) -> dict[str, Any] | None:
    name = env_id.rpartition(":")[2] if ":" in env_id else SHORT_IDS.get(env_id, env_id)
    return PRESETS.get(name, _ATARI if ATARI_ID.fullmatch(name) else None)


def preset_for(env_id: str) -> dict[str, Any]:
    """Settings (nested, as in a config file) to start from for an environment; just its id when there is no preset."""
    settings = copy.deepcopy(_preset(env_id) or {})
    settings["env"] = {**settings.get("env", {}), "id": env_id}
    return settings


def for_grpo(env_id: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings to start from for GRPO, made of those for PPO.

    An environment keeps its own section, its engine, length, networks and the normalisation of its observations;
    sizes and optimisation are GRPO's.
    """
    name = env_id.rpartition(":")[2]
    out = {key: value for key, value in settings.items() if key in ("env", "engine", "total_steps", "network")}
    if settings.get("normalize", {}).get("observations"):
        out["normalize"] = {"observations": True}
    return out | copy.deepcopy(GRPO_PRESETS.get(name, _GRPO))


def defaults_for(continuous: bool, images: bool) -> tuple[dict[str, Any], str]:
    """Settings to start from for an environment without a preset, by its spaces, and what to call them."""
    if images:
        return copy.deepcopy(_IMAGES), "image observations (as for Atari)"
    if continuous:
        return copy.deepcopy(_MUJOCO), "continuous actions (as for MuJoCo)"
    return copy.deepcopy(_DISCRETE), "discrete actions"
