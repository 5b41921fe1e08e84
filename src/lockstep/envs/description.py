"""Describes an environment: how observations and actions lie in rows, its time limit, how its rewards are shaped."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import gymnasium

from lockstep.config.run import EnvConfig
from lockstep.core.spaces import ActionLayout, ObservationLayout, action_layout, observation_layout, texts_in
from lockstep.envs.arrays import ARRAY_ENVIRONMENTS, ArrayEnvironment
from lockstep.envs.arrays.frame_stack import FrameStack
from lockstep.envs.rewards import RewardShaping

MASK_SOURCES = ("info", "method")


@dataclass(frozen=True)
class EnvDescription:
    """The description of an environment.

    Attributes:
        is_array: whether it is one of our array environments and is stepped as a batch of arrays.
        mask_from: where the action mask comes from: ``info``, ``method``, or ``""`` (no mask, or it is in the
            observation).
        rewards: how its rewards are shaped for the learner.
        lives: whether a lost life ends an episode for the learner.
        texts: parts of the observation that are text, which a policy doesn't see.
    """

    id: str
    observation: ObservationLayout
    action: ActionLayout
    max_episode_steps: int | None = None
    is_array: bool = False
    mask_from: str = ""
    rewards: RewardShaping = field(default_factory=RewardShaping)
    lives: bool = False
    texts: tuple[str, ...] = ()


def make_arrays(config: EnvConfig) -> ArrayEnvironment:
    """Makes the array environment of a config, in a :class:`FrameStack` if the config stacks frames."""
    made = ARRAY_ENVIRONMENTS[config.id](**config.kwargs)
    return FrameStack(made, config.frame_stack) if config.frame_stack > 1 else made


def arguments_of(config: EnvConfig) -> dict[str, Any]:
    """Returns an environment's arguments; for an array environment they include the defaults."""
    kind = ARRAY_ENVIRONMENTS.get(config.id)
    taken = {} if kind is None else inspect.signature(kind.__init__).parameters
    own = {name: p.default for name, p in taken.items() if p.default is not inspect.Parameter.empty}
    return own | config.kwargs


def stepped_as_arrays(config: EnvConfig) -> bool:
    """Returns whether an environment is one of our array environments and is stepped as a batch of arrays."""
    return config.backend in ("auto", "tensor") and config.id in ARRAY_ENVIRONMENTS


def described(
    config: EnvConfig, observations: gymnasium.Space, actions: gymnasium.Space, limit: int | None
) -> EnvDescription:
    """Describes an environment by its spaces and time limit.

    Raises:
        ValueError: a space isn't supported, or the action mask doesn't fit the spaces; one line.
    """
    source = config.action_mask if config.action_mask in MASK_SOURCES else ""
    key = None if source else config.action_mask
    try:
        action = action_layout(actions)
        if config.action_mask and not action.discrete:
            raise ValueError(f"env.action_mask: {config.action_mask!r}, but actions are continuous; leave it out")
        observation = observation_layout(observations, key, action.outputs if source else 0)
    except ValueError as error:
        raise ValueError(f"env.id: {config.id}: {error}") from None
    if observation.mask is not None and observation.mask.size != action.outputs:
        raise ValueError(
            f"env.action_mask: {config.action_mask!r} has {observation.mask.size} entries and the actions have "
            f"{action.outputs} choices"
        )
    return EnvDescription(
        id=config.id,
        observation=observation,
        action=action,
        max_episode_steps=limit,
        is_array=stepped_as_arrays(config),
        mask_from=source,
        rewards=RewardShaping(config.reward_sign, config.reward_scale, config.reward_clip),
        lives=config.atari.enabled and config.atari.terminal_on_life_loss,
        texts=texts_in(observations),
    )
