import pytest

from lockstep.topology import Topology, error_file, from_environment, started_by_lockstep


def torchrun(rank, world_size, local_rank, local_world_size, **more):
    values = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world_size}
    return {name: str(value) for name, value in (values | more).items()}


def complaint(environ):
    with pytest.raises(ValueError) as caught:
        from_environment(environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_a_launcher_there_is_one_rank():
    topology = from_environment({"PATH": "/bin"})
    assert topology == Topology(rank=0, world_size=1, local_rank=0, local_world_size=1, launched=False)
    assert topology.loopback


def test_torchrun_on_one_host():
    topology = from_environment(torchrun(3, 4, 3, 4, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"))
    assert topology == Topology(3, 4, 3, 4, launched=True)
    assert topology.on_one_host
    assert topology.loopback


def test_torchrun_on_two_hosts():
    topology = from_environment(torchrun(5, 8, 1, 4, MASTER_ADDR="node-0"))
    assert (topology.rank, topology.world_size) == (5, 8)
    assert (topology.local_rank, topology.local_world_size) == (1, 4)
    assert topology.master_addr == "node-0"
    assert not topology.on_one_host
    assert not topology.loopback


def test_one_rank_under_a_launcher_is_launched():
    assert from_environment(torchrun(0, 1, 0, 1)).launched
    assert not from_environment({}).launched


@pytest.mark.parametrize(("address", "loopback"), [("localhost", True), ("::1", True), ("10.0.0.5", False)])
def test_loopback_is_an_address_of_this_host_alone(address, loopback):
    assert from_environment(torchrun(0, 2, 0, 2, MASTER_ADDR=address)).loopback is loopback


def test_without_local_variables_every_rank_is_on_this_host():
    assert from_environment({"RANK": "1", "WORLD_SIZE": "2"}) == Topology(1, 2, 1, 2, launched=True)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (torchrun(4, 4, 0, 4), "RANK 4 of WORLD_SIZE 4"),
        (torchrun(-1, 4, 0, 4), "RANK -1 of WORLD_SIZE 4"),
        (torchrun(0, 0, 0, 1), "RANK 0 of WORLD_SIZE 0"),
        (torchrun(3, 4, 2, 2), "LOCAL_RANK 2 of LOCAL_WORLD_SIZE 2"),
        (torchrun(3, 4, -1, 2), "LOCAL_RANK -1 of LOCAL_WORLD_SIZE 2"),
        (torchrun(0, 2, 0, 4), "LOCAL_WORLD_SIZE 4"),
    ],
)
def test_variables_that_contradict_one_another(environ, named):
    text = complaint(environ)
    assert named in text
    assert "torchrun" in text


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("value", ["", "two", "1.0"])
def test_variables_that_are_no_numbers(name, value):
    text = complaint(torchrun(1, 2, 1, 2) | {name: value})
    assert "whole numbers" in text
    assert repr(value) in text


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE"])
def test_half_a_launcher_is_no_single_rank(missing):
    """Several processes that each take themselves for the only rank would write over one another."""
    environ = torchrun(1, 2, 1, 2)
    del environ[missing]
    assert missing in complaint(environ)


def test_where_a_failing_rank_leaves_its_message(tmp_path):
    assert error_file({"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}) == tmp_path / "error.json"
    assert error_file({"TORCHELASTIC_ERROR_FILE": ""}) is None
    assert error_file({}) is None


def test_who_started_this_rank():
    assert started_by_lockstep({"LOCKSTEP_LAUNCHER": "1"})
    assert not started_by_lockstep(torchrun(0, 1, 0, 1))
