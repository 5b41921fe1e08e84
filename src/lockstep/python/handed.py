"""Hands environments, networks and losses that a caller gives as objects to other processes: by name, or pickled."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from lockstep.config.files import merge
from lockstep.core.errors import one_line
from lockstep.core.temporary import temporary_directory
from lockstep.core.user_code.handed import HANDED, VARIABLES, imported_name, is_wanted_again, shown_name
from lockstep.core.user_code.search_path import PATH_VARIABLE


class _Stands(Enum):
    """What stands in an object's place where it hasn't been loaded."""

    PICKLED = "pickled"


class Handed:
    """An environment, network or loss that was given as an object.

    One that can't be imported is pickled by its bytes, and loaded again only if it is asked for.

    Attributes:
        key: the setting that names it: ``env.id``, ``network.custom`` or ``ppo.loss``.
        id: its name in a config: ``module:name``, or ``python:name`` if it can't be imported.
        pickled: the object as bytes; None if it can be imported.
    """

    def __init__(self, key: str, id: str, given: Any, pickled: bytes | None = None) -> None:
        self.key, self.id, self.pickled = key, id, pickled
        self._given = given

    @property
    def given(self) -> Any:
        """The object; in a process that got it pickled, it is loaded when it is first asked for.

        Raises:
            ValueError: it can't be loaded in this process; one line.
        """
        if self._given is _Stands.PICKLED:
            from lockstep.python.pickled import unpickled

            assert self.pickled is not None
            try:
                self._given = unpickled(self.pickled)
            except Exception as error:  # from its imports or its own code
                reason = one_line(error)
                raise ValueError(
                    f"{self.key}: {self.id} can't be loaded in this process: {type(error).__name__}: {reason}"
                ) from error
        return self._given

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes what 0.1.0 pickled: attributes by name."""
        self.__init__(**state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Handed:
        """Returns itself: copies of a class or a function are the same one."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Handed, (self.key, self.id, self._given if self.pickled is None else _Stands.PICKLED, self.pickled)


def handed(key: str, given: Any) -> Handed:
    """Names what makes an environment (a class, function or lambda), a network's class or a loss; pickles it if needed.

    Raises:
        ValueError: a network isn't a class, a loss can't be called, or the object can be neither imported by other
            processes nor pickled; one line.
    """
    _check_kind(key, given)
    name = imported_name(given)
    if name is not None:
        return Handed(key, name, given)
    return Handed(key, f"{HANDED}:{_short_name(given)}", given, _pickled(key, given))


def handed_again(key: str, given: Any, recorded: str | None, run: Path) -> Handed | None:
    """Pickles an object that is given again for a run; returns None if the run finds it by name anyway.

    Args:
        key: the setting that names it.
        given: the object, or a name.
        recorded: the setting's value in the run's config.
        run: the run's directory.

    Raises:
        ValueError: the run was trained with something else, or the object can't be pickled; one line.
    """
    if not is_wanted_again(key, given, recorded, run):
        return None
    _check_kind(key, given)
    assert recorded is not None
    if key == "ppo.loss" and f"{HANDED}:{_short_name(given)}" != recorded:
        first = shown_name(recorded)
        raise ValueError(
            f"loss: {_short_name(given)} was given, but {run} was started with {first}; give that one again"
        )
    return Handed(key, recorded, given, _pickled(key, given))


def with_objects(asked: dict[str, Any], others: Sequence[Handed]) -> tuple[Handed, ...]:
    """Replaces a network's class and a loss in the nested settings ``asked`` by their names, in place.

    Returns:
        These objects, and those of ``others`` that they don't replace.

    Raises:
        ValueError: as :func:`handed`.
    """
    everything = tuple(others)
    for key in ("network.custom", "ppo.loss"):
        name, _, setting = key.partition(".")
        section = asked.get(name)
        value = section.get(setting) if isinstance(section, dict) else None
        if value is None or isinstance(value, str):
            continue
        given = handed(key, value)
        merge(asked, {name: {setting: given.id}})
        everything = *(other for other in everything if other.key != key), given
    return everything


def _short_name(given: Any) -> str:
    """Returns the name by which a config records a class or function."""
    name = getattr(given, "__qualname__", "") or type(given).__name__
    return "".join(c if c.isalnum() else "_" for c in name.rpartition(".")[2]).strip("_") or "object"


def _check_kind(key: str, given: Any) -> None:
    if key == "ppo.loss" and not callable(given):
        raise ValueError(f"{key}: {given!r} can't be called; give a function of a lockstep.LossSample")
    if key == "network.custom" and not inspect.isclass(given):
        name = getattr(given, "__qualname__", type(given).__name__)
        raise ValueError(f"{key}: {name} is no class; give the class, and its arguments as network.custom_kwargs")


def _pickled(key: str, given: Any) -> bytes:
    try:
        from lockstep.python.pickled import pickled

        return pickled(given)
    except Exception as error:  # the object's own
        reason = one_line(error)
        name = getattr(given, "__qualname__", "") or repr(given)
        raise ValueError(
            f"{key.removesuffix('.id')}: {name!r} can't be taken to another process ({reason}); put it into a module, "
            "and give it from there or as 'module:name'"
        ) from None


def _place_of(given: Any) -> str:
    """Returns the directory in which Python found an object's module; empty if unknown."""
    # sys.path may have it as a relative path, from another working directory
    module = sys.modules.get(given.__module__)
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        return ""
    above, depth = Path(file).absolute().parents, module.__name__.count(".") + hasattr(module, "__path__")
    return str(above[depth]) if depth < len(above) else ""


@contextlib.contextmanager
def variables_for(given: Sequence[Handed]) -> Iterator[dict[str, str]]:
    """Yields the environment variables by which processes find the given objects; files are removed after the block."""
    pickled = {each.key: each.pickled for each in given if each.pickled is not None}
    places = [_place_of(each.given) for each in given if each.pickled is None]
    variables = {PATH_VARIABLE: os.pathsep.join(places)} if places else {}
    if not pickled:
        yield variables
        return
    with temporary_directory() as directory:
        for key, content in pickled.items():
            file = Path(directory, f"{key}.pickle")
            file.write_bytes(content)
            os.chmod(file, 0o600)
            variables[VARIABLES[key]] = str(file)
        yield variables
