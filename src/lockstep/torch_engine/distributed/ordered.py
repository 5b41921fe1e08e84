"""Sums over shards in the order of one fixed tree, whatever the number of ranks: by one gather, or by slices.

A rank adds the nodes of the tree inside its own range of shards. A small sum then travels whole: one gather, one
latency, and every rank finishes the tree. A large sum travels at the cost of a ring all-reduce: slice ``j`` of every
node goes to rank ``j``, which finishes the tree for its slice, and the slices are gathered. Each element is added by
itself, so both ways give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.tree import Tree
from lockstep.torch_engine.distributed.shared_memory import SharedSlots
from lockstep.torch_engine.nets.memory import on_host

PIECE_ELEMENTS = 1 << 21  # of one piece of a backend's sum, so that its buffers stay in warm memory
CACHED_ELEMENTS = 1 << 16  # of each shard summed at a time, so that sums between stay in a processor's cache
LINE_ELEMENTS = 16  # slices begin at multiples of this, so that no two ranks write one cache line


class Traffic(NamedTuple):
    """Holds the bytes that a rank sends in a sum, and those that it receives."""

    sent: int
    received: int


def traffic(tree: Tree, rank: int, node_bytes: int) -> Traffic:
    """Counts what a rank sends to others, and what it receives from them, in one sum."""
    ranks, own, total = len(tree.owned), tree.counts[rank], tree.all_nodes
    if not tree.sliced(node_bytes):
        return Traffic(own * node_bytes, (total - own) * node_bytes)
    others = ranks - 1
    return Traffic((own * others + others) * node_bytes // ranks, (total - own + others) * node_bytes // ranks)


def tree_sum(x: Tensor) -> Tensor:
    """Sums over the first axis by a fixed binary tree of neighbours; a row without one waits for the next round.

    On a CPU NumPy adds, which is faster there.
    """
    if len(x) > 1 and on_host(x.device) and x.dtype in (torch.float32, torch.float64):
        total = x.new_empty(x.shape[1:])
        _sum_array(x.numpy(), total.numpy())
        return total
    while len(x) > 1:
        paired = x[0:-1:2] + x[1::2]
        x = torch.cat([paired, x[-1:]]) if len(x) % 2 else paired
    return x[0]


@np.errstate(all="ignore")  # the update reports what isn't finite
def _sum_array(x: np.ndarray, out: np.ndarray) -> None:
    """Sums two rows or more as :func:`tree_sum` does, into ``out``."""
    while len(x) > 2:
        paired = x[0:-1:2] + x[1::2]
        x = np.concatenate([paired, x[-1:]]) if len(x) % 2 else paired
    np.add(x[0], x[1], out=out)


def _sum_of_own(x: Tensor) -> Tensor:
    """Sums as :func:`tree_sum` does; on a CPU large rows are added part by part, into the first row's memory."""
    if not on_host(x.device) or x.dim() != 2 or x.shape[1] <= CACHED_ELEMENTS:
        return tree_sum(x)
    for part in x.split(CACHED_ELEMENTS, 1):
        part[0] = tree_sum(part)
    return x[0]


def own_nodes(x: Tensor, tree: Tree, rank: int) -> Tensor:
    """Sums a rank's shards ``[local shards, …]`` into the nodes of the tree inside its range, ``[nodes, …]``.

    Large sums may use the memory of ``x``, whose values are lost.
    """
    nodes = tree.nodes[rank]
    if len(nodes) == 1:
        return _sum_of_own(x).unsqueeze(0)
    first = tree.owned[rank].start
    return torch.stack([_sum_of_own(x[node.start - first : node.stop - first]) for node in nodes])


def finished(parts: Sequence[Tensor], tree: Tree, out: Tensor | None = None) -> Tensor:
    """Finishes the tree with the nodes of all ranks, from left to right, in ``out``; no other memory is changed."""
    if tree.regular and out is None:
        return tree_sum(torch.stack(list(parts)))
    sums, last = list(parts), len(tree.additions) - 1
    for number, (left, right) in enumerate(tree.additions):
        sums[left] = torch.add(sums[left], sums[right], out=out if number == last else None)
    return sums[0]


def bounds(size: int, ranks: int) -> list[tuple[int, int]]:
    """Cuts ``size`` elements into a slice for each rank; the last ones may be shorter, or empty."""
    length = -(-size // (ranks * LINE_ELEMENTS)) * LINE_ELEMENTS
    return [(min(rank * length, size), min((rank + 1) * length, size)) for rank in range(ranks)]


# --- by a backend -----------------------------------------------------------------------------------------------------


def gathered_sum(nodes: Tensor, tree: Tree, gather: Callable[[Tensor], Tensor]) -> Tensor:
    """Sums nodes ``[k, n]`` by one gather of all; ``gather`` takes a tensor of the same shape on every rank."""
    short = tree.most_nodes - len(nodes)
    everyone = gather(torch.cat([nodes, nodes.new_zeros((short, nodes.shape[1]))]) if short else nodes)
    return finished([rows[i] for rows, count in zip(everyone, tree.counts, strict=True) for i in range(count)], tree)


def sliced_sum(nodes: Tensor, tree: Tree, group: dist.ProcessGroup | None, out: Tensor) -> Tensor:
    """Sums nodes ``[k, n]`` by an all-to-all of slices and a gather of sums, by PyTorch's backend, piece by piece.

    ``out`` ``[n]`` takes the sum; it may be one of the nodes.
    """
    size, ranks, rank = nodes.shape[1], len(tree.owned), dist.get_rank(group)
    width = -(-size // -(-size // PIECE_ELEMENTS))
    for start in range(0, size, width):
        piece = nodes[:, start : start + width]
        cuts = bounds(piece.shape[1], ranks)
        lengths = [last - first for first, last in cuts]
        sent = piece[0] if len(piece) == 1 else torch.cat([piece[:, a:b].reshape(-1) for a, b in cuts])
        counts, mine = [count * lengths[rank] for count in tree.counts], lengths[rank]
        slices = nodes.new_empty(sum(counts))
        dist.all_to_all_single(slices, sent, counts, [len(piece) * length for length in lengths], group=group)
        total = finished(slices.view(tree.all_nodes, mine).unbind(), tree, slices[:mine])
        _gather_slices(total, out[start : start + width], cuts, rank, group)
    return out


def _gather_slices(own: Tensor, out: Tensor, cuts: list[tuple[int, int]], rank: int, group: Any) -> None:
    """Gathers every rank's slice into its place in ``out``."""
    ranks = len(cuts)
    if dist.get_backend(group) != "gloo":
        length = cuts[0][1]
        padded = torch.nn.functional.pad(own, (0, length - len(own)))
        everyone = out if len(out) == ranks * length else out.new_empty(ranks * length)
        (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(everyone, padded, group)
        if everyone is not out:
            out.copy_(everyone[: len(out)])
        return
    under_way = []  # gloo's own gather copies everything twice
    for step in range(1, ranks):
        to, source = (rank + step) % ranks, (rank - step) % ranks
        first, last = cuts[source]
        if last > first:
            under_way.append(dist.irecv(out[first:last], group=group, group_src=source))
        if len(own):
            under_way.append(dist.isend(own, group=group, group_dst=to))
    out[slice(*cuts[rank])] = own
    for work in under_way:
        assert work is not None
        work.wait()


# --- in shared memory -------------------------------------------------------------------------------------------------


def sum_in_memory(nodes: Tensor, tree: Tree, slots: SharedSlots, out: Tensor | None = None) -> Tensor:
    """Sums nodes ``[k, n]`` through the ranks' shared memory.

    A sum that takes several pieces or slices is written into ``out`` ``[n]``, if given; it may be one of the nodes.
    """
    size, capacity = nodes.shape[1], slots.capacity(nodes.dtype) // tree.most_nodes
    if tree.sliced(size * nodes.element_size()):
        return _slices_in_memory(nodes, tree, slots, nodes.new_empty(size) if out is None else out)
    if size <= capacity:
        return _finished(slots.exchange(nodes, tree.most_nodes * size), tree, size, 0, size)
    out = nodes.new_empty(size) if out is None else out
    for piece, total in zip(nodes.split(capacity, 1), out.split(capacity), strict=True):
        width = piece.shape[1]
        _finished(slots.exchange(piece, tree.most_nodes * width), tree, width, 0, width, total)
    return out


def _finished(rows: Tensor, tree: Tree, width: int, start: int, stop: int, out: Tensor | None = None) -> Tensor:
    """Finishes the tree with the nodes in the ranks' slots, ``width`` elements each, from ``start`` to ``stop``."""
    if tree.regular and out is None:
        return tree_sum(rows[:, start:stop])
    parts = [
        row[node * width + start : node * width + stop]
        for row, count in zip(rows, tree.counts, strict=True)
        for node in range(count)
    ]
    return finished(parts, tree, out)


def _slices_in_memory(nodes: Tensor, tree: Tree, slots: SharedSlots, out: Tensor) -> Tensor:
    """Sums piece by piece; each exchange also carries this rank's finished slice of the piece before."""
    ranks, size, most = len(tree.owned), nodes.shape[1], tree.most_nodes
    capacity = slots.capacity(nodes.dtype)
    step = (capacity - LINE_ELEMENTS) * ranks // (most * ranks + 1)
    starts = range(0, size, step)
    mine, begun, before = nodes.new_empty(0), 0, 0
    for start in (*starts, size):
        piece = nodes[:, start : start + step]
        width = piece.shape[1]
        rows = slots.exchange(piece, most * width, mine)
        for row, count, (first, last) in zip(rows, tree.counts, bounds(before, ranks), strict=True):
            out[begun + first : begun + last] = row[count * width : count * width + last - first]
        first, last = bounds(width, ranks)[slots.rank]
        mine, begun, before = _finished(rows, tree, width, first, last), start, width
    return out
