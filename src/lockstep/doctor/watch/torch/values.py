"""Reduces tensors to what can be compared later: all of small ones, a sample and a digest of large ones."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor

DENSE_NUMBERS = 1 << 18
"""Numbers kept of one part (all parameters, all gradients, …) at each of the first steps."""
SPARSE_NUMBERS = 1 << 13
"""Numbers kept of one part at each step compared later."""
FEWEST = 16
INPUT_BYTES = 1 << 20
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
TAKEN_NUMBERS = 1024
_CHUNK = 1 << 22
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def capturing() -> bool:
    """Returns whether a CUDA graph is being captured: it would repeat at every replay what is launched now."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def has_compiled() -> bool:
    """Returns whether ``torch.compile`` compiled anything, without importing it."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return counters.get("frames", {}).get("total", 0) > 0


def shards_of(tensor: Tensor) -> int:
    """Returns the number of ranks over which a tensor is sharded; 0 if every rank holds all of it, or a term of a sum.

    A gradient may be such a term, ``Partial``, which the optimiser's own operations reduce.
    """
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return 0
    mesh: Any = tensor.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    sizes = [
        mesh.size(dim)
        for dim, placement in enumerate(placements)
        if not (placement.is_replicate() or placement.is_partial())
    ]
    return int(np.prod(sizes)) if sizes else 0


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor, or the tensor itself, detached."""
    to_local: Any = getattr(tensor, "to_local", None)
    return (tensor if to_local is None else to_local()).detach()


def readable(tensor: Tensor) -> bool:
    """Returns whether elements can be read: not of sparse, nested, quantised, meta, fake, torch.func's or zero tensors.

    PyTorch's zero tensors have no memory: they are tangents of what doesn't depend on an input.
    """
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return False
    if tensor._is_zerotensor():
        return False
    return not isinstance(tensor, FakeTensor) and not is_functorch_wrapped_tensor(tensor)


def digest(tensor: Tensor) -> str:
    """Returns a 64-bit hash, in hexadecimal, of a tensor's bits on this rank, its shape and dtype."""
    flat = tensor.resolve_conj().contiguous().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    words = flat.view(_INTEGERS[flat.element_size()])
    out = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=8)
    if words.device.type == "cpu":
        out.update(words.numpy().data)
    else:
        out.update(str(_device_sum(words)).encode())
    return out.hexdigest()


def _device_sum(words: Tensor) -> int:
    """Returns a hash of integers that depends on their places, modulo 2⁶⁴, computed on the tensor's device."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + part.numel(), dtype=torch.int64, device=words.device)
        mixed = (part + place * _ODD) * (place * 2 + 1)
        total += (mixed ^ (mixed >> 29)).sum()
    return int(total)


def sampled(tensor: Tensor, most: int) -> Tensor:
    """Returns all elements if there are at most ``most``, else at most so many at equal distances, flattened.

    The distance is a power of two: of one tensor, a rarer sample is a part of each denser one.
    """
    flat, step = tensor.reshape(-1), 1
    while -(-flat.numel() // step) > most:
        step *= 2
    return flat[::step]


def spread(tensor: Tensor, most: int) -> Tensor:
    """Returns all elements if there are at most ``most``, else about so many at equal distances, flattened.

    For what is compared by its digest alone, with the same number of elements: the distance is seldom a power of two,
    as the widths of images are, so that it goes through all of their columns.
    """
    flat = tensor.reshape(-1)
    return flat if flat.numel() <= most else flat[:: -(-flat.numel() // most)]


class Taken(NamedTuple):
    """A sample (``numbers``) and a digest of a tensor that will be gone when the others are compared."""

    numbers: Tensor
    elements: int
    digest: str


def take(tensor: Tensor) -> Taken:
    """Returns a sample and a digest of a readable tensor, without a reference to its memory."""
    mine = _real(local(tensor)).clone()  # FSDP can't free memory that NumPy refers to
    return Taken(sampled(mine, TAKEN_NUMBERS).clone(), mine.numel(), digest(mine))


def _real(tensor: Tensor) -> Tensor:
    """Returns a view with each complex element as two real ones; other tensors as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def take_part(
    tensors: Mapping[str, Tensor | Taken], most: int, sharded: Container[str] = ()
) -> tuple[list[list[Any]], np.ndarray]:
    """Samples the readable tensors, in all about ``most`` numbers; of a shard only this rank's part.

    Args:
        tensors: tensors by name.
        most: how many numbers to keep of all tensors together, at most; small tensors keep more.
        sharded: names of tensors that are parts of larger ones although they aren't DTensors.

    Returns:
        For each tensor ``[name, numbers kept, elements, shards, digest]``, where the digest is "" unless it was sampled
        and a complex element counts as two; and the numbers, flat: float32 if all tensors are float32 on one device,
        else float64.
    """
    each = max(FEWEST, most // max(1, len(tensors)))
    entries: list[list[Any]] = []
    kept: list[Tensor] = []
    for name, tensor in tensors.items():
        if isinstance(tensor, Taken):
            some = sampled(tensor.numbers, each)
            whole = some.numel() == tensor.elements
            entries.append([name, some.numel(), tensor.elements, 0, "" if whole else tensor.digest])
        elif readable(tensor):
            mine = _real(local(tensor))
            some = sampled(mine, each)
            whole = some.numel() == mine.numel()
            shards = 1 if name in sharded else shards_of(tensor)
            entries.append([name, some.numel(), mine.numel(), shards, "" if whole else digest(mine)])
        else:
            continue
        kept.append(some)
    return entries, _numbers(kept)


def _numbers(kept: Sequence[Tensor]) -> np.ndarray:
    if not kept:
        return np.empty(0, np.float32)
    if len({(t.dtype, t.device) for t in kept}) > 1 or kept[0].dtype != torch.float32:
        return torch.cat([t.to("cpu", torch.float64) for t in kept]).numpy()
    return torch.cat(list(kept)).cpu().numpy()


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yields the tensors in a module's arguments, also in a few levels of containers."""
    if isinstance(value, Tensor):
        yield value
    elif depth <= 3 and isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item, depth + 1)


def input_digests(value: Any) -> list[str]:
    """Returns digests of the data in a module's arguments: of tensors without gradients, sampled if they are large.

    A COO tensor gives two, of its indices and its values as stored. Other unreadable tensors are left out.
    """
    data = (part for x in tensors_in(value) if not x.requires_grad for part in _parts(x))
    found = [local(x) for x in data if readable(x) and x.numel()]
    return [digest(spread(x, INPUT_BYTES // x.element_size())) for x in found]


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    sparse = tensor.layout == torch.sparse_coo and not is_functorch_wrapped_tensor(tensor)
    return (tensor._indices(), tensor._values()) if sparse else (tensor,)
