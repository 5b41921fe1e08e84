"""The sections of settings of the algorithms: PPO, and GRPO, which builds on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from lockstep.config.sections import MOST_SIZE, Section

Schedule = Literal["constant", "linear"]

FLOAT32_MAX = 3.4028234663852886e38
CLIPPED = "clipped"
"""Value of ``ppo.value_clip_range`` for "clipped, by a number to be found": that of lower layers, or ``clip_range``."""


class PPOConfig(Section):
    """Proximal policy optimisation (Schulman et al. 2017)."""

    learning_rate: float = Field(default=3e-4, gt=0, description="Adam's step size")
    schedule: Literal["constant", "linear", "adaptive"] = Field(
        default="linear",
        description="of the learning rate: linear falls to 0 over total_steps, adaptive follows desired_kl",
    )
    gamma: float = Field(default=0.99, ge=0, le=1, description="discount per step")
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="lambda of GAE (Schulman et al. 2016)")
    num_epochs: int = Field(default=4, ge=1, le=MOST_SIZE, description="passes over each rollout")
    num_minibatches: int = Field(default=4, ge=1, description="minibatches (optimiser steps) per epoch")
    batch_size: int | None = Field(
        default=None, ge=1, description="instead of num_minibatches: samples of a minibatch, of the whole run"
    )
    drop_remainder: bool = Field(
        default=False,
        description="jax: leave out, in each epoch others, the samples by which minibatches don't come out even",
    )
    gradient_accumulation: int = Field(
        default=1, ge=1, description="parts in which a minibatch goes through the networks, to save memory"
    )
    loss: str | None = Field(
        default=None,
        pattern=r"^[\w.]+:[\w.]+$",
        description="a function that gives the loss of each sample, in place of PPO's, as 'module:function'; see "
        "docs/losses.md",
    )
    loss_kwargs: dict[str, Any] = Field(default_factory=dict, description="further arguments of that function, as JSON")
    clip_range: float = Field(default=0.2, gt=0, description="clipping of the probability ratio, not of values")
    value_clip_range: float | None = Field(default=None, gt=0, description="clipping of the value's change; None: off")
    advantage_normalization: Literal["global", "local", "rank", "off"] = Field(
        default="global",
        description="over the global minibatch, over each shard's part of it (local), over each rank's (as CleanRL's "
        "ppo_atari_multigpu; not with reduction exact), or not at all",
    )
    clip_schedule: Schedule = Field(
        default="constant", description="of clip_range and value_clip_range: linear falls to 0 over total_steps"
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="weight of the entropy bonus")
    entropy_schedule: Schedule = Field(
        default="constant", description="of entropy_coef: linear falls to 0 over total_steps"
    )
    value_coef: float = Field(
        default=0.5,
        ge=0,
        description="weight of the value loss 0.5*(v-return)^2 (as in CleanRL; SB3's vf_coef is half of it)",
    )
    max_grad_norm: float | None = Field(
        default=0.5, gt=0, description="clipping by global norm, after the reduction; None: off"
    )
    target_kl: float | None = Field(
        default=None, gt=0, description="stop an update above 1.5 times this approx_kl; None: off"
    )
    desired_kl: float = Field(default=0.01, gt=0, description="what the adaptive schedule aims at")
    adam_eps: float = Field(default=1e-5, gt=0, description="Adam's epsilon")
    adam_betas: tuple[float, float] = Field(default=(0.9, 0.999), description="Adam's decay rates")

    @field_validator("learning_rate")
    @classmethod
    def _in_float32(cls, value: float) -> float:
        if value > FLOAT32_MAX:
            raise ValueError(f"{value:g} is beyond float32, which holds numbers up to {FLOAT32_MAX:.4g}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _clipped_values(cls, values: Any) -> Any:
        """Clips values by the range of the ratio if they are to be clipped and no range is given (CleanRL, rsl_rl)."""
        if not isinstance(values, dict) or values.get("value_clip_range") != CLIPPED:
            return values
        return {**values, "value_clip_range": values.get("clip_range", cls.model_fields["clip_range"].default)}


class GRPOConfig(Section):
    """Group-relative policy optimisation (Shao et al. 2024).

    It takes its optimisation from the ppo section. Episodes count for num_steps steps at most.
    """

    group_size: int = Field(
        default=8, ge=2, description="environments that start each iteration from the same seeded state"
    )
    normalize_std: bool = Field(
        default=True, description="divide by the group's standard deviation (Liu et al. 2025 leave that out)"
    )
    kl_coef: float = Field(default=0.0, ge=0, description="weight of the KL divergence from the reference policy")
    reference: str | None = Field(
        default=None, min_length=1, description="run or checkpoint of the reference policy; None: the initial one"
    )


def check_read_by_grpo(ppo: Any) -> None:
    """Refuses explicit settings of PPO's value loss or advantages that GRPO doesn't use."""
    asked = ppo if isinstance(ppo, Mapping) else {}
    clip, scale = asked.get("value_clip_range"), asked.get("advantage_normalization", "global")
    if clip is not None:
        raise ValueError(f"ppo.value_clip_range: {clip}, but GRPO has no critic, whose values it clips; leave it out")
    if scale != "global":
        raise ValueError(
            f"ppo.advantage_normalization: {scale}, but GRPO's advantages are of a group; --grpo.normalize-std false "
            "leaves out their scale"
        )


def check_read_by_ppo(grpo: Any, config: GRPOConfig) -> None:
    """Refuses explicit settings of GRPO, with their values in ``config``, in a run of PPO, which would ignore them."""
    for name, info in GRPOConfig.model_fields.items() if isinstance(grpo, Mapping) else ():
        value = getattr(config, name)
        if name in grpo and value != info.default:
            raise ValueError(f"grpo.{name}: {value}, but algorithm is ppo; add --algorithm grpo, or leave it out")
