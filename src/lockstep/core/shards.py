"""Shards, the unit of data parallelism, and the random numbers keyed to them.

A run has ``num_envs`` environments with global ids ``0 … num_envs-1``, cut into ``num_shards`` equal, contiguous
shards. ``num_shards`` is part of the config; the number of ranks is not. Ranks own contiguous ranges of shards, whose
lengths differ by at most one. Every random draw is keyed by its purpose, never by a rank.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from lockstep.core.tree import Tree, tree_of

MAX_DEFAULT_SHARDS = 8
SHOWN_RANKS = 8
"""Largest number of ranks for which a message lists the shards of each."""


@dataclass(frozen=True)
class ShardPlan:
    """Says which shards and environments a rank owns, or a process that has several ranks.

    Attributes:
        num_envs: environments of the whole run.
        num_shards: shards of the whole run, a divisor of ``num_envs``.
        world_size: ranks of the run, at most ``num_shards``.
        rank: this rank; in a process of the JAX engine, whose devices are ranks, the first of them.
        ranks: number of ranks in this process.
    """

    num_envs: int
    num_shards: int
    world_size: int = 1
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        check_shards(self.num_envs, self.num_shards)
        check_world_size(self.world_size, self.num_shards)

    @property
    def envs_per_shard(self) -> int:
        """Environments in one shard."""
        return self.num_envs // self.num_shards

    @property
    def tree(self) -> Tree:
        """The tree in which the run's shards are summed, shared by its ranks."""
        return tree_of(self.num_shards, self.world_size)

    @property
    def shards(self) -> range:
        """Global indices of the shards owned by this process."""
        owned = self.tree.owned
        return range(owned[self.rank].start, owned[self.rank + self.ranks - 1].stop)

    @property
    def local_num_shards(self) -> int:
        """Number of shards owned by this process."""
        return len(self.shards)

    @property
    def local_num_envs(self) -> int:
        """Number of environments stepped by this process."""
        return self.local_num_shards * self.envs_per_shard

    @property
    def env_ids(self) -> range:
        """Global ids of the environments stepped by this process, shard by shard."""
        return range(self.shards.start * self.envs_per_shard, self.shards.stop * self.envs_per_shard)


def default_num_shards(num_envs: int) -> int:
    """Returns the largest power of two that divides ``num_envs``, at most 8."""
    return min(num_envs & -num_envs, MAX_DEFAULT_SHARDS)


def check_shards(num_envs: int, num_shards: int) -> None:
    """Raises a one-line ``ValueError`` unless ``num_shards`` divides ``num_envs``."""
    if num_shards < 1 or num_envs % num_shards:
        below = num_envs // max(1, num_shards) * num_shards
        envs = " or ".join(str(n) for n in (below, below + num_shards) if n > 0)
        raise ValueError(
            f"num_shards: {num_envs} environments can't be cut into {num_shards} equal shards; nearest that work: "
            f"num_shards {nearest_divisors(num_envs, num_shards)}" + (f", or num_envs {envs}" if envs else "")
        )


def nearest_divisors(number: int, wanted: float, each: int = 1) -> str:
    """Returns the two divisors of ``number`` that are nearest to ``wanted``, times ``each``, in words: ``4 or 8``."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]  # each has a large partner
    fits = sorted({*small, *(number // n for n in small)})
    return " or ".join(str(n * each) for n in sorted(sorted(fits, key=lambda n: abs(n - wanted))[:2]))


def check_world_size(world_size: int, num_shards: int, key: str = "nproc", what: str = "ranks") -> None:
    """Raises a one-line ``ValueError`` unless each of ``world_size`` ranks can own a shard."""
    if not 1 <= world_size <= num_shards:
        raise ValueError(
            f"{key}: {world_size} {what} can't share {num_shards} shard{'' if num_shards == 1 else 's'}, at least one "
            f"each; use at most {num_shards}, or for a new run --num-shards {world_size} or more (a divisor of "
            "num_envs, which may have to grow)"
        )


def uneven(world_size: int, num_shards: int, num_envs: int, what: str = "ranks") -> str | None:
    """Says how unevenly ranks own shards (``8 shards on 3 ranks: 3, 3, 2``) and what would be even; None if even."""
    tree = tree_of(num_shards, world_size)
    if tree.even:
        return None
    lengths = [len(shards) for shards in tree.owned]
    shown = ", ".join(map(str, lengths))
    if world_size > SHOWN_RANKS:
        most = lengths.count(lengths[0])
        shown = f"{lengths[0]} on {most} and {lengths[-1]} on {world_size - most}"
    above = (num_shards // world_size + 1) * world_size
    fits = [n for n in range(above, num_envs + 1, world_size) if num_envs % n == 0]
    how = f"{fits[0]} shards would be even" if fits else f"{above} shards would be even, with as many environments each"
    return f"{num_shards} shards on {world_size} {what}: {shown}; {how}"


def _digest(seed: int, purpose: str, key: tuple[int, ...]) -> bytes:
    text = f"{seed}/{purpose}/" + "/".join(str(int(k)) for k in key)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def keyed_generator(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """Returns a counter-based generator (Philox, Salmon et al. 2011) for one purpose and key; no state has to be kept.

    Args:
        seed: the run's seed.
        purpose: what the numbers are for: ``"init"``, ``"action"``, ``"minibatch"``, ``"reset"``, ``"eval"``, …
        key: integers, e.g. ``(iteration, shard)`` or ``(global env id, episode)``.
    """
    words = np.frombuffer(_digest(seed, purpose, key), dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=words))


class KeyedDraws:
    """Gives the numbers of :func:`keyed_generator` faster, by setting one generator to each key in turn."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._bits)
        self._fresh = self._bits.state

    def generator(self, seed: int, purpose: str, *key: int) -> np.random.Generator:
        """Returns a generator of the numbers of ``keyed_generator(seed, purpose, *key)``; valid until the next call."""
        self._fresh["state"]["key"] = np.frombuffer(_digest(seed, purpose, key), dtype=np.uint64)
        self._bits.state = self._fresh
        return self._generator


def keyed_seed(seed: int, purpose: str, *key: int) -> int:
    """Returns a 31-bit integer seed for one purpose and key, for ``env.reset(seed=…)``."""
    return int.from_bytes(_digest(seed, purpose, key)[:4], "little") & 0x7FFFFFFF
