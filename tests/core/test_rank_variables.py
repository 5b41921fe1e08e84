"""Variables that ranks get: by class of machine, and never in place of the user's."""

import pytest

from lockstep.core import rank_variables
from lockstep.core.rank_variables import (
    ETHERNET,
    INFINIBAND,
    ONE_HOST,
    apply,
    in_lines,
    link_speed,
    machine_class,
    settings_of,
    settings_of_xla,
)
from lockstep.core.topology import Topology

HERE = Topology(world_size=2, local_world_size=2)
APART = Topology(world_size=2, local_world_size=1, master_addr="10.0.0.1")


def values(device, topology, kind):
    return {setting.name: setting.value for setting in settings_of(device, topology, kind)}


@pytest.fixture
def interface(monkeypatch):
    """The interface ``ens1`` leads to the others, with a link of so many Mbit/s."""
    monkeypatch.setattr(rank_variables, "own_address", lambda _: "10.0.0.2")
    monkeypatch.setattr(rank_variables, "interface_of", lambda address: "ens1" if address == "10.0.0.2" else None)

    def speed(value):
        monkeypatch.setattr(rank_variables, "link_speed", lambda _: value)

    speed(10_000)
    return speed


def test_the_class_of_a_machine(tmp_path):
    assert machine_class(HERE, tmp_path) == ONE_HOST
    assert machine_class(APART, tmp_path) == machine_class(APART, tmp_path / "none") == ETHERNET
    (tmp_path / "mlx5_0").mkdir()
    assert machine_class(APART, tmp_path) == INFINIBAND
    assert machine_class(HERE, tmp_path) == ONE_HOST


def test_a_gpu_repeats_its_bits_and_a_cpu_needs_nothing():
    assert values("cuda", Topology(), ONE_HOST)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert values("cpu", Topology(), ONE_HOST) == {}


def test_sums_on_gpus_are_kept_out_of_a_switch_which_may_not_repeat_them():
    for topology in (Topology(), HERE, APART):
        for kind in (ONE_HOST, ETHERNET, INFINIBAND):
            assert values("cuda", topology, kind)["NCCL_ALGO"] == "^NVLS,NVLSTree"
            assert "NCCL_ALGO" not in values("cpu", topology, kind) | values("xpu", topology, kind)


def test_ranks_of_one_host_meet_on_loopback():
    assert values("cpu", HERE, ONE_HOST) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def test_hosts_meet_over_the_interface_that_leads_there(interface):
    found = values("cuda", APART, ETHERNET)
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("ens1", "=ens1")
    assert "NCCL_SOCKET_NTHREADS" not in found
    interface(100_000)
    assert values("cuda", APART, ETHERNET)["NCCL_SOCKET_NTHREADS"] == "4"
    infiniband = values("cuda", APART, INFINIBAND)
    assert infiniband["GLOO_SOCKET_IFNAME"] == "ens1"
    assert not {"NCCL_SOCKET_IFNAME", "NCCL_SOCKET_NTHREADS"} & set(infiniband)


def test_on_one_host_too_the_address_that_a_launcher_names_decides(interface):
    """It is the host's name under torchrun's c10d; in containers of one host ranks have loopbacks of their own."""
    named = Topology(world_size=2, local_world_size=2, master_addr="node-0")
    found = values("cuda", named, machine_class(named))
    assert (machine_class(named), found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == (
        ONE_HOST,
        "ens1",
        "=ens1",
    )


def test_gpus_of_engine_jax_meet_where_those_of_engine_torch_do(interface):
    """By NCCL alone, for JAX tells gloo itself; the GPUs of one process meet by NCCL, too."""
    interface(100_000)

    def found(device, topology, kind=None):
        return {s.name: s.value for s in settings_of_xla(device, topology, kind or machine_class(topology))}

    repeats = {"NCCL_ALGO": "^NVLS,NVLSTree"}
    assert found("cuda", HERE) == found("cuda", Topology()) == repeats | {"NCCL_SOCKET_IFNAME": "lo"}
    assert found("cuda", APART, ETHERNET) == repeats | {"NCCL_SOCKET_IFNAME": "=ens1", "NCCL_SOCKET_NTHREADS": "4"}
    assert found("cuda", APART, INFINIBAND) == repeats
    assert found("cpu", HERE) == found("tpu", APART, ETHERNET) == {}


def test_a_link_says_its_speed_or_nothing(tmp_path):
    for name, said in (("fast", "100000\n"), ("down", "-1\n"), ("odd", "?")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(said)
    assert [link_speed(name, tmp_path) for name in ("fast", "down", "odd", "none")] == [100_000, 0, 0, 0]


def test_what_the_user_set_stays_and_is_shown_so():
    settings = settings_of("cuda", HERE, ONE_HOST)
    environ = {"NCCL_DEBUG": "INFO"}
    first, *lines = in_lines(settings, ONE_HOST, environ)
    assert first == "# one host"
    (debug,) = (line for line in lines if line.startswith("NCCL_DEBUG"))
    assert debug.startswith("NCCL_DEBUG=INFO  # yours; else WARN")
    assert all("; https://docs." in line for line in lines)
    apply(settings, environ)
    assert environ["NCCL_DEBUG"] == "INFO"
    assert environ["NCCL_SOCKET_IFNAME"] == "lo"
