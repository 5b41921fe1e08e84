"""How a process ends with its parent, also with one that was gone before it could ask; and what a command said."""

import contextlib
import os
import pty
import shlex
import signal
import subprocess
import sys
from functools import partial

import pytest

from lockstep.core.process import (
    command_that_ends_with_us,
    end_with_parent,
    failure_line,
    open_closed_streams,
    read_failure,
    report_failure,
    say,
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
    assert failure_line(stderr, 3) == said


@pytest.mark.parametrize(
    ("stderr", "code", "said"),
    [
        ("", -signal.SIGKILL, "was killed by SIGKILL; out of memory?"),
        ("lockstep: restart 1 of 5: a rank\n", -signal.SIGKILL, "was killed by SIGKILL; out of memory?"),
        ("lockstep: error: no\n", -signal.SIGKILL, "no"),
        ("", -signal.SIGSEGV, "was killed by SIGSEGV"),
        ("free(): invalid pointer\n", -signal.SIGABRT, "free(): invalid pointer"),
    ],
)
def test_a_command_that_a_signal_ended(stderr, code, said):
    assert failure_line(stderr, code) == said


def test_a_process_ends_though_nobody_can_be_told():
    code = "import sys; from lockstep.core.process import fail_now; sys.stderr.close(); fail_now('the last')"
    assert subprocess.run([sys.executable, "-c", code], timeout=600, check=False).returncode == 1


@pytest.mark.parametrize(("term", "shown"), [("xterm", True), ("dumb", False), (None, False)])
def test_a_process_that_ends_at_once_leaves_the_terminals_cursor_visible(term, shown):
    """The live bar of a run hides it."""
    ours, theirs = pty.openpty()
    code = "from lockstep.core.process import fail_now; fail_now('the last')"
    known = {name: value for name, value in os.environ.items() if name != "TERM"} | ({"TERM": term} if term else {})
    for stdout in (theirs, subprocess.DEVNULL):
        ended = subprocess.run(
            [sys.executable, "-c", code], env=known, stdout=stdout, stderr=subprocess.PIPE, text=True
        )
        assert (ended.returncode, ended.stderr) == (1, "lockstep: error: the last\n")
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # its other side is closed
        said = os.read(ours, 100)
    os.close(ours)
    assert said == (b"\x1b[?25h" if shown else b"")


def test_a_fault_says_where_it_was_unless_nobody_can_be_told():
    """A segmentation fault is a line of Python then; a closed standard error is no fault of a command's."""
    fault = "import os; from lockstep.core import process; process.enable_fault_handler(); os.kill(os.getpid(), 11)"
    ended = subprocess.run([sys.executable, "-c", fault], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGSEGV
    assert 'File "<string>", line 1' in ended.stderr
    quiet = (
        "import sys; from lockstep.core.process import enable_fault_handler; enable_fault_handler(); print(sys.stderr)"
    )
    command = f"exec {shlex.join([sys.executable, '-c', quiet])} 2>&-"
    told = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, text=True)
    assert (told.returncode, told.stdout) == (0, "None\n")


def test_a_failure_is_said_on_standard_error_where_its_file_cannot_be_written(tmp_path, monkeypatch, capsys):
    """Of a rank, whose launcher would say it: the disk of temporary files is full, or somebody has tidied up."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    monkeypatch.setenv("LOCKSTEP_LAUNCHER", "1")
    report_failure("the disk is full")
    assert capsys.readouterr().err == "lockstep: error: the disk is full\n"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    report_failure("the disk is full")
    assert capsys.readouterr().err == ""
    assert read_failure(str(tmp_path / "error.json")) == ("the disk is full", False)


def test_what_is_said_is_heard_at_once(capsys):
    say("an error")
    say("a line", sys.stdout)
    assert capsys.readouterr() == ("a line\n", "an error\n")


def test_what_nobody_can_read_changes_nothing():
    """Python itself would end with 120, for what is left in the buffer."""
    program = """if True:
        import sys
        from lockstep.core.process import flush_output, say
        say("an error")
        print("what is buffered")
        say("a line", sys.stdout)
        flush_output()
        print("later")
        sys.exit(7)"""
    reading, writing = os.pipe()
    os.close(reading)
    variables = {**os.environ, "PYTHONUNBUFFERED": ""}
    ended = subprocess.run([sys.executable, "-c", program], stdout=writing, stderr=writing, env=variables)
    os.close(writing)
    assert ended.returncode == 7


def test_streams_that_are_closed_lead_nowhere(tmp_path):
    program = """if True:
        import os, sys
        from lockstep.core.process import open_closed_streams
        open_closed_streams()
        print("a line", flush=True)
        print("an error", file=sys.stderr)
        said = [os.path.realpath(f"/dev/fd/{number}") for number in range(3)]
        with open(sys.argv[1], "w") as file:
            file.write(" ".join([*said, sys.stdin.read(), str(file.fileno() > 2), str(os.get_inheritable(1))]))"""
    told = tmp_path / "told"
    command = f"exec {shlex.join([sys.executable, '-c', program, str(told)])} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command]).returncode == 0
    assert told.read_text() == "/dev/null /dev/null /dev/null  True True"


def test_streams_that_are_open_stay_as_they_are():
    before = sys.stdin, sys.stdout, sys.stderr
    open_closed_streams()
    assert (sys.stdin, sys.stdout, sys.stderr) == before


def test_children_that_a_process_was_given_are_left_alone():
    """As those of a shell in whose place it is."""
    code = """
import subprocess, sys
from lockstep.core.process import kill_children, exempt_present_children
given = subprocess.Popen(["sleep", "3600"])
exempt_present_children()
own = subprocess.Popen(["sleep", "3600"])
kill_children()
print(given.poll(), own.poll() is not None)
given.kill()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["None", "True"], done.stderr


def test_signs_that_a_terminal_lacks_are_written_by_their_numbers():
    code = "from lockstep.core.process import say; say('1 rank · 8 shards')"
    given = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=given)
    assert done.stderr == "1 rank \\xb7 8 shards\n"
