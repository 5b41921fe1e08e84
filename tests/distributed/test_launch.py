"""How ranks are started, where they listen, and that none of them outlives its parent."""

import os
import re
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from command_line import EVALUATED, GATED, NEEDS_PROC, marked, metrics_of, ranks_of, running, wait_until

LISTENING = "0A"
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


def start_line(run):
    return run.ended.stdout.splitlines()[0]


def address(hexadecimal):
    """An address of /proc/net/tcp: words in the machine's byte order."""
    words = [bytes.fromhex(hexadecimal[i : i + 8])[::-1] for i in range(0, len(hexadecimal), 8)]
    packed = b"".join(words)
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def sockets_of(pid):
    """``(local address, remote address, state)`` of every TCP socket that a process holds."""
    inodes = set()
    for handle in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(os.readlink(handle).removeprefix("socket:[").rstrip("]"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes:
                local, remote = (address(field.partition(":")[0]) for field in fields[1:3])
                found.append((local, remote, fields[3]))
    return found


@pytest.mark.parametrize(
    ("nproc", "ranks"), [(1, "1 rank × 8 shards"), (2, "2 ranks × 4 shards"), (8, "8 ranks × 1 shard")]
)
def test_the_first_line_confirms_ranks_shards_device_and_parameters(trained, nproc, ranks):
    run = trained(*EVALUATED) if nproc == 1 else trained(*EVALUATED, "--nproc", nproc)
    fixed = f"CartPole-v1 · torch · {ranks} × 1 environment · cpu · exact, shards batched · parameters in sync"
    assert re.fullmatch(re.escape(fixed) + r" \([0-9a-f]{8}\)", start_line(run))


def test_the_first_line_shows_a_digest_of_the_first_parameters(trained):
    one, two, other = (start_line(trained(*EVALUATED, *more)) for more in ((), ("--nproc", 2), ("--seed", 1)))
    assert one.split("sync")[1] == two.split("sync")[1]
    assert one.split("sync")[1] != other.split("sync")[1]


@NEEDS_PROC
@pytest.mark.parametrize("collectives", ["auto", "backend"])
def test_ranks_listen_on_loopback_or_nowhere_and_die_with_their_parent(tmp_path, collectives):
    gate, path = tmp_path / "gate", tmp_path / "runs" / "run"
    gate.touch()
    words = ("train", *GATED, "--nproc", 2, "--env.workers", 1, "--name", "run", "--collectives", collectives)
    with running(*words, cwd=tmp_path, GATE=str(gate), MASTER_ADDR="192.0.2.9", MASTER_PORT="x") as (process, mark):
        wait_until(lambda: len(metrics_of(path)) == 4, "the run doesn't reach the gate")
        sockets = {pid: sockets_of(pid) for pid in marked(mark)}
        ranks = [ranks_of(mark, rank) for rank in range(2)]
        process.send_signal(signal.SIGKILL)
        process.wait(600)
        wait_until(lambda: not marked(mark), "ranks or environment workers outlive their parent", 60.0)
    assert [len(pids) for pids in ranks] == [1, 1]
    assert len(sockets) >= 6  # launcher, server, two ranks and their workers
    held = [entry for entries in sockets.values() for entry in entries]
    listening = {pid for pid, entries in sockets.items() for _, _, state in entries if state == LISTENING}
    if collectives == "auto":  # memory and a file, which ranks inherit from the server
        assert held == []
    assert listening == ({*ranks[0], *ranks[1]} if collectives == "backend" else set())  # gloo's own sockets
    assert all(local in LOOPBACK for local, _, _ in held), held
    assert all(remote in LOOPBACK for _, remote, state in held if state != LISTENING), held


@NEEDS_PROC
def test_a_socket_on_every_interface_would_be_seen():
    with socket.create_server(("0.0.0.0", 0)):
        assert ("0.0.0.0", "0.0.0.0", LISTENING) in sockets_of(os.getpid())


@NEEDS_PROC
def test_workers_of_a_single_process_die_with_it(tmp_path):
    gate, path = tmp_path / "gate", tmp_path / "runs" / "run"
    gate.touch()
    words = ("train", *GATED, "--env.workers", 2, "--name", "run")
    with running(*words, cwd=tmp_path, GATE=str(gate)) as (process, mark):
        wait_until(lambda: len(metrics_of(path)) == 4, "the run doesn't reach the gate")
        assert len(marked(mark)) >= 3
        process.send_signal(signal.SIGKILL)
        process.wait(600)
        wait_until(lambda: not marked(mark), "environment workers outlive their parent", 60.0)
