"""Ranks of one round of torchrun's meet in a store that holds what earlier rounds left there."""

import datetime
from concurrent.futures import ThreadPoolExecutor

from torch._C._distributed_c10d import HashStore

from lockstep.core.silence import sign_name
from lockstep.core.topology import Topology
from lockstep.torch_engine.distributed.process_group import store_of_round

LIMIT = datetime.timedelta(seconds=600)


def meet(store, rank, world_size):
    """What a rank does; what it finds of the round."""
    mine = store_of_round(store, Topology(rank, world_size), LIMIT)
    mine.set(sign_name(rank), "")
    mine.wait([sign_name(r) for r in range(world_size)], LIMIT)
    if rank == 0:
        mine.set("round", "its own")
    mine.wait(["round"], LIMIT)
    return mine.add("here", 1)


def rounds(store, world_size):
    with ThreadPoolExecutor(world_size) as pool:
        return sorted(pool.map(lambda rank: meet(store, rank, world_size), reversed(range(world_size))))


def test_each_round_has_a_part_of_its_own():
    store = HashStore()
    for world_size in (3, 2, 4, 1, 4):
        assert rounds(store, world_size) == list(range(1, world_size + 1))


def test_a_rank_that_asked_before_its_round_and_was_killed_is_none_of_it():
    store = HashStore()
    for rank in (1, 2):
        store.set(f"lockstep/asks/{rank}", "the dead's")
    assert rounds(store, 3) == [1, 2, 3]


def test_a_round_in_which_somebody_is_missing_ends_in_time():
    mine = store_of_round(HashStore(), Topology(0, 2), datetime.timedelta(seconds=0.1))
    assert not mine.check([sign_name(1)])
