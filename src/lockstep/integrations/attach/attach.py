"""Makes any PyTorch loop data-parallel in one line: ``lockstep.attach(module, optimizer)``.

Gradients are reduced at the end of every backward pass, whichever method computed the loss: hooks on the parameters
see what is accumulated, and a callback of the autograd engine reduces it before ``backward`` returns. The script's own
clipping, gradient scaler and optimiser therefore see the gradient of all ranks' data.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.autograd import Variable
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lockstep.config.on_off import switch
from lockstep.core.errors import UnreducedGradientError
from lockstep.integrations.attach.agreement import broadcast_tensors, check_alike
from lockstep.integrations.attach.ddp_forward import DDPForward
from lockstep.integrations.attach.increments import Increments, current_pass
from lockstep.integrations.attach.phases import Phases
from lockstep.integrations.attach.process_group import Same, communicator, join, meet
from lockstep.integrations.attach.rates import Rates
from lockstep.torch_engine.distributed.scripts import parallel_wrapper, unwrapped

Reduction = Literal["mean", "sum"]

REDUCED = "_lockstep_reduced"
"""Attribute set on a gradient when it is reduced: an optimiser may then step with it more than once."""

EQUALLY = "every rank must run equally many; decide together, with lockstep.stop_if or from lockstep.all_mean"

_attached: weakref.WeakSet[Attached] = weakref.WeakSet()


def attach(
    module: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    broadcast_buffers: bool = True,
    reduction: Reduction = "mean",
    check_phases: bool = True,
) -> Attached:
    """Makes a PyTorch loop data-parallel over the ranks that a launcher started; a collective.

    Every rank takes the first rank's parameters, and its buffers if ``broadcast_buffers``. From then on every
    ``backward`` ends with one reduction, in a fixed order, of what it added to the gradients. With one rank nothing is
    hooked.

    Args:
        module: the module to train, or several (actor and critic) whose backward passes may be separate. A module
            wrapped in DDP is unwrapped: gradients are reduced whether or not the loss went through DDP's forward.
        optimizer: the optimisers of these parameters. Each step first checks that its gradients were reduced.
        broadcast_buffers: copy the first rank's buffers (running statistics) to all ranks now and after each reduction.
        reduction: ``mean`` averages gradients over ranks, right for a loss that is a mean over equally many samples on
            every rank. ``sum`` adds them, right for a loss divided by the count of all ranks' samples; such a loss
            must not go through DDP's forward.
        check_phases: raise if one rank ran forward passes without gradients (a rollout) between two backward passes
            and another rank did not: one of them has stopped its epochs early.

    Returns:
        A handle with ``no_sync()`` and ``detach()``.

    Raises:
        ValueError: a module is wrapped in FSDP, has a part wrapped in DDP, or is attached already; it has complex or
            sparse parameters, lazy ones without a shape yet, or none that require gradients; a buffer that would be
            broadcast is sparse; an optimiser steps parameters of other modules; or an argument is of another type.
        RankMismatchError: on every rank, if the ranks' modules or optimisers differ.
    """
    optimizers = _listed(optimizer, "param_groups", "an optimiser")
    modules = [unwrapped(each) for each in _listed(module, "named_parameters", "a torch.nn.Module")]
    if reduction not in get_args(Reduction):
        raise ValueError(f"attach: reduction {reduction!r} is unknown; use mean or sum")
    broadcasts = switch("broadcast_buffers", broadcast_buffers)
    checks = switch("check_phases", check_phases)
    _check(modules, optimizers)
    _check_broadcast(modules, broadcasts)
    return Attached(modules, optimizers, broadcasts, reduction, checks)


def _listed(given: Any, attribute: str, wanted: str) -> list[Any]:
    """Returns a module or optimiser, or those of a sequence, as a list; they are known by ``attribute``."""
    if given is None or hasattr(given, attribute):
        each = [] if given is None else [given]
    else:
        each = list(given) if isinstance(given, Iterable) else [given]
    for one in each:
        if not hasattr(one, attribute):
            raise ValueError(
                f"attach: {type(one).__name__} stands where {wanted} is wanted, or a list of them: "
                "attach(module, optimizer), attach([actor, critic], [first, second])"
            )
    return each


def _check_broadcast(modules: Sequence[nn.Module], broadcast_buffers: bool) -> None:
    """Refuses parameters and buffers that the first rank can't send to the others."""
    tensors: list[tuple[str, str, Tensor]] = [("parameter", *each) for each in _named_parameters(modules).items()]
    whole = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    tensors += [("buffer", *each) for each in whole.named_buffers()] if broadcast_buffers else []
    for kind, name, tensor in tensors:
        if is_lazy(tensor):
            raise ValueError(
                f"attach: {kind} {name} has no shape yet, in a lazy module; run a forward pass first, on every rank"
            )
        if tensor.layout != torch.strided:
            instead = "attach with broadcast_buffers=False" if kind == "buffer" else "keep it dense"
            raise ValueError(f"attach: {kind} {name} is sparse ({tensor.layout}) and can't be broadcast; {instead}")


def _named_parameters(modules: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Returns parameters by name, each once; if there are several modules, names start with a number: ``1.weight``."""
    return dict((modules[0] if len(modules) == 1 else nn.ModuleList(modules)).named_parameters())


def _check(modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    named = _named_parameters(modules)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ValueError("attach: no parameter of the module requires gradients; there is nothing to train")
    for module in modules:
        wrapper = parallel_wrapper(module)
        if wrapper is not None:
            raise ValueError(f"attach: the module is already in the hands of {wrapper}; attach the bare module")
    for name, parameter in named.items():
        if parameter.is_complex():
            raise ValueError(f"attach: parameter {name} is complex; keep its real and imaginary parts as two")
        if any(id(parameter) in handle.indices for handle in _attached):
            raise ValueError(f"attach: parameter {name} is attached already; attach it once, or detach() first")
    known = {id(parameter) for parameter in named.values()}
    for optimizer in optimizers:
        others = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
        if others:
            raise ValueError(
                f"attach: {type(optimizer).__name__} steps {others} tensors that are no parameters of the module; "
                "attach every module that it trains: attach([actor, critic], optimizer)"
            )


class Attached:
    """Keeps attached modules identical on all ranks by reducing their gradients; :func:`attach` makes it.

    Attributes:
        reductions: number of backward passes so far that ended with a reduction.
        indices: maps ``id(parameter)`` to the parameter's index among those that are reduced; empty with one rank.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        broadcast_buffers: bool,
        reduction: Reduction,
        check_phases: bool,
    ) -> None:
        self.rank, self.world_size = join()
        self.reductions = 0
        self.indices: dict[int, int] = {}
        self._modules, self._optimizers, self._reduction = modules, optimizers, reduction
        self._syncing, self._steps, self._passes = True, 0, 0
        self._queued: set[int] = set()
        self._handles: list[RemovableHandle] = []
        if self.world_size > 1:
            self._begin(broadcast_buffers, check_phases)

    def _begin(self, broadcast_buffers: bool, check_phases: bool) -> None:
        named = _named_parameters(self._modules)
        check_alike(named, self._optimizers)
        buffers = list({id(b): b for module in self._modules for b in module.buffers()}.values())
        broadcast_tensors([*named.values(), *(buffers if broadcast_buffers else ())])
        trained = {name: p for name, p in named.items() if p.requires_grad}
        self._frozen = {name: p for name, p in named.items() if not p.requires_grad}
        self._where = f"the end of a backward pass (of {', '.join(type(m).__name__ for m in self._modules)})"
        self._follow = broadcast_buffers and bool(buffers)
        self.indices = {id(p): index for index, p in enumerate(trained.values())}
        self._increments = Increments(list(trained.values()), list(trained), self._queue)
        self._phases = Phases(self._modules, check_phases)
        self._rates = Rates(self._optimizers)
        guard = DDPForward(refuses=True, summed=self._reduction == "sum")
        self._handles += [module.register_forward_pre_hook(guard) for module in self._modules]
        self._reduced_for: list[set[int]] = [set() for _ in self._optimizers]
        for number, optimizer in enumerate(self._optimizers):
            self._handles.append(optimizer.register_step_pre_hook(partial(self._before_step, number)))
        _attached.add(self)

    def detach(self) -> None:
        """Removes every hook; from here on each rank trains independently."""
        if self.indices:
            self._increments.remove()
            self._phases.remove()
        for handle in self._handles:
            handle.remove()
        self._handles, self.indices = [], {}
        _attached.discard(self)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Suspends reduction: backward passes inside only accumulate; the first one after it reduces all of it."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def _queue(self) -> None:
        """Queues one callback of the autograd engine for the end of this backward pass."""
        task = current_pass()
        if task in self._queued:
            return
        self._queued.add(task)

        def end() -> None:
            self._queued.discard(task)
            self._passes += 1
            self._increments.pass_ends(task)
            if self._syncing:
                self._reduce()

        Variable._execution_engine.queue_callback(end)  # pyright: ignore[reportAttributeAccessIssue]

    @torch.no_grad()
    def _reduce(self) -> None:
        """Reduces everything that backward passes have added to gradients since the last reduction."""
        increments = self._increments
        indices = self._agree(sorted(increments.added))
        self._check_frozen()
        reduced: dict[int, Tensor] = {}
        by_device: dict[torch.device, list[int]] = {}
        for index in indices:
            by_device.setdefault(increments.parameters[index].device, []).append(index)
        for members in by_device.values():
            reduced.update(self._reduce_together(members))
        increments.settle(reduced)
        for index in indices:
            setattr(increments.parameters[index].grad, REDUCED, True)
        for optimizer in self._reduced_for:
            optimizer.update(indices)
        if self._follow:
            broadcast_tensors(list({id(b): b for module in self._modules for b in module.buffers()}.values()))
        self.reductions += 1
        self._passes = 0

    def _agree(self, used: list[int]) -> list[int]:
        """Raises unless ranks are in step; returns indices of the parameters that at least one rank used."""
        told = meet(
            self._where,
            [
                Same("had run {} backward passes since the last reduction", self._passes, EQUALLY),
                Same("had taken {} optimiser steps", self._steps, EQUALLY),
                *self._phases.said(),
            ],
            telling=self._rates.digest() << 33 | zlib.crc32(repr(used).encode()) << 1 | self._phases.telling(),
        )
        self._phases.told([digest & 1 for digest in told])
        self._rates.compare([digest >> 33 for digest in told])
        if len({digest >> 1 & 0xFFFFFFFF for digest in told}) == 1:
            return used
        bitmap = torch.zeros(len(self.indices), dtype=torch.bool)
        bitmap[used] = True
        return communicator().gather_ranks(bitmap).any(0).nonzero().flatten().tolist()

    def _reduce_together(self, indices: list[int]) -> dict[int, Tensor]:
        """Reduces the increments on one device in one buffer, float64 if one of them is, else float32."""
        parts = [self._increments.increment(index) for index in indices]
        dtypes = {part.dtype for part in parts}
        wire = torch.float64 if torch.float64 in dtypes else torch.float32
        if dtypes != {wire}:
            parts = [part.to(wire) for part in parts]
        total = communicator().sum_ranks(_flatten_dense_tensors(parts))
        if self._reduction == "mean":
            total /= self.world_size
        return dict(zip(indices, _unflatten_dense_tensors(total, parts), strict=True))

    def _check_frozen(self) -> None:
        for name, parameter in self._frozen.items():
            if parameter.requires_grad and parameter.grad is not None:
                raise UnreducedGradientError(
                    f"parameter {name} began to require gradients after attach, which therefore doesn't reduce them: "
                    "detach() and attach again, on every rank"
                )

    def _before_step(self, number: int, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._check_step(number, optimizer)
        self._rates.before_step(number)
        self._reduced_for[number].clear()
        self._steps += 1

    def _check_step(self, number: int, optimizer: Optimizer) -> None:
        """Raises unless every gradient that an optimiser is about to use was reduced."""
        self._check_frozen()
        reduced = self._reduced_for[number]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                index = self.indices.get(id(parameter))
                if index is None:
                    raise UnreducedGradientError(
                        f"{type(optimizer).__name__} steps a parameter of shape {tuple(parameter.shape)} that wasn't "
                        "there at attach: detach() and attach again, on every rank"
                    )
                name = self._increments.names[index]
                if self._increments.outstanding(index):
                    raise UnreducedGradientError(
                        f"the gradient of {name} holds a backward pass that was not reduced: the last one before a "
                        "step must be outside of no_sync() and must end"
                    )
                if index not in reduced and not hasattr(parameter.grad, REDUCED):
                    raise UnreducedGradientError(
                        f"the gradient of {name} did not come by a backward pass since the last step, so it was never "
                        "reduced (autograd.grad, or p.grad = …): use loss.backward()"
                    )
