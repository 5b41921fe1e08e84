"""The one fixed binary tree in which shards are summed, and how ranks share its additions.

Each round adds neighbours pairwise, first shards, then their sums; one without a neighbour waits for the next round. A
rank adds the maximal nodes of that tree that lie inside its own range of shards. The ranks then hold parts of the tree,
from left to right, and whichever process gathers them all finishes it. No addition depends on the process that makes
it, so any number of ranks gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

FEWEST_SLICING_RANKS = 3
SLICED_BYTES = 1 << 22
"""Size of all ranks' nodes together from which on sums are exchanged in slices."""


def ranges(num_shards: int, world_size: int) -> tuple[range, ...]:
    """Cuts shards into contiguous ranges, one per rank, whose lengths differ by at most one; longer ones come first."""
    least, more = divmod(num_shards, world_size)
    starts = [rank * least + min(rank, more) for rank in range(world_size + 1)]
    return tuple(range(a, b) for a, b in pairwise(starts))


@dataclass(frozen=True)
class Tree:
    """The additions of ``num_shards`` shards, shared by the ranks that own them.

    Attributes:
        owned: the shards of each rank, in rank order.
        nodes: for each rank the maximal nodes of the tree inside its range, from left to right; a node is the range of
            the shards that it sums.
        additions: the additions that finish the tree, in order: ``(a, b)`` adds node ``b`` to node ``a``. Nodes are
            numbered over all ranks from left to right; node 0 ends up as the whole sum.
    """

    num_shards: int
    owned: tuple[range, ...]
    nodes: tuple[tuple[range, ...], ...]
    additions: tuple[tuple[int, int], ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of nodes of each rank."""
        return tuple(map(len, self.nodes))

    @cached_property
    def all_nodes(self) -> int:
        """Number of nodes of all ranks."""
        return sum(self.counts)

    @cached_property
    def most_nodes(self) -> int:
        """Largest number of nodes on one rank."""
        return max(self.counts)

    @cached_property
    def most_shards(self) -> int:
        """Largest number of shards on one rank; the first rank has it."""
        return len(self.owned[0])

    def sliced(self, node_bytes: int) -> bool:
        """Whether a sum of nodes of ``node_bytes`` each goes by slices, because a gather would send much to every rank.

        Slices take two rounds and a gather one, so small sums, and two ranks, use the gather.
        """
        return len(self.owned) >= FEWEST_SLICING_RANKS and self.all_nodes * node_bytes >= SLICED_BYTES

    @cached_property
    def regular(self) -> bool:
        """Whether each rank has one node and adding neighbours pairwise, an odd one waiting, finishes the tree."""
        lengths = [len(node) for own in self.nodes for node in own]
        if self.all_nodes > len(self.owned):
            return False
        return len(set(lengths[:-1])) <= 1 and lengths[-1] <= lengths[0] and lengths[0] & (lengths[0] - 1) == 0

    @cached_property
    def even(self) -> bool:
        """Whether all ranks own equally many shards."""
        return self.num_shards % len(self.owned) == 0


@cache
def tree_of(num_shards: int, world_size: int) -> Tree:
    """Returns the tree over shards that ``world_size`` ranks own in ranges of equal or nearly equal length."""
    owned = ranges(num_shards, world_size)
    nodes = tuple(tuple(_maximal_nodes(shards, num_shards)) for shards in owned)
    places = {node: place for place, node in enumerate(node for own in nodes for node in own)}
    additions: list[tuple[int, int]] = []

    def place_of(node: range) -> int:
        if node in places:
            return places[node]
        left, right = map(place_of, _children(node))
        additions.append((left, right))
        return left

    place_of(range(num_shards))
    return Tree(num_shards, owned, nodes, tuple(additions))


def _children(node: range) -> tuple[range, range]:
    """Splits a node of at least two shards into the two that it sums; the left one's length is a power of two."""
    middle = node.start + (1 << (len(node) - 1).bit_length() - 1)
    return range(node.start, middle), range(middle, node.stop)


def _maximal_nodes(shards: range, num_shards: int) -> list[range]:
    found, waiting = [], [range(num_shards)]
    while waiting:
        node = waiting.pop()
        if shards.start <= node.start and node.stop <= shards.stop:
            found.append(node)
        elif node.start < shards.stop and shards.start < node.stop:
            waiting += reversed(_children(node))
    return found
