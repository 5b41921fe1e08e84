"""The parts of an iteration's metrics record that both engines compute alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.core.episodes import STATED, SUCCESS_RATE, RecentEpisodes
from lockstep.training.losses import LOSS, REFERENCE_KL, LossSettings

LOGGED = ("entropy_coef", "clip_range")
"""Coefficients that are logged if they are scheduled; ``value_clip_range`` falls as ``clip_range`` does."""

Record = dict[str, float | int | None]
"""A metrics record: numbers by name, in a fixed order; None if a number isn't known for this iteration."""

WORLD_SIZE = "time/world_size"
"""Number of ranks; it stands with the times because it depends on the hardware, so it needn't be equal."""
WAITED_FOR = "time/waited_for"
"""The rank that others waited for; only records of several ranks have it."""
EVALUATION = "eval/"
"""Prefix of what an evaluation found."""
OCCASIONAL = (SUCCESS_RATE, WAITED_FOR)
"""Metrics that some of a run's records have and others don't."""
OCCASIONAL_PREFIXES = (EVALUATION, STATED)


def is_own_name(name: str) -> bool:
    """Returns whether a name is kept for metrics that the run itself logs, even if not with every record."""
    return name in OCCASIONAL or name.startswith(OCCASIONAL_PREFIXES)


def episode_metrics(iteration: int, global_step: int, recent: RecentEpisodes) -> Record:
    """Returns the first part of a record: the counters after an iteration, and ``rollout/…`` of the last episodes."""
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
    """Returns ``train/…`` of an iteration, from numbers that are the same on every rank.

    ``terms`` are sums over the ``evaluated`` minibatches, ``grad_norm`` is a sum over ``steps``; ``coefficients`` are
    the scheduled ones of the loss, by name.
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
