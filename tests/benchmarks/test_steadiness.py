"""The benchmark says whether the machine was as fast all the time."""

from benchmarks import side_by_side
from benchmarks.steadiness import loop_seconds, steadiness


def test_a_steady_machine_is_described_and_an_unsteady_one_named():
    steady = steadiness([0.066, 0.065, 0.070, 0.067])
    assert steady == "the same loop of Python took 66 ms (fastest 65, slowest 70), 4 times in the course of the run"
    unsteady = steadiness([0.065] * 8 + [0.150] * 2)
    assert "took 65 ms (fastest 65, slowest 150), 10 times" in unsteady
    assert unsteady.endswith("; a tenth took 2.3 times the fastest or more: others use these cores too")


def test_one_slow_loop_of_many_is_no_neighbour():
    assert "others" not in steadiness([0.065] * 19 + [0.4])


def test_the_loop_is_timed_by_the_clock():
    ticks = iter((5.0, 7.5))
    assert loop_seconds(lambda: next(ticks)) == 2.5


def test_the_machine_is_looked_at_before_every_program(scripted):
    looked = []
    good = scripted("for _ in range(8):\n    time.sleep(0.001)\n    say()\n")
    side_by_side.run_interleaved([good, good], 2, 60, lambda: looked.append(len(looked)))
    assert looked == [0, 1, 2, 3]
