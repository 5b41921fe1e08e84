"""That a fault of the chaos driver strikes what it is aimed at, and what must be said of it."""

import dataclasses
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import NEEDS_PROC

from benchmarks.chaos.lines import expected_line, problem_of
from benchmarks.chaos.moments import Commit, Evaluation, commits_in, evaluation_of
from benchmarks.chaos.plan import CASES, Fault
from benchmarks.chaos.processes import Processes
from lockstep.core.life import LINE_BYTES, Life, Part

ALONE = Processes(10, {}, workers={10: (20, 21)})
SERVED = Processes(10, {13: 1, 12: 0}, (11,), {12: (20, 21), 13: (22, 23)}, (20, 21, 22, 23))
RUN = Path("/place/runs/run")
KILLED = "was killed by SIGKILL; out of memory?"


@pytest.mark.parametrize(
    ("words", "victims", "line", "others"),
    [
        (("kill", "rank"), [13], f"rank 1 {KILLED}", [f"rank 0 {KILLED}", "rank 1 was killed by SIGTERM", "rank 1: x"]),
        (("kill", "server"), [11], f"the process that starts the ranks {KILLED}", [f"rank 0 {KILLED}"]),
        (
            ("kill", "worker"), [23], f"rank 1: environment 6 (Pendulum-v1), worker process 1, {KILLED}",
            [f"rank 1: environment 6 (Pendulum-v1), worker process 0, {KILLED}",
             f"rank 0: environment 6 (Pendulum-v1), worker process 1, {KILLED}", f"rank 1 {KILLED}"],
        ),
        (("disk", "disk"), [], f"checkpoint {RUN}/checkpoints/step_9 can't be written: the disk is full; …",
            ["the disk is full", f"{RUN} is gone"]),
    ],
)  # fmt: skip
def test_the_one_line_must_say_what_was_struck_and_by_what(words, victims, line, others):
    expected = expected_line(Fault(words[0], words[1], "training", 1, 0.5), SERVED, victims, RUN, workers=2)
    assert problem_of(f"lockstep: warning: x\nlockstep: error: {line}\n", expected) is None
    for other in others:
        assert "another line than" in (problem_of(f"lockstep: error: {other}\n", expected) or "")
    assert "not one line" in (problem_of("", expected) or "")
    assert "not one line" in (problem_of(f"lockstep: error: {line}\nTraceback\n", expected) or "")


def test_workers_of_evaluations_have_numbers_of_their_own():
    processes = Processes(10, {}, workers={10: (20, 21, 22, 23)})
    fault = Fault("kill", "worker", "training", 1, 0.5)
    line = "lockstep: error: environment 0 (Pendulum-v1), worker process {}, " + KILLED
    for workers, numbers in ((2, [1]), (3, [0]), (None, [0, 1, 2, 3])):
        expected = expected_line(fault, processes, [23], RUN, workers)
        assert [n for n in range(5) if problem_of(line.format(n), expected) is None] == numbers
    assert [case.workers_of_a_rank for case in CASES] == [2 if case.workers else None for case in CASES]


def test_a_lone_worker_is_told_without_a_rank_and_a_stop_by_its_own_line():
    line = f"lockstep: error: environment 0 (Pendulum-v1), worker process 0, {KILLED}"
    assert problem_of(line, expected_line(Fault("kill", "worker", "training", 1, 0.5), ALONE, [20], RUN)) is None
    stop = expected_line(Fault("stop", "launcher", "training", 1, 0.5), SERVED, [10], RUN)
    assert problem_of("lockstep: stopped by a signal, with a checkpoint\n", stop) is None
    assert problem_of("lockstep: stopped by a signal before training began\n", stop) is not None


def test_silence_is_right_only_where_the_launcher_was_struck():
    launcher = Fault("kill", "launcher", "training", 1, 0.5)
    everything, rank = (dataclasses.replace(launcher, target=target) for target in ("everything", "rank"))
    for fault, processes in ((launcher, SERVED), (everything, SERVED), (rank, ALONE)):
        victims = fault.one_of(processes.of_role(fault.target))
        assert expected_line(fault, processes, victims, RUN) is None
    assert expected_line(rank, SERVED, rank.one_of(SERVED.of_role("rank")), RUN) is not None
    assert problem_of("", None) is None
    assert "said by nobody" in (problem_of("Segmentation fault\n", None) or "")


def test_a_worker_that_is_started_as_its_rank_is_killed_is_no_fault_of_the_run():
    """``spawn``'s own child finds nothing in its pipe; here one that is given an empty pipe says it."""
    read, write = os.pipe()
    os.close(write)
    program = f"from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=0, pipe_handle={read})"
    words = [sys.executable, "-c", program, "--multiprocessing-fork"]
    said = subprocess.run(words, pass_fds=(read,), capture_output=True, text=True, check=False).stderr
    os.close(read)
    assert said.endswith("EOFError: Ran out of input\n")
    assert problem_of(said, None) is None
    line = r"lockstep: error: rank 1 was killed"
    assert problem_of(f"{said}{line}\n", line) is None
    for other in (said.replace("EOFError", "ValueError"), said.replace("spawn.py", "wspawn.py"), f"{said}more\n"):
        assert "said by nobody" in (problem_of(other, None) or "")


def test_processes_have_roles():
    assert SERVED.of_role("everything") == [10, 11, 12, 13, 20, 21, 22, 23]
    assert (SERVED.of_role("worker"), SERVED.of_role("rank"), SERVED.of_role("disk")) == (
        [20, 21, 22, 23],
        [12, 13],
        [],
    )
    assert (ALONE.of_role("rank"), ALONE.of_role("server")) == ([10], [])
    assert (SERVED.place_of(23), ALONE.place_of(20)) == ((1, 1), (None, 0))


@NEEDS_PROC
def test_a_commit_is_seen_as_it_begins_and_was_torn_unless_it_is_in_its_place(tmp_path):
    with commits_in(tmp_path) as commits:
        assert commits.next(0.01) is None
        (tmp_path / ".step_7.old").mkdir()
        assert commits.next(10.0) is None
        temporary = tmp_path / ".step_256.99.tmp"
        temporary.mkdir()
        commit = commits.next(10.0)
    assert commit is not None
    assert commit == Commit(temporary)
    assert commit.struck()
    temporary.rename(tmp_path / "step_256")
    assert not commit.struck()


def test_folders_that_are_not_there_cannot_be_watched(tmp_path):
    with pytest.raises(OSError, match="No such file"), commits_in(tmp_path / "none"):
        pass


def test_an_evaluation_is_told_by_the_memory_in_which_a_rank_counts():
    memory = mmap.mmap(-1, 2 * LINE_BYTES)
    counting = Life()
    counting.share(memory, 1)
    struck = []
    for part in (Part.ROLLOUT, Part.EVALUATION, Part.LOGGING):
        counting.begin(part)
        struck.append((Evaluation(memory, 1).struck(), Evaluation(memory, 0).struck()))
    assert struck == [(False, False), (True, False), (False, False)]


@NEEDS_PROC
def test_the_memory_of_ranks_is_found_and_a_lone_process_has_none():
    descriptor, own = os.memfd_create("lockstep"), os.getpid()
    try:
        os.ftruncate(descriptor, 2 * LINE_BYTES)
        counting = Life()
        counting.share(mmap.mmap(descriptor, 2 * LINE_BYTES), 1)
        found = evaluation_of(Processes(1, {own: 1, -1: 0}), [own])
        assert found is not None
        assert (found.rank, found.struck()) == (1, False)
        counting.begin(Part.EVALUATION)
        assert found.struck()
    finally:
        os.close(descriptor)
    assert evaluation_of(ALONE, [10]) is None
