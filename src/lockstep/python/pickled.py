"""Pickles what no other process can import, as cloudpickle does, and Equinox's modules, which it takes apart wrongly.

cloudpickle makes a class without anything in it, and puts its attributes in afterwards, so that methods may refer to
the class. An Equinox module is a dataclass and a pytree of the fields that it has when it is made; so those are in from
the start here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import sys
import threading
from collections.abc import Iterator
from typing import Any

import cloudpickle

from lockstep.config.handed import SPAWNED

MADE_AGAIN = ("__dataclass_fields__", "__dataclass_params__", "__match_args__", "__annotations__")
"""Attributes that follow from a dataclass's fields."""
OPTIONS = ("default", "default_factory", "init", "repr", "hash", "compare", "kw_only")
_registering = threading.Lock()


def pickled(given: Any) -> bytes:
    """Pickles a class or function, with what it refers to in the caller's script; ``pickle.loads`` reads it.

    Raises:
        Exception: some part can't be, as that part says it.
    """
    file = io.BytesIO()
    with _script_by_value():
        _Pickler(file).dump(given)
    return file.getvalue()


@contextlib.contextmanager
def _script_by_value() -> Iterator[None]:
    """Has cloudpickle take along what of the script is in a process of ``multiprocessing``, as it does elsewhere."""
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
        if found is NotImplemented or not _is_equinox_module(obj):  # the former of a class that is found by its name
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
    """What of a class's body makes the fields that it adds to those of its bases."""
    annotations = inspect.get_annotations(module)
    fields: dict[str, dataclasses.Field[Any]] = module.__dataclass_fields__
    return {"__annotations__": annotations} | {name: _Field(fields[name]) for name in annotations if name in fields}


class _Field:
    """Pickles as a field of a dataclass to be, without ``dataclasses.MISSING``, which no other process has."""

    def __init__(self, field: dataclasses.Field[Any]) -> None:
        self._field = field

    def __reduce__(self) -> tuple[Any, ...]:
        given = {name: getattr(self._field, name) for name in OPTIONS}
        said = {name: value for name, value in given.items() if value is not dataclasses.MISSING}
        return functools.partial(dataclasses.field, metadata=dict(self._field.metadata), **said), ()


def _init_to_come(self: Any) -> None:
    """Stands for a constructor that refers to its class, until that is there."""
    raise AssertionError
