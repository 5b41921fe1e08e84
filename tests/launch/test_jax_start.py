"""On which device JAX is started by who looks at an environment: processes that start others leave GPUs to them."""

import contextlib
import itertools
import signal
import socket
import threading
import types

import pytest
from command_line import ending, running
from command_line import train as trained_here

from lockstep.commands import bench, check, clone, eval, train
from lockstep.config.command_line import read_request
from lockstep.config.run import Config, RunOptions
from lockstep.core.errors import RankMismatchError
from lockstep.core.topology import Topology
from lockstep.launch import jax_start, world
from lockstep.launch import request as request_module
from lockstep.launch.request import RunRequest, described_run, request_of
from lockstep.launch.seeds import group
from lockstep.launch.world import World
from lockstep.planning import outlook
from lockstep.planning.hardware import parse_target
from lockstep.planning.request import PlanRequest
from lockstep.proof import verify
from lockstep.proof.verify import Trace

STEPPED_BY_JAX = "gymnax/Acrobot-v1"
ON_GPUS = ("--engine", "jax", "--device", "cuda")
CONFIG = Config.model_validate({"env": {"id": STEPPED_BY_JAX}, "engine": "jax", "device": "cuda"})


@pytest.fixture
def asked(monkeypatch):
    """What JAX is started with, and when an environment is looked at, in order."""
    done = []
    door = types.SimpleNamespace(
        MOST_DEVICES=8,
        pool_devices=lambda shards: 8,
        roomy_pool=lambda devices: 16,
        set_up_jax=lambda threads, platform, *more: done.append(platform),
        look_with_cpu=lambda: done.append("cpu, to look"),
    )
    monkeypatch.setattr(jax_start, "engine_module", lambda name: door)

    def look(config):
        done.append("looked")
        raise ValueError("nothing is there to be seen")

    for module in (request_module, bench, verify, outlook, group):
        monkeypatch.setattr(module, "describe", look)
    return done


PLACES = ((0, 1, 0, 1), (0, 2, 0, 2), (1, 2, 0, 1), (3, 4, 1, 2))


@pytest.mark.parametrize(
    "words",
    [
        (),
        *(("--num-envs", count) for count in ("1", "3", "12", "20", "100")),
        ("--num-envs", "24", "--num-shards", "12"),
        ("--algorithm", "grpo", "--num-envs", "24", "--grpo.group-size", "8"),
        ("--devices", "1"),
        ("--simulate-devices", "4"),
        ("--num-envs-per-rank", "4"),
    ],
)
def test_jax_is_started_with_devices_enough_for_the_run_that_is_made_then(monkeypatch, words):
    """JAX's first use, here to look at an environment, settles how many there are; the run takes the first ones."""
    started = []
    door = types.SimpleNamespace(
        MOST_DEVICES=64,
        pool_devices=lambda shards: 8,
        roomy_pool=lambda devices: 16,
        set_up_jax=lambda threads, platform, devices, *more: started.append(devices),
    )
    monkeypatch.setattr(jax_start, "engine_module", lambda name: door)
    monkeypatch.setattr(jax_start, "wait_for_master", lambda topology: None)
    for module, name in ((jax_start, "available_cores"), (world, "available_cores"), (world, "bound_cores")):
        monkeypatch.setattr(module, name, lambda: cores)
    read = read_request(["lockstep/CartPole-v1", "--engine", "jax", "--env.backend", "jax", *words])
    for cores, place in itertools.product((1, 2, 3, 5, 6, 7, 8, 16), PLACES):
        here = Topology(*place, launched=place[1] > 1)
        jax_start.start_jax(read.config, read.options, here)
        wanted = world.world_of(read.options, read.config, here).devices
        assert wanted is not None
        assert started[-1] >= wanted, (cores, place)
        if "--devices" in words or "--simulate-devices" in words:
            assert started[-1] == wanted
    assert len(started) == 32


def test_a_run_takes_fewer_devices_than_jax_was_started_with(tmp_path):
    """Of one environment there is one shard, and JAX has started with a device for each core by then."""
    words = ("lockstep/CartPole-v1", "--engine", "jax", "--env.backend", "jax", "--num-envs", 1, "--total-steps", 256)
    made, told = (trained_here(tmp_path, *words, *more, name=f"run{len(more)}") for more in ((), ("--devices", 1)))
    assert made.summary["params_sha256"] == told.summary["params_sha256"]


@pytest.mark.parametrize("command", ["verify", "bench", "plan"])
def test_a_command_that_starts_runs_looks_with_the_cpu(asked, command):
    assert described_run(command, STEPPED_BY_JAX, ON_GPUS).env.id == STEPPED_BY_JAX
    assert asked == ["cpu, to look", "looked"]


def test_a_run_and_the_check_of_an_environment_look_with_the_device_that_they_use(asked):
    described_run("check", STEPPED_BY_JAX, ON_GPUS, starts_others=False)
    request_of([STEPPED_BY_JAX, *ON_GPUS])
    assert asked == ["cuda", "looked"] * 2


def test_an_environment_of_the_host_is_looked_at_without_jax(asked):
    described_run("verify", "Acrobot-v1", ON_GPUS)
    assert asked == []  # it has a preset
    jax_start.look_with_cpu(Config(engine="jax", device="cuda"))
    jax_start.look_with_cpu(Config(engine="jax"))
    assert asked == []


def test_verify_looks_with_the_cpu_before_its_runs_start(asked, monkeypatch):
    monkeypatch.setattr(verify, "run_trace", lambda config, size, *more: Trace(size, "untrained", [], []))
    with pytest.raises(ValueError, match=r"^nothing is there to be seen$"):
        verify.verify(CONFIG, [(1, 1), (2, 1)], 1)
    assert asked == ["cpu, to look", "looked"]


def test_bench_looks_with_the_cpu_before_its_runs_start(asked, monkeypatch):
    counted = []
    door = types.SimpleNamespace(check_device=lambda device, count: counted.append((device, count)))
    monkeypatch.setattr(bench, "engine_module", lambda name: door)
    monkeypatch.setattr(bench, "described_run", lambda *words: CONFIG)
    with pytest.raises(ValueError, match=r"^nothing is there to be seen$"):
        bench._read_plan([STEPPED_BY_JAX, "--world-sizes", "1,2"])
    assert (asked, counted) == (["cpu, to look", "looked"], [("cuda", 2)])


def test_plan_looks_with_the_cpu_before_engines_count(asked):
    request = PlanRequest(CONFIG, (parse_target("h100:2"),))
    with pytest.raises(ValueError, match=r"^nothing is there to be seen$"):
        list(outlook.outlooks(request, print))
    assert asked == ["cpu, to look", "looked"]


@pytest.mark.parametrize(
    ("words", "platform"),
    [
        ((), "cuda"),  # agents of one program, which is here
        (("--eval.interval", "1"), "cpu, to look"),
        (("--proof.trace",), "cpu, to look"),
        (("--seeds-at-once", "2"), "cpu, to look"),
        (("--nproc", "2"), "cpu, to look"),
    ],
)
def test_a_group_of_seeds_is_looked_at_with_the_gpu_only_where_it_is_trained_here(asked, words, platform):
    request = request_of([STEPPED_BY_JAX, *ON_GPUS, "--seeds", "0-1", *words])
    assert asked == [platform, "looked"]
    assert jax_start.start_jax(request.config, request.options, Topology()) is None
    assert asked[2:] == [platform]


def test_a_group_looks_with_the_cpu_before_its_seeds_start(asked, monkeypatch, tmp_path):
    options = RunOptions(seeds="0-1", seeds_at_once=1, runs_dir=str(tmp_path))
    sized = CONFIG.model_copy(update={"num_envs_per_rank": "auto"})
    monkeypatch.setattr(group, "resolved_here", lambda config, world, description: description())
    with pytest.raises(ValueError, match=r"^nothing is there to be seen$"):
        group.start_group(RunRequest(sized, options, {}), group.GroupStart(None, World(1, 1, 1), "as asked"), None)
    assert asked == ["cpu, to look", "looked"]
    assert not any(tmp_path.iterdir())


def test_processes_of_a_launcher_meet_before_they_look(asked, monkeypatch):
    place, joined = Topology(0, 2, 0, 2, launched=True), []
    monkeypatch.setattr(request_module, "topology_of", lambda options: place)
    door = jax_start.engine_module("jax")
    monkeypatch.setattr(door, "set_up_jax", lambda threads, platform, devices, topology, *_: joined.append(topology))
    request_of([STEPPED_BY_JAX, *ON_GPUS, "--nproc", "2"], trains=True)
    assert joined == [place]
    assert asked == ["looked"]


def test_processes_that_cannot_meet_say_so_and_meet_no_second_time(asked, monkeypatch):
    met = []

    def meet(*_):
        met.append("tried")
        raise RankMismatchError("rank 1 can't meet the others at host:1: nobody is there")

    monkeypatch.setattr(request_module, "topology_of", lambda options: Topology(1, 2, 1, 2, launched=True))
    monkeypatch.setattr(jax_start.engine_module("jax"), "set_up_jax", meet)
    with pytest.raises(RankMismatchError, match=r"^rank 1 can't meet the others"):
        request_of([STEPPED_BY_JAX, *ON_GPUS, "--nproc", "2"], trains=True)
    assert (met, asked) == (["tried"], [])


def test_the_name_of_rank_0_is_looked_up_before_processes_meet(asked, monkeypatch):
    place = Topology(1, 2, 0, 1, launched=True, master_addr="node-0")
    monkeypatch.setattr(request_module, "topology_of", lambda options: place)
    monkeypatch.setattr(world, "wait_for_name", lambda host, tell: asked.append(f"waits for {host}"))
    request_of([STEPPED_BY_JAX, *ON_GPUS], trains=True)
    assert asked == ["waits for node-0", "cuda", "looked"]


# ---- what trains nothing, where a launcher's variables stand (a shell in a pod of a run)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (train, [STEPPED_BY_JAX, "--engine", "jax", "--print-config"]),
        (train, [STEPPED_BY_JAX, "--engine", "jax", "--print-environment"]),
        (train, [STEPPED_BY_JAX, "--engine", "jax", "--help"]),
        (check, [STEPPED_BY_JAX]),
        (eval, [STEPPED_BY_JAX, "--policy", "random"]),
        (clone, ["none.episodes", "--out", "none", "--like", STEPPED_BY_JAX]),
    ],
)
def test_a_command_that_trains_nothing_is_no_rank(asked, monkeypatch, command, words):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node-0"}.items():
        monkeypatch.setenv(name, value)
    joined, door = [], jax_start.engine_module("jax")
    monkeypatch.setattr(door, "set_up_jax", lambda threads, platform, devices, topology, *_: joined.append(topology))
    monkeypatch.setattr(world, "wait_for_name", lambda host, tell: asked.append(f"waits for {host}"))
    monkeypatch.setattr(check, "examine", lambda *_: [])
    with contextlib.suppress(ValueError):  # nothing is there to be seen
        command.main(words)
    assert asked == ["looked"]
    assert set(joined) == {Topology()}


def test_a_config_is_shown_beside_a_run_that_lives_without_a_connection_to_it(tmp_path):
    words = ("train", "corridors:Corridor", "--engine", "jax", "--env.backend", "jax", "--print-config")
    place, met = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, []
    with socket.create_server(("127.0.0.1", 0)) as rank_0:
        port = str(rank_0.getsockname()[1])
        with running(*words, cwd=tmp_path, MASTER_PORT=port, **place) as (process, mark):

            def listen():
                with contextlib.suppress(OSError):
                    rank_0.accept()[0].close()
                    met.append("somebody")
                    process.send_signal(signal.SIGKILL)  # it would wait for an answer

            threading.Thread(target=listen, daemon=True).start()
            ended = ending(process, mark)
        rank_0.shutdown(socket.SHUT_RDWR)
    assert (ended.code, met) == (0, []), ended.stderr
    assert "id: corridors:Corridor" in ended.stdout
