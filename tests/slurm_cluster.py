"""A Slurm cluster on this machine: two nodes, with a controller, a key and a place of their own, gone afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import marked, surroundings, wait_until
from free_ports import free_port

PACKAGES = ("slurm-wlm", "munge")
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
NODES = ("node1", "node2")
CPUS = 4
"""Of each node, by its configuration: more tasks than the machine has cores."""
KILL_WAIT = 5
"""Seconds between a job's SIGTERM and its SIGKILL."""
CONFIGURATION = """
ClusterName=lockstep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
# a requeued job waits for so many seconds, of which five are the least
AuthInfo=socket={directory}/munge/socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=0
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait={kill_wait}
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Cluster:
    """A cluster that runs.

    Attributes:
        environment: leads Slurm's commands to it.
        mark: of its daemons, by which their processes are found.
        names: whether the names of the nodes lead to addresses there.
    """

    environment: dict[str, str]
    mark: str
    names: bool

    def ask(self, *words: object) -> str:
        """What one of Slurm's commands prints, which must end well."""
        done = subprocess.run(
            list(map(str, words)), env=os.environ | self.environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """A job's state, such as ``RUNNING``, and how often it was started again: ``RUNNING 1``."""
        words = self.ask("scontrol", "show", "job", "--oneliner", job).split()
        fields = dict(word.split("=", 1) for word in words if "=" in word)
        return f"{fields['JobState']} {fields['Restarts']}"


def install() -> None:
    """Installs Slurm where it isn't; the test is skipped where that can't be."""
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons are started by root")
    if all(map(shutil.which, NEEDED)):
        return
    if shutil.which("apt-get") is None:
        pytest.skip(f"needs Slurm, and there is no apt-get to install {' and '.join(PACKAGES)}")
    said = ""
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for words in (("install", "-y", "--no-install-recommends", *PACKAGES), ("update",)) * 2:
        words = ("apt-get", "-o", "DPkg::Lock::Timeout=120", *words)
        done = subprocess.run(words, env=quiet, capture_output=True, text=True, timeout=600, check=False)
        said = done.stderr.strip() or said
        if all(map(shutil.which, NEEDED)):
            return
    pytest.skip(f"needs Slurm, which can't be installed here: {said[-200:]}")


def _configure(directory: Path) -> None:
    """Writes slurm.conf, the key of munged, and a table of hosts in which the nodes are."""
    for name in ("munge", "state", *NODES):
        (directory / name).mkdir(mode=0o755)
    (directory / "munge" / "key").touch(mode=0o400)
    (directory / "munge" / "key").write_bytes(os.urandom(128))
    port, *ports = [free_port() for _ in range(1 + len(NODES))]
    host = socket.gethostname()
    lines = [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={own} CPUs={CPUS} State=UNKNOWN"
        for node, own in zip(NODES, ports, strict=True)
    ]
    text = CONFIGURATION.format(
        host=host.partition(".")[0], port=port, directory=directory, kill_wait=KILL_WAIT, nodes="\n".join(lines)
    )
    (directory / "slurm.conf").write_text(text)
    (directory / "hosts").write_text(f"{Path('/etc/hosts').read_text()}\n127.0.0.1 {' '.join(NODES)}\n")


def _daemons(directory: Path) -> tuple[list[Sequence[str]], bool]:
    """Their command lines, and whether names of nodes lead somewhere: in a mount namespace, by a table of its own."""
    munge = directory / "munge"
    places = [f"--{what}={munge / name}" for what, name in (("key-file", "key"), ("socket", "socket"))]
    places += [f"--{what}={munge / name}" for what, name in (("pid-file", "pid"), ("seed-file", "seed"))]
    with_hosts = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', f"{directory}/hosts"]
    names = subprocess.run([*with_hosts, "true"], capture_output=True, check=False).returncode == 0
    nodes = [[*(with_hosts if names else []), "slurmd", "-D", "-N", node] for node in NODES]
    return [["munged", "--foreground", "--num-threads=2", *places], ["slurmctld", "-D", "-i"], *nodes], names


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """The cluster as long as the block runs."""
    mark, daemons = uuid.uuid4().hex, []
    directory = Path(tempfile.mkdtemp(prefix="slurm-"))
    directory.chmod(0o755)
    try:
        _configure(directory)
        conf = {"SLURM_CONF": str(directory / "slurm.conf")}
        words, names = _daemons(directory)
        cluster = Cluster(conf, mark, names)
        for number, line in enumerate(words):
            with (directory / f"{number}.out").open("w") as out:
                place = without_slurm(surroundings(mark, conf))
                line = ["setpriv", "--pdeathsig", "TERM", *line]  # it ends with the tests, however they end
                daemons.append(subprocess.Popen(line, env=place, cwd=directory, stdout=out, stderr=out))
            if number == 0:
                _wait((directory / "munge" / "socket").exists, "munged doesn't start", directory)
        _wait(lambda: _idle(cluster) == len(NODES), "nodes aren't idle", directory)
        yield cluster
        cluster.ask("scancel", "--user", "root")
        wait_until(lambda: not cluster.ask("squeue", "--noheader"), "jobs don't end", 60.0)
    finally:
        _end(daemons, mark)
        shutil.rmtree(directory, ignore_errors=True)


def without_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that isn't of the Slurm job in which tests may run, but for where Slurm is."""
    return {name: value for name, value in environ.items() if name == "SLURM_CONF" or not name.startswith("SLURM")}


def _idle(cluster: Cluster) -> int:
    """How many nodes are idle."""
    words, place = ["sinfo", "--noheader", "--Node", "--states=idle"], os.environ | cluster.environment
    asked = subprocess.run(words, env=place, capture_output=True, text=True, timeout=60, check=False)
    return len(asked.stdout.splitlines())


def _wait(condition: Callable[[], object], what: str, directory: Path) -> None:
    """Waits for the daemons; fails with what they said."""
    try:
        wait_until(condition, what, 60.0)
    except pytest.fail.Exception as failure:
        said = "\n".join(file.read_text()[-1000:] for file in sorted(directory.glob("*.out")))
        raise pytest.fail.Exception(f"{failure}\n{said}") from None


def _end(daemons: Sequence[subprocess.Popen[bytes]], mark: str) -> None:
    """Ends the daemons, and what they started."""
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in daemons:
        with suppress(subprocess.TimeoutExpired):
            daemon.wait(10)
    for pid in marked(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for daemon in daemons:
        daemon.wait()
