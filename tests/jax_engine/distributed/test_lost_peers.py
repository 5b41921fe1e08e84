"""What JAX says when another process is gone isn't the error to show; everything else that it raises is."""

import pytest
from jax.errors import JaxRuntimeError

from lockstep.core.errors import PeerFailureError, RankMismatchError
from lockstep.core.topology import Topology
from lockstep.jax_engine.distributed.processes import peers_needed

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
