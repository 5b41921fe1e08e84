"""Ranks as plain processes: what they are told, how they fail, and that nothing of them is left."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep.core.topology import Topology
from lockstep.jax_engine.distributed.elastic import start_ranks
from lockstep.launch.spawn import SpawnedRanks
from lockstep.launch.supervise import supervise

TELLS = """
import json, os, sys
from dataclasses import asdict
from pathlib import Path
from lockstep.core.topology import error_file, from_environment, started_by_lockstep
topology = from_environment()
facts = asdict(topology) | {"coordinator": topology.coordinator, "listened_to": started_by_lockstep()}
facts |= {"error_file": str(error_file()), "threads": os.environ.get("OMP_NUM_THREADS"), "group": os.getpgid(0)}
Path(sys.argv[1], f"{topology.rank}.json").write_text(json.dumps(facts))
"""
LISTENS = """
import os, socket, sys
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    server.bind(address)
    server.listen()
    server.accept()[0].sendall(b"met")
else:
    import time
    for _ in range(1000):
        try:
            client = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    sys.exit(0 if client.recv(3) == b"met" else 1)
"""
FAILS = """
import os, sys, time
from lockstep.core.process import report_failure
if os.environ["RANK"] == "1":
    report_failure("the cart fell over")
    sys.exit(1)
time.sleep(60)
"""
LEAVES = """
import subprocess, sys, time
from pathlib import Path
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
Path(sys.argv[1], "worker").write_text(str(worker.pid))
time.sleep(60 if sys.argv[2] == "stay" else 0)
"""
STOPS = """
import signal, sys, time
from pathlib import Path
def stop(number, frame):
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
import os
Path(sys.argv[1], f"ready{os.environ['RANK']}").touch()
time.sleep(60)
"""


@pytest.fixture
def spawn(tmp_path):
    """Start ranks of a script; whatever happens they are ended."""
    started = []

    def start(script, nproc, *arguments, start=SpawnedRanks):
        ranks = start(["-c", script, str(tmp_path), *arguments], nproc, tmp_path)
        started.append(ranks)
        return ranks

    yield start
    for ranks in started:
        ranks.kill()


def ended(ranks, seconds=30.0):
    return until(lambda: None not in ranks.exit_codes().values() and ranks.exit_codes(), seconds)


def until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError, ValueError):
            value = condition()
            if value:
                return value
        time.sleep(0.02)
    pytest.fail("not in time")


def alive(pid):
    """Whether a process runs; one that is dead but not yet collected by its parent doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_every_rank_is_told_its_place(spawn, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # of a torchrun around us
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[1-2]")
    ranks = spawn(TELLS, 3)
    assert ended(ranks) == {0: 0, 1: 0, 2: 0}
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    port = told[0]["master_port"]
    for rank, facts in enumerate(told):
        place = {name: facts[name] for name in Topology.__dataclass_fields__}
        assert Topology(**place) == Topology(rank, 3, rank, 3, launched=True, master_port=port)
        assert facts["coordinator"] == f"127.0.0.1:{port}"
        assert facts["error_file"] == ranks.message_file(rank)
        assert facts["listened_to"]
        assert facts["group"] != os.getpgid(0)


def test_the_port_is_kept_for_rank_0(spawn):
    ranks = spawn(LISTENS, 2)
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("127.0.0.1", ranks._port.getsockname()[1]))
    assert ended(ranks) == {0: 0, 1: 0}


def test_the_engines_ranks_are_told_their_threads(spawn, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def three_threads(arguments, nproc, log_dir):
        return start_ranks(arguments, nproc, 3, log_dir)

    ended(spawn(TELLS, 1, start=three_threads))
    assert json.loads((tmp_path / "0.json").read_text())["threads"] == "3"


def test_the_engines_launcher_starts_no_framework():
    module = "lockstep.jax_engine.distributed.elastic"
    script = f"import sys\nimport {module}\nprint(sorted({{'jax', 'torch', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_one_failure_ends_all_ranks_and_is_told_once(tmp_path, capfd):
    code = supervise(lambda logs: SpawnedRanks(["-c", FAILS], 2, logs))
    assert code == 1
    assert capfd.readouterr().err == "lockstep: error: rank 1: the cart fell over\n"


def test_a_rank_that_is_killed_is_named(spawn, tmp_path, capfd):
    script = (
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGKILL) if os.environ['RANK'] == '0' else time.sleep(60)"
    )
    assert supervise(lambda logs: SpawnedRanks(["-c", script], 2, logs)) == 1
    assert "rank 0 was killed by SIGKILL; out of memory?" in capfd.readouterr().err


def test_ranks_that_end_well(capfd):
    assert supervise(lambda logs: SpawnedRanks(["-c", "pass"], 2, logs)) == 0
    assert capfd.readouterr().err == ""


def test_a_signal_is_passed_on(spawn, tmp_path):
    ranks = spawn(STOPS, 2)
    until(lambda: (tmp_path / "ready0").exists() and (tmp_path / "ready1").exists())
    assert ranks.exit_codes() == {0: None, 1: None}
    ranks.send(signal.SIGTERM)
    assert ended(ranks) == {0: 0, 1: 0}
    ranks.send(signal.SIGTERM)  # nobody is left to get it


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
@pytest.mark.parametrize("how", ["stay", "leave"])
def test_what_a_rank_started_ends_with_it(spawn, tmp_path, how):
    ranks = spawn(LEAVES, 1, how)
    worker = until(lambda: int((tmp_path / "worker").read_text()))
    if how == "leave":
        assert ended(ranks) == {0: 0}
    assert alive(worker)
    ranks.kill()
    until(lambda: not alive(worker))
    assert ranks.exit_codes() == {0: 0 if how == "leave" else -signal.SIGKILL}


def test_a_rank_that_cannot_be_started_leaves_no_other_behind(tmp_path, monkeypatch):
    from lockstep.launch import spawn as module

    started, really = [], module.subprocess.Popen

    def second_fails(*arguments, **options):
        if started:
            raise OSError("no more processes")
        started.append(really(*arguments, **options))
        return started[0]

    monkeypatch.setattr(module.subprocess, "Popen", second_fails)
    with pytest.raises(OSError, match="no more processes"):
        SpawnedRanks(["-c", "import time; time.sleep(60)"], 2, tmp_path)
    assert started[0].poll() == -signal.SIGKILL
