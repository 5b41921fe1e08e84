"""Other names of settings, and one line for a keyword that is none, of frozen dataclasses."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Kind = TypeVar("Kind", bound=type)


class SettingError(ValueError, TypeError):
    """A keyword is no setting, or an argument is of another type; one line, caught as either of its two kinds."""


def also_known_as(
    names: Mapping[str, str] | None = None, elsewhere: Mapping[str, str] | None = None
) -> Callable[[Kind], Kind]:
    """Makes a dataclass take and give settings by further names, and refuse unknown ones in a line.

    Args:
        names: the setting of each further name.
        elsewhere: what to say of keywords that other classes have.
    """
    names, elsewhere = names or {}, elsewhere or {}

    def of(kind: Kind) -> Kind:
        known = [field.name for field in dataclasses.fields(kind)]
        init: Any = kind.__init__

        @functools.wraps(init)
        def initialised(self: Any, *values: Any, **settings: Any) -> None:
            if len(values) > len(known):
                raise SettingError(f"{type(self).__name__}: {len(values)} values for {len(known)} settings; name them")
            for name in list(settings):
                if name in names:
                    _take(settings, name, names[name], known[: len(values)])
                elif name not in known and type(self) is kind:
                    raise SettingError(_unknown(kind.__name__, name, [*known, *names], elsewhere))
            try:
                init(self, *values, **settings)
            except TypeError as error:
                if isinstance(error, SettingError):
                    raise
                raise SettingError(f"{kind.__name__}: {str(error).splitlines()[0]}") from None

        kind.__init__ = initialised  # type: ignore[misc]
        for name, setting in names.items():
            setattr(kind, name, property(lambda self, setting=setting: getattr(self, setting), doc=f"``{setting}``."))
        return kind

    return of


def _take(settings: dict[str, Any], name: str, setting: str, positional: list[str]) -> None:
    """Moves a value to the setting's own name."""
    value = settings.pop(name)
    if setting in positional or setting in settings:
        raise SettingError(f"{name}: {value!r}, and {setting} is the same setting and was given too; leave one out")
    settings[setting] = value


def _unknown(kind: str, name: str, known: list[str], elsewhere: Mapping[str, str]) -> str:
    if name in elsewhere:
        return f"{name}: {elsewhere[name]}"
    close = difflib.get_close_matches(name, known, 1, 0.6)
    return f"{name}: no setting of {kind}; " + (
        f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
    )
