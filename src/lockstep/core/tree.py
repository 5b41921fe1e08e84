"""The one fixed binary tree in which shards meet, and how ranks share its additions.

Shards are added to their neighbours pairwise, the sums again, and so on; one without a neighbour waits for the next
round. A rank adds the maximal nodes of that tree that lie inside its own range of shards; what the ranks then hold are
parts of the tree, from left to right, and whoever has them all finishes it. So no addition depends on who makes it: any
number of ranks gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

FEWEST_SLICING_RANKS = 3
SLICED_BYTES = 1 << 22
"""Of all nodes of all ranks, from which on sums go by slices."""


def ranges(num_shards: int, world_size: int) -> tuple[range, ...]:
    """Cuts shards into contiguous ranges, one for each rank, whose lengths differ by one at most; longer ones first."""
    least, more = divmod(num_shards, world_size)
    starts = [rank * least + min(rank, more) for rank in range(world_size + 1)]
    return tuple(range(a, b) for a, b in pairwise(starts))


@dataclass(frozen=True)
class Tree:
    """The additions of ``num_shards`` shards, shared by the ranks that own them.

    Attributes:
        owned: the shards of each rank, in the order of ranks.
        nodes: of each rank the maximal nodes of the tree inside its range, from left to right, each as the range of
            shards that it is the sum of.
        additions: what finishes the tree: ``(a, b)`` adds node ``b`` to node ``a``, numbered over all ranks from left
            to right, one after the other; the whole is node 0 in the end.
    """

    num_shards: int
    owned: tuple[range, ...]
    nodes: tuple[tuple[range, ...], ...]
    additions: tuple[tuple[int, int], ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Nodes of each rank."""
        return tuple(map(len, self.nodes))

    @cached_property
    def all_nodes(self) -> int:
        """Nodes of all ranks."""
        return sum(self.counts)

    @cached_property
    def most_nodes(self) -> int:
        """Nodes of the rank that has most."""
        return max(self.counts)

    @cached_property
    def most_shards(self) -> int:
        """Shards of the rank that has most: the first."""
        return len(self.owned[0])

    def sliced(self, node_bytes: int) -> bool:
        """Whether a sum of nodes of so many bytes goes by slices: where a gather would bring much to every rank.

        Slices take two rounds and the gather one, so that what is small, and two ranks, keep the gather.
        """
        return len(self.owned) >= FEWEST_SLICING_RANKS and self.all_nodes * node_bytes >= SLICED_BYTES

    @cached_property
    def regular(self) -> bool:
        """Whether each rank has one node, and adding those to their neighbours pairwise, an odd one waiting, is all."""
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
    """The tree over shards that ``world_size`` ranks own in equal ranges, or nearly."""
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
    """A node of at least two shards is the sum of two: the left one's length is the largest power of two below its."""
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
