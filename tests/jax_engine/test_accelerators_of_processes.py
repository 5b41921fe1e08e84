"""Which GPUs a process takes, and who starts JAX to count them."""

import re
import shutil
import types

import jax
import pytest
from command_line import error_line, lockstep

from lockstep.core.errors import RankMismatchError
from lockstep.core.topology import Topology
from lockstep.jax_engine.distributed import devices, processes
from lockstep.jax_engine.setup import accelerators, set_up
from lockstep.jax_engine.setup.accelerators import Accelerators, on_this_machine
from lockstep.launch import jax_start
from lockstep.launch.request import request_of


@pytest.fixture
def machine(monkeypatch):
    """A machine with so many GPUs, of which CUDA's driver tells, and where no process is started to count them."""

    def has(count):
        monkeypatch.setattr(accelerators, "_gpus_of_driver", lambda: count)
        monkeypatch.setattr(accelerators, "on_this_machine", None)
        monkeypatch.setattr(devices, "on_this_machine", lambda device: Accelerators(count, "H100", 7))

    return has


@pytest.fixture
def begun(monkeypatch):
    """What is done until JAX starts on GPUs, in order: variables, what is joined with, GPUs that JAX sees."""
    visible = jax.config.values["jax_cuda_visible_devices"]
    done = []
    monkeypatch.setattr(processes, "configure", lambda *args: None)
    monkeypatch.setattr(processes, "has_started", lambda: False)
    monkeypatch.setattr(processes, "apply", lambda settings: done.append({s.name: s.value for s in settings}))
    monkeypatch.setattr(processes, "_join_processes", lambda topology, gpus, silence: done.append(gpus))
    monkeypatch.setattr(processes, "keep_programs", lambda *args: None)
    monkeypatch.setattr(
        processes, "check_device", lambda platform: done.append(jax.config.values["jax_cuda_visible_devices"])
    )

    def of(topology, each=None, platform="cuda", again=False):
        done.clear()
        if not again:
            jax.config.update("jax_cuda_visible_devices", "all")
            monkeypatch.setattr(accelerators, "_told", None)
        processes.set_up_jax(1, platform, None, topology, accelerators=each)
        return list(done)

    yield of
    jax.config.update("jax_cuda_visible_devices", visible)


def place(rank, size, local, here):
    return Topology(rank, size, local, here, launched=True)


def test_a_process_takes_its_own_part_of_the_hosts_gpus(machine):
    machine(8)
    assert processes._own_gpus(place(1, 2, 1, 2), None) == [4, 5, 6, 7]
    assert processes._own_gpus(place(3, 4, 1, 2), None) == [4, 5, 6, 7]  # the second of the second host
    assert processes._own_gpus(place(2, 3, 2, 3), None) == [4, 5]
    assert processes._own_gpus(place(2, 3, 2, 3), 1) == [2]
    assert processes._own_gpus(place(1, 2, 0, 1), None) is None
    assert processes._own_gpus(place(1, 2, 0, 1), 3) == [0, 1, 2]  # hosts may have different numbers of them


def test_a_process_holds_no_gpu_beyond_those_that_it_was_told_to_take(machine, begun):
    machine(8)
    assert begun(Topology(), 2)[-1] == "0,1"
    assert begun(Topology())[-1] == "all"
    assert begun(place(1, 2, 0, 1), 3)[1:] == [[0, 1, 2], "0,1,2"]
    assert begun(place(1, 2, 1, 2))[1:] == [[4, 5, 6, 7], "4,5,6,7"]


def test_a_process_that_sets_up_again_takes_the_same_gpus(machine, begun):
    """JAX may not have started after the first time: it found no GPU, say, which the second time has to say again."""
    machine(8)
    first = begun(place(1, 2, 1, 2))
    assert begun(place(1, 2, 1, 2), again=True) == first
    assert first[1:] == [[4, 5, 6, 7], "4,5,6,7"]


def test_the_users_own_choice_of_gpus_is_shared_out(machine, monkeypatch):
    machine(8)
    monkeypatch.setitem(jax.config._value_holders, "jax_cuda_visible_devices", types.SimpleNamespace(value="6,2,3"))
    assert processes._own_gpus(Topology(), 2) == [6, 2]
    assert processes._own_gpus(place(2, 3, 2, 3), None) == [3]


def test_gpus_of_engine_jax_are_told_their_interface_before_processes_meet(machine, begun):
    machine(8)
    variables, joined, _ = begun(place(1, 2, 1, 2))
    assert (variables["NCCL_SOCKET_IFNAME"], joined) == ("lo", [4, 5, 6, 7])
    assert begun(Topology())[0]["NCCL_SOCKET_IFNAME"] == "lo"  # they meet in one process, too
    assert begun(place(1, 2, 1, 2), platform="cpu") == [None, "all"]


def test_too_few_gpus_for_the_processes_are_named(machine):
    machine(1)
    with pytest.raises(ValueError, match="2 processes share this machine and each sees 1 of its GPUs; start at most 1"):
        processes._own_gpus(place(1, 2, 1, 2), None)


def test_more_gpus_than_there_are_is_one_line(machine):
    machine(8)
    with pytest.raises(ValueError, match=r"^devices: 9 asked for and this machine has 8 GPUs; use at most 8$"):
        processes._own_gpus(Topology(), 9)
    with pytest.raises(
        ValueError, match=r"^devices: 5 for each of 2 processes asked for and this machine has 8 GPUs; use at most 4$"
    ):
        processes._own_gpus(place(0, 2, 0, 2), 5)


def test_processes_that_hold_unlike_numbers_of_devices_are_told_what_to_give(monkeypatch):
    owners = [0] * 8 + [1] * 4
    monkeypatch.setattr(processes.jax, "devices", lambda: [types.SimpleNamespace(process_index=n) for n in owners])
    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "gather_json", None)
    with pytest.raises(
        RankMismatchError, match=r"^rank 1 holds 4 devices and rank 0 8; every process needs as many: use --devices 4$"
    ):
        processes.check_ranks_alike({})


def test_processes_compare_the_version_of_lockstep(monkeypatch):
    monkeypatch.setattr(processes.jax, "devices", lambda: [types.SimpleNamespace(process_index=0)])
    monkeypatch.setattr(processes.jax, "process_count", lambda: 1)
    monkeypatch.setattr(processes, "machine_facts", dict)
    monkeypatch.setattr(processes, "gather_json", lambda mine: [mine, mine | {"lockstep": "0"}])
    with pytest.raises(RankMismatchError, match=r"^rank 1 differs from rank 0 in lockstep: 0 against \d"):
        processes.check_ranks_alike({})


def driver(status):
    """CUDA's driver, which shows four GPUs, if it can be begun with."""

    def count(found):
        found._obj.value = 4
        return 0

    return types.SimpleNamespace(cuInit=lambda flags: status, cuDeviceGetCount=count)


def test_cudas_driver_tells_how_many_gpus_there_are(monkeypatch):
    monkeypatch.setattr(accelerators, "on_this_machine", lambda device: Accelerators(3, "H100", 7))
    for status, numbers in ((0, [0, 1, 2, 3]), (100, [0, 1, 2])):
        monkeypatch.setattr(accelerators.ctypes, "CDLL", lambda name, status=status: driver(status))
        assert accelerators.gpus_of_this_host() == numbers

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(accelerators.ctypes, "CDLL", missing)
    assert accelerators.gpus_of_this_host() == [0, 1, 2]


def test_what_is_shared_is_what_each_has_times_the_processes(machine, monkeypatch):
    machine(8)
    assert devices.count_accelerators("cuda") == 8
    assert devices.device_memory("cuda") == 7
    with pytest.raises(ValueError, match=r"devices: 9 asked for and this machine has 8 \(H100\); use at most 8"):
        devices.check_device("cuda", 9)
    monkeypatch.setattr(set_up, "has_started", lambda: True)
    monkeypatch.setattr(devices.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(devices, "in_this_process", lambda: Accelerators(3, "H100", 5))
    monkeypatch.setattr(processes, "_joined", place(1, 2, 1, 2))
    assert devices.count_accelerators("cuda") == 6


@pytest.fixture
def told(monkeypatch):
    """What JAX is set up with for a command line."""

    def of(*words, launched=False):
        calls = []
        monkeypatch.setattr(processes, "set_up_jax", lambda *args: calls.append(args))
        request = request_of(["CartPole-v1", "--engine", "jax", *words])
        jax_start.start_jax(request.config, request.options, place(0, 2, 0, 2) if launched else Topology())
        return [(platform, number) for _, platform, number, *_ in calls]

    return of


def test_who_only_starts_the_others_holds_no_gpu(told):
    assert told("--device", "cuda", "--nproc", "2") == [("cpu", None)]
    assert told("--device", "cuda") == [("cuda", None)]
    assert told() == []


def test_launched_processes_meet_before_anything_is_counted(told):
    assert told("--device", "cuda", launched=True) == [("cuda", None)]


def test_another_process_finds_no_gpu_here_and_says_so():
    on_this_machine.cache_clear()
    with pytest.raises(ValueError, match=r"^device: tpu, but JAX .* finds none here"):
        on_this_machine("tpu")


@pytest.mark.parametrize("environment", ["CartPole-v1", "lockstep/CartPole-v1"])
def test_a_run_on_a_gpu_says_that_there_is_none(tmp_path, environment):
    if shutil.which("nvidia-smi"):
        pytest.skip("this machine may have a GPU")
    ended = lockstep("train", environment, "--engine", "jax", "--device", "cuda", cwd=tmp_path)
    assert re.search(r"device: cuda, but JAX .* finds none here", error_line(ended))


def test_the_report_of_the_other_process_is_read(monkeypatch):
    def run(command, **kwargs):
        assert kwargs["env"]["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
        return types.SimpleNamespace(
            returncode=0, stdout='noise\n{"count": 4, "kind": "H100", "memory": 9}\n', stderr=""
        )

    monkeypatch.setattr(accelerators.subprocess, "run", run)
    on_this_machine.cache_clear()
    assert on_this_machine("cuda") == Accelerators(4, "H100", 9)
    on_this_machine.cache_clear()


def test_a_driver_may_print_any_bytes_beside_the_report(tmp_path, monkeypatch):
    program = tmp_path / "program"
    report = '{"count": 4, "kind": "H100", "memory": 9}'
    program.write_text(f"#!/bin/sh\nprintf 'driver \\377\\n'\necho '{report}'\n")
    program.chmod(0o755)
    monkeypatch.setattr(accelerators.sys, "executable", str(program))
    on_this_machine.cache_clear()
    assert on_this_machine("cuda") == Accelerators(4, "H100", 9)
    on_this_machine.cache_clear()
