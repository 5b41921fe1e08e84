import dataclasses
import json

import pytest

from benchmarks.cases import ARRAY_CARTPOLE, T1
from benchmarks.process_tree import ProcessTree, Sample
from benchmarks.programs import ours
from benchmarks.steady_rate import MeasurementError, evaluate, joint_rate, measure, steady_rate


def test_slow_first_quarter_is_left_out():
    times = [0.0, 10.0, 20.0, 20.5, 21.0, 21.5, 22.0, 22.5]  # 8 lines: the window begins at index 2
    assert steady_rate(times, 100) == pytest.approx(5 * 100 / 2.5)


def test_a_pause_between_iterations_counts():
    even = [float(t) for t in range(8)]
    paused = [*even[:6], 16.0, 17.0]
    assert steady_rate(paused, 10) == pytest.approx(10 * 5 / 15)
    assert steady_rate(paused, 10) < steady_rate(even, 10)


def test_too_few_lines_are_no_figure():
    with pytest.raises(MeasurementError, match="3 iterations are too few"):
        steady_rate([0.0, 1.0, 2.0], 10)


def test_lines_that_came_at_once_are_no_figure():
    with pytest.raises(MeasurementError, match="the last 6 iterations came at once"):
        steady_rate([5.0] * 8, 10)


def test_copies_are_counted_only_while_both_run():
    first = [float(t) for t in range(20)]  # steady from 5
    second = [10 + float(t) for t in range(20)]  # steady from 15: together from 15 to 19
    assert joint_rate([first, second], 10) == pytest.approx(20.0)
    alone_at_last = [*[5 + float(t) for t in range(15)], 19.1, 19.2, 19.3]  # faster once the other has gone
    assert joint_rate([first, alone_at_last], 10) == pytest.approx(20.0)
    assert steady_rate(first, 10) + steady_rate(alone_at_last, 10) > 22.0


def test_copies_that_did_not_overlap_are_no_figure():
    first, second = [float(t) for t in range(8)], [100.0 + t for t in range(8)]
    with pytest.raises(MeasurementError, match="hardly ran at the same time"):
        joint_rate([first, second], 10)


def test_records_are_those_of_the_steady_state():
    program = ours(T1, ARRAY_CARTPOLE, "exact")
    text = "".join(json.dumps({"iteration": i}) + "\n" for i in range(1, 9)).encode()
    measured = evaluate(program, [[float(t) for t in range(8)]], text, 1.0, ProcessTree())
    assert [record["iteration"] for record in measured.records] == [3, 4, 5, 6, 7, 8]
    assert measured.wall == 5.0
    assert (measured.cpu, measured.memory) == (None, None)


def test_cpu_time_is_of_the_steady_state_and_memory_of_all():
    program = dataclasses.replace(ours(T1, ARRAY_CARTPOLE, "exact"), package="other", steps_per_iteration=1000)
    seen = [(0.0, 0.0, 900), (2.5, 10.0, 500), (4.5, 11.0, 600), (6.5, 12.0, 500), (9.0, 20.0, 100)]
    tree = ProcessTree(samples=[Sample(*one) for one in seen])
    measured = evaluate(program, [[float(t) for t in range(8)]], b"", 1.0, tree)
    assert measured.steps_per_second == 1000.0
    assert measured.cpu == pytest.approx(500.0)  # half a core at a thousand steps/s
    assert measured.memory == 900


def test_a_program_is_measured_by_its_lines(scripted):
    measured = measure(scripted("for _ in range(8):\n    time.sleep(0.02)\n    say()\n"), 60)
    assert 0 < measured.steps_per_second < 2 * 10 / 0.02  # it sleeps; a line may be read late on a busy machine
    assert measured.records == []


HOLDING = """
import os, signal
read, write = os.pipe()
child = os.fork()
if child == 0:
    held = os.urandom(1 << 20) * 100
    os.write(write, b"x")
    signal.pause()
os.read(read, 1)
for _ in range(8):
    say()
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
"""


def test_memory_of_what_a_program_starts_counts(scripted):
    measured = measure(scripted(HOLDING), 60, ProcessTree(shortest=0.0, share=float("inf")))
    assert measured.memory is not None
    assert measured.memory > 100 << 20


def test_copies_are_run_at_once(scripted):
    body = "for _ in range(40):\n    time.sleep(0.02)\n    say()\n"
    measured = measure(scripted(body, copies=2), 60)
    assert 0 < measured.steps_per_second < 2 * 2 * 10 / 0.02


def test_a_program_that_fails_says_why(scripted):
    with pytest.raises(MeasurementError, match="exit status 1: ValueError: no such thing"):
        measure(scripted("for _ in range(8):\n    say()\nraise ValueError('no such thing')\n"), 60)


def test_a_program_that_hangs_is_killed(scripted):
    with pytest.raises(MeasurementError, match="killed after 1 s; nearly there"):
        measure(scripted("print('nearly there', flush=True)\ntime.sleep(600)\n"), 1.0)


def test_a_program_that_is_not_there_is_a_failure(scripted):
    program = dataclasses.replace(scripted("say()\n"), command=("/nonexistent/python", "{lines}"))
    with pytest.raises(MeasurementError, match="can't be started"):
        measure(program, 60)
