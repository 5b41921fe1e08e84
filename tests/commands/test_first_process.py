"""The command as the first process of a container, which the kernel spares the signals that it doesn't handle."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

OWN_NAMESPACE = ("unshare", "--map-root-user", "--pid", "--fork")
SIGNALLED = """
import os, signal, sys
import lockstep.cli as cli
here = os.getpid()
if "played" in sys.argv:
    os.getpid = lambda: 1
cli._run = lambda words: os.kill(here, signal.SIGTERM) or print("goes on") or 0
sys.exit(cli.main(["eval", "x"]))
"""


def signalled(*before: str, more: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*before, sys.executable, "-c", SIGNALLED, *more], capture_output=True, text=True)


def test_a_stop_signal_ends_what_takes_itself_for_the_first_process():
    done = signalled(more=("played",))
    assert (done.returncode, done.stdout) == (143, ""), done.stderr


def test_a_stop_signal_ends_the_first_process_of_a_container():
    if shutil.which("unshare") is None or subprocess.run([*OWN_NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("no namespace of processes can be made here")
    done = signalled(*OWN_NAMESPACE)
    assert (done.returncode, done.stdout) == (143, ""), done.stderr


def test_any_other_is_ended_by_the_signal_itself():
    assert signalled().returncode == -15
