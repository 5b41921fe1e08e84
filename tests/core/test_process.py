"""How a process ends with its parent, also with one that was gone before it could ask; and what a command said."""

import os
import shlex
import signal
import subprocess
import sys
from functools import partial

import pytest

from lockstep.core.process import (
    command_that_ends_with_us,
    end_with_parent,
    read_failure,
    report_done,
    report_failure,
    said_error,
)

SAYS = [sys.executable, "-c", "print('here')"]


def test_a_process_whose_parent_is_gone_already_ends():
    not_its_parent = os.getppid()
    done = subprocess.run(SAYS, capture_output=True, text=True, preexec_fn=partial(end_with_parent, not_its_parent))
    assert (done.returncode, done.stdout) == (1, "")


def test_a_process_whose_parent_is_there_goes_on():
    done = subprocess.run(SAYS, capture_output=True, text=True, preexec_fn=partial(end_with_parent, os.getpid()))
    assert (done.returncode, done.stdout) == (0, "here\n")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells a child of its parent's end on Linux")
def test_a_command_that_ends_with_us_ends_at_once_below_another_parent():
    command = command_that_ends_with_us("--help")
    here = subprocess.run(command, capture_output=True, text=True)
    assert here.returncode == 0
    assert "train" in here.stdout
    shell = ["sh", "-c", f"{shlex.join(command)}; exit $?"]
    below = subprocess.run(shell, capture_output=True, text=True)
    assert (below.returncode, below.stdout) == (1, "")


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        ("lockstep: warning: hot\nlockstep: error: rank 1: it broke\n", "rank 1: it broke"),
        ("lockstep: error: one\nlockstep: error: two\nmore\n", "two"),
        ("Segmentation fault\n", "Segmentation fault"),
        ("", "exit status 3"),
    ],
)
def test_what_a_failed_command_said(stderr, said):
    assert said_error(stderr, 3) == said


def test_a_process_ends_though_nobody_can_be_told(tmp_path):
    code = "import sys; from lockstep.core.process import fail_now; sys.stderr.close(); fail_now('the last')"
    assert subprocess.run([sys.executable, "-c", code], timeout=600, check=False).returncode == 1


def test_a_fault_says_where_it_was_unless_nobody_can_be_told():
    """A segmentation fault is a line of Python then; a closed standard error is no fault of a command's."""
    fault = "from lockstep.core.process import tell_of_faults; tell_of_faults(); import os; os.kill(os.getpid(), 11)"
    ended = subprocess.run([sys.executable, "-c", fault], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGSEGV
    assert 'File "<string>", line 1' in ended.stderr
    quiet = "import sys; from lockstep.core.process import tell_of_faults; tell_of_faults(); print(sys.stderr)"
    command = f"exec {shlex.join([sys.executable, '-c', quiet])} 2>&-"
    told = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, text=True)
    assert (told.returncode, told.stdout) == (0, "None\n")


def test_a_failure_is_said_on_standard_error_where_its_file_cannot_be_written(tmp_path, monkeypatch, capsys):
    """Of a rank, whose launcher would say it: the disk of temporary files is full, or somebody has tidied up."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    monkeypatch.setenv("LOCKSTEP_LAUNCHER", "1")
    report_failure("the disk is full")
    assert capsys.readouterr().err == "lockstep: error: the disk is full\n"
    report_done()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    report_failure("the disk is full")
    assert capsys.readouterr().err == ""
    assert read_failure(str(tmp_path / "error.json")) == ("the disk is full", False)
