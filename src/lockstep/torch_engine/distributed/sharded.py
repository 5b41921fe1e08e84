"""Slices parameters, gradients and Adam's moments of a large network over the ranks, by FSDP2.

Each rank keeps a slice of every parameter, cut along its first axis, and both moments of that slice. In a training
step FSDP gathers the parameters for the forward and backward pass and gives each rank its slice of the gradient. A
rollout calls the networks at every step, so it gathers one whole copy (:meth:`ShardedAdam.gather`) and frees it
before the update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from lockstep.torch_engine.nets.parameters import MOMENTS, Arrays, FlatParameters, fused_adam_step

if TYPE_CHECKING:
    from lockstep.torch_engine.distributed.communicator import Communicator

Collective = Callable[[Tensor], Tensor]


class _Allocating:
    """Allocates the buffers of FSDP's collectives."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Makes an uninitialised tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Gathering(_Allocating, AllGather):
    """Makes FSDP's all-gather by another collective than the backend's."""

    def __init__(self, gather: Collective) -> None:
        self._gather = gather

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        output_tensor.copy_(self._gather(input_tensor).view(-1))


class _Scattering(_Allocating, ReduceScatter):
    """Makes FSDP's reduce-scatter by another collective than the backend's."""

    def __init__(self, reduce: Collective, rank: int) -> None:
        self._reduce, self._rank = reduce, rank

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        size = output_tensor.numel()
        output_tensor.copy_(self._reduce(input_tensor)[self._rank * size : (self._rank + 1) * size])


class ShardedParameters:
    """Holds one rank's slices of a module's parameters; gathers and cuts slices of parameters and moments.

    The module's parameters, all of them float32 with one axis or more, are sharded in place. FSDP's collectives go
    through the communicator too, except NCCL's own, which overlap with the computation.

    Attributes:
        module: computes the loss.
        slices: this rank's part of each parameter; the optimiser changes this memory.
    """

    def __init__(self, module: nn.Module, communicator: Communicator) -> None:
        self.shapes = [tuple(p.shape) for p in module.parameters()]
        self._sizes = [p.numel() for p in module.parameters()]
        assert all(self.shapes), "FSDP shards along the first axis"
        self._rank, self._world_size = communicator.topology.rank, communicator.topology.world_size
        self._gather, self._reduce = communicator.gather_ranks, communicator.all_reduce
        mesh = init_device_mesh(communicator.device.type, (self._world_size,))
        wrapped = fully_shard(module, mesh=mesh)
        assert isinstance(wrapped, FSDPModule)
        wrapped.set_gradient_divide_factor(1.0)  # the loss is a part of a global mean already
        wrapped.set_force_sum_reduction_for_comms(True)
        if communicator.own_backend is None:
            wrapped.set_custom_all_gather(_Gathering(self._gather))
            wrapped.set_custom_reduce_scatter(_Scattering(self._reduce, self._rank))
        self._wrapped, self.module = wrapped, module
        with torch.no_grad():
            self.slices: list[Tensor] = [p.to_local() for p in module.parameters()]  # pyright: ignore[reportAttributeAccessIssue]

    def _rows(self, shape: tuple[int, ...]) -> int:
        """Returns the most rows of a parameter that a rank holds."""
        return -(-shape[0] // self._world_size)

    def full(self, slices: Sequence[Tensor]) -> Tensor:
        """Gathers every rank's slices, of parameters or of a moment, into the whole vector ``[P]`` on all ranks."""
        pieces = []
        for piece, shape in zip(slices, self.shapes, strict=True):
            padded = piece.new_zeros((self._rows(shape), *shape[1:]))
            padded[: len(piece)] = piece
            pieces.append(padded.flatten())
        everyone = self._gather(torch.cat(pieces))
        parts = torch.split(everyone, [piece.numel() for piece in pieces], 1)
        return torch.cat([part.reshape(-1)[:size] for part, size in zip(parts, self._sizes, strict=True)])

    @torch.no_grad()
    def take(self, slices: Sequence[Tensor], vector: Tensor) -> None:
        """Copies this rank's part of a whole vector ``[P]`` into its slices: the reverse of :meth:`full`."""
        for piece, shape, part in zip(slices, self.shapes, torch.split(vector, self._sizes), strict=True):
            first = self._rank * self._rows(shape)
            piece.copy_(part.view(shape)[first : first + len(piece)])

    def reduce_after(self, backward: bool) -> None:
        """Sets whether the next backward pass reduces the gradients, or keeps them for a later pass that does."""
        self._wrapped.set_requires_gradient_sync(backward)

    def take_gradient(self) -> Tensor:
        """Removes this rank's part of the reduced gradient from the module; returns it in the order of ``slices``."""
        parts = []
        for parameter, piece in zip(self.module.parameters(), self.slices, strict=True):
            gradient = parameter.grad
            parts.append(torch.zeros_like(piece) if gradient is None else gradient.to_local())  # pyright: ignore[reportAttributeAccessIssue]
            parameter.grad = None
        return torch.cat([part.flatten() for part in parts])

    def combined(self, gradient: Tensor, terms: Tensor) -> tuple[Tensor, float]:
        """Sums loss terms ``[T]`` over ranks, and computes the gradient's global norm in the same collective."""
        squares = gradient.double().square().sum()
        total = self._reduce(torch.cat([terms.double(), squares.unsqueeze(0)]))
        return total[:-1].to(terms.dtype), float(total[-1].sqrt().float())


class ShardedAdam:
    """Applies Adam to this rank's slices; see :class:`lockstep.torch_engine.nets.parameters.Optimizer`.

    The whole copy ``parameters`` has memory only between :meth:`gather` and :meth:`release`. ``options`` are Adam's, by
    PyTorch's names.
    """

    def __init__(self, sharded: ShardedParameters, parameters: FlatParameters, options: dict[str, Any]) -> None:
        self._sharded, self._parameters = sharded, parameters
        self._options = options
        slices = sharded.slices
        self._gradients = [torch.zeros_like(piece) for piece in slices]
        self._moments = [
            {"step": torch.zeros((), device=piece.device)} | {name: torch.zeros_like(piece) for name in MOMENTS}
            for piece in slices
        ]
        self.release()

    def step(self, gradient: Tensor, learning_rate: float | Tensor, skipped: Tensor | None = None) -> None:
        """See :meth:`Optimizer.step`; ``skipped`` must be None."""
        assert skipped is None
        parts = torch.split(gradient, [g.numel() for g in self._gradients])
        for mine, part in zip(self._gradients, parts, strict=True):
            mine.copy_(part.view_as(mine))
        fused_adam_step(self._sharded.slices, self._gradients, self._moments, learning_rate, **self._options)

    def slices(self, name: str) -> list[Tensor]:
        """Returns this rank's slices of a moment."""
        return [moments[name] for moments in self._moments]

    def parameters(self) -> Tensor:
        """See :meth:`Optimizer.parameters`."""
        return self._sharded.full(self._sharded.slices)

    def moments(self) -> dict[str, Tensor]:
        """See :meth:`Optimizer.moments`."""
        return {"step": self.slices("step")[0]} | {name: self._sharded.full(self.slices(name)) for name in MOMENTS}

    def load(self, parameters: Arrays, moments: Mapping[str, Arrays], step: float) -> None:
        """See :meth:`Optimizer.load`; keeps only this rank's slices."""
        flat = self._parameters.flat
        whole = torch.empty(flat.shape, device=flat.device)
        for arrays, slices in (
            (parameters, self._sharded.slices),
            *((moments[name], self.slices(name)) for name in MOMENTS),
        ):
            self._parameters.load(whole, arrays)
            self._sharded.take(slices, whole)
        for count in self.slices("step"):
            count.fill_(step)
        self.release()

    def gather(self) -> None:
        """See :meth:`Optimizer.gather`: fills the vector if it was released."""
        flat = self._parameters.flat
        storage = flat.untyped_storage()
        if not storage.nbytes():
            storage.resize_(flat.numel() * flat.element_size())
            flat.copy_(self.parameters())

    def release(self) -> None:
        """See :meth:`Optimizer.release`: frees the vector's memory; it and its views keep their shapes."""
        self._parameters.flat.untyped_storage().resize_(0)
