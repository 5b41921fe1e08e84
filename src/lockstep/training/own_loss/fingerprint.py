"""Fingerprints of a user's own loss, which show whether its function was edited."""

from __future__ import annotations

import hashlib
import inspect
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import CodeType
from typing import Any

import numpy as np

from lockstep.training.losses import LOSS, SETTING, LossFunction
from lockstep.training.own_loss.trial import FAR, Gradients, Losses

KEY = "own_loss"
"""Its key in a checkpoint's ``state.json``; rename it whenever the made-up samples change."""
DIGITS = 7
CLOSE = 1e-4
"""Largest difference that counts as equal, relative to the larger number, or to a tenth of the largest if numbers
cancelled: other versions and machines round differently, by 1e-6.
"""
SMALL = 1e-2
"""Smaller numbers are compared as if they were this: samples are about 1, and rounding leaves 1e-7 in place of 0."""
_WEIGHTS = 1
"""Seed of the weights by which gradients with respect to several outputs are summed."""


@dataclass(frozen=True)
class Fingerprint:
    """What is known of a function.

    Attributes:
        numbers: its losses on the made-up samples and their gradients by name, one number per sample; None: not finite.
        code: a hash of its compiled code, with the version of Python that compiled it; None if it isn't Python's.
        note: a message for a run that resumes with it.
    """

    numbers: Mapping[str, list[float | None]]
    code: str | None = None
    note: str | None = None

    @property
    def trains_the_policy(self) -> bool:
        """Whether a gradient reaches the policy by more than its entropy."""
        return any(any(self.numbers.get(name, ())) for name in ("log_prob", "actor_output"))

    def to_json(self) -> dict[str, Any]:
        """Returns what a checkpoint stores."""
        return {name: value for name, value in asdict(self).items() if name != "note"}


def loss_fingerprint(loss: LossFunction, losses: Losses, gradients: Gradients) -> Fingerprint:
    """Returns the fingerprint of a loss, from its losses and gradients on all made-up samples.

    Gradients with respect to several outputs are stored as a weighted sum, so that the size doesn't depend on their
    number.
    """
    out = {LOSS: losses}
    for name, gradient in gradients.items():
        flat = gradient.reshape(len(losses), -1).astype(np.float64)
        weights = np.random.Generator(np.random.Philox(_WEIGHTS)).uniform(0.5, 1.5, flat.shape)
        out[name] = flat[:, 0] if gradient.ndim == 1 else (flat * weights).sum(1)
    return Fingerprint({name: [_rounded(x) for x in numbers] for name, numbers in out.items()}, _code_of(loss))


def fingerprint_in(facts: Mapping[str, Any]) -> Fingerprint | None:
    """Reads the fingerprint in a ``state.json``; None if there is none or it is invalid."""
    found = facts.get(KEY)
    numbers, code = (found.get("numbers"), found.get("code")) if isinstance(found, Mapping) else (None, None)
    if not isinstance(numbers, Mapping) or LOSS not in numbers or not isinstance(code, str | None):
        return None
    plain = all(
        isinstance(row, list) and all(x is None or (isinstance(x, int | float) and abs(x) < 1e300) for x in row)
        for row in numbers.values()
    )
    return Fingerprint(numbers, code) if plain else None


def difference(old: Fingerprint, new: Fingerprint) -> str | None:
    """Says how a function differs from an older one in what it returns; None if it doesn't."""
    lengths = [{name: len(row) for name, row in each.numbers.items()} for each in (old, new)]
    if lengths[0] != lengths[1]:
        return "is trained through other fields of its samples"
    arrays = {name: (_array(old.numbers[name]), _array(new.numbers[name])) for name in new.numbers}
    distances = {name: _apart(*pair) for name, pair in arrays.items()}
    name = max(distances, key=lambda name: distances[name].max(initial=0.0))
    at = int(distances[name].argmax()) if distances[name].size else 0
    if distances[name].max(initial=0.0) <= CLOSE:
        return None
    before, now = (array[at] for array in arrays[name])
    what = "a loss" if name == LOSS else f"a gradient by {name}"
    return f"gives {what} of {now:.6g} where it gave {before:.6g}, of the same made-up sample"


def same_loss(name: str | None, now: Fingerprint | None, facts: Mapping[str, Any]) -> Fingerprint | None:
    """Compares the fingerprint of a loss with that of a checkpoint.

    Args:
        name: the loss's name in the config.
        now: its fingerprint; None if the config names no loss.
        facts: the checkpoint's facts; ``of_run`` is its run, if it is another one.

    Returns:
        ``now``, with a note if the function was edited but returns the same on the made-up samples.

    Raises:
        ValueError: the function returns something else than it did; one line.
    """
    recorded = fingerprint_in(facts)
    if now is None or recorded is None:
        return now
    place = f"step_{facts.get('global_step', '?')}" + (f" of {facts['of_run']}" if "of_run" in facts else "")
    if (found := difference(recorded, now)) is not None:
        raise ValueError(
            f"{SETTING}: {name} isn't what {place} was trained with any more: it {found}; put it back as it was, or "
            "start a new run"
        )
    if recorded.code in (None, now.code) or now.code is None or _python(recorded.code) != _python(now.code):
        return now
    return replace(
        now, note=f"{SETTING}: {name} was edited since {place}; what it gives of the made-up samples is the same"
    )


def check_loss_on_ranks(name: str | None, own: Fingerprint | None, gather: Callable[[Any], list[Any]]) -> None:
    """Compares the fingerprints of all ranks with that of rank 0; ``gather`` is a collective for JSON.

    Raises:
        ValueError: a rank's function returns something else; one line, on every rank.
    """
    if own is None:
        return
    first, *others = [fingerprint_in({KEY: each}) for each in gather(own.to_json())]
    for rank, other in enumerate(others, 1):
        found = None if first is None or other is None else difference(first, other)
        if found is not None:
            raise ValueError(
                f"{SETTING}: {name} is another function on rank {rank} than on rank 0: it {found}; give all hosts the "
                "same file"
            )


def _rounded(x: Any) -> float | None:
    return float(f"{x:.{DIGITS}g}") + 0.0 if np.isfinite(x) else None


def _array(numbers: Any) -> np.ndarray:
    return np.array([np.nan if x is None else x for x in numbers], np.float64)


def _apart(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Returns how far numbers are apart, as :data:`CLOSE` defines; infinite if only one of the two is finite."""
    if len(old) > FAR:  # the last FAR numbers are thousands of times as large as the others
        return np.concatenate([_apart_of_one_size(old[part], new[part]) for part in (slice(-FAR), slice(-FAR, None))])
    return _apart_of_one_size(old, new)


def _apart_of_one_size(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    finite = np.isfinite(old) & np.isfinite(new)
    sizes = np.where(finite, np.maximum(np.abs(old), np.abs(new)), 0.0)
    scale = np.maximum(np.maximum(sizes, 0.1 * sizes.max(initial=0.0)), SMALL)
    distances = np.where(finite, np.abs(old - new) / scale, 0.0)
    return np.where(np.isfinite(old) == np.isfinite(new), distances, np.inf)


def _code_of(function: Any) -> str | None:
    """Hashes a function's compiled code, without comments, file names and docstring."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return None
    digest = hashlib.sha256()
    for part in _parts(code, function.__doc__):
        digest.update(part)
    return f"{platform.python_version()} {digest.hexdigest()}"


def _parts(code: CodeType, doc: str | None) -> Iterator[bytes]:
    """Yields the instructions, names and constants of a function and of functions inside it."""
    yield code.co_code
    yield repr((code.co_names, code.co_varnames, code.co_freevars)).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant, None)
        elif constant is not None and (doc is None or constant != doc):  # skips the docstring
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant).encode()


def _python(code: str) -> str:
    return code.partition(" ")[0]
