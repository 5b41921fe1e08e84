"""One generator set to a key again and again: the numbers of a generator made for each key."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.shards import KeyedDraws, keyed_generator

KEYS = st.tuples(st.integers(0, 9), st.sampled_from(["reset", "eval"]), st.integers(0, 9), st.integers(0, 9))


def drawn(generator: np.random.Generator, kind: str, size: int) -> bytes:
    if kind == "float32":  # takes half a word at a time: an odd number leaves the other half behind
        return generator.random(size, np.float32).tobytes()
    return (generator.normal(size=size) if kind == "normal" else generator.integers(0, 2**40, size)).tobytes()


@given(st.lists(st.tuples(KEYS, st.sampled_from(["float32", "normal", "integers"]), st.integers(1, 7)), max_size=8))
def test_nothing_of_one_key_is_left_in_the_next(calls):
    draws = KeyedDraws()
    for key, kind, size in calls:
        assert drawn(draws.generator(*key), kind, size) == drawn(keyed_generator(*key), kind, size)


def test_another_key_has_other_numbers():
    draws = KeyedDraws()
    first = [draws.generator(0, "reset", *key).random() for key in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert len(set(first)) == 3
    assert first[0] == first[3]
