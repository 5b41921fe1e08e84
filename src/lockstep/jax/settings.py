"""Other names of settings, and one line for a keyword that is none, of dataclasses of settings."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar


class SettingError(ValueError, TypeError):
    """A keyword is no setting, or an argument is of another type; one line, caught as either of its two kinds."""


class Settings(type):
    """The class of a dataclass, and of those derived from it, that takes settings by further names as well.

    ``ALSO`` of such a dataclass has the setting of each further name, which can be read too; ``ELSEWHERE`` says of
    keywords that other classes have where they are.
    """

    ALSO: ClassVar[Mapping[str, str]] = {}
    ELSEWHERE: ClassVar[Mapping[str, str]] = {}

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> None:
        super().__init__(name, bases, namespace)
        for further, setting in namespace.get("ALSO", {}).items():
            setattr(cls, further, property(lambda self, setting=setting: getattr(self, setting), doc=f"``{setting}``."))

    if not TYPE_CHECKING:  # which knows the dataclass's own signature

        def __call__(cls, *values: Any, **settings: Any) -> Any:
            """Makes settings; raises a :class:`SettingError` for what is none."""
            known = [field.name for field in dataclasses.fields(cls)]
            if len(values) > len(known):
                raise SettingError(f"{cls.__name__}: {len(values)} values for {len(known)} settings; name them")
            for name in list(settings):
                if name in cls.ALSO:
                    _take(settings, name, cls.ALSO[name], known[: len(values)])
                elif name in known[: len(values)]:
                    raise SettingError(f"{name}: given twice, by place and by name; leave one out")
                elif name not in known:
                    raise SettingError(_unknown(cls.__name__, name, [*known, *cls.ALSO], cls.ELSEWHERE))
            return super().__call__(*values, **settings)


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
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
    return f"{name}: no setting of {kind}; {hint}"
