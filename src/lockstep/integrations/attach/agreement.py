"""Compares what the ranks are about to train, and broadcasts the first rank's values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.core.errors import RankMismatchError
from lockstep.integrations.attach.process_group import communicator, meet

PACKED_BYTES = 64 << 20
"""The most bytes that one broadcast packs together."""

Fact = list[Any]


def check_alike(parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
    """Raises unless all ranks train the same parameters with the same optimisers; a collective.

    Raises:
        RankMismatchError: on every rank, naming the first difference.
    """
    meet("attach")
    facts = [*_described(parameters), *(fact for number, o in enumerate(optimizers) for fact in _settings(number, o))]
    everyone = communicator().gather_json(facts)
    for rank, theirs in enumerate(everyone):
        if len(theirs) != len(everyone[0]):
            raise RankMismatchError(
                f"attach: rank {rank} has other parameters or optimisers than rank 0 ({len(theirs)} against "
                f"{len(everyone[0])}); build the same on every rank"
            )
        for (name, first), (other, value) in zip(everyone[0], theirs, strict=True):
            if (name, first) != (other, value):
                raise RankMismatchError(
                    f"attach: rank {rank} differs from rank 0: {other} {value} against {name} {first}; build the same, "
                    "and load the same checkpoint, on every rank"
                )


def _described(parameters: Mapping[str, nn.Parameter]) -> Iterator[Fact]:
    for name, p in parameters.items():
        yield [name, [list(p.shape), str(p.dtype), "trained" if p.requires_grad else "frozen"]]


def _settings(number: int, optimizer: Optimizer) -> Iterator[Fact]:
    """Yields an optimiser's hyperparameters and a fingerprint of its state, as JSON that ranks compare."""
    kind = f"optimizer {number} ({type(optimizer).__name__})"
    for position, group in enumerate(optimizer.param_groups):
        for key, value in sorted(group.items()):
            told = len(value) if key == "params" else value.tolist() if isinstance(value, Tensor) else value
            if isinstance(told, (int, float, str, tuple, list, type(None))):
                yield [f"{kind} group {position} {key}", repr(told)]
    yield [f"{kind} state", _fingerprint(optimizer.state_dict()["state"])]


def _fingerprint(state: Any) -> str:
    """Returns a hash of nested dicts and lists of tensors and numbers; ``"empty"`` if there is nothing in them."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            digest.update(as_bytes(value).cpu().numpy().tobytes())
        elif isinstance(value, Mapping):
            for key, item in value.items():
                digest.update(repr(key).encode())
                add(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            digest.update(repr(value).encode())

    add(state)
    return digest.hexdigest()[:16] if state else "empty"


def as_bytes(x: Tensor) -> Tensor:
    """Returns a tensor's elements in order, as uint8 ``[bytes]``."""
    return x.detach().contiguous().view(-1).view(torch.uint8)


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[Tensor]) -> None:
    """Overwrites the tensors with the first rank's values, in packs of up to :data:`PACKED_BYTES`; a collective."""
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        pack: list[Tensor] = []
        size = 0
        for tensor in (t for t in tensors if t.device == device):
            if pack and size + tensor.nbytes > PACKED_BYTES:
                _broadcast(pack)
                pack, size = [], 0
            pack.append(tensor)
            size += tensor.nbytes
        _broadcast(pack)


def _broadcast(tensors: Sequence[Tensor]) -> None:
    received = communicator().broadcast(torch.cat([as_bytes(tensor) for tensor in tensors]))
    start = 0
    for tensor in tensors:
        part = received[start : start + tensor.nbytes].clone()  # the slice may be misaligned for the dtype
        _overwrite(tensor.data, part.view(tensor.dtype).view(tensor.shape))  # .data: a graph that saved it stays valid
        start += tensor.nbytes


def _overwrite(tensor: Tensor, values: Tensor) -> None:
    """Copies values into a tensor whose elements may share memory along some dimensions, as ``expand`` makes it."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor, values = tensor.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
    tensor.copy_(values)
