"""Finds a running script's models and their names, DDP and FSDP wrappers, and normalisers, without patching them."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule
from torch.optim import Optimizer

from lockstep.doctor.watch.places import attributes_of, find_places, is_a
from lockstep.doctor.watch.statistics_names import names_statistics
from lockstep.doctor.watch.torch.flat_parts import is_whole, parts_of, tensors_of, updated_by_parts
from lockstep.doctor.watch.torch.process_group import group_facts
from lockstep.doctor.watch.torch.running_statistics import held, resembles, statistics_of

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
SKIPPED = frozenset({"torch", "numpy", "builtins", "importlib", "collections", "typing", "functools"})

Root = tuple[str, str, "weakref.ref[nn.Module]"]
"""An outermost module: the prefix of its tensors' names, its place, and a weak reference to it."""


@dataclass
class Inventory:
    """What :func:`look_around` found.

    Attributes:
        names: names of parameters, buffers and modules by ``id``.
        modules: the outermost modules; the place is "" if none was found.
        wrappers: kinds of wrappers around modules: ``ddp``, ``fsdp1``, ``fsdp2``.
        broadcast: ids of buffers that DDP sends from rank 0 to all before each forward pass.
        wrapped: ids of parameters whose gradients DDP reduces.
        sharded: ids of parameters of FSDP1 modules, which keep a part on every rank, and of tensors that are parts.
        optimizers: those there were.
        optimized: ids of parameters that some optimiser updates, wholly or in part.
        by_parts: ids of parameters of which an optimiser holds only this rank's part.
        owners: by ``id`` of a tensor, module and name of each base class of the outermost module that holds it.
        normalizers: by name, functions that return an object with running statistics, or None once it is gone.
        unknown: classes of objects that may keep running statistics in attributes of unknown names.
        unplaced: names of normalisers without a place; another rank may give these names to different ones.
    """

    names: dict[int, str] = field(default_factory=dict)
    modules: list[Root] = field(default_factory=list)
    wrappers: set[str] = field(default_factory=set)
    broadcast: set[int] = field(default_factory=set)
    wrapped: set[int] = field(default_factory=set)
    sharded: set[int] = field(default_factory=set)
    optimizers: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)
    optimized: set[int] = field(default_factory=set)
    by_parts: set[int] = field(default_factory=set)
    owners: dict[int, list[str]] = field(default_factory=dict)
    normalizers: dict[str, Callable[[], Any]] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    unplaced: set[str] = field(default_factory=set)

    def buffers(self, used: Container[int]) -> Iterator[tuple[str, Tensor]]:
        """Yields names and buffers of live modules: of models only if they are trained or ``used`` (ids) on this rank.

        Parameters count as buffers if they hold running statistics that nothing trains. Modules without other
        parameters count always: they may be normalisers whose ``forward`` is never called. They, and models that aren't
        trained, are named by their places, because another rank may hold different ones.
        """
        for prefix, place, ref in reversed(self.modules):  # trained models last: they win if two names are equal
            root = ref()
            if root is None:
                continue
            trained = self.trains(root)
            start = prefix if trained or not place else f"{place}."
            kept = dict(self._statistics(root))
            if trained or _uses(root, used) or len(kept) == sum(1 for _ in root.parameters()):
                for name, tensor in (*root.named_buffers(), *kept.items()):
                    yield start + bare(name), tensor

    def _statistics(self, root: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yields statistics that modules keep as parameters which nothing trains, as MAPPO's value normaliser does.

        One alone is something else: a policy's fixed ``log_std``.
        """
        for start, module in root.named_modules():
            own = [(f"{start}.{name}".lstrip("."), p) for name, p in module._parameters.items() if p is not None]
            resting = [(name, p) for name, p in own if not p.requires_grad and id(p) not in self.optimized]
            kept = [(name, p) for name, p in resting if names_statistics(name)]
            if len(kept) > 1:
                yield from kept

    def parameters(self, used: Container[int] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields names and parameters of live modules that have a place; only of those ``used`` (ids), if given."""
        for _, place, ref in self.modules:
            root = ref()
            if root is None or not place:
                continue
            if used is None or _uses(root, used):
                for name, parameter in root.named_parameters():
                    if parameter.numel() and not parameter.is_meta:
                        yield f"{place}.{bare(name)}", parameter

    def updated_by_parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters that an optimiser updates by parts and that this rank holds wholly now."""
        for prefix, place, ref in self.modules:
            root = ref()
            for name, parameter in root.named_parameters() if root is not None else ():
                if id(parameter) in self.by_parts and is_whole(parameter):
                    yield (f"{place}." if place else prefix) + bare(name), parameter

    def trains(self, root: nn.Module) -> bool:
        """Returns whether an optimiser updates at least one parameter of a model."""
        return any(id(parameter) in self.optimized for parameter in root.parameters())

    def frozen(self, used: Container[int]) -> Iterator[tuple[str, Tensor]]:
        """Returns names and parameters of used modules that no optimiser updates and that aren't sharded."""
        kept = {id(p) for _, _, ref in self.modules if (root := ref()) is not None for _, p in self._statistics(root)}
        known = self.optimized | self.sharded | kept
        return ((name, p) for name, p in self.parameters(used) if id(p) not in known)

    def unstepped(self, stepped: Container[int]) -> Iterator[tuple[str, Tensor]]:
        """Returns names and parameters that an optimiser holds, none of which are among the ``stepped`` (ids)."""
        mine = self.optimized - self.sharded - self.by_parts
        return ((name, p) for name, p in self.parameters() if id(p) in mine and id(p) not in stepped)


def _uses(root: nn.Module, used: Container[int]) -> bool:
    return any(id(module) in used for module in root.modules())


def bare(name: str) -> str:
    """Returns a tensor's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def look_around(before: Inventory | None = None) -> Inventory:
    """Finds modules, optimisers and normalisers among this process's objects; modules known ``before`` keep names."""
    for find in () if before is None else before.normalizers.values():
        find()  # lets go what is kept only here
    things = gc.get_objects()
    kinds = {cls: _kind(cls, thing) for cls, thing in dict(zip(map(type, things), things, strict=True)).items()}
    telling = {cls for cls, kind in kinds.items() if any(kind)}
    things = [thing for thing in things if type(thing) in telling]
    modules = [thing for thing in things if kinds[type(thing)][0] and not _is_compiled(thing)]
    owners = [thing for thing in things if kinds[type(thing)][1]]
    wanted = {id(module) for module in modules} | {id(item) for _, item in _normalizers(owners)}
    places = find_places(wanted, sys._getframe(1))
    found = Inventory()
    roots = _outermost(modules)
    _note_optimizers(found, roots, [thing for thing in things if is_a(thing, Optimizer)])
    _name_tensors(found, roots, places, [] if before is None else before.modules)
    for module in modules:
        _note_wrapper(found, module)
    _name_normalizers(found, owners, places)
    for thing in things:
        if kinds[type(thing)][3] and statistics_of(thing) is None:
            found.unknown.add(type(thing).__name__)
    return found


def _is_compiled(module: nn.Module) -> bool:
    """Returns whether Dynamo made a module out of compiled code: its tensors are other objects', under other names."""
    return is_a(module, GraphModule) and "compile_subgraph_reason" in vars(module)


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    inner = {id(child) for module in modules for child in module._modules.values()}
    return [module for module in modules if id(module) not in inner]


def _note_optimizers(found: Inventory, roots: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    found.optimizers = weakref.WeakSet(optimizers)
    found.optimized = {id(tensor) for optimizer in optimizers for tensor in tensors_of(optimizer)}
    owned = {id(tensor) for root in roots for tensor in (*root.parameters(), *root.buffers())}
    ranks = group_facts().get("size", 1)
    for optimizer in optimizers:
        models = updated_by_parts(optimizer, roots, owned, found.optimized, ranks)
        if models:
            found.by_parts |= {id(parameter) for parameter in models}
            found.sharded |= {id(vector) for vector in parts_of(optimizer, models)}
    found.optimized |= found.by_parts


def _kind(cls: type, thing: Any) -> tuple[bool, bool, bool, bool]:
    """Classifies a class by one instance.

    Returns:
        Whether it is a module; may hold running statistics; is an optimiser; may keep statistics under unknown names.
    """
    if issubclass(cls, Optimizer):
        return False, False, True, False
    if issubclass(cls, nn.Module):
        return True, not cls.__module__.startswith("torch."), False, False
    if issubclass(cls, type) or str(cls.__module__).partition(".")[0] in SKIPPED:
        return False, False, False, False
    known = statistics_of(thing) is not None
    return False, known or any(True for _ in held(thing)), False, not known and resembles(thing)


def _at(owner: Any, path: Sequence[str]) -> Any:
    """Returns what an object holds now at a path of :func:`held`; None if nothing."""
    value = attributes_of(owner).get(path[0])
    if len(path) == 1:
        return value
    return dict.get(value, path[1]) if value is not None and is_a(value, dict) else None


# --- names ------------------------------------------------------------------------------------------------------


def _name_tensors(
    found: Inventory, roots: Sequence[nn.Module], places: Mapping[int, str], before: Sequence[Root]
) -> None:
    """Names tensors as their outermost modules do, with the module's place in front if a name is taken.

    Trained models are named first: other models, such as an average, may exist on one rank only.
    """
    known = {id(root): (number, prefix, place) for number, (prefix, place, ref) in enumerate(before)
             if (root := ref()) is not None}  # fmt: skip
    taken: set[str] = set()

    def order(root: nn.Module) -> tuple[int, bool, int, str]:
        number = known[id(root)][0] if id(root) in known else len(known)
        return number, not found.trains(root), -sum(1 for _ in root.modules()), places.get(id(root), "~")

    for root in sorted(roots, key=order):
        tensors = [*root.named_parameters(), *root.named_buffers()]
        new = {id(tensor): bare(name) for name, tensor in tensors if id(tensor) not in found.names}
        if not new:
            continue
        place = bare(places.get(id(root), ""))
        distinct = place or f"{_class_name(root)}{len(found.modules) + 1}"
        prefix = "" if taken.isdisjoint(new.values()) else f"{distinct}."
        _, prefix, place = known.get(id(root), (0, prefix, place))
        found.names |= {key: prefix + name for key, name in new.items()}
        found.names |= {id(module): prefix + bare(name) for name, module in root.named_modules()}
        inside = root._modules.get("module") if is_ddp(type(root)) else root
        bases = [f"{cls.__module__}.{cls.__qualname__}" for cls in type(inside).__mro__]
        found.owners |= dict.fromkeys(new, bases)
        taken |= {prefix + name for name in new.values()}
        found.modules.append((prefix, place, weakref.ref(root)))


def _class_name(module: nn.Module) -> str:
    inner = module._modules.get("module")
    return type(module if inner is None else inner).__name__


def is_ddp(cls: type) -> bool:
    """Returns whether a class is DistributedDataParallel or derived from it."""
    return any(base.__name__ == "DistributedDataParallel" for base in cls.__mro__)


def _note_wrapper(found: Inventory, module: nn.Module) -> None:
    if is_ddp(type(module)):
        found.wrappers.add("ddp")
        found.wrapped |= {id(parameter) for parameter in module.parameters()}
        if getattr(module, "broadcast_buffers", False):
            found.broadcast |= {id(buffer) for buffer in module.buffers()}
    classes = {cls.__name__ for cls in type(module).__mro__}
    if "FullyShardedDataParallel" in classes:
        found.wrappers.add("fsdp1")
        found.sharded |= {id(parameter) for parameter in module.parameters()}
    if "FSDPModule" in classes:
        found.wrappers.add("fsdp2")


# --- normalisers ------------------------------------------------------------------------------------------------


def _normalizers(owners: Sequence[Any]) -> Iterator[tuple[tuple[Any, Sequence[str]], Any]]:
    """Yields ``(owner, path), normaliser`` for each normaliser once; its owner is itself if no object holds it.

    Normalisers of wrappers that don't update them (:func:`_rests`) are left out.
    """
    taken = {id(item) for owner in owners if _rests(owner) for _, item in held(owner)}
    for owner in owners:
        for path, item in held(owner):
            if id(item) not in taken:
                taken.add(id(item))
                yield (owner, path), item
    for owner in owners:
        if statistics_of(owner) is not None and id(owner) not in taken:
            taken.add(id(owner))
            yield (owner, ()), owner


def _name_normalizers(found: Inventory, owners: Sequence[Any], places: Mapping[int, str]) -> None:
    """Names normalisers by class, attribute and place, which is the same on every rank."""
    for (owner, path), item in _normalizers(owners):
        name = type(owner).__name__ + (
            "" if not path else f".{path[0]}" if len(path) == 1 else f".{path[0]}[{path[1]}]"
        )
        place = places.get(id(item))
        if place is not None:
            found.normalizers[f"{name} ({place})"] = _reference(owner, path)
            continue
        number = sum(1 for other in found.normalizers if other.partition("#")[0] == name)
        unplaced = f"{name}#{number + 1}" if number else name
        found.normalizers[unplaced] = _reference(owner, path)
        found.unplaced.add(unplaced)


def _rests(owner: Any) -> bool:
    """Returns whether a wrapper doesn't update its statistics: an evaluation's, which one rank alone may have."""
    attributes = attributes_of(owner)  # names in VecNormalize; in Gymnasium's wrappers
    return attributes.get("training") is False or attributes.get("_update_running_mean") is False


def _reference(owner: Any, path: Sequence[str] = ()) -> Callable[[], Any]:
    """Returns a function that finds a normaliser, or its replacement at the same path, while its owner lives."""
    try:
        ref: Callable[[], Any] = weakref.ref(owner)
    except TypeError:  # the class has no weak references, as with slots
        ref = Kept(owner)
    return (lambda: _at(ref(), path)) if path else ref


class Kept:
    """Stands for a weak reference to an object of a class that has none: lets the object go if nobody else has it."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def __call__(self) -> Any:
        """Returns the object; None once only this reference is left."""
        if sys.getrefcount(self._thing) <= 2:  # ours, and the argument's
            self._thing = None
        return self._thing
