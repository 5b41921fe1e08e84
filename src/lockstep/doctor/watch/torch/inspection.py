"""Finds a running script's models and their names, DDP and FSDP, and normalisers; it never patches them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

STATISTICS = tuple({count, mean, spread} for count in ("count", "n") for mean in ("mean", "_mean")
                   for spread in ("var", "std", "M2", "S", "_var", "_std", "_M2", "_S"))  # fmt: skip
"""Attributes by which running statistics are known, whatever their class is called."""
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
SKIPPED = frozenset({"torch", "numpy", "builtins", "importlib", "collections", "typing", "functools"})


@dataclass
class Inventory:
    """Holds what one look found.

    Attributes:
        names: of parameters, buffers and modules by ``id``.
        modules: the outermost ones, with what their tensors' names begin with.
        wrappers: kinds of wrappers around modules: ``ddp``, ``fsdp1``, ``fsdp2``.
        broadcast: ids of buffers that DDP sends from rank 0 to all before each forward pass.
        sharded: ids of parameters of which an FSDP1 module keeps a part on every rank.
        normalizers: objects with running statistics by name, for as long as they live.
    """

    names: dict[int, str] = field(default_factory=dict)
    modules: list[tuple[str, weakref.ref[nn.Module]]] = field(default_factory=list)
    wrappers: set[str] = field(default_factory=set)
    broadcast: set[int] = field(default_factory=set)
    sharded: set[int] = field(default_factory=set)
    normalizers: dict[str, Callable[[], Any]] = field(default_factory=dict)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers of all modules that still live."""
        for prefix, ref in self.modules:
            module = ref()
            for name, buffer in module.named_buffers() if module is not None else ():
                yield prefix + bare(name), buffer


def bare(name: str) -> str:
    """A tensor's name without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def look_around() -> Inventory:
    """Find modules and normalisers among all objects of this process."""
    things = gc.get_objects()
    kinds = {cls: _kind(cls, thing) for cls, thing in dict(zip(map(type, things), things, strict=True)).items()}
    telling = {cls for cls, kind in kinds.items() if any(kind)}
    things = [thing for thing in things if type(thing) in telling]
    found = Inventory()
    _name_tensors(found, [thing for thing in things if kinds[type(thing)][0]])
    _name_normalizers(found, [thing for thing in things if kinds[type(thing)][1]])
    return found


def _kind(cls: type, thing: Any) -> tuple[bool, bool]:
    """Whether a class, of which one instance is seen, is a module, and whether it may hold running statistics."""
    if issubclass(cls, nn.Module):
        return True, not cls.__module__.startswith("torch.")
    if issubclass(cls, type) or str(cls.__module__).partition(".")[0] in SKIPPED:
        return False, False
    return False, statistics_of(thing) is not None or any(True for _ in _held(thing))


def _attributes(thing: Any) -> Mapping[str, Any]:
    try:
        found = object.__getattribute__(thing, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def statistics_of(thing: Any) -> dict[str, Any] | None:
    """An object's running statistics: arrays, tensors or numbers by attribute; None if it holds none."""
    attributes = _attributes(thing)
    for names in STATISTICS:
        if names <= attributes.keys() and all(_numeric(attributes[name]) for name in names):
            return {name: attributes[name] for name in sorted(names)}
    return None


def _numeric(value: Any) -> bool:
    return isinstance(value, (int, float, np.ndarray, np.number, Tensor)) and not isinstance(value, bool)


def _held(thing: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Normalisers among an object's attributes, and in dictionaries there, with the path of names to each."""
    for name, value in list(_attributes(thing).items()):
        if isinstance(value, dict):
            for key, item in list(value.items()):
                if isinstance(key, str) and statistics_of(item) is not None:
                    yield (name, key), item
        elif statistics_of(value) is not None:
            yield (name,), value


def _at(owner: Any, path: Sequence[str]) -> Any:
    """Reads what an object holds now at a path of :func:`_held`; None if nothing."""
    value = _attributes(owner).get(path[0])
    return value if len(path) == 1 else value.get(path[1]) if isinstance(value, dict) else None


# --- names ------------------------------------------------------------------------------------------------------


def _name_tensors(found: Inventory, modules: list[nn.Module]) -> None:
    inner = {id(child) for module in modules for child in module._modules.values()}
    roots = [module for module in modules if id(module) not in inner]
    taken: set[str] = set()
    for root in sorted(roots, key=lambda module: -sum(1 for _ in module.modules())):
        tensors = [*root.named_parameters(), *root.named_buffers()]
        new = {id(tensor): bare(name) for name, tensor in tensors if id(tensor) not in found.names}
        if not new:
            continue
        prefix = "" if taken.isdisjoint(new.values()) else f"{_class_name(root)}{len(found.modules) + 1}."
        found.names |= {key: prefix + name for key, name in new.items()}
        found.names |= {id(module): prefix + bare(name) for name, module in root.named_modules()}
        taken |= {prefix + name for name in new.values()}
        found.modules.append((prefix, weakref.ref(root)))
    for module in modules:
        _note_wrapper(found, module)


def _class_name(module: nn.Module) -> str:
    inner = module._modules.get("module")
    return type(module if inner is None else inner).__name__


def is_ddp(cls: type) -> bool:
    """Whether a class is DistributedDataParallel or one derived from it."""
    return any(base.__name__ == "DistributedDataParallel" for base in cls.__mro__)


def _note_wrapper(found: Inventory, module: nn.Module) -> None:
    if is_ddp(type(module)):
        found.wrappers.add("ddp")
        if getattr(module, "broadcast_buffers", False):
            found.broadcast |= {id(buffer) for buffer in module.buffers()}
    classes = {cls.__name__ for cls in type(module).__mro__}
    if "FullyShardedDataParallel" in classes:
        found.wrappers.add("fsdp1")
        found.sharded |= {id(parameter) for parameter in module.parameters()}
    if "FSDPModule" in classes:
        found.wrappers.add("fsdp2")


# --- normalisers ------------------------------------------------------------------------------------------------


def _name_normalizers(found: Inventory, owners: list[Any]) -> None:
    resting = [owner for owner in owners if _rests(owner)]
    copies = {id(item) for owner in resting for _, item in _held(owner)}
    taken = copies
    for owner in owners:
        for path, item in _held(owner):
            if id(item) not in taken:
                taken.add(id(item))
                name = path[0] if len(path) == 1 else f"{path[0]}[{path[1]}]"
                _add(found, f"{type(owner).__name__}.{name}", _reference(owner, path))
    for owner in owners:
        if statistics_of(owner) is not None and id(owner) not in taken:
            taken.add(id(owner))
            _add(found, type(owner).__name__, _reference(owner))


def _add(found: Inventory, name: str, find: Callable[[], Any]) -> None:
    number = sum(1 for other in found.normalizers if other.partition("#")[0] == name)
    found.normalizers[f"{name}#{number + 1}" if number else name] = find


def _rests(owner: Any) -> bool:
    """Whether a wrapper's statistics are not updated: of an evaluation environment, which one rank alone may have."""
    attributes = _attributes(owner)  # VecNormalize's; Gymnasium's
    return attributes.get("training") is False or attributes.get("_update_running_mean") is False


def _reference(owner: Any, path: Sequence[str] = ()) -> Callable[[], Any]:
    """Finds a normaliser for as long as its owner lives; also another that took its place there."""
    try:
        ref: Callable[[], Any] = weakref.ref(owner)
    except TypeError:  # a class without weak references: it is kept

        def ref() -> Any:
            return owner

    return (lambda: _at(ref(), path)) if path else ref


def numbers_of(normalizer: Any) -> dict[str, Tensor]:
    """A normaliser's statistics as tensors, float64."""
    found = statistics_of(normalizer) or {}
    arrays = {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in found.items()}
    return {name: torch.as_tensor(np.asarray(value, np.float64)) for name, value in arrays.items()}
