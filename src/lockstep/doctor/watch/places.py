"""Finds the names under which a script holds objects: unlike ``id``, they are the same on every rank."""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

MOST_VISITED = 200_000
DEEPEST = 8
MOST_ITEMS = 1024
"""Only this many items of a container are searched: scripts don't keep normalisers or models by the thousand."""
_OURS = 3
"""References to a frame's variables that aren't the script's: the frame's, ours, and ``getrefcount``'s argument."""
_LEAVES = (str, bytes, int, float, complex, type(None), type, types.ModuleType, types.BuiltinFunctionType)
Slots = tuple[tuple[str, types.MemberDescriptorType], ...]
_known_slots: weakref.WeakKeyDictionary[type, Slots] = weakref.WeakKeyDictionary()
_FOREIGN = ("site-packages", "dist-packages", "lib/python", "<frozen", "<string>")


def find_places(wanted: Collection[int], frame: types.FrameType | None) -> dict[int, str]:
    """Returns the place of each wanted object, by ``id``: ``main.env.obs_rms``, ``agent.critics[1]``.

    A place is the shortest path of attributes, keys and indices from a variable of the script's own modules
    (``__main__`` first) or of the functions that called ``frame``. Objects that are held in other ways are left out.
    """
    left, found = set(wanted), {}
    seen: set[int] = set()
    for variables in _namespaces(frame):
        _search(variables, left, found, seen)
    return found


def _search(variables: Iterable[tuple[str, Any]], left: set[int], found: dict[int, str], seen: set[int]) -> None:
    queue = deque((thing, name, 0) for name, thing in variables)
    while queue and left and len(seen) < MOST_VISITED:
        thing, place, depth = queue.popleft()
        if id(thing) in seen or is_a(thing, _LEAVES):
            continue
        seen.add(id(thing))
        if id(thing) in left:
            found[id(thing)] = place
            left.discard(id(thing))
        if depth < DEEPEST:
            queue.extend((value, place + step, depth + 1) for step, value in _parts(thing))


def _namespaces(frame: types.FrameType | None) -> Iterator[list[tuple[str, Any]]]:
    """Yields names and variables, the longest-lived first: modules', then functions' from the outermost inwards."""
    modules = {name: attributes_of(module) for name, module in list(sys.modules.items()) if is_a(name, str)}
    mine = [name for name, held in modules.items() if _own(held.get("__file__"))]
    for name in sorted(mine, key=lambda name: (name != "__main__", name)):
        prefix = "" if name == "__main__" else f"{name}."
        variables = list(modules[name].items())
        yield [(prefix + key, value) for key, value in variables if not (key.startswith("__") and key.endswith("__"))]
    functions = []
    while frame is not None:
        code = frame.f_code
        if code.co_name != "<module>" and _own(code.co_filename):
            functions.append((code.co_name, _variables(frame)))
        frame = frame.f_back
    for function, variables in reversed(functions):
        yield [(key if key == "self" else f"{function}.{key}", value) for key, value in variables]


def _variables(frame: types.FrameType) -> list[tuple[str, Any]]:
    """Returns a function's variables as they are now, and leaves no copies of them in the frame.

    Before Python 3.13 the frame keeps the dictionary ``f_locals``, which ``locals()`` returns as well. If nobody else
    holds it, the variables are removed from it again. Names that ``exec`` made exist only there, and stay.
    """
    held = frame.f_locals
    found = list(held.items())
    if type(held) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.getrefcount(held) <= _OURS:
        code = frame.f_code
        for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
            held.pop(name, None)
    return found


def _own(file: Any) -> bool:
    """Returns whether a file is the script's or its author's, not a library's or the doctor's."""
    return is_a(file, str) and not any(part in file for part in _FOREIGN) and "/lockstep/doctor/" not in file


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yields an object's parts, each with the step of the path that leads to it."""
    if is_a(thing, dict):
        for key, value in list(dict.items(thing))[:MOST_ITEMS]:
            if is_a(key, (str, int)):
                yield f"[{key!r}]", value
        return
    sequence = next((kind for kind in (list, tuple, deque) if is_a(thing, kind)), None)
    if sequence is not None:
        for number, value in enumerate(list(sequence.__iter__(thing))[:MOST_ITEMS]):
            yield f"[{number}]", value
        return
    if is_a(thing, types.FunctionType):
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=False)
        for name, cell in cells:
            try:
                yield f"().{name}", cell.cell_contents
            except ValueError:
                continue  # not filled yet
        return
    if is_a(thing, types.MethodType):
        yield "", thing.__self__
        return
    attributes = attributes_of(thing)
    for name, value in list(attributes.items()):
        inner = is_a(value, dict) and name in ("_modules", "_parameters", "_buffers")
        if inner:
            yield from ((f".{key}", item) for key, item in list(dict.items(value)))
        elif is_a(name, str) and not name.startswith("__"):
            yield f".{name}", value


def is_a(thing: Any, classes: type | tuple[type, ...]) -> bool:
    """Returns whether an object's own class is derived from one of ``classes``.

    Unlike ``isinstance`` this doesn't ask the object for its ``__class__``: a proxy would ask what it stands for, which
    may be gone, or not be loaded yet.
    """
    return issubclass(type(thing), classes)


def attributes_of(thing: Any) -> Mapping[str, Any]:
    """Returns what an object's ``__dict__`` and slots hold, without calling anything of its class."""
    try:
        found = object.__getattribute__(thing, "__dict__")
    except Exception:  # none, or its class computes it
        found = {}
    found = found if is_a(found, dict) else {}
    slots = _slots(type(thing))
    return found | _filled(thing, slots) if slots else found


def _slots(cls: type) -> Slots:
    """Returns names and descriptors of the slots that a class and its bases name in ``__slots__``."""
    known = _known_slots.get(cls)
    if known is None:
        bases = [vars(base) for base in cls.__mro__ if "__slots__" in vars(base)]
        slots = (item for base in bases for item in base.items() if type(item[1]) is types.MemberDescriptorType)
        known = _known_slots[cls] = tuple(slots)
    return known


def _filled(thing: Any, slots: Slots) -> dict[str, Any]:
    found = {}
    for name, slot in slots:
        with contextlib.suppress(AttributeError):  # nothing was put there yet
            found[name] = slot.__get__(thing, type(thing))
    return found
