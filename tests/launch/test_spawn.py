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

from lockstep.config.run import Config
from lockstep.core.errors import KilledError, RunError
from lockstep.core.process import write_failure
from lockstep.core.topology import Topology
from lockstep.launch import spawn as spawn_module
from lockstep.launch.spawn import RankServer, rank_server, threads_of
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
    for _ in range(60_000):
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
time.sleep(3600)
"""
LEAVES = """
import subprocess, sys, time
from pathlib import Path
where = {"own group": {"process_group": 0}, "own session": {"start_new_session": True}}
own = where.get(sys.argv[3] if len(sys.argv) > 3 else "", {})
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], **own)
Path(sys.argv[1], "worker").write_text(str(worker.pid))
time.sleep(3600 if sys.argv[2] == "stay" else 0)
"""
KILLED_LAUNCHER = """
import time
from pathlib import Path
from lockstep.launch.spawn import RankServer
server = RankServer()
ranks = server.start(1, Path({directory!r}), arguments=["-c", {leaves!r}, {directory!r}, "stay"])
print(server._process.pid, *ranks._pids.values(), flush=True)
while None in ranks.exit_codes().values():
    time.sleep(0.02)
print(ranks.exit_codes(), flush=True)
"""
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
STOPS = """
import signal, sys, time
from pathlib import Path
def stop(number, frame):
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
import os
Path(sys.argv[1], f"ready{os.environ['RANK']}").touch()
time.sleep(3600)
"""


def spawned(script, nproc, log_dir, *arguments, environment=None):
    """Fresh ranks of a script; their server ends when they are killed."""
    return RankServer().start(nproc, log_dir, arguments=["-c", script, *arguments], environment=environment)


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """A server ends of itself, however busy the machine is."""
    monkeypatch.setattr(spawn_module, "KILL_SECONDS", 600.0)


@pytest.fixture
def spawn(tmp_path):
    """Start ranks of a script; whatever happens they are ended."""
    started = []

    def start(script, nproc, *arguments, environment=None):
        ranks = spawned(script, nproc, tmp_path, str(tmp_path), *arguments, environment=environment)
        started.append(ranks)
        return ranks

    yield start
    for ranks in started:
        ranks.kill()


@pytest.fixture
def server(monkeypatch):
    """A server of ranks, which finds the tests' modules; it is closed at the end."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "modules"), prepend=os.pathsep)
    with RankServer() as one:
        yield one


def ended(ranks):
    return until(lambda: None not in ranks.exit_codes().values() and ranks.exit_codes())


def until(condition, seconds=600.0):
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
    except (FileNotFoundError, ProcessLookupError):  # the second between opening and reading
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
        assert Topology(**place) == Topology(rank, 3, rank, 3, launched=True, master_port=port, restarts=True)
        assert facts["coordinator"] == f"127.0.0.1:{port}"
        assert facts["error_file"] == ranks.message_file(rank)
        assert facts["listened_to"]
        assert facts["group"] != os.getpgid(0)


def test_the_port_is_kept_for_rank_0(spawn):
    ranks = spawn(LISTENS, 2)
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("127.0.0.1", ranks.port))
    assert ended(ranks) == {0: 0, 1: 0}


def test_ranks_are_told_their_threads(spawn, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ended(spawn(TELLS, 1, environment=threads_of(3)))
    assert json.loads((tmp_path / "0.json").read_text())["threads"] == "3"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    ended(spawn(TELLS, 1, environment=threads_of(3)))
    assert json.loads((tmp_path / "0.json").read_text())["threads"] == "5"


def test_the_launcher_loads_no_framework():
    script = "import sys\nimport lockstep.launch.spawn\nprint(sorted({'jax', 'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_one_failure_ends_all_ranks_and_is_told_once(capfd):
    code = supervise(lambda logs: spawned(FAILS, 2, logs))
    assert code == 1
    assert capfd.readouterr().err == "lockstep: error: rank 1: the cart fell over\n"


def test_a_rank_that_is_killed_is_named(capfd):
    script = "import os, signal, time\nif os.environ['RANK'] == '0':\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    script += "time.sleep(3600)"
    assert supervise(lambda logs: spawned(script, 2, logs)) == 1
    assert "rank 0 was killed by SIGKILL; out of memory?" in capfd.readouterr().err


def test_ranks_that_end_well(capfd):
    assert supervise(lambda logs: spawned("pass", 2, logs)) == 0
    assert capfd.readouterr().err == ""


def test_a_signal_is_passed_on(spawn, tmp_path):
    ranks = spawn(STOPS, 2)
    until(lambda: (tmp_path / "ready0").exists() and (tmp_path / "ready1").exists())
    assert ranks.exit_codes() == {0: None, 1: None}
    ranks.send(signal.SIGTERM)
    assert ended(ranks) == {0: 0, 1: 0}
    ranks.send(signal.SIGTERM)  # nobody is left to get it


@needs_proc
@pytest.mark.parametrize("how", ["stay", "leave"])
@pytest.mark.parametrize("group", ["same group", "own group"])
def test_what_a_rank_started_ends_with_it(spawn, tmp_path, how, group):
    ranks = spawn(LEAVES, 1, how, group)
    worker = until(lambda: int((tmp_path / "worker").read_text()))
    if how == "leave":
        assert ended(ranks) == {0: 0}
        until(lambda: not alive(worker))
    else:
        assert alive(worker)
        assert ranks.exit_codes() == {0: None}
    ranks.kill()
    assert not alive(worker)
    assert ranks.exit_codes() == {0: 0 if how == "leave" else -signal.SIGKILL}


@needs_proc
def test_what_a_rank_started_in_a_session_of_its_own_ends_with_the_run(spawn, tmp_path):
    ranks = spawn(LEAVES, 1, "leave", "own session")
    worker = until(lambda: int((tmp_path / "worker").read_text()))
    assert ended(ranks) == {0: 0}
    assert alive(worker)  # its session isn't the rank's
    ranks.kill()
    assert not alive(worker)


@needs_proc
@pytest.mark.parametrize("whom", ["launcher", "server"])
@pytest.mark.parametrize("moment", ["at once", "later"])
def test_nobody_outlives_a_launcher_or_a_server_that_is_killed(tmp_path, whom, moment):
    script = KILLED_LAUNCHER.format(leaves=LEAVES, directory=str(tmp_path))
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    server, rank = (int(word) for word in launcher.stdout.readline().split())
    if moment == "later":
        until(lambda: (tmp_path / "worker").read_text())
    os.kill(launcher.pid if whom == "launcher" else server, signal.SIGKILL)
    until(lambda: not alive(rank) and not alive(server))
    if whom == "server":
        assert launcher.stdout.read() == "{0: -9}\n"
    launcher.wait()
    if moment == "later":
        worker = int((tmp_path / "worker").read_text())
        until(lambda: not alive(worker))


@needs_proc
@pytest.mark.parametrize("told", [False, True])
def test_a_server_that_is_killed_is_named_unless_a_rank_has_said_why_it_failed(spawn, tmp_path, capfd, told):
    def start(logs):
        ranks = spawn("import time; time.sleep(3600)", 2)
        if told:
            write_failure(Path(ranks.message_file(1)), "the cart fell over", secondary=False)
        ranks._server._process.kill()
        return ranks

    assert supervise(start) == 1
    why = "rank 1: the cart fell over" if told else "the process that starts the ranks was killed by SIGKILL"
    assert capfd.readouterr().err.startswith(f"lockstep: error: {why}")


@needs_proc
def test_a_server_whose_launcher_dies_ends_while_it_still_loads_the_engine():
    script = (
        "from lockstep.launch.spawn import RankServer\nprint(RankServer('torch')._process.pid, flush=True)\ninput()"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    server = int(launcher.stdout.readline())
    launcher.kill()
    launcher.communicate()
    until(lambda: not alive(server))


def test_a_check_runs_in_a_child_of_the_server_and_says_what_is_wrong(server):
    server.check("checking", "fine", value=3)
    with pytest.raises(ValueError, match="value: 4 is above 3; use 3"):
        server.check("checking", "user_error", value=4)
    with pytest.raises(RunError, match="the environment hung"):
        server.check("checking", "run_error", value=4)
    with pytest.raises(OSError, match="no such thing"):
        server.check("checking", "os_error", value=4)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        server.check("checking", "bug", value=0)
    with pytest.raises(RunError, match="made the environment to look at it was killed by SIGSEGV"):
        server.check("checking", "crash", value=0)
    with pytest.raises(RunError, match="made the environment to look at it ended with exit code 0"):
        server.check("checking", "leaves", value=0)
    server.check("checking", "leaves_a_child", value=0)  # which holds the pipe open
    server.check("checking", "fine", value=3)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGKILL, KilledError), (signal.SIGABRT, RunError)])
def test_a_server_that_is_gone_is_said_so(server, number, error):
    server._process.send_signal(number)
    with pytest.raises(error, match=f"the process that starts the ranks was killed by {number.name}"):
        server.check("checking", "fine", value=3)


def test_only_torch_on_cpus_of_linux_is_forked(monkeypatch):
    asked = []
    monkeypatch.setattr("lockstep.launch.spawn.RankServer", lambda *words, **options: asked.append((words, options)))
    monkeypatch.setattr(sys, "platform", "linux")
    rank_server(Config())
    rank_server(Config(device="cuda"))
    rank_server(Config(engine="jax"))
    monkeypatch.setattr(sys, "platform", "darwin")
    rank_server(Config())
    forked, gpu, jax, mac = asked
    assert forked == (("torch",), {"forks": True, "meeting": "file"})
    assert gpu == mac == (("torch",), {"forks": False, "meeting": "file"})
    assert jax == ((), {})


def test_fresh_ranks_take_a_first_ctrl_c_as_any_process_does(spawn, tmp_path):
    ready = "import sys, time\nfrom pathlib import Path\nPath(sys.argv[1], 'up').touch()\ntime.sleep(3600)"
    ranks = spawn(ready, 1)
    until(lambda: (tmp_path / "up").exists())
    ranks.send(signal.SIGINT)
    assert ended(ranks) == {0: -signal.SIGINT}


@needs_proc
def test_messages_that_arrive_together_are_all_read(spawn, tmp_path):
    ranks = spawn(STOPS, 2)
    until(lambda: (tmp_path / "ready0").exists() and (tmp_path / "ready1").exists())
    for _ in range(20):
        ranks.send(signal.SIGCONT)
    ranks.send(signal.SIGTERM)
    assert ended(ranks) == {0: 0, 1: 0}
    server = ranks._server._process
    ranks.kill()
    assert server.returncode == 0  # it ended of itself, having read the last message


@needs_proc
def test_orphans_of_a_rank_are_reaped_while_it_runs(spawn, tmp_path):
    script = (
        "import os, sys, time\nfrom pathlib import Path\n"
        "[os.system('sleep 0.01 &') for _ in range(5)]\nPath(sys.argv[1], 'done').touch()\ntime.sleep(3600)"
    )
    ranks = spawn(script, 1)
    until(lambda: (tmp_path / "done").exists())
    server = ranks._server._process.pid
    until(lambda: len(Path(f"/proc/{server}/task/{server}/children").read_text().split()) == 1)
    assert ranks.exit_codes() == {0: None}


def test_standard_input_is_a_scripts_own():
    script = "from lockstep.launch.script import start_script\nfrom lockstep.launch.supervise import supervise\n"
    script += "supervise(lambda logs: start_script(['-c', 'print(input())'], 1, logs))"
    done = subprocess.run([sys.executable, "-c", script], input="five\n", capture_output=True, text=True, check=True)
    assert done.stdout == "five\n"
