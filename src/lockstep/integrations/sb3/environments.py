"""Tells environments with the same random numbers on several ranks apart."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from lockstep.core.shards import keyed_seed

ANSWER = "lockstep_random_numbers"
"""Name of the method that environments in processes of ``SubprocVecEnv`` get."""

GIVEN = 2**32
"""Seeds that a script gives are smaller: NumPy's global generator takes no larger ones. Drawn ones have 128 bits."""


class Seed(NamedTuple):
    """Where an environment's random numbers come from.

    ``number`` is a seed, or what else stays the same in a generator that draws; None if nothing is known. It is
    ``pending`` if the next reset will use it. ``kind`` says which environment it is.
    """

    number: int | None
    pending: bool = False
    kind: str = ""


def random_numbers(env: Any) -> tuple[int | None, str]:
    """Returns number and kind of an environment's :class:`Seed`, without touching its generator.

    Gymnasium's ``np_random_seed`` would do that: it replaces a generator that the environment has made itself.
    """
    base = getattr(env, "unwrapped", env)
    kind = f"{type(base).__module__}.{type(base).__qualname__} {getattr(getattr(base, 'spec', None), 'id', None)}"
    seed = getattr(base, "_np_random_seed", None)
    if isinstance(seed, (int, np.integer)) and seed >= 0:
        return int(seed), kind
    bits = getattr(getattr(base, "_np_random", None), "bit_generator", None)
    if isinstance(bits, (np.random.PCG64, np.random.PCG64DXSM)):
        return int(bits.state["state"]["inc"]), kind  # drawing leaves it
    return None, kind


def answering(env: Any) -> Any:
    """Adds a method to an environment in a process of its own that says where its random numbers come from."""
    with contextlib.suppress(AttributeError):
        setattr(env, ANSWER, functools.partial(random_numbers, env))
    return env


def seeds(env: VecEnv) -> list[Seed]:
    """Returns where each environment's random numbers come from; empty if the vector environment keeps no seeds."""
    inner = env.unwrapped
    pending = [seed.item() if isinstance(seed, np.generic) else seed for seed in getattr(inner, "_seeds", [])]
    used: list[tuple[int | None, str]] = [(None, "")] * len(pending)
    if isinstance(inner, DummyVecEnv):
        used = [random_numbers(one) for one in inner.envs]
    elif isinstance(inner, SubprocVecEnv) and hasattr(inner, "has_attr") and inner.has_attr(ANSWER):
        used = inner.env_method(ANSWER)
    if len(used) != len(pending):  # a class of the user's, derived from one of these
        used = [(None, "")] * len(pending)
    both = zip(pending, used, strict=True)
    return [Seed(number, False, kind) if seed is None else Seed(seed, True, kind) for seed, (number, kind) in both]


class KnownEnvironments:
    """Vector environments that once were in it, by identity: a class of the user's may have no hash."""

    def __init__(self) -> None:
        self._envs: WeakValueDictionary[int, VecEnv] = WeakValueDictionary()

    def __contains__(self, env: VecEnv) -> bool:
        return self._envs.get(id(env.unwrapped)) is env.unwrapped

    def add(self, env: VecEnv) -> None:
        """Remembers an environment, whatever wraps it, as long as it exists."""
        self._envs[id(env.unwrapped)] = env.unwrapped


def alike(everyone: Sequence[Sequence[Seed]], rank: int) -> list[bool]:
    """Returns which of a rank's environments draw the same random numbers as a lower rank's at the same place."""
    mine = everyone[rank]
    lower = [theirs for theirs in everyone[:rank] if len(theirs) == len(mine)]
    return [any(_alike(seed, theirs[place]) for theirs in lower) for place, seed in enumerate(mine)]


def in_use_alike(everyone: Sequence[Sequence[Seed]], rank: int) -> bool:
    """Returns whether an environment of a rank draws a lower rank's random numbers, and no other seed is pending."""
    return any(same and not seed.pending for same, seed in zip(alike(everyone, rank), everyone[rank], strict=True))


def tell_apart(env: VecEnv, everyone: Sequence[Sequence[Seed]], rank: int, in_use: bool) -> None:
    """Seeds those of this rank's environments anew that draw the same random numbers as a lower rank's.

    Seeds that follow one another go on over the ranks, by global environment ids. The next reset uses the new seeds.
    Environments without a pending seed are left alone unless ``in_use`` is set.
    """
    mine = everyone[rank]
    found = [same and (seed.pending or in_use) for same, seed in zip(alike(everyone, rank), mine, strict=True)]
    if not any(found):
        return
    numbers = [seed.number for seed in mine]
    first = numbers[0]
    if all(found) and first is not None and first < GIVEN and numbers == list(range(first, first + len(mine))):
        env.seed(first + rank * len(mine))
        return
    inner: Any = env.unwrapped
    for place, number in enumerate(numbers):
        if found[place] and number is not None:
            inner._seeds[place] = keyed_seed(number, "sb3 environment", rank, place)


def _alike(one: Seed, other: Seed) -> bool:
    return (
        one.number is not None
        and one.number == other.number
        and (one.kind == other.kind or (one.pending and other.pending))
    )
