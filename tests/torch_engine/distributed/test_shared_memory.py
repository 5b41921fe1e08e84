"""When ranks share memory: on one host that can do it, and only if every rank says so."""

import os
import platform

import pytest
import torch
from small_runs import plan_of, small_config

from lockstep.core.errors import NoSharedMemoryError
from lockstep.core.topology import Topology
from lockstep.torch_engine.distributed import communicator as distributed
from lockstep.torch_engine.distributed import shared_memory
from lockstep.torch_engine.distributed.communicator import Communicator
from lockstep.torch_engine.distributed.shared_memory import SharedSlots, obstacle, open_shared_slots

NEEDS_MEMORY = pytest.mark.skipif(obstacle() is not None, reason=f"shared memory: {obstacle()}")


def handles():
    return len(os.listdir("/proc/self/fd"))


def opened(*answers):
    """What the first of two ranks concludes; ``answers`` turn its own words into the second's, question by question."""
    questions = iter(answers)

    def gather_json(value):
        return [value, next(questions, lambda same: same)(value)]

    return open_shared_slots(0, 2, gather_json, 1.0)


@NEEDS_MEMORY
def test_two_ranks_of_one_host_share_memory_and_let_go_of_it():
    before = handles()
    slots = opened()
    assert isinstance(slots, SharedSlots)
    assert handles() == before + 3  # the memory's own, and one of each process
    slots.close()
    del slots
    assert handles() == before


@NEEDS_MEMORY
@pytest.mark.parametrize("name", ["boot", "host", "net", "ipc", "pid"])
def test_ranks_that_differ_in_where_they_run_do_not_try(name):
    elsewhere = opened(lambda said: {**said, "identity": {**said["identity"], name: "another"}})
    assert elsewhere == f"ranks run on several hosts (they differ in {name})"


@NEEDS_MEMORY
def test_what_one_rank_cannot_do_none_does():
    before = handles()
    assert opened(lambda said: {**said, "problem": "it needs Linux"}) == "it needs Linux"
    refused = opened(lambda same: same, lambda same: same, lambda _: "rank 1 can't map another rank's memory")
    assert refused == "rank 1 can't map another rank's memory"
    assert handles() == before


@NEEDS_MEMORY
@pytest.mark.parametrize("wrong", [{"token": "00" * 16}, {"fd": 10**6}, {"pid": 2**22 + 1}])
def test_memory_that_is_not_the_first_ranks_is_refused(wrong):
    before = handles()
    answers = iter([lambda v: [v, v], lambda v: [{**v, **wrong}, v], lambda v: [v, v]])
    refused = open_shared_slots(1, 2, lambda value: next(answers)(value), 1.0)
    assert isinstance(refused, str)
    assert refused.startswith("rank 1 can't map another rank's memory")
    assert handles() == before


def test_a_processor_that_reorders_stores_gets_no_shared_memory(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert obstacle() == "it needs x86-64, not aarch64"
    monkeypatch.setattr(shared_memory.sys, "platform", "darwin")
    assert obstacle() == "it needs Linux"


def sharing(monkeypatch, collectives, found):
    """A communicator of two ranks that looked for memory and found this."""
    config = small_config(collectives=collectives)
    communicator = Communicator(Topology(world_size=2), plan_of(config, 2), torch.device("cpu"))
    monkeypatch.setattr(distributed, "open_shared_slots", lambda *_: found)
    communicator.share_memory(config)
    return communicator


def test_a_config_that_demands_memory_is_refused_where_there_is_none(monkeypatch):
    with pytest.raises(NoSharedMemoryError) as caught:
        sharing(monkeypatch, "shared", "ranks run on several hosts (they differ in net)")
    expected = "collectives: shared can't be had: ranks run on several hosts (they differ in net); use collectives auto"
    assert str(caught.value) == expected
    assert caught.value.everywhere


def test_elsewhere_the_backend_takes_over_and_says_why(monkeypatch):
    communicator = sharing(monkeypatch, "auto", "it needs Linux")
    assert (communicator.transport, communicator.no_slots) == ("gloo", "it needs Linux")
    unasked = sharing(monkeypatch, "backend", "never looked for")
    assert (unasked.transport, unasked.no_slots) == ("gloo", None)
