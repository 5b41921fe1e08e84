"""How many ranks a request makes, for both engines; and that the JAX engine is told its devices."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.core.done import DoneFile
from lockstep.core.topology import Topology
from lockstep.launch import jax_start, start, world
from lockstep.launch.rank import Assignment
from lockstep.launch.request import request_of
from lockstep.launch.world import World, topology_of, world_of, world_words

JAX = ("--engine", "jax")


@pytest.fixture
def cores(monkeypatch):
    def have(number):
        monkeypatch.setattr(world, "available_cores", lambda: number)
        monkeypatch.setattr(world, "bound_cores", lambda: number)

    return have


def asked(*words, topology=None):
    request = request_of(["CartPole-v1", "--num-envs", "8", *words])
    return world_of(request.options, request.config, topology or Topology())


def refused(*words, topology=None):
    with pytest.raises(ValueError) as caught:
        asked(*words, topology=topology)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- numbers


def test_torchs_ranks_are_processes(cores):
    cores(6)
    assert asked("--nproc", "2") == World(2, 2)
    assert asked("--nproc", "auto") == World(6, 6)
    assert asked("--nproc", "auto", "--num-shards", "4") == World(4, 4)
    assert asked("--nproc", "auto", "--num-envs", "3") == World(1, 1)  # which make one shard by default
    assert asked("--nproc", "auto", "--num-envs", "3", "--num-shards", "3") == World(3, 3)
    two_hosts = Topology(1, 4, 1, 2, launched=True)
    assert asked(topology=two_hosts) == World(4, 2)
    assert "launcher started 4" in refused("--nproc", "2", topology=two_hosts)


@pytest.mark.parametrize(
    ("bound", "given", "each"),
    [
        (8, 8, 8),  # each task to its own
        (64, 8, 8),  # none is: they may use the whole node
        (1, 8, 1),
        (8, None, 2),
    ],
)
def test_cores_that_slurm_gave_each_task_are_not_divided_once_more(cores, bound, given, each):
    cores(bound)
    task = Topology(1, 4, 1, 4, launched=True, cores=given)
    assert asked(topology=task).cores_of_rank(bound) == each
    jax = asked(*JAX, "--num-envs", "64", "--num-shards", "32", topology=task)
    assert (jax.devices, jax.cores_of_rank(bound)) == (each, 1)


def test_a_rank_takes_as_many_cores_as_it_has_threads(cores):
    cores(7)
    assert asked("--nproc", "auto", "--threads", "2") == World(3, 3)
    assert asked("--nproc", "2:8", "--threads", "3") == World(2, 2)
    assert asked("--nproc", "auto", "--threads", "8") == World(1, 1)
    assert asked("--nproc", "4", "--threads", "8") == World(4, 4)  # who gives a number gets it


def test_jaxs_ranks_are_devices(cores):
    cores(6)
    assert asked(*JAX) == World(1, 1, 4)
    assert asked(*JAX, "--devices", "2") == World(1, 1, 2)
    assert asked(*JAX, "--simulate-devices", "8") == World(1, 1, 8)
    assert asked(*JAX, "--simulate-devices", "8", "--devices", "2") == World(1, 1, 2)
    assert asked(*JAX, "--nproc", "2") == World(2, 2, 2)
    assert asked(*JAX, "--nproc", "2", "--simulate-devices", "4").ranks == 8
    assert asked(*JAX, topology=Topology(1, 4, 1, 2, launched=True)) == World(4, 2, 2)


def test_devices_follow_what_shards_there_are(cores):
    cores(6)
    assert asked(*JAX, "--num-envs", "2") == World(1, 1, 2)
    assert asked(*JAX, "--num-shards", "1") == World(1, 1, 1)
    per_rank = ("--engine", "jax", "--num-envs-per-rank", "3")
    request = request_of(["CartPole-v1", *per_rank])
    assert world_of(request.options, request.config, Topology()) == World(1, 1, 6)


def test_a_cpu_that_has_fewer_cores(cores):
    cores(2)
    assert refused(*JAX, "--devices", "4").startswith("devices: 4 asked for and this machine's CPU has 2")
    assert asked(*JAX, "--simulate-devices", "4").devices == 4


def test_devices_that_are_asked_for_may_be_more_than_a_containers_limit_allows_at_a_time(cores, monkeypatch):
    cores(2)
    monkeypatch.setattr(world, "bound_cores", lambda: 64)
    assert asked(*JAX, "--devices", "4").devices == 4
    assert asked(*JAX).devices == 2


def test_the_fsdp_axis_is_checked_against_all_devices(cores):
    cores(2)
    words = (*JAX, "--reduction", "fast", "--fsdp", "--simulate-devices", "4")
    assert asked(*words, "--fsdp-devices", "2").ranks == 4
    assert refused(*words, "--fsdp-devices", "3").startswith("fsdp_devices: 3 doesn't divide the run's 4 devices")


@pytest.fixture
def accelerators(monkeypatch):
    """Eight of them."""
    engine = types.SimpleNamespace(count_accelerators=lambda device: 8)
    monkeypatch.setattr(world, "engine_module", lambda name: engine)


@pytest.mark.usefixtures("accelerators")
def test_accelerators_are_counted_by_the_engine():
    assert asked(*JAX, "--device", "cuda").devices == 8
    assert asked(*JAX, "--device", "cuda", "--nproc", "2").devices == 4
    assert asked(*JAX, "--device", "tpu").devices == 8
    assert asked(*JAX, "--device", "cuda", "--devices", "2").devices == 2


@pytest.mark.usefixtures("accelerators")
def test_no_more_accelerators_are_taken_than_there_are_shards():
    cuda = (*JAX, "--device", "cuda")
    assert asked(*cuda, "--num-envs", "4") == World(1, 1, 4)
    assert asked(*cuda, "--num-shards", "2") == World(1, 1, 2)
    assert asked(*cuda, "--num-shards", "4", "--nproc", "2") == World(2, 2, 2)
    assert asked(*cuda, "--num-shards", "8", topology=Topology(2, 4, 0, 2, launched=True)) == World(4, 2, 2)
    assert asked(*cuda, "--num-envs", "24", "--num-shards", "12") == World(1, 1, 8)
    per_rank = request_of(["CartPole-v1", *cuda, "--num-envs-per-rank", "3"])  # shards follow the devices
    assert world_of(per_rank.options, per_rank.config, Topology()) == World(1, 1, 8)
    assert asked(*cuda, "--num-shards", "2", "--devices", "4").devices == 4  # which is refused, with both numbers


@pytest.mark.usefixtures("accelerators")
def test_one_process_holds_all_chips_of_a_tpus_host(monkeypatch):
    monkeypatch.delenv("TPU_VISIBLE_CHIPS", raising=False)
    tpu, two_a_host = (*JAX, "--device", "tpu"), Topology(1, 4, 1, 2, launched=True)
    line = "device: tpu with 2 processes on this host, where one process holds all chips; start one a host"
    assert refused(*tpu, "--nproc", "2") == line
    assert refused(*tpu, topology=two_a_host) == line
    assert asked(*tpu, topology=Topology(1, 4, 0, 1, launched=True)) == World(4, 1, 2)
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "0,1")
    assert asked(*tpu, topology=two_a_host) == World(4, 2, 2)  # whose launcher has shared them out
    assert refused(*tpu, "--nproc", "2") == line


def test_launched_processes_ask_no_tpu_before_that_is_known(monkeypatch):
    monkeypatch.delenv("TPU_VISIBLE_CHIPS", raising=False)
    flags = ("--coordinator", "127.0.0.1:4000", "--num-processes", "2", "--process-id", "1")
    request = request_of(["CartPole-v1", *JAX, "--device", "tpu", *flags])
    engine = types.SimpleNamespace(MOST_DEVICES=8, pool_devices=lambda _: 8, roomy_pool=lambda _: 8)
    engine.set_up_jax = lambda *_: pytest.fail("JAX was started")
    monkeypatch.setattr(jax_start, "engine_module", lambda name: engine)
    with pytest.raises(ValueError, match=r"^device: tpu with 2 processes on this host"):
        jax_start.start_jax(request.config, request.options, topology_of(request.options))


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (("train", "CartPole-v1", *JAX, "--device", "tpu", "--seeds", "0-3", "--seeds-at-once", "4"), 4),
        (("verify", "CartPole-v1", *JAX, "--device", "tpu", "--world-sizes", "1,2x1"), 2),
    ],
)
def test_runs_side_by_side_want_a_tpu_each(words, count, tmp_path, monkeypatch, capsys, request):
    request.getfixturevalue("accelerators")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    assert main(list(words)) == 2
    assert f"device: tpu with {count} processes on this host" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_process_that_is_told_its_place():
    flags = ("--coordinator", "127.0.0.1:4000", "--num-processes", "2", "--process-id", "1")
    topology = topology_of(request_of(["CartPole-v1", *JAX, *flags]).options)
    assert (topology.rank, topology.world_size, topology.coordinator) == (1, 2, "127.0.0.1:4000")
    assert asked(*JAX, *flags, "--simulate-devices", "2", topology=topology) == World(2, 2, 2)
    assert topology_of(request_of(["CartPole-v1"]).options) == Topology()


def test_the_words_that_make_a_world():
    torch, jax = (request_of(["CartPole-v1", "--engine", name]).config for name in ("torch", "jax"))
    assert world_words(torch, 4) == ["--nproc", "4"]
    assert world_words(jax, 4) == ["--nproc", "1", "--simulate-devices", "4"]
    assert world_words(jax, 4, 2) == ["--nproc", "2", "--simulate-devices", "2"]
    assert world_words(jax.model_copy(update={"device": "cuda"}), 4, 2) == ["--nproc", "2", "--devices", "2"]


# ---- the door, with an engine that only tells what it was given


class TellingEngine(types.ModuleType):
    """Stands in for the JAX engine's door."""

    PACKAGES = ()

    def __init__(self, name):
        super().__init__(name)
        self.told = {}

    def check_networks(self, config, description):
        self.told["networks"] = description.observation.width

    def check_own_loss(self, config, net):
        self.told["loss"] = config.ppo.loss

    def check_device(self, device, number):
        self.told["checked"] = (device, number)

    def train(self, config, run, topology, options, checkpoint):
        self.told |= {"config": config, "options": options, "topology": topology, "checkpoint": checkpoint}
        summary = {"status": "finished", "final_return": None, "global_step": 8, "wall_time": 1.0}
        (run.path / "summary.json").write_text(json.dumps(summary | {"params_sha256": "0" * 64}))
        return types.SimpleNamespace(signal=None)


class TellingServer:
    """In place of the server of ranks."""

    def __init__(self, told):
        self.told = told

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def start(self, nproc, log_dir, *, assignment, environment):
        self.told |= {"assignment": assignment, "nproc": nproc, "environment": environment, "log_dir": log_dir}
        return self

    def exit_codes(self):
        return {0: 0}

    def message_file(self, rank):
        file = self.told["log_dir"] / f"rank_{rank}.json"
        DoneFile(file).tell()
        return str(file)

    def kill(self):
        pass

    def end(self):
        pass

    def close(self):
        pass


@pytest.fixture
def engine(monkeypatch, tmp_path, cores):
    telling = TellingEngine("lockstep.jax_engine.engine")
    monkeypatch.setitem(sys.modules, "lockstep.jax_engine.engine", telling)
    monkeypatch.setattr(start, "rank_server", lambda config: TellingServer(telling.told))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    cores(4)
    return telling


def train(*words):
    return main(["train", "CartPole-v1", "--num-envs", "8", *JAX, "--name", "run", *words])


def test_one_process_trains_here_on_its_devices(engine, capsys):
    assert train("--num-seeds", "3") == 0
    assert engine.told["config"].engine == "jax"
    assert (engine.told["config"].envs, engine.told["config"].shards) == (8, 8)
    assert (engine.told["options"].devices, engine.told["options"].num_seeds) == (4, 3)
    assert (engine.told["topology"], engine.told["checkpoint"], engine.told["networks"]) == (Topology(), None, 4)
    assert "evaluate: " in capsys.readouterr().out


@pytest.mark.parametrize(("processes", "devices"), [(2, 4), (3, 2)])
def test_several_processes_are_started_and_told_their_devices(engine, processes, devices):
    assert train("--nproc", str(processes), "--simulate-devices", str(devices)) == 0
    assert (engine.told["nproc"], engine.told["environment"]) == (processes, {"OMP_NUM_THREADS": "1"})
    options = Assignment.from_json(engine.told["assignment"]).options
    assert (options.devices, options.simulate_devices) == (devices, devices)
    assert "config" not in engine.told


def test_devices_of_an_accelerator_are_checked_before_the_run_is_made(engine, capsys, monkeypatch):
    monkeypatch.setattr(start, "start_jax", lambda *_: None)

    def none(device, number):
        raise ValueError(f"devices: {number} asked for and there is no {device}")

    engine.check_device = none
    assert train("--device", "cuda", "--devices", "2") == 2
    assert capsys.readouterr().err == "lockstep: error: devices: 2 asked for and there is no cuda\n"
    assert not Path("runs").exists()


def test_environments_grow_with_devices_and_that_is_said(engine, capsys):
    assert main(["train", "CartPole-v1", *JAX, "--name", "run", "--num-envs-per-rank", "8"]) == 0
    assert (engine.told["config"].envs, engine.told["config"].shards) == (32, 4)
    assert "num_envs_per_rank 8 on 4 devices: num_envs 32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--num-shards", "4", "--simulate-devices", "5"],
            "devices: 5 devices can't share 4 shards, at least one each",
        ),
        (
            ["--num-envs", "10", "--simulate-devices", "3"],
            "10 environments make 2 shards by default and 3 devices need",
        ),
        (["--devices", "8"], "devices: 8 asked for and this machine's CPU has 4"),
        (["--compile"], "compile: true is for engine torch"),
        (["--nproc", "9"], "8 environments make 8 shards by default and 9 devices need one each"),
    ],
)
def test_what_does_not_fit_leaves_no_run_behind(engine, capsys, words, line):
    assert train(*words) == 2
    assert line in capsys.readouterr().err
    assert not Path("runs").exists()
    assert "config" not in engine.told
