"""How ranks join PyTorch's process group, what becomes of its errors, and how they leave it."""

import datetime
import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.config.run import Config
from lockstep.core.errors import PeerFailureError, RankMismatchError, UnavailableError
from lockstep.core.life import Life
from lockstep.core.topology import Topology
from lockstep.torch_engine.distributed import communicator as communicator_module
from lockstep.torch_engine.distributed import process_group, scripts
from lockstep.torch_engine.distributed.communicator import Communicator
from lockstep.torch_engine.distributed.ordered import Traffic
from lockstep.torch_engine.distributed.process_group import WITHOUT_LIMIT, left_at_the_end, own_backend

GPU = Config(device="cuda")
HOSTS, NCCL = "cpu:gloo,cuda:gloo,xpu:gloo", "cpu:gloo,cuda:nccl"


@pytest.fixture
def left(monkeypatch):
    """Times that a group was left."""
    times: list[bool] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: times.append(True))
    return times


@pytest.mark.parametrize("backends", [HOSTS, NCCL])
def test_a_rank_that_is_done_leaves_the_group(backends, left, monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    with left_at_the_end():
        assert not left
    assert len(left) == 1


@pytest.mark.parametrize(("backends", "times"), [(HOSTS, 1), (NCCL, 0), ("cpu:gloo,xpu:xccl", 0)])
def test_one_that_fails_leaves_a_gpus_backend_to_the_end_of_its_process(backends, times, left, monkeypatch):
    """All ranks leave NCCL together; the others don't know of the failure yet, and wait in a collective."""
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    with pytest.raises(OSError, match="No space left"), left_at_the_end():
        raise OSError("No space left on device")
    assert len(left) == times


@pytest.mark.parametrize(("error", "times"), [(None, 1), (ValueError("a script's"), 0)])
def test_a_script_that_fails_likewise(error, times, left, monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda: NCCL)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    scripts._leave()
    assert len(left) == times


def test_a_backend_that_this_pytorch_lacks_is_one_line(monkeypatch):
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name != "nccl")
    with pytest.raises(UnavailableError, match=r"^backend: nccl isn't in PyTorch \S+; use auto or gloo$"):
        own_backend(Config(device="cuda", backend="nccl"))
    assert own_backend(GPU) is None
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    assert own_backend(Config(device="cuda", backend="nccl")) == own_backend(GPU) == "nccl"


def test_a_stranger_who_listens_where_ranks_meet_and_never_answers_is_one_line(monkeypatch):
    monkeypatch.setattr(process_group, "ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        place = Topology(1, 2, 1, 2, launched=True, master_port=port)
        said = (
            rf"^rank 1 can't meet the others at 127\.0\.0\.1:{port}: what listens there hasn't answered .* MASTER_PORT"
        )
        with pytest.raises(RankMismatchError, match=said) as refusal:
            process_group.meet(place, datetime.timedelta(seconds=0.2))
        assert "\n" not in str(refusal.value)


def test_a_port_that_rank_0_can_not_have_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        place = Topology(0, 2, 0, 2, launched=True, master_port=stranger.getsockname()[1])
        said = r"^rank 0 can't meet the others at \S+: another program has this port; .* \(MASTER_PORT, .*\)$"
        with pytest.raises(RankMismatchError, match=said):
            process_group.meet(place, datetime.timedelta(seconds=0.2))


@pytest.mark.parametrize(
    ("world_size", "said"),
    [(2, "rank 1 hasn't"), (3, "ranks 1, 2 haven't"), (12, "ranks 1, 2, 3, 4, 5, 6, 7, 8, … haven't")],
)
def test_ranks_that_do_not_come_are_named(world_size, said, tmp_path):
    place = Topology(0, world_size, 0, world_size, launched=True, store_file=str(tmp_path / "store"))
    with pytest.raises(RankMismatchError, match=rf"^rank 0 can't meet the others at \S+: {said} come within 0.1 s$"):
        process_group.meet(place, datetime.timedelta(seconds=0.1))


def test_a_rank_that_nobody_awaits_says_so_in_one_line_and_pytorch_says_nothing(capfd):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        place = Topology(1, 2, 1, 2, launched=True, master_port=silent.getsockname()[1])
        said = r"^rank 1 can't meet .*: rank 0 hasn't listened there within 0.2 s \(Connection refused\)$"
        with pytest.raises(RankMismatchError, match=said):
            process_group.meet(place, datetime.timedelta(seconds=0.2))
    assert capfd.readouterr() == ("", "")


def test_ranks_compare_the_version_of_lockstep():
    """Hosts with an installation each, of which one was upgraded."""
    other: Any = SimpleNamespace(device=torch.device("cpu"), gather_json=lambda mine: [mine, mine | {"lockstep": "0"}])
    with pytest.raises(RankMismatchError, match=r"^rank 1 differs from rank 0 in lockstep: 0 against \d"):
        communicator_module.check_ranks_alike(other, Config())


class Store:
    """Notes what its copies may wait."""

    def __init__(self):
        self.limits: list[datetime.timedelta] = []

    def clone(self):
        return self

    def set(self, name, value):
        del name, value

    def set_timeout(self, limit):
        self.limits.append(limit)


@pytest.mark.parametrize(("backend", "marked"), [("nccl", False), (None, True)])
def test_ranks_watch_each_other_and_the_backend_has_no_limit_of_its_own(backend, marked, monkeypatch):
    watched, joined, store = [], [], Store()
    monkeypatch.setattr(communicator_module, "meet", lambda *_: store)
    monkeypatch.setattr(communicator_module, "join_process_group", lambda *given: joined.append(given))
    monkeypatch.setattr(communicator_module, "watch", lambda *given: watched.append(given) or SimpleNamespace())
    communicator = Communicator(Topology(0, 2), None, torch.device("cpu"), backend)
    communicator._open_backend(GPU)
    assert [given[-1] for given in watched] == [
        marked
    ]  # collectives of a device's backend are launched, not waited for
    assert store.limits == [WITHOUT_LIMIT]
    assert joined == [(communicator.topology, backend, WITHOUT_LIMIT, store)]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("Connection closed by peer\nsome/file.cc:12"), "Connection closed by peer"),
        (dist.DistError("NCCL error\nDuplicate GPU detected : rank 1"), "NCCL error Duplicate GPU detected : rank 1"),
    ],
)
def test_what_a_backend_says_of_others_is_said(error, said):
    with pytest.raises(PeerFailureError) as caught:
        failed_in_a_collective(error)
    assert str(caught.value) == f"rank 0 lost its peers: {said}"


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError, PeerFailureError])
def test_what_a_device_says_of_itself_is_no_loss_of_peers(kind):
    error = kind("CUDA out of memory. Tried to allocate 2.00 GiB")
    with pytest.raises(kind) as caught:
        failed_in_a_collective(error)
    assert caught.value is error


def failed_in_a_collective(error: Exception) -> None:
    """A collective of two ranks that raises in this one."""

    def operation():
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicator_module, "life", Life())  # of which it would be known for good that it waits
        Communicator(Topology(0, 2), None, torch.device("cpu"))._timed(Traffic(0, 0), torch.device("cpu"), operation)
