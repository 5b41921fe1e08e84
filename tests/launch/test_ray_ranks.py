"""Ranks on a Ray cluster, without one: who is which rank, what is asked for, and the keeper of one rank."""

import contextlib
import dataclasses
import gc
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from command_line import wait_until

from lockstep.config.run import Config, RunOptions
from lockstep.core.process import _processes
from lockstep.core.topology import Topology, from_environment
from lockstep.launch.rank import Assignment
from lockstep.launch.ray import actor as actors
from lockstep.launch.ray import cluster as clusters
from lockstep.launch.ray.actor import Place, RankActor, Told
from lockstep.launch.ray.cluster import Cluster, Node, check_ray, connected, needs_of, places, with_devices
from lockstep.launch.ray.ranks import RayRanks, RayServer, gpus_of, order_of, variables_of
from lockstep.launch.supervise import supervise

A, B = "a" * 8, "b" * 8
MASTER = ("10.0.0.1", 4711)


def config(**changed):
    return Config.model_validate({"env": {"id": "CartPole-v1"}, **changed})


# --- places -------------------------------------------------------------------------------------------------------


def test_ranks_are_ordered_by_node_and_begin_on_this_one():
    found = [Place(node, "", ()) for node in (B, A, "c", B, A)]
    assert order_of(found, A) == [1, 4, 0, 3, 2]
    assert order_of(found, B) == [0, 3, 1, 4, 2]


def test_ranks_know_their_node_and_where_they_meet():
    ranks = [Place(node, "", ()) for node in (A, A, B)]
    found = [from_environment(own) for own in variables_of(ranks, MASTER)]
    assert [(one.rank, one.world_size, one.local_rank, one.local_world_size) for one in found] == [
        (0, 3, 0, 2),
        (1, 3, 1, 2),
        (2, 3, 0, 1),
    ]
    assert {one.master for one in found} == {"10.0.0.1:4711"}
    assert not any(one.on_one_host for one in found)


def test_ranks_of_a_node_see_all_gpus_that_ray_gave_the_run_there():
    ranks = [Place(A, "", ("10",)), Place(A, "", ("2",)), Place(B, "", ("0", "1")), Place("c", "", ())]
    assert [gpus_of(ranks, node) for node in (A, B, "c")] == ["2,10", "0,1", None]
    assert [own.get("CUDA_VISIBLE_DEVICES") for own in variables_of(ranks, MASTER)] == ["2,10", "2,10", "0,1", None]
    assert gpus_of([Place(A, "", ("GPU-f",)), Place(A, "", ("GPU-a",))], A) == "GPU-a,GPU-f"


@pytest.mark.parametrize(
    ("changed", "options", "needs", "count"),
    [
        ({}, {}, {"CPU": 1}, 6),
        ({"threads": 2}, {}, {"CPU": 2}, 2),
        ({"device": "cuda"}, {}, {"GPU": 1, "CPU": 1}, 4),
        ({"device": "cuda", "engine": "jax"}, {"devices": 2}, {"GPU": 2, "CPU": 1}, 3),
        ({"engine": "jax"}, {}, {"CPU": 1}, 6),
        ({"engine": "jax"}, {"devices": 3}, {"CPU": 3}, 2),
        ({"engine": "jax"}, {"simulate_devices": 4}, {"CPU": 1}, 6),
    ],
)
def test_what_ray_is_asked_for_each_process(changed, options, needs, count):
    mine = config(**changed)
    found = needs_of(mine, with_devices(RunOptions(**options), mine))
    assert found == needs
    assert places([{"CPU": 3.0, "GPU": 8.0}, {"CPU": 3.5, "GPU": 1.0}, {}], found) == count


def test_only_a_node_whose_host_refuses_connections_is_gone(monkeypatch):
    """One that doesn't answer in a second may be a virtual machine that is being moved."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = Node("1", "127.0.0.1", server.getsockname()[1], {}, {})
        assert (node.answers(), node.refuses()) == (True, False)
    assert (node.answers(), node.refuses()) == (False, True)

    def silent(*_):
        raise TimeoutError

    monkeypatch.setattr(clusters.socket, "create_connection", silent)
    assert (node.answers(), node.refuses()) == (False, False)


def cluster(*nodes, own=False):
    """A cluster of nodes with so many CPUs, that this process isn't connected to."""
    made = object.__new__(Cluster)
    made.here, made.own = "0", own
    made.nodes = lambda: [
        Node(str(n), f"10.0.0.{n}", 1, {"CPU": float(cpus)}, {"CPU": float(cpus)}) for n, cpus in enumerate(nodes)
    ]
    return made


def test_the_world_is_as_large_as_the_cluster_and_the_shards_allow():
    def world(nproc, *nodes):
        return cluster(*nodes).world(RunOptions(nproc=nproc, launcher="ray"), config(num_envs=8), Topology())

    assert [world("auto", *nodes).processes for nodes in ((2, 3), (1,), (8, 8))] == [5, 1, 8]
    assert world("2:4", 2, 3).processes == 4
    assert (world(4, 2, 3).processes_here, world(1, 2, 3).processes_here) == (2, 1)
    with pytest.raises(ValueError, match=r"^nproc: 6 ranks need 6 CPUs, and the Ray cluster has 5; use --nproc 5, or"):
        world(6, 2, 3)
    with pytest.raises(ValueError, match=r"^nproc: 6 ranks need 6 CPUs, and the Ray cluster has 5"):
        world("6:8", 2, 3)
    with pytest.raises(ValueError, match=r"node of this command \(10\.0\.0\.0\), which has 0 of Ray's CPUs"):
        world(1, 0, 4)


@pytest.mark.parametrize(
    ("key", "name"), [("env.id", "python:Maze"), ("network.custom", "python:Net"), ("ppo.loss", "python:lambda")]
)
def test_an_object_that_was_handed_over_is_refused_where_other_nodes_would_need_it(key, name):
    section, _, setting = key.partition(".")

    def ranks(nproc, *nodes, own=False):
        mine = config(num_envs=8, **{section: {setting: name}})
        return cluster(*nodes, own=own).world(RunOptions(nproc=nproc, launcher="ray"), mine, Topology()).processes

    line = rf"^{key}: {name} was handed over as an object, .* put it into a module that every node can import, or use"
    for nproc in (2, "auto", "1:4"):
        with pytest.raises(ValueError, match=line):
            ranks(nproc, 4, 4)
    assert [ranks("auto", 4), ranks(3, 4, own=True), ranks(1, 4, 4), ranks(2, 4, 0)] == [4, 3, 1, 2]


def test_a_containers_limit_holds_the_number_of_ranks_only_where_nobody_gives_one(monkeypatch):
    monkeypatch.setattr(clusters, "available_cores", lambda: 1)  # of four

    def world(nproc, own=True, **changed):
        made = cluster(4, own=own)
        return made.world(RunOptions(nproc=nproc, launcher="ray"), config(num_envs=8, **changed), Topology()).processes

    assert [world(nproc) for nproc in ("auto", "2:4", 2, 4)] == [1, 2, 2, 4]
    assert (world("auto", threads=4), world(2, threads=2)) == (1, 2)
    assert world("auto", own=False) == 4  # a cluster says itself what it has
    with pytest.raises(ValueError, match=r"^nproc: 6 ranks need 6 CPUs, and the Ray cluster has 4; use --nproc 4$"):
        world(6)
    server = RayServer(cluster(4, own=True), config(num_envs=8), RunOptions(nproc="1:4", launcher="ray"))
    assert server.places() == 1


def test_a_cluster_of_its_own_has_the_cores_that_this_process_is_bound_to(monkeypatch):
    ray, told = pytest.importorskip("ray"), {}
    from ray._private import ray_constants

    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setattr(ray, "init", lambda **given: told.update(given))
    monkeypatch.setattr(clusters, "bound_cores", lambda: 6)
    monkeypatch.setattr(clusters, "available_cores", lambda: 2)
    with contextlib.ExitStack() as stack:
        clusters._start_own(stack, {})
    assert told["num_cpus"] == 6


# --- what can be wrong --------------------------------------------------------------------------------------------


def test_what_ray_cant_start_is_one_line(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    check_ray(config(), Topology())
    with pytest.raises(ValueError, match="another launcher started this process"):
        check_ray(config(), Topology(launched=True))
    with pytest.raises(ValueError, match="device is tpu"):
        check_ray(config(device="tpu", engine="jax"), Topology())
    for address in ("ray://head:10001", "http://head:8265"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ValueError, match=f"RAY_ADDRESS is {address}, and this command must run on a node"):
            check_ray(config(), Topology())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^launcher: ray needs ray; pip install 'lockstep-rl\[ray\]'$"):
        check_ray(config(), Topology())


def test_ray_is_imported_only_where_it_is_asked_for():
    words = "import sys, lockstep.commands.train; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], timeout=600, check=False).returncode == 0


# --- one rank's keeper --------------------------------------------------------------------------------------------


def assignment(path, **changed):
    return dataclasses.replace(Assignment(config(), path, RunOptions()), **changed).to_json()


def own():
    (mine,) = variables_of([Place(A, "", ())], ("127.0.0.1", 4711))
    return mine


def last(keeper):
    """What a keeper tells once its rank has ended, with all that the rank wrote since it was last asked."""
    told = []

    def ended():
        told.append(keeper.poll())
        return told[-1].code is not None

    wait_until(ended, "the rank goes on")
    written = {name: b"".join(getattr(x, name) for x in told) for name in ("stdout", "stderr", "native")}
    return told[-1]._replace(**written)


def test_a_keeper_tells_how_its_rank_ended_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # of whoever started the keeper
    keeper = RankActor()
    (tmp_path / "none").mkdir()
    keeper.start(assignment(tmp_path / "none", resume_from="latest"), own(), None, str(tmp_path))
    told = last(keeper)
    assert (told.code, told.done) == (1, False)
    assert told.message is not None
    assert "holds no checkpoint to resume from" in told.message
    directory = keeper._directory
    assert directory.is_dir()
    keeper.end()
    assert not directory.exists()


SLEEPS = [sys.executable, "-c", "import time; print('begun', flush=True)\nwhile True: time.sleep(0.1)"]
"""In short naps: a signal that comes just before one begins is seen after it."""


def sleeper(monkeypatch, tmp_path, words=SLEEPS):
    """A keeper of a process that does something else than a rank does."""
    popen = subprocess.Popen
    monkeypatch.setattr(actors.subprocess, "Popen", lambda _, **more: popen(words, **more))
    keeper = RankActor()
    keeper.start(assignment(tmp_path), own(), dict(os.environ), str(tmp_path))
    wait_until(lambda: keeper.poll().stdout == b"begun\n", "it doesn't begin")
    return keeper


def test_a_rank_gets_signals_though_its_keeper_blocks_them(tmp_path, monkeypatch):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        keeper = sleeper(monkeypatch, tmp_path)
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    keeper.send(signal.SIGINT)
    told = last(keeper)
    assert b"KeyboardInterrupt" in told.stderr
    assert told.code == -signal.SIGINT
    keeper.end()
    sleeper(monkeypatch, tmp_path).end()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_an_ended_keeper_takes_along_what_its_rank_started(tmp_path, monkeypatch):
    starts = (
        "import subprocess, time; subprocess.Popen(['sleep', '3600']); print('begun', flush=True); time.sleep(3600)"
    )
    keeper = sleeper(monkeypatch, tmp_path, [sys.executable, "-c", starts])
    assert keeper._process is not None
    pid = keeper._process.pid
    assert len([one for one, session in _processes(3).items() if session == pid]) == 2
    keeper.end()
    wait_until(lambda: pid not in _processes(3).values(), "something is left")


def test_a_long_output_comes_in_parts_and_whole(tmp_path, monkeypatch):
    most = 3 * actors.MOST
    gate = tmp_path / "gate"
    gate.touch()
    waits = f"import pathlib, time\nwhile pathlib.Path({str(gate)!r}).exists():\n    time.sleep(0.01)\n"
    writes = f"print('begun', flush=True)\n{waits}print('x' * {most}, end='')"
    keeper = sleeper(monkeypatch, tmp_path, [sys.executable, "-c", writes])
    gate.unlink()
    found, deadline = b"", time.monotonic() + 600
    while (told := keeper.poll()).code is None and time.monotonic() < deadline:
        assert len(told.stdout) < actors.MOST + actors.CHUNK
        found += told.stdout
    assert len(found + told.stdout) == most
    keeper.end()


def test_a_long_text_of_a_ranks_libraries_is_passed_on_to_its_end(tmp_path, capfd):
    ranks = RayRanks(cast("Any", None), [None], [None], [Place(A, "", ())], tmp_path)
    text = b"x" * 200_000 + b"cause"
    ranks._take(0, Told(b"", b"", text, None, None, False))
    ranks._errors.close()
    os.close(ranks._native[0])
    assert capfd.readouterr().err == text.decode()


def test_what_libraries_say_as_their_rank_ends_is_passed_on_and_nothing_stays_open(capfd, monkeypatch):
    told = Told(b"", b"", b"CHECK failed: out of memory\n", -signal.SIGABRT, None, False)
    monkeypatch.setattr(RayRanks, "_answers", lambda ranks: [(0, told)])
    rank = SimpleNamespace(poll=SimpleNamespace(remote=lambda: None))
    server = SimpleNamespace(end_ranks=lambda: True)
    gc.collect()  # or what other tests left may be closed meanwhile
    opened = os.listdir("/proc/self/fd")
    assert supervise(lambda logs: RayRanks(cast("Any", server), [rank], [None], [Place(A, "", ())], logs)) == 1
    said = "lockstep: error: rank 0 was killed by SIGABRT\nCHECK failed: out of memory\n"
    assert capfd.readouterr().err == said
    assert os.listdir("/proc/self/fd") == opened


# --- which cluster ------------------------------------------------------------------------------------------------

NONE_HERE = ConnectionError("Could not find any running Ray instance. Please specify the one to connect to")
OTHER_VERSION = RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.9.3\nThis process has 2.60.0")


@pytest.fixture
def joins(monkeypatch):
    """Connects with a cluster at ``RAY_ADDRESS`` that answers so, and says what came of it."""
    ray = pytest.importorskip("ray")
    import ray._private.worker as worker

    monkeypatch.setattr(worker, "print_to_stdstream", None)
    monkeypatch.setattr(clusters, "Cluster", lambda note, own: SimpleNamespace(note=note, own=own))
    monkeypatch.setattr(clusters, "bound_cores", lambda: 6)

    def join(address, answer):
        done = []

        def init(address):
            done.append(f"joins {address}")
            if answer is not None:
                raise answer

        if address is not None:
            monkeypatch.setenv(clusters.ADDRESS, address)
        else:
            monkeypatch.delenv(clusters.ADDRESS, raising=False)
        monkeypatch.setattr(ray, "init", lambda address, **_: init(address))
        monkeypatch.setattr(clusters, "_start_own", lambda *_: done.append("starts its own"))
        with connected() as found:
            assert found.own == ("starts its own" in done)
            return done, found.note

    return join


@pytest.mark.parametrize("address", [None, "", "10.0.0.1:6379"])
def test_a_cluster_that_is_there_is_joined(joins, address):
    assert joins(address, None) == (["joins auto"], None)


def test_a_machine_that_belongs_to_no_cluster_gets_one_of_its_own_and_a_line(joins):
    done, note = joins(None, NONE_HERE)
    assert done == ["joins auto", "starts its own"]
    assert note == (
        "launcher ray: this machine belongs to no cluster; one of its own has its 6 cores alone, and ends with the run"
    )
    assert joins("local", None) == (["starts its own"], None)  # as asked


@pytest.mark.parametrize(
    ("address", "answer", "line"),
    [
        (None, OTHER_VERSION, r"the cluster of this machine can't be joined: Version mismatch: .*; RAY_ADDRESS=local"),
        (
            None,
            ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379"),
            "can't be joined: Failed .* stop`",
        ),
        ("10.0.0.1:6379", OTHER_VERSION, r"there is no cluster at RAY_ADDRESS 10\.0\.0\.1:6379: Version mismatch"),
        ("10.0.0.1:6379", NONE_HERE, r"there is no cluster at RAY_ADDRESS 10\.0\.0\.1:6379"),
    ],
)
def test_a_cluster_that_cannot_be_joined_is_no_reason_to_train_on_another(joins, address, answer, line):
    with pytest.raises(ValueError, match=f"^launcher: ray: .*{line}") as caught:
        joins(address, answer)
    assert "\n" not in str(caught.value)


def test_how_ranks_failed_is_said_where_messages_have_been_tidied_up(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    ranks = RayRanks(cast("Any", None), [None, None], [None, None], [Place(A, "10.0.0.7", ())] * 2, tmp_path / "logs")
    shutil.rmtree(tmp_path / "logs")
    content = json.dumps({"message": {"message": "the motor is gone", "extraInfo": {"secondary": False}}})
    ranks._take(0, Told(b"", b"", b"", 1, content, False))
    ranks._lost(1)
    ranks._errors.close()
    for descriptor in ranks._native:
        os.close(descriptor)
    for file in ranks._done:
        file.close()
    assert ranks._codes == {0: 1, 1: -signal.SIGKILL}
    assert capsys.readouterr().err == (
        "lockstep: error: the motor is gone\nlockstep: error: rank 1 was lost with its Ray node 10.0.0.7\n"
    )
