"""A launcher that is killed at any moment leaves no process behind: no server, rank, worker, or what these started."""

import os
import random
import signal
import subprocess
import sys
import time
import uuid

import pytest
from command_line import NEEDS_PROC, SMALL, command, marked, surroundings, wait_until

TRAINED = ("--total-steps", 10**8, "--checkpoint.interval", 3, "--eval.interval", 0)
KINDS = {
    "torch, forked ranks": ("CartPole-v1", *SMALL, *TRAINED, "--nproc", 2),
    "torch, ranks with workers": ("CartPole-v1", *SMALL, *TRAINED, "--nproc", 2, "--env.workers", 2),
    "jax, processes": ("CartPole-v1", *SMALL, *TRAINED, "--engine", "jax", "--nproc", 2),
    "jax, processes with workers": (
        *("Pendulum-v1", *SMALL, *TRAINED, "--engine", "jax", "--nproc", 2, "--env.workers", 2),
    ),
}
KILLS = int(os.environ.get("LOCKSTEP_KILLS", "6"))
"""Of each kind."""
LONGEST = 8.0
"""Seconds after which a launcher is killed at the latest: some of them are training by then."""

pytestmark = [NEEDS_PROC, pytest.mark.long]


def kill_after(seconds: float, words: tuple, cwd) -> float:
    """Start ``lockstep train``, kill the launcher, and wait until nothing of it is left; the seconds that took."""
    mark = f"killed-{os.getpid()}-{random.getrandbits(64)}"
    nothing = subprocess.DEVNULL
    launcher = subprocess.Popen(
        command("train", *words), cwd=cwd, env=surroundings(mark), stdout=nothing, stderr=nothing
    )
    time.sleep(seconds)
    launcher.send_signal(signal.SIGKILL)
    assert launcher.wait() == -signal.SIGKILL  # it had not ended of itself
    killed = time.monotonic()
    wait_until(lambda: not marked(mark), f"processes outlive a launcher that was killed after {seconds:.2f} s")
    return time.monotonic() - killed


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_launcher_leaves_nobody(tmp_path, kind):
    moments = random.Random(kind)
    took = [kill_after(moments.uniform(0.0, LONGEST), KINDS[kind], tmp_path) for _ in range(KILLS)]
    print(f"{kind}: {len(took)} kills, the last process was gone after {max(took):.2f} s at most")
    assert len(took) == KILLS


def test_a_process_that_a_launcher_leaves_is_seen():
    mark = uuid.uuid4().hex
    script = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep({60})'])"
    subprocess.run([sys.executable, "-c", script], env=surroundings(mark), check=True)
    left = marked(mark)
    assert len(left) == 1
    os.kill(left[0], signal.SIGKILL)
    wait_until(lambda: not marked(mark), "it was killed")
