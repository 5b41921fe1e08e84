"""A fingerprint of a loss of the user's own, by which a resumed run finds that its function was edited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lockstep.training.losses import LOSS, SETTING
from lockstep.training.own_loss.trial import Gradients, Losses, made_up_samples

Fingerprint = dict[str, list[float | None]]
"""Losses of the made-up samples, and their gradients by name, a number a sample; None: it isn't finite."""
KEY = "own_loss"
"""Where it stands in the ``state.json`` of a checkpoint; who changes the made-up samples gives it another name."""
DIGITS = 7
CLOSE = 1e-4
"""How far two numbers may be apart, relative to the larger one or, where they cancelled, to a tenth of the largest:
other versions and machines round otherwise, by 1e-6."""


def loss_fingerprint(losses: Losses, gradients: Gradients) -> Fingerprint:
    """Makes the fingerprint of what a loss gave of all made-up samples: a few hundred numbers, for JSON.

    Of gradients by several outputs it has a weighted sum, so that its size doesn't depend on how many there are.
    """
    out = {LOSS: losses}
    for name, gradient in gradients.items():
        flat = gradient.reshape(len(losses), -1).astype(np.float64)
        weights = made_up_samples(flat.shape[1], critic=False, reference=False)["actor_output"]
        assert weights is not None
        out[name] = flat[:, 0] if gradient.ndim == 1 else (flat * weights[: len(flat)]).sum(1)
    return {name: [_rounded(x) for x in numbers] for name, numbers in out.items()}


def check_same_loss(name: str | None, now: Fingerprint | None, facts: Mapping[str, Any]) -> None:
    """Compares the fingerprint of a loss with the one that a checkpoint has.

    Args:
        name: of the loss, as the config has it.
        now: its fingerprint; None: the config names no loss.
        facts: of the checkpoint; without ``own_loss`` where a version wrote it that kept none.

    Raises:
        ValueError: the function is another one than then, by what it does; one line.
    """
    recorded = facts.get(KEY)
    if now is None or recorded is None:
        return
    if not isinstance(recorded, Mapping) or now.keys() != recorded.keys():
        difference = "is trained through other fields of its samples"
    else:
        arrays = {key: (_array(recorded[key]), _array(now[key])) for key in now}
        distances = {key: _apart(old, new) for key, (old, new) in arrays.items()}
        key = max(distances, key=lambda key: distances[key].max())
        at = int(distances[key].argmax())
        if distances[key][at] <= CLOSE:
            return
        old, new = (array[at] for array in arrays[key])
        what = "a loss" if key == LOSS else f"a gradient by {key}"
        difference = f"gives {what} of {new:.6g} where it gave {old:.6g}, of the same made-up sample"
    raise ValueError(
        f"{SETTING}: {name} isn't what step_{facts['global_step']} was trained with any more: it {difference}; "
        "put it back as it was, or start a new run"
    )


def _rounded(x: Any) -> float | None:
    return float(f"{x:.{DIGITS}g}") + 0.0 if np.isfinite(x) else None


def _array(numbers: Any) -> np.ndarray:
    return np.array([np.nan if x is None else x for x in numbers], np.float64)


def _apart(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Returns how far numbers are apart, as :data:`CLOSE` says; infinitely where only one of the two is finite."""
    finite = np.isfinite(old) & np.isfinite(new)
    sizes = np.where(finite, np.maximum(np.abs(old), np.abs(new)), 0.0)
    scale = np.maximum(np.maximum(sizes, 0.1 * sizes.max()), np.finfo(np.float32).tiny)
    distances = np.where(finite, np.abs(old - new) / scale, 0.0)
    return np.where(np.isfinite(old) == np.isfinite(new), distances, np.inf)
