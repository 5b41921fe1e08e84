import dataclasses
import json
import time
from types import SimpleNamespace

import pytest

from benchmarks import steady_rate as rate_module
from benchmarks.cases import ARRAY_CARTPOLE, J3, T1
from benchmarks.process_tree import ProcessTree, Sample
from benchmarks.programs import ours, ours_with_jax
from benchmarks.steady_rate import MeasurementError, end_of_burst, evaluate, joint_rate, measure, steady_rate


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


def bursts(calls: int, size: int, seconds: float, apart: float = 1e-4) -> list[float]:
    """Arrival times of lines, ``size`` at once after each call."""
    return [seconds * (call + 1) + apart * line for call in range(calls) for line in range(size)]


def test_what_came_with_the_first_line_took_no_time_and_is_not_counted():
    times = bursts(4, 16, 1.6)  # a window that begins in the second burst, whose other lines were done by then
    assert steady_rate(times, 10) == pytest.approx(10 * 32 / 3.2, rel=1e-3)
    uneven = [1.0, 2.0, *bursts(4, 3, 3.0)[1:]]
    assert uneven[end_of_burst(uneven, 3)] == pytest.approx(3.0002)


def test_lines_that_are_merely_near_are_not_left_out():
    even, swinging = [float(t) for t in range(20)], [t + 0.4 * (t % 2) for t in range(20)]
    for times in (even, swinging):
        assert end_of_burst(times, 5) == 5
        assert steady_rate(times, 10) == 10 * 14 / (times[19] - times[5])


def test_lines_of_one_call_are_told_by_what_they_say_though_the_pipe_was_read_between_them():
    times, calls = bursts(4, 4, 1.0), [float(line // 4) for line in range(16)]
    times[4] -= 0.2  # the reader came in the middle of the second call's lines
    assert end_of_burst(times, 4) == 4
    assert end_of_burst(times, 4, calls) == 7
    assert steady_rate(times, 10, calls) == pytest.approx(10 * 8 / 2.0)


def test_lines_of_a_single_burst_are_no_figure():
    with pytest.raises(MeasurementError, match="the last 6 iterations came at once"):
        steady_rate(bursts(8, 1, 1.0), 10, [0.0, 0.0, *[1.0] * 6])


def test_copies_are_counted_from_the_end_of_a_burst():
    first, second = [2.5 + t for t in range(20)], bursts(10, 2, 2.0, apart=0.01)  # both are steady from 7.5 on
    assert joint_rate([first, second], 10) == pytest.approx(20.0, rel=0.01)


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


def test_all_that_is_said_of_a_row_of_bursts_is_of_the_same_window():
    program, times = ours_with_jax(J3, ARRAY_CARTPOLE, "exact", 2), bursts(4, 4, 1.0)
    records = [{"iteration": i + 1, "time/t_iter": 0.25 + 0.001 * (i // 4)} for i in range(16)]
    text = "".join(json.dumps(record) + "\n" for record in records).encode()
    seen = [(0.9, 0.0), (2.1, 2.0), (3.0, 3.8), (3.9, 5.6), (4.1, 90.0)]
    tree = ProcessTree(samples=[Sample(time, cpu, 1) for time, cpu in seen])
    measured = evaluate(program, [times], text, 1.0, tree)
    assert [record["iteration"] for record in measured.records] == [8, *range(9, 17)]
    assert measured.wall == pytest.approx(2.0)
    assert measured.steps_per_second == pytest.approx(8 * 1024 / 2.0)
    assert measured.cpu == pytest.approx(2.0 / (8 * 1024 / 2.0) * 1e6)


def test_cpu_time_is_of_the_steady_state_and_memory_of_all():
    program = dataclasses.replace(ours(T1, ARRAY_CARTPOLE, "exact"), package="other", steps_per_iteration=1000)
    seen = [(0.0, 0.0, 900), (2.5, 10.0, 500), (4.5, 11.0, 600), (6.5, 12.0, 500), (9.0, 20.0, 100)]
    tree = ProcessTree(samples=[Sample(*one) for one in seen])
    measured = evaluate(program, [[float(t) for t in range(8)]], b"", 1.0, tree)
    assert measured.steps_per_second == 1000.0
    assert measured.cpu == pytest.approx(500.0)  # half a core at a thousand steps/s
    assert measured.memory == 900


def test_a_program_is_measured_by_its_lines(scripted):
    measured = measure(scripted("for _ in range(40):\n    time.sleep(0.02)\n    say()\n"), 600)
    assert 0 < measured.steps_per_second < 2 * 10 / 0.02  # it sleeps; a line may be read late on a busy machine
    assert measured.records == []


def test_every_run_has_an_empty_place_for_what_jax_compiles(scripted, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "mine"))
    out = tmp_path / "places"
    body = f"import os, pathlib\nplace = os.environ['JAX_COMPILATION_CACHE_DIR']\nopen({str(out)!r}, 'a').write("
    body += "f'{place} {os.path.exists(place)}\\n')\nos.makedirs(place)\n"
    program = scripted(body + "for _ in range(8):\n    time.sleep(0.01)\n    say()\n")
    for _ in range(2):
        measure(program, 600)
    first, second = (line.split() for line in out.read_text().splitlines())
    assert first[1] == second[1] == "False"
    assert len({first[0], second[0], str(tmp_path / "mine")}) == 3


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
    measured = measure(scripted(HOLDING), 600, ProcessTree(shortest=0.0, share=float("inf")))
    assert measured.memory is not None
    assert measured.memory > 100 << 20


BESIDE_ANOTHER = """
import pathlib
here = pathlib.Path(__file__).parent
mine = here / f"{pathlib.Path.cwd().name}.said"
for line in range(40):
    time.sleep(0.02)
    mine.write_text("x" * line)
    while sum(file.stat().st_size >= line for file in here.glob("*.said")) < 2:
        time.sleep(0.001)
    say()
"""
"""A copy that waits before each line for the other one, for a busy machine may start it seconds later."""


def test_copies_are_run_at_once(scripted):
    measured = measure(scripted(BESIDE_ANOTHER, copies=2), 600)
    assert 0 < measured.steps_per_second < 2 * 2 * 10 / 0.02


def test_a_program_that_fails_says_why(scripted):
    with pytest.raises(MeasurementError, match="exit status 1: ValueError: no such thing"):
        measure(scripted("for _ in range(8):\n    say()\nraise ValueError('no such thing')\n"), 600)


def test_a_program_that_hangs_is_killed(scripted, tmp_path, monkeypatch):
    body = "import pathlib\nprint('nearly there', flush=True)\npathlib.Path(__file__).with_name('said').touch()\n"
    clock = SimpleNamespace(
        monotonic=lambda: 2.0 * (tmp_path / "said").exists(), sleep=time.sleep, perf_counter=time.perf_counter
    )
    monkeypatch.setattr(rate_module, "time", clock)
    with pytest.raises(MeasurementError, match="killed after 1 s; nearly there"):
        measure(scripted(body + "time.sleep(3600)\n"), 1.0)


def test_a_program_that_is_not_there_is_a_failure(scripted):
    program = dataclasses.replace(scripted("say()\n"), command=("/nonexistent/python", "{lines}"))
    with pytest.raises(MeasurementError, match="can't be started"):
        measure(program, 600)
