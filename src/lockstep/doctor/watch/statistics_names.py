"""Tells by its name whether a tensor of a module holds running statistics."""

from __future__ import annotations

import re

STATISTICS = frozenset(
    {
        "running",
        "mean",
        "means",
        "avg",
        "average",
        "ema",
        "var",
        "variance",
        "std",
        "stddev",
        "sq",
        "m2",
        "sumsq",
        "rms",
        "cluster",
        "debiasing",
    }
)
"""Words of a tensor's name by which it holds running statistics: ``running_mean``, ``obs_rms``, ``embed_avg``."""


def names_statistics(name: str) -> bool:
    """Returns whether the last part of a tensor's name says so: ``norm.running_mean``, also ``norm.runningMean``."""
    words = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+", name.rpartition(".")[2])
    return any(word.lower() in STATISTICS for word in words)
