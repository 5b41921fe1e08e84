"""Named starting points: hyperparameters of published, tuned baselines, by environment id.

Sources: [zoo] RL Baselines3 Zoo, ``hyperparams/ppo.yml`` (Raffin 2020); [cleanrl] CleanRL,
``ppo_continuous_action.py`` and ``ppo_atari.py`` (Huang et al. 2022); [starter] RL Starter Files, ``scripts/train.py``
(Willems); [own] found by us, where none of them has values.
A preset says where a value departs from its source. All have 8 shards, so that 1 to 8 ranks can share them.
``value_coef`` follows CleanRL's convention (weight of half the squared error): SB3's ``vf_coef`` 0.5 is 1.0 here.
"""

from __future__ import annotations

from lockstep.config.presets.by_id import PRESETS, defaults_for, for_grpo, has_preset, preset_for, with_version
from lockstep.config.presets.games import ATARI_ID
from lockstep.config.presets.grpo import GRPO_PRESETS

__all__ = [
    "ATARI_ID",
    "GRPO_PRESETS",
    "PRESETS",
    "defaults_for",
    "for_grpo",
    "has_preset",
    "preset_for",
    "with_version",
]
