"""A rank that exchanges tensors: ``python -m exchanging CASE`` with torchrun's variables set.

It prints one JSON line for each thing it saw; the tests read them. Where ``RANK`` isn't set it is all ranks, as forks
of one process that has imported everything, and each line says whose it is.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.core import tree
from lockstep.core.errors import PeerFailureError
from lockstep.core.shards import ShardPlan
from lockstep.core.topology import Topology, from_environment
from lockstep.torch_engine.distributed import ordered
from lockstep.torch_engine.distributed.communicator import Communicator
from lockstep.torch_engine.distributed.ordered import tree_sum
from lockstep.torch_engine.distributed.process_group import close_process_group
from lockstep.torch_engine.distributed.shared_memory import SharedSlots, open_shared_slots

SLOT = 1 << 12
SHAPES = [(0,), (3, 0), (), (1,), (7, 3), (10_000,), (SLOT,), (SLOT + 1,), (5, 2 * SLOT + 3)]
SHARDS = [7, 8, 12]
SUMMED = [(0,), (), (3, 5), (1003,), (2500,)]
SLICED = 1 << 10  # bytes of all nodes: so that what takes little time goes by slices
PIECE = 1000  # elements that a backend sends at a time
MILLION = 1 << 20
DTYPES = [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]


FORKS = "RANK" not in os.environ


def say(**facts):
    facts |= {"rank": int(os.environ["RANK"])} if FORKS else {}
    os.write(1, (json.dumps(facts) + "\n").encode())  # a line of a fork's stays in one piece


def fork():
    """Returns in each rank; the process that they are forks of ends with them."""
    ranks = []
    for rank in range(int(os.environ["WORLD_SIZE"])):
        pid = os.fork()
        if not pid:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            return
        ranks.append(pid)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks))


class Ranks:
    """This rank, and communicators of its run."""

    def __init__(self):
        torch.set_num_threads(1)
        self.topology = from_environment()
        self.rank, self.size = self.topology.rank, self.topology.world_size
        self.config = resolve(Config(num_envs=8, num_steps=16, collectives="backend"), self.size)
        self.plan = ShardPlan(8, 8, self.size, self.rank)
        self.backend = self.communicator()
        self.backend.join(self.config)

    def communicator(self):
        return Communicator(self.topology, self.plan, torch.device("cpu"))

    def leave(self):
        """As a run does, so that no thread of a library's is left when Python ends."""
        self.backend.close()
        close_process_group()

    def sharing(self, timeout=600.0, slot_bytes=SLOT):
        communicator = self.communicator()
        slots = open_shared_slots(self.rank, self.size, self.backend.gather_json, timeout, slot_bytes)
        assert isinstance(slots, SharedSlots), slots
        communicator.slots = slots
        return communicator


def random(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=dtype) * 10 ** torch.randn(shape, generator=generator)
    return torch.randint(0, 2 if dtype == torch.bool else 200, shape, generator=generator).to(dtype)


def same(a, b):
    contents = (x.contiguous().view(-1).view(torch.uint8) for x in (a, b))
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*contents)


def compare():
    """Both ways over all sizes and types, and strided; then one rank brings something else to one of them."""
    ranks = Ranks()
    backend, shared = ranks.backend, ranks.sharing()
    for dtype in DTYPES:
        for number, shape in enumerate(SHAPES):
            sent = [random(shape, dtype, 100 * number + rank) for rank in range(ranks.size)]
            rows = [c.gather_ranks(sent[ranks.rank]) for c in (backend, shared)]
            say(what=f"gather {dtype} {shape}", equal=same(*rows) and same(rows[1], torch.stack(sent)))
            first = [c.broadcast(sent[ranks.rank]) for c in (backend, shared)]
            say(what=f"broadcast {dtype} {shape}", equal=same(*first) and same(first[1], sent[0]))
            if dtype.is_floating_point:
                local = random((ranks.plan.local_num_shards, *shape), dtype, 100 * number + ranks.rank)
                say(what=f"sum {dtype} {shape}", equal=same(backend.sum_shards(local), shared.sum_shards(local)))
                reduced = [c.all_reduce(local.clone()) for c in (backend, shared)]
                say(what=f"reduce {dtype} {shape}", equal=torch.allclose(*reduced, rtol=1e-4, atol=1e-3))
    grid = random((6, 8), torch.float32, ranks.rank)
    say(what="strided", equal=same(backend.gather_ranks(grid.t()[::2]), shared.gather_ranks(grid.t()[::2])))
    kept = shared.gather_ranks(grid)
    for other in range(4):
        shared.gather_ranks(random((6, 8), torch.float32, 50 + other))
    say(what="kept", equal=same(kept, backend.gather_ranks(grid)))
    payload = bytes(range(200)) * 50 * ranks.rank
    say(what="bytes", equal=backend.gather_bytes(payload) == shared.gather_bytes(payload))
    first = [c.broadcast_bytes(bytes([ranks.rank]) * (9 * SLOT)) for c in (backend, shared)]
    say(what="first bytes", equal=first == [bytes(9 * SLOT)] * 2)
    other = grid.clone()
    other[0, 0] += float(ranks.rank == ranks.size - 1)
    say(what="other", equal=same(backend.gather_ranks(grid), shared.gather_ranks(other)))
    counts = shared.calls, min(shared.traffic), len(shared.take_durations())
    say(what="counted", equal=counts[0] == counts[2] > 0 and counts[1] > 0)
    ranks.leave()


def ways(ranks, members, shards):
    """Two communicators of the first ranks of a run, by the backend and through memory, None on the other ranks."""
    everyone = [dist.new_group(list(range(size))) for size in members]
    out = {}
    for size, group in zip(members, everyone, strict=True):
        if ranks.rank >= size:
            continue
        assert isinstance(group, dist.ProcessGroup)  # this rank is a member
        topology = Topology(rank=ranks.rank, world_size=size)
        plans = [ShardPlan(number, number, size, ranks.rank) for number in shards]
        by_backend = [Communicator(topology, plan, torch.device("cpu"), group=group) for plan in plans]
        slots = open_shared_slots(ranks.rank, size, by_backend[0].gather_json, 600.0, SLOT)
        assert isinstance(slots, SharedSlots), slots
        in_memory = [Communicator(topology, plan, torch.device("cpu"), group=group) for plan in plans]
        for communicator in in_memory:
            communicator.slots = slots
        out[size] = list(zip(by_backend, in_memory, strict=True))
    return out


def sums():
    """Sums of shards on 2 to 5 ranks, small and by slices, have the bytes of one rank; and how much travels."""
    ranks, limit = Ranks(), tree.SLICED_BYTES
    found = ways(ranks, range(2, ranks.size + 1), SHARDS)
    tree.SLICED_BYTES = SLICED
    ordered.PIECE_ELEMENTS, piece = PIECE, ordered.PIECE_ELEMENTS
    for size, pairs in found.items():
        for number, both in zip(SHARDS, pairs, strict=True):
            for shape in SUMMED:
                x = random((number, *shape), torch.float32, number)
                local, expected = x[list(both[0].plan.shards)], tree_sum(x)
                for name, communicator in zip(("backend", "memory"), both, strict=True):
                    communicator.sums = None
                    equal = same(communicator.sum_shards(local.clone()), expected)  # which may lie in its memory
                    what = f"{number} shards {shape} on {size} by {name}"
                    say(what=what, equal=equal, sums=communicator.sums)
                    say(what=f"gather {what}", equal=same(communicator.gather_shards(local), x))
            in_order = sum(both[0].gather_ranks(tree_sum(local))[1:], both[0].gather_ranks(tree_sum(local))[0])
            say(what=f"{number} shards in the order of {size} ranks", equal=same(in_order, expected))
    tree.SLICED_BYTES, ordered.PIECE_ELEMENTS = limit, piece
    for size in set(found) - {2}:
        for name, communicator in zip(("backend", "memory"), found[size][SHARDS.index(8)], strict=True):
            before, local = communicator.traffic, torch.ones(communicator.plan.local_num_shards, MILLION)
            right = bool((communicator.sum_shards(local) == 8).all())
            moved = [after - sooner for after, sooner in zip(communicator.traffic, before, strict=True)]
            say(what=f"a million on {size} by {name}", right=right, moved=moved, sums=communicator.sums)
    ranks.leave()


def hurry():
    """Collectives one upon the other, of ranks that are now and then late: nobody reads what is not yet or no more."""
    ranks = Ranks()
    shared = ranks.sharing(slot_bytes=1 << 18)
    x, right = torch.empty(1 << 16), 0
    for number in range(400):
        if (number * 7 + ranks.rank * 5) % 11 == 0:
            time.sleep(0.0005)
        x.fill_(number + 1000 * ranks.rank)
        everyone = ranks.size * number + 1000 * sum(range(ranks.size))
        right += bool((shared.all_reduce(x) == everyone).all())
    say(what="hurry", right=right)
    ranks.leave()


def failure(what, operation):
    try:
        operation()
    except PeerFailureError as error:
        say(what=what, error=str(error))
    else:
        say(what=what, error=None)


def fail():
    """What a rank sees of a peer that brings another size, stays away, leaves, and is killed; the first one waits."""
    ranks = Ranks()
    mismatched, late, leaving, killed = (ranks.sharing() for _ in range(4))
    assert late.slots is not None
    late.slots._timeout = 0.3  # once it is open, for which a busy machine takes longer
    failure("size", lambda: mismatched.gather_ranks(torch.zeros(3 + ranks.rank)))
    if ranks.rank == 0:
        failure("late", lambda: late.gather_ranks(torch.zeros(3)))
        failure("left", lambda: leaving.gather_ranks(torch.zeros(3)))
        say(what="waiting")
        failure("killed", lambda: killed.gather_ranks(torch.zeros(3)))
    else:
        leaving.close()
        say(what="left")
        time.sleep(600)


def behind_ddp():
    """A backward pass through DDP whose peer never comes to it."""
    ranks = Ranks()
    shared = ranks.sharing()
    module = shared.data_parallel(torch.nn.Linear(2, 1))
    loss = module(torch.full((4, 2), float(ranks.rank))).sum()
    loss.backward()
    say(
        what="gradient",
        values=[p.grad.flatten().tolist() for p in module.parameters() if p.grad is not None],
        calls=shared.calls,
    )
    loss = module(torch.ones(4, 2)).sum()
    if ranks.rank == 0:
        say(what="waiting")
        failure("killed", loss.backward)
    else:
        say(what="left")
        time.sleep(600)


if FORKS:
    fork()
{"compare": compare, "sums": sums, "hurry": hurry, "fail": fail, "behind_ddp": behind_ddp}[sys.argv[1]]()
