"""Pickles what other processes can't import with cloudpickle, and adapts it to Equinox modules.

cloudpickle makes an empty class and sets its attributes afterwards, so that methods may refer to the class. An Equinox
module becomes a dataclass and a pytree with the fields that it has when it is made. So here the fields are in the class
from the start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import pickle
import sys
import threading
from collections.abc import Iterator
from typing import Any

import cloudpickle

from lockstep.core.user_code.handed import SPAWNED

MADE_AGAIN = ("__dataclass_fields__", "__dataclass_params__", "__match_args__", "__annotations__")
"""Attributes that Python derives from a dataclass's fields, and that aren't pickled."""
OPTIONS = ("default", "default_factory", "init", "repr", "hash", "compare", "kw_only")
_registering = threading.Lock()


def pickled(given: Any) -> bytes:
    """Pickles a class or function with what it refers to in the caller's script; ``pickle.loads`` reads the bytes.

    Raises:
        Exception: a part can't be pickled; the exception is that part's own.
    """
    file = io.BytesIO()
    with _script_by_value():
        _Pickler(file).dump(given)
    return file.getvalue()


def unpickled(content: bytes) -> Any:
    """Loads what :func:`pickled` has pickled in a process of this user's, from an object that was itself unpickled.

    Raises:
        Exception: it can't be loaded in this process; the exception is its own.
    """
    return pickle.loads(content)


@contextlib.contextmanager
def _script_by_value() -> Iterator[None]:
    """Makes cloudpickle pickle a script's code by value in a process of ``multiprocessing`` too, during the block."""
    module = sys.modules.get(SPAWNED)
    with _registering:
        if module is None or module.__name__ != SPAWNED or SPAWNED in cloudpickle.list_registry_pickle_by_value():
            yield
            return
        cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            cloudpickle.unregister_pickle_by_value(module)


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        found: Any = super().reducer_override(obj)
        if found is NotImplemented or not _is_equinox_module(
            obj
        ):  # NotImplemented for a class that is found by its name
            return found
        make, (metaclass, name, bases, namespace, *rest), (attributes, slots), *others = found
        made, attributes = {*MADE_AGAIN}, dict(attributes)
        if obj.__dataclass_params__.init:
            made.add("__init__")
        elif "__init__" in attributes:
            namespace = namespace | {"__init__": _init_to_come}
        attributes = {name: value for name, value in attributes.items() if name not in made}
        namespace = namespace | _fields_of(obj)
        return (make, (metaclass, name, bases, namespace, *rest), (attributes, slots), *others)


def _is_equinox_module(given: Any) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(given, type(equinox.Module))


def _fields_of(module: type) -> dict[str, Any]:
    """Returns the part of a class's namespace that declares its own fields, without those of its bases."""
    annotations = inspect.get_annotations(module)
    fields: dict[str, dataclasses.Field[Any]] = module.__dataclass_fields__
    return {"__annotations__": annotations} | {name: _Field(fields[name]) for name in annotations if name in fields}


class _Field:
    """Pickles a field as a call of ``dataclasses.field``, without ``dataclasses.MISSING``, which differs by process."""

    def __init__(self, field: dataclasses.Field[Any]) -> None:
        self._field = field

    def __reduce__(self) -> tuple[Any, ...]:
        given = {name: getattr(self._field, name) for name in OPTIONS}
        said = {name: value for name, value in given.items() if value is not dataclasses.MISSING}
        return functools.partial(dataclasses.field, metadata=dict(self._field.metadata), **said), ()


def _init_to_come(self: Any) -> None:
    """Stands in for a constructor that refers to its class, until the class exists."""
    raise AssertionError
