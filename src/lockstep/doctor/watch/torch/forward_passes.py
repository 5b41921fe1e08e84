"""Records the data that forward passes were given, with gradients and without, and the parameters that they used."""

from __future__ import annotations

import hashlib
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from lockstep.doctor.watch.side_store import BETWEEN_WORDS
from lockstep.doctor.watch.torch.inspection import is_ddp
from lockstep.doctor.watch.torch.optimizer_watch import OptimizerWatch
from lockstep.doctor.watch.torch.values import digest, input_digests, local, readable, spread, tensors_in

MOST_PASSES = 4096
MOST_COLLECTED = 1024
"""Calls without gradients that are recorded of a phase: more cost time, and say nothing new."""
COLLECTED_NUMBERS = 1 << 14
"""Numbers of one argument of such a call that are digested, at most about."""
ROW_NUMBERS = 64
"""Numbers of a row that are hashed, at most about."""
MOST_ROWS = 256
"""Hashes of a step's rows that are kept: the smallest, which are of the same rows on every rank that has them."""


class Pass(NamedTuple):
    """One call of one module.

    Attributes:
        digests: of the data in its arguments.
        parameters: ids of all parameters of the module.
        made: whether arguments had tensors that require gradients, so other parameters had made them.
        ddp: whether it is DDP's own forward.
        collected: hashes of the rows of an argument that the phase's passes without gradients were given once, if they
            were given all of its rows.
        use: whether ``backward`` came to what it returned.
    """

    digests: list[str]
    parameters: frozenset[int]
    made: bool
    ddp: bool
    collected: set[int]
    use: Use


class Use:
    """Tells whether ``backward`` came to what a call returned.

    Attributes:
        known: whether the call returned tensors that show it.
        seen: whether it has.
    """

    def __init__(self) -> None:
        self.known = self.seen = False

    def watch(self, output: Any) -> None:
        """Listens to the functions that made the tensors of a call's output."""
        for tensor in tensors_in(output):
            if not is_functorch_wrapped_tensor(tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._reached)
                self.known = True

    def _reached(self, _gradients: Any) -> None:
        self.seen = True


class Collected:
    """Records what modules were given without gradients since a phase began: what a rollout collects."""

    def __init__(self) -> None:
        self._chain, self._calls, self._kinds = hashlib.blake2b(digest_size=8), 0, set[str]()
        self._rows: dict[int, set[int]] = {}  # by module: an outer one's argument is often its inner ones', too
        self._repeated, self._all = set[int](), True

    def note(self, module: nn.Module, args: Any) -> None:
        """Records a call of a module without gradients."""
        if self._calls >= MOST_COLLECTED:
            self._all = False
            return
        self._calls += 1
        for tensor in _data(args):
            word = digest(spread(tensor, COLLECTED_NUMBERS))
            self._chain.update(word.encode())
            self._kinds.add(word)
            given, rows = self._rows.setdefault(id(module), set()), Counter(_rows(tensor))
            self._repeated.update(row for row, times in rows.items() if times > 1 or row in given)
            given.update(rows)

    def rows_of(self, args: Any) -> set[int]:
        """Returns hashes of those rows of an argument of floats that no module was given more than once before.

        Two samples may have the same observation, so repeated rows can't tell whose sample a row is. There are none if
        not all rows of the argument were given before, or not all calls are known.
        """
        known = set[int]().union(*self._rows.values()) if self._all else set[int]()
        each = [set(_rows(tensor)) for tensor in _data(args) if tensor.is_floating_point()] if known else []
        return next((rows - self._repeated for rows in each if rows <= known), set())

    def word(self) -> str:
        """Returns a word for all data in order; empty unless there were several different ones."""
        return self._chain.hexdigest() if len(self._kinds) > 1 else ""


def _data(args: Any) -> list[Tensor]:
    """Returns the dense tensors with rows that don't require gradients."""
    found = [x for x in tensors_in(args) if not x.requires_grad and readable(x) and x.dim() > 1 and x.numel()]
    return [local(x) for x in found if not x.is_complex()]


def _rows(tensor: Tensor) -> list[int]:
    """Returns hashes, the same in every process, of samples of a tensor's rows."""
    rows = tensor.reshape(tensor.shape[0], -1)
    rows = rows[:, :: -(-rows.shape[1] // ROW_NUMBERS)].to("cpu", torch.float64).contiguous().numpy()
    return [zlib.crc32(row.tobytes()) for row in rows]


class ForwardPasses:
    """Records forward passes with gradients before compared steps; at most the newest :data:`MOST_PASSES`."""

    def __init__(self) -> None:
        self._passes: deque[Pass] = deque(maxlen=MOST_PASSES)
        self._count = 0
        self._parameters: dict[int, tuple[weakref.ref[nn.Module], frozenset[int]]] = {}
        self._open: deque[tuple[int, Use]] = deque(maxlen=MOST_PASSES)  # bounded: a call that raises never returns
        self._collected = Collected()

    def begin_phase(self) -> None:
        """Forgets what the last phase's passes without gradients were given."""
        self._collected = Collected()

    def note_collected(self, module: nn.Module, args: Any) -> None:
        """Records a call of a module without gradients."""
        self._collected.note(module, args)

    def note(self, module: nn.Module, args: Any) -> None:
        """Records a call of a module."""
        with torch.no_grad():
            digests, collected = input_digests(args), self._collected.rows_of(args)
        ddp = is_ddp(type(getattr(module, "_orig_mod", module)))  # compiled or not
        made = any(tensor.requires_grad for tensor in tensors_in(args))
        self._passes.append(Pass(digests, self._parameters_of(module), made, ddp, collected, use := Use()))
        self._count += 1
        self._open.append((id(module), use))

    def note_output(self, module: nn.Module, output: Any) -> None:
        """Records what the innermost call of a module that hasn't returned yet gives."""
        place = next((n for n, (number, _) in enumerate(reversed(self._open), 1) if number == id(module)), 0)
        if place:
            use = [self._open.pop()[1] for _ in range(place)][-1]  # after calls within it, which have raised
            use.watch(output)

    def before_step(self, watch: OptimizerWatch) -> tuple[str, dict[str, Any]]:
        """Returns words for the data of each pass behind an optimiser's coming step, and where they are from.

        The words are in the order of passes; empty if none was seen. If these passes were given what passes without
        gradients since the phase began had been given, the second has a word for all of that, and hashes of some rows
        that no module had been given twice.

        Passes to whose output no ``backward`` came don't count, if it came to others. The passes are those through
        modules with parameters of this optimiser. All passes count if there are none (it updates parameters outside
        modules, or parameters were replaced), or if an outermost one of them was given what other modules had computed
        from the data.
        """
        fresh = min(self._count - watch.seen_passes, len(self._passes))
        new = list(self._passes)[len(self._passes) - fresh :]
        new = [each for each in new if each.use.seen or not each.use.known] if any(p.use.seen for p in new) else new
        watch.seen_passes = self._count
        mine = {id(parameter) for group in watch.groups for parameter in group["params"]}
        own = [each for each in new if not each.parameters.isdisjoint(mine)]
        if any(each.ddp for each in own or new):
            watch.through.add("ddp")
        alone = own and not any(each.made for each in _outermost(own))
        given = [each for each in (own if alone else new) if each.digests]
        rows = sorted(set[int]().union(*(each.collected for each in given)))[:MOST_ROWS]
        source = {"collected": self._collected.word(), "rows": rows} if rows else {}
        return BETWEEN_WORDS.join(_joined(each.digests) for each in given), source

    def clear(self) -> None:
        """Forgets all passes, because no optimiser's next step is compared."""
        self._passes.clear()
        self._parameters.clear()
        self._open.clear()

    def _parameters_of(self, module: nn.Module) -> frozenset[int]:
        known = self._parameters.get(id(module))
        if known is None or known[0]() is not module:
            ids = frozenset(id(parameter) for parameter in module.parameters())
            known = self._parameters[id(module)] = (weakref.ref(module), ids)
        return known[1]


def _outermost(passes: Sequence[Pass]) -> list[Pass]:
    """Returns the passes through modules whose parameters aren't a proper subset of another pass's."""
    kinds = {each.parameters for each in passes}
    outer = {kind for kind in kinds if not any(kind < other for other in kinds)}
    return [each for each in passes if each.parameters in outer]


def _joined(digests: list[str]) -> str:
    return hashlib.blake2b("".join(digests).encode(), digest_size=8).hexdigest()
