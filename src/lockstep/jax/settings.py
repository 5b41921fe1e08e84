"""Gives dataclasses of settings further names for their settings, and one-line errors for unknown keywords."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_made: ContextVar[bool] = ContextVar("lockstep_settings_made", default=True)
"""False while settings are being made."""


class SettingError(ValueError, TypeError):
    """Raised if a keyword is no setting or an argument has the wrong type; one line, caught as either base class."""


class Settings(type):
    """Metaclass of a dataclass, and of its subclasses, that takes settings by further names as well.

    ``ALSO`` of the dataclass maps each further name, by which the setting can be read too, to the setting.
    ``ELSEWHERE`` says where keywords belong that other classes have.
    """

    ALSO: ClassVar[Mapping[str, str]] = {}
    ELSEWHERE: ClassVar[Mapping[str, str]] = {}

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> None:
        super().__init__(name, bases, namespace)
        for further, setting in namespace.get("ALSO", {}).items():
            setattr(cls, further, property(lambda self, setting=setting: getattr(self, setting), doc=f"``{setting}``."))

    if not TYPE_CHECKING:  # type checkers read the dataclass's own signature

        @property
        def __signature__(cls) -> inspect.Signature:
            """The dataclass's own signature, for ``help`` and editors."""
            _, *parameters = inspect.signature(cls.__init__).parameters.values()
            return inspect.Signature(parameters)

        def __call__(cls, *values: Any, **settings: Any) -> Any:
            """Makes settings; raises a :class:`SettingError` for unknown keywords."""
            known = [field.name for field in dataclasses.fields(cls)]
            if len(values) > len(known):
                raise SettingError(f"{cls.__name__}: {len(values)} values for {len(known)} settings; name them")
            for name in list(settings):
                if name in cls.ALSO and set(known) <= set(settings):
                    raise SettingError(
                        f"{name}: dataclasses.replace takes a setting by its own name; give "
                        f"{cls.ALSO[name]}={settings[name]!r}"
                    )
                if name in cls.ALSO:
                    _take(settings, name, cls.ALSO[name], known[: len(values)])
                elif name in known[: len(values)]:
                    raise SettingError(f"{name}: given twice, by place and by name; leave one out")
                elif name not in known:
                    raise SettingError(_unknown(cls.__name__, name, [*known, *cls.ALSO], cls.ELSEWHERE))
            token = _made.set(False)  # a user's subclass may add attributes while it is made
            try:
                return super().__call__(*values, **settings)
            finally:
                _made.reset(token)


def check_attribute(settings: Any, name: str) -> None:
    """Raises if settings that are already made have no such attribute, as for an unknown keyword.

    Raises:
        SettingError: there is no such setting; one line.
    """
    kind = type(settings)
    if _made.get() and not name.startswith("_") and not hasattr(settings, name):
        raise SettingError(_unknown(kind.__name__, name, names_of(kind), kind.ELSEWHERE))


def names_of(kind: Settings) -> list[str]:
    """Lists the settings of a dataclass of settings, with their further names."""
    return [*(field.name for field in dataclasses.fields(kind)), *kind.ALSO]  # pyright: ignore[reportArgumentType]


def in_one_line(elsewhere: Mapping[str, str]) -> Callable[[Function], Function]:
    """Makes a function report unknown arguments in one line; ``elsewhere`` says where those belong.

    Raises:
        SettingError: an argument is unknown, or too many are given by place; one line.
    """

    def of(function: Function) -> Function:
        parameters = inspect.signature(function).parameters
        by_place = [name for name, parameter in parameters.items() if parameter.kind is not parameter.KEYWORD_ONLY]
        named = [name for name in parameters if name not in by_place]

        @functools.wraps(function)
        def called(*values: Any, **arguments: Any) -> Any:
            kind = function.__name__
            for name in arguments:
                if name not in parameters:
                    raise SettingError(_unknown(kind, name, list(parameters), elsewhere, "argument"))
            if len(values) > len(by_place):
                raise SettingError(
                    f"{kind}: {len(values)} arguments were given by place, which are {' and '.join(by_place)}; give "
                    f"others by name: {', '.join(named)}"
                )
            return function(*values, **arguments)

        return called  # pyright: ignore[reportReturnType]

    return of


def _take(settings: dict[str, Any], name: str, setting: str, positional: list[str]) -> None:
    """Moves a value from a further name to the setting's own name."""
    value = settings.pop(name)
    if setting in positional or setting in settings:
        raise SettingError(f"{name}: {value!r}, and {setting} is the same setting and was given too; leave one out")
    settings[setting] = value


def _unknown(kind: str, name: str, known: list[str], elsewhere: Mapping[str, str], what: str = "setting") -> str:
    if name in elsewhere:
        return f"{name}: {elsewhere[name]}"
    close = difflib.get_close_matches(name, known, 1, 0.6)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
    return f"{name}: no {what} of {kind}; {hint}"
