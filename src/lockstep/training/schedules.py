"""Schedules of the learning rate and of the loss's coefficients: what each is as an iteration begins."""

from __future__ import annotations

from lockstep.config.run import Config


def scheduled_learning_rate(config: Config, global_step: int, current: float) -> float:
    """Returns the learning rate at the start of an iteration, after ``global_step`` environment steps.

    The constant and the adaptive schedule keep the ``current`` one.
    """
    if config.ppo.schedule == "linear":
        return config.ppo.learning_rate * remaining(config, global_step)
    return current


def remaining(config: Config, global_step: int) -> float:
    """Returns the share of a run that is left after ``global_step`` steps; linear schedules multiply by it."""
    return max(0.0, 1.0 - global_step / config.total_steps)


def follows_length(config: Config) -> bool:
    """Returns whether a schedule falls to 0 over ``total_steps``, so that a longer run differs from its start."""
    return "linear" in (config.ppo.schedule, config.ppo.entropy_schedule, config.ppo.clip_schedule)


def scheduled_coefficients(config: Config, global_step: int) -> dict[str, float]:
    """Returns those coefficients of the loss that have a schedule, by name, at the start of an iteration.

    Value clipping follows the schedule of ``clip_range``, as in the Atari experiments of Schulman et al. (2017, table
    5) and in OpenAI Baselines' PPO2.
    """
    ppo, left = config.ppo, remaining(config, global_step)
    out: dict[str, float] = {}
    if ppo.entropy_schedule == "linear":
        out["entropy_coef"] = ppo.entropy_coef * left
    if ppo.clip_schedule == "linear":
        out["clip_range"] = ppo.clip_range * left
        if ppo.value_clip_range is not None:
            out["value_clip_range"] = ppo.value_clip_range * left
    return out
