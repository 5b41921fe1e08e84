"""Asks a callback about an iteration's record, and checks what it answers."""

from __future__ import annotations

import difflib
import unicodedata
from typing import Any

import numpy as np

from lockstep.training.metrics import is_own_name

OTHER_WORDS = {
    "rollout/ep_rew_mean": "rollout/episode_return_mean",
    "rollout/ep_len_mean": "rollout/episode_length_mean",
}
"""Stable-Baselines3's names of metrics, with the names that they have here."""
CONTROL = frozenset({"Cc", "Cs"})
"""Categories of characters that no name of a metric has: control characters, and halves of UTF-16's pairs."""


class _Record(dict[str, Any]):
    """A record whose ``KeyError`` has a note that lists its keys and suggests a similar one."""

    def __missing__(self, key: Any) -> Any:
        error = KeyError(key)
        close = difflib.get_close_matches(OTHER_WORDS.get(key, key), self, 1, 0.6) if isinstance(key, str) else []
        meant = f"did you mean {close[0]!r}? " if close else ""
        error.add_note(f"{key!r} is no key of a record; {meant}There are: {', '.join(self)}")
        raise error

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self),)


def answer_of(method: Any, record: dict[str, Any]) -> bool | dict[str, float]:
    """Calls a callback's method, if it exists, with a record; returns whether to go on, or the numbers to log.

    Raises:
        TypeError: the method returns neither.
        ValueError: a number has the name of one of the run's own metrics, even if this record doesn't have it, or one
            that files can't hold, or is too large for a float.
    """
    try:
        said = None if method is None else method(_Record(record))
    except TypeError as error:
        unknown = [name for name, value in record.items() if value is None]
        if unknown:
            error.add_note(f"None until an episode has ended: {', '.join(unknown)}")
        raise
    if said is None or isinstance(said, bool | np.bool):
        return said is None or bool(said)
    if not isinstance(said, dict):
        raise TypeError(f"a callback said {said!r} to an iteration; it says False, True, None or a dict of numbers")
    for key, value in said.items():
        try:
            float(value)
        except (TypeError, ValueError):
            raise TypeError(f"a callback's metric {key!r} is {value!r}; a number is logged") from None
        except OverflowError:
            raise ValueError(f"a callback's metric {key!r} is too large for a float, which ends at 1.8e308") from None
        if any(unicodedata.category(letter) in CONTROL for letter in str(key)):
            raise ValueError(f"a callback's metric {key!r} has a control character or half a letter in its name")
        if key in record or is_own_name(str(key)):
            raise ValueError(f"a callback's metric {key!r} is one of the run's own; log yours by another name")
    return {str(key): float(value) for key, value in said.items()}
