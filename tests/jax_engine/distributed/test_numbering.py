"""Processes whose number for JAX, which a TPU's runtime gives them, is another than they were started with."""

import jax
import pytest

from lockstep.core.topology import Topology
from lockstep.jax_engine.distributed import processes

HOSTS = 4


@pytest.fixture
def set_up(monkeypatch):
    """Sets up a process that JAX finds to be one of ``HOSTS``, of which others were started as ``ranks`` say."""

    def of(topology, own, ranks=None, platform="tpu"):
        joined = []
        monkeypatch.setattr(processes, "configure", lambda *_: None)
        monkeypatch.setattr(processes, "check_device", lambda _: None)
        monkeypatch.setattr(processes, "_join_processes", lambda topology, *_: joined.append(topology))
        monkeypatch.setattr(processes, "_own_gpus", lambda *_: None)
        monkeypatch.setattr(processes, "keep_programs", lambda *_: None)
        monkeypatch.setattr(processes, "gather_json", lambda rank: ranks)
        monkeypatch.setattr(jax, "process_count", lambda: HOSTS)
        monkeypatch.setattr(jax, "process_index", lambda: own)
        processes.set_up_jax(1, platform, None, topology)
        return joined

    return of


def place(rank, size=HOSTS):
    return Topology(rank, size, 0, 1, launched=True, master_addr="tpu-host-0")


def refused(set_up, *arguments):
    with pytest.raises(ValueError) as caught:
        set_up(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_worker_that_was_started_as_the_only_one_is_told_which_it_is(set_up):
    line = refused(set_up, Topology(), 2)
    assert line.startswith("num_processes: 1, but JAX finds 4")
    assert "--coordinator HOST:PORT --num-processes 4 --process-id 2" in line
    assert refused(set_up, place(1, 2), 1).startswith("num_processes: 2, but JAX finds 4")


@pytest.mark.parametrize("own", range(HOSTS))
def test_every_process_refuses_another_order_and_is_told_its_own_number(set_up, own):
    ranks = [0, 2, 1, 3]
    line = refused(set_up, place(ranks[own]), own, ranks)
    assert line.startswith("process_id: JAX numbers 2 of 4 processes otherwise")
    assert "number 1 was started as 2" in line
    assert line.endswith(f"JAX's number, which is {own} here, and --coordinator on the host of number 0")


def test_what_was_refused_once_is_refused_again(set_up, monkeypatch):
    """A command looks at an environment first, and takes a refusal there for one of the environment."""
    refused(set_up, place(1), 2, [0, 2, 1, 3])
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert refused(set_up, place(1), 2, [0, 2, 1, 3]).startswith("process_id: JAX numbers 2 of 4")


def test_the_same_order_is_trained_in(set_up):
    assert set_up(place(2), 2, [0, 1, 2, 3]) == [place(2)]


def test_nothing_is_exchanged_where_jax_takes_the_numbers_that_it_is_given(set_up):
    assert set_up(place(2), 2, None, "cuda") == [place(2)]
