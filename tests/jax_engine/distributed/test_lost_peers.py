"""What JAX says when another process is gone isn't the error to show; everything else that it raises is."""

import jax
import pytest
from jax._src import distributed
from jax.errors import JaxRuntimeError

from lockstep.core.errors import PeerFailureError, RankMismatchError
from lockstep.core.life import life
from lockstep.core.topology import Topology
from lockstep.jax_engine.distributed import processes
from lockstep.jax_engine.distributed.placement import waited
from lockstep.jax_engine.distributed.processes import leaving_together, peers_needed

PEER = "UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"


@pytest.mark.parametrize("kind", [JaxRuntimeError, ValueError])
@pytest.mark.parametrize("rest", ["", "\nand a stack"])
def test_a_status_that_speaks_of_other_processes_is_a_lost_peer(kind, rest):
    with pytest.raises(PeerFailureError) as caught, peers_needed(Topology(rank=1, world_size=2)):
        raise kind(PEER + rest)
    assert str(caught.value) == f"rank 1 lost its peers: {PEER}"


@pytest.mark.parametrize(
    ("error", "world_size"),
    [
        (JaxRuntimeError(PEER), 1),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes"), 2),
        (ValueError("env.id: Connection-v0 is no environment"), 2),
        (RankMismatchError("rank 1 can't meet the others: barrier"), 2),
    ],
)
def test_other_errors_stay_what_they_are(error, world_size):
    with pytest.raises(type(error)) as caught, peers_needed(Topology(rank=0, world_size=world_size)):
        raise error
    assert caught.value is error


# --- meeting ----------------------------------------------------------------------------------------------------------


def test_after_a_meeting_that_failed_processes_are_not_taken_for_joined(monkeypatch):
    state = distributed.global_state

    def initialize(*_, **__):
        state.client = state.service = object()  # as JAX has them before it connects
        raise RuntimeError("DEADLINE_EXCEEDED: Barrier timed out\nand a stack")

    monkeypatch.setattr(state, "client", None)
    monkeypatch.setattr(state, "service", None)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    for _ in range(2):
        with pytest.raises(RankMismatchError, match=r"^rank 0 can't meet .*: DEADLINE_EXCEEDED: Barrier timed out$"):
            processes._join_processes(Topology(0, 2, 0, 2, launched=True), None, 1.0)
        assert not jax.distributed.is_initialized()


def test_a_port_that_rank_0_can_not_have_is_one_line(monkeypatch):
    def initialize(*_, **__):
        raise RuntimeError("UNKNOWN: Failed to start RPC server")

    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(RankMismatchError, match=r"^rank 0 can't meet .*: rank 0 can't listen there; .*MASTER_PORT"):
        processes._join_processes(Topology(0, 2, 0, 2, launched=True), None, 1.0)


# --- leaving ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch):
    """What is done on the way out, in order."""
    done = []
    monkeypatch.setattr(processes, "wait_for_all", lambda what: done.append(f"waits for all: {what}"))
    monkeypatch.setattr(processes, "leave_processes", lambda: done.append("leaves"))
    return done


def test_processes_leave_together_when_all_are_done(told):
    with leaving_together(Topology(rank=0, world_size=2)):
        told.append("works")
    assert told == ["works", "waits for all: done", "leaves"]


@pytest.mark.parametrize("everywhere", [True, False])
def test_who_fails_alone_is_gone_and_who_fails_with_all_leaves_with_them(told, everywhere):
    error = RankMismatchError("it differs")
    error.everywhere = everywhere
    with pytest.raises(RankMismatchError), leaving_together(Topology(rank=0, world_size=2)):
        raise error
    assert told == (["waits for all: failed", "leaves"] if everywhere else [])


def test_a_program_that_was_compiled_may_wait_when_it_is_called():
    waits = []
    program = waited(lambda: waits.append(life.sign().waits))
    for _ in range(3):
        program()
    assert waits == [False, True, True]
    assert not life.sign().waits
