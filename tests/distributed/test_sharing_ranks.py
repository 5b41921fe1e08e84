"""Ranks of one host meet in memory: the same bytes as by the backend, an error when a peer is gone, no traces."""

import json
import os
import signal
import subprocess
import sys
import uuid
from contextlib import contextmanager, suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from command_line import (
    EVALUATED,
    GATED,
    MODULES,
    marked,
    metrics_of,
    ranks_of,
    run_words,
    running,
    same,
    surroundings,
    wait_until,
)
from free_ports import free_port
from variants import variants

from lockstep.torch_engine.distributed.shared_memory import obstacle

pytestmark = pytest.mark.skipif(obstacle() is not None, reason=f"shared memory: {obstacle()}")


@contextmanager
def exchanging(case, world_size):
    """Ranks of ``exchanging CASE`` while they run; at the end they are gone."""
    common = surroundings(uuid.uuid4().hex) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    try:
        for rank in range(world_size):
            env = common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
            words = [sys.executable, str(MODULES / "exchanging.py"), case]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            processes.append(subprocess.Popen(words, env=env, **pipes))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def said(line):
    facts = json.loads(line)
    return facts.pop("what"), facts


@pytest.mark.parametrize("world_size", variants([2, 4], [2]))
def test_both_ways_give_the_same_bytes(world_size):
    for seen in said_by_forks("compare", world_size):
        assert len(seen) == 2 * 5 * 9 + 2 * 2 * 9 + 6
        assert seen.pop("other") == {"equal": False}  # one rank brought something else to one of the two
        assert [what for what, facts in seen.items() if not facts["equal"]] == []


def said_by_forks(case, world_size):
    """What each rank of ``exchanging CASE`` says, by name, which are forks of one process."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    ended = run_words([sys.executable, str(MODULES / "exchanging.py"), case], MODULES, **variables)
    assert ended.code == 0, ended.stderr
    seen = [{} for _ in range(world_size)]
    for what, facts in map(said, ended.stdout.splitlines()):
        seen[facts.pop("rank")][what] = facts
    return seen


@pytest.fixture(scope="module")
def summed():
    """What each of five ranks says of sums over the first two, three, four and all of them."""
    return said_by_forks("sums", 5)


def test_sums_over_any_number_of_ranks_have_the_bytes_of_one(summed):
    compared, ways = 0, set()
    for rank, seen in enumerate(summed):
        for size in range(max(2, rank + 1), 6):
            of_size = {what: facts for what, facts in seen.items() if "shards" in what and f" on {size} by " in what}
            assert [what for what, facts in of_size.items() if not facts["equal"]] == []
            ways |= {(size, facts["sums"]) for facts in of_size.values() if facts.get("sums")}
            compared += len(of_size)
    assert compared == (2 + 3 + 4 + 5) * 3 * 5 * 2 * 2  # ranks, numbers of shards, sizes, sums and gathers, ways
    assert ways == {(2, "gather"), *((size, way) for size in (3, 4, 5) for way in ("gather", "slices"))}


def test_sums_in_the_order_of_ranks_have_other_bytes(summed):
    """The negative of the above."""
    equal = {what: facts["equal"] for what, facts in summed[0].items() if "in the order of" in what}
    assert len(equal) == 12
    for shards, size in ((7, 3), (8, 3), (8, 4), (8, 5), (12, 5)):
        assert not equal[f"{shards} shards in the order of {size} ranks"]
    assert equal["8 shards in the order of 2 ranks"]


@pytest.mark.parametrize("way", ["memory", "backend"])
@pytest.mark.parametrize(("size", "most"), [(3, 3), (4, 2.1), (5, 3)])
def test_a_million_numbers_travel_at_about_the_price_of_a_ring(summed, size, most, way):
    """Three and five ranks have up to two nodes of the tree each."""
    for seen in summed[:size]:
        facts = seen[f"a million on {size} by {way}"]
        assert facts["right"]
        assert facts["sums"] == "slices"
        assert 0 < min(facts["moved"]) <= max(facts["moved"]) <= most * (1 << 20) * 4


def test_ranks_in_a_hurry_read_neither_too_early_nor_too_late():
    assert said_by_forks("hurry", 4) == [{"hurry": {"right": 400}}] * 4


def test_a_peer_that_is_late_leaves_or_dies_ends_the_others():
    with exchanging("fail", 2) as (first, second):
        wait_until(lambda: second.stdout.readline().startswith('{"what": "left"'), "the second rank doesn't leave")
        seen = dict(said(first.stdout.readline()) for _ in range(4))
        assert "waiting" in seen
        second.kill()
        seen |= [said(first.communicate(timeout=600)[0])]
    errors = {what: facts["error"] for what, facts in seen.items() if what != "waiting"}
    assert errors == {
        "size": "rank 0 brought 12 bytes to a collective and rank 1 brought 16",
        "late": "rank 0 lost its peers: rank 1 didn't come to a collective in 0.3 s",
        "left": "rank 0 lost its peers: rank 1 has left the run",
        "killed": "rank 0 lost its peers: rank 1 has ended",
    }


def test_ddp_reduces_through_memory_and_notices_a_dead_peer():
    with exchanging("behind_ddp", 2) as (first, second):
        _, gradient = said(first.stdout.readline())
        # Rank r has 4 rows of (r, r): the weight's gradient is 4·r, the bias's 4; DDP takes the mean over ranks.
        assert gradient == {"values": [[2.0, 2.0], [4.0]], "calls": 1}
        assert said(first.stdout.readline())[0] == "waiting"
        second.kill()
        output, errors = first.communicate(timeout=600)
        assert said(output) == ("killed", {"error": "rank 0 lost its peers: rank 1 has ended"}), errors


@pytest.mark.parametrize("reduction", ["exact", "fast"])  # fast: of two numbers there is only one sum
def test_a_run_is_the_same_by_memory_and_by_the_backend(trained, reduction):
    words = (*EVALUATED, "--nproc", 2, "--reduction", reduction)
    shared, backend = (trained(*words, "--collectives", how) for how in ("shared", "backend"))
    same(shared, backend)
    assert [run.summary["collectives"] for run in (shared, backend)] == ["shared memory", "gloo"]


def mappings(pid):
    """Files that a process has mapped into its memory."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}


def named_memory(pid):
    return {name for name in mappings(pid) if name.startswith("/dev/shm/")}


def test_shared_memory_has_no_name_that_could_be_left_behind(tmp_path):
    gate, path = tmp_path / "gate", tmp_path / "runs" / "run"
    gate.touch()
    with running("train", *GATED, "--nproc", 2, "--name", "run", cwd=tmp_path, GATE=str(gate)) as (process, mark):
        wait_until(lambda: len(metrics_of(path)) == 4, "the run doesn't reach the gate")
        ranks = [pid for rank in range(2) for pid in ranks_of(mark, rank)]
        assert len(ranks) == 2
        for pid in ranks:
            assert [name for name in mappings(pid) if "memfd:lockstep" in name] == ["/memfd:lockstep (deleted)"]
            assert named_memory(pid) == set()
        for pid in [process.pid, *ranks]:
            with suppress(ProcessLookupError):  # ranks that the launcher took along
                os.kill(pid, signal.SIGKILL)
        process.wait(600)
        wait_until(lambda: not marked(mark), "ranks outlive their parent", 60.0)


def test_memory_with_a_name_would_be_seen():
    before = named_memory(os.getpid())  # of other tests in this process
    memory = SharedMemory(create=True, size=64)
    try:
        assert named_memory(os.getpid()) - before == {f"/dev/shm/{memory.name}"}
    finally:
        memory.close()
        memory.unlink()
