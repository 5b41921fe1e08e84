"""The metrics record of an iteration, as far as both engines compute it alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.core.episodes import RecentEpisodes
from lockstep.training.losses import LOSS, REFERENCE_KL, LossSettings

LOGGED = ("entropy_coef", "clip_range")
"""Coefficients that a record has where they are scheduled; ``value_clip_range`` falls as ``clip_range`` does."""

Record = dict[str, float | int | None]
"""A metrics record: name to number, in a fixed order; None where nothing is known this time."""


WORLD_SIZE = "time/world_size"
"""Ranks of an iteration; like all that hardware decides it stands with the times, outside of what must be equal."""


def episode_metrics(iteration: int, global_step: int, recent: RecentEpisodes) -> Record:
    """Begins a record with the counters after an iteration, and ``rollout/…`` of the last episodes."""
    return {"iteration": iteration, "global_step": global_step, **recent.metrics()}


def update_metrics(
    settings: LossSettings,
    terms: Sequence[float],
    evaluated: int,
    grad_norm: float,
    steps: int,
    stopped_by_kl: bool,
    learning_rate: float,
    coefficients: Mapping[str, float] | None = None,
) -> Record:
    """Computes ``train/…`` of an iteration, from numbers that are the same on every rank.

    The terms are summed over the ``evaluated`` minibatches, gradient norms over ``steps``; ``coefficients`` are those
    of the loss that are scheduled, by name.
    """
    coefficients = coefficients or {}
    settings = settings.scheduled(coefficients)
    means = {name: total / max(1, evaluated) for name, total in zip(settings.terms, terms, strict=True)}
    own = means.pop(LOSS, None)
    loss = means["policy_loss"] + settings.value_coef * means["value_loss"]
    loss += settings.kl_coef * means.get(REFERENCE_KL, 0.0) - settings.entropy_coef * means["entropy"]
    return {
        "train/loss": loss if own is None else own,
        **{f"train/{name}": value for name, value in means.items()},
        "train/grad_norm": grad_norm / max(1, steps),
        "train/learning_rate": learning_rate,
        **{f"train/{name}": coefficients[name] for name in LOGGED if name in coefficients},
        "train/optimizer_steps": steps,
        "train/stopped_by_kl": int(stopped_by_kl),
    }
