"""What calls of several iterations are told, and the episodes that they tell of."""

import subprocess
import sys
import threading

import numpy as np
import pytest
from jax import numpy as jnp
from jax_engine.small_programs import opened, small_config, trained

from lockstep.core.episodes import WINDOW
from lockstep.jax_engine.distributed.mesh import make_mesh
from lockstep.jax_engine.distributed.placement import place
from lockstep.jax_engine.program import calls
from lockstep.jax_engine.program.calls import CallClock, CallInputs, iterations_per_call
from lockstep.jax_engine.program.iterations import Finished, coefficients_of, finished, learning_rates


def one_by_one(returns, marks):
    """:func:`finished` of one iteration, episode by episode."""
    shards, steps, rows = marks.shape
    places = [(s, t, e) for t in range(steps) for s in range(shards) for e in range(rows) if marks[s, t, e]]
    episodes = [(float(returns[at]), int(marks[at] // 4), int(marks[at] % 4 - 2)) for at in places]
    return Finished(episodes[-WINDOW:], len(episodes))


@pytest.mark.parametrize("share", [0.0, 0.02, 0.9])
def test_episodes_are_found_in_the_order_of_steps_and_environments(share):
    rng, shape = np.random.default_rng(0), (3, 2, 16, 5)  # with 0.9 more than a window in each iteration
    marks = np.where(rng.random(shape) < share, rng.integers(1, 50, shape) * 4 + rng.integers(1, 4, shape), 0)
    marks[1] = 0  # an iteration without an end between two
    returns = rng.normal(size=shape).astype(np.float32)
    found = finished(returns, marks.astype(np.int32))
    assert found == [one_by_one(r, m) for r, m in zip(returns, marks, strict=True)]
    assert found[1] == Finished([], 0)
    assert (found[0].count > WINDOW) is (share == 0.9)


@pytest.fixture
def inputs():
    config = small_config()
    return CallInputs(config, make_mesh(num_devices=1), 1)


def test_a_call_is_told_its_iterations(inputs):
    capacity = iterations_per_call(small_config())
    (numbers, rates, _), stops, count = inputs(4, 3, 143, before=10)
    assert capacity > 3
    assert np.array_equal(numbers, np.arange(14, 14 + capacity))
    assert np.array_equal(rates, np.full(capacity, 5e-3, np.float32))
    assert (np.asarray(stops).tolist(), int(count)) == ([143], 3)


def test_what_is_the_same_is_not_placed_again_and_what_is_not_is(inputs):
    (numbers, rates, _), stops, count = inputs(0, 3, 0)
    (later, again, _), still, three = inputs(3, 3, 0)
    assert (again is rates, still is stops, three is count) == (True, True, True)
    assert int(later[0]) == 3
    assert int(numbers[0]) == 0
    _, stopping, two = inputs(6, 2, 143)
    assert (np.asarray(stopping).tolist(), int(two)) == ([143], 2)
    _, going_on, three = inputs(8, 3, 0)
    assert (np.asarray(going_on).tolist(), int(three)) == ([0], 3)


def test_numbers_that_a_call_left_on_the_mesh_are_not_placed_again(inputs):
    capacity = iterations_per_call(small_config())
    left = jnp.arange(13, 13 + capacity, dtype=jnp.int32)
    inputs.follows(3, left, before=10)
    assert inputs(3, 2, 0, before=10)[0].iteration is left
    elsewhere = inputs(5, 2, 0, before=10)[0].iteration
    assert np.array_equal(elsewhere, np.arange(15, 15 + capacity))


def test_only_a_call_that_goes_on_elsewhere_is_given_numbers(monkeypatch):
    run, placed = opened(small_config(), 1), []
    trained(run)
    monkeypatch.setattr(calls, "place", lambda value, sharding: placed.append(value) or place(value, sharding))
    on, elsewhere = trained(run, first=1, iterations=2), trained(run, first=7)
    assert [iteration.number for iteration in on + elsewhere] == [1, 2, 7]
    assert [numbers[0] for numbers in placed] == [7]


def test_learning_rates_of_a_schedule_are_those_of_the_iterations():
    config = small_config(ppo={"num_minibatches": 2, "learning_rate": 5e-3, "schedule": "linear"})
    told = CallInputs(config, make_mesh(num_devices=1), 1)
    for first in (0, 5):
        (_, rates, _), _, _ = told(first, 4, 0)
        assert np.array_equal(rates[:4], learning_rates(config, first, 4))
    assert float(rates[0]) < 5e-3


def test_a_call_is_told_scheduled_coefficients_and_only_those(inputs):
    assert inputs(0, 3, 0)[0].coefficients is None
    ppo = {"clip_schedule": "linear", "value_clip_range": 0.4}
    config = small_config(ppo=ppo)
    told = CallInputs(config, make_mesh(num_devices=1), 1)(5, 4, 0)[0].coefficients
    assert told is not None
    expected = coefficients_of(config, 5, 4)
    assert expected is not None
    assert told.keys() == expected.keys() == {"clip_range", "value_clip_range"}
    left = 1 - 128 * np.arange(5, 9) / config.total_steps
    for name, start in (("clip_range", 0.2), ("value_clip_range", 0.4)):
        assert np.array_equal(told[name][:4], expected[name])
        np.testing.assert_allclose(expected[name], start * left, rtol=1e-6)


# --- how long a call took ---------------------------------------------------------------------------------------------


class EndsAt:
    """What a call leaves, which is there at a time."""

    def __init__(self, now: list[float], end: float) -> None:
        self.now, self.end = now, end

    def block_until_ready(self) -> None:
        self.now[0] = self.end


def test_each_call_takes_from_the_end_of_the_one_before_however_late_the_host_reads():
    now = [0.0]
    clock = CallClock(lambda: now[0])
    now[0] = 10.0
    clock.begins()
    clock.follow(EndsAt(now, 13.0))
    clock.begins()  # while the first is under way
    clock.follow(EndsAt(now, 17.0))
    assert (clock.shares(1), clock.shares(1)) == ([(3.0, 13.0)], [(4.0, 17.0)])  # the host reads when both are over
    now[0] = 100.0  # an evaluation, or a checkpoint
    clock.begins()
    clock.follow(EndsAt(now, 102.0))
    assert clock.shares(1) == [(2.0, 102.0)]


def test_iterations_of_a_call_share_its_time_and_end_one_after_the_other():
    now = [0.0]
    clock = CallClock(lambda: now[0])
    clock.begins()
    clock.follow(EndsAt(now, 8.0))
    assert clock.shares(4) == [(2.0, 2.0), (2.0, 4.0), (2.0, 6.0), (2.0, 8.0)]


def test_a_call_that_fails_is_over_too():
    class Fails:
        def block_until_ready(self) -> None:
            raise RuntimeError("no memory")

    clock = CallClock(lambda: 5.0)
    for _ in range(2):  # and the thread goes on
        clock.begins()
        clock.follow(Fails())
        assert clock.shares(1) == [(0.0, 5.0)]


def test_the_thread_of_a_clock_ends_with_it():
    threads = {thread for thread in threading.enumerate() if thread.name == CallClock.THREAD}
    clock = CallClock()
    (own,) = {thread for thread in threading.enumerate() if thread.name == CallClock.THREAD} - threads
    del clock
    own.join(600)
    assert not own.is_alive()


def test_a_process_that_ends_while_a_call_is_under_way_ends_as_it_would():
    """A thread that came back from XLA then would end it by an abort."""
    code = """
import sys

import jax
from jax import numpy as jnp

from lockstep.jax_engine.program.calls import CallClock

long = jax.jit(lambda x: jax.lax.fori_loop(0, 20_000, lambda i, y: jnp.sin(y @ y), x))
clock = CallClock()
clock.begins()
clock.follow(long(jnp.ones((64, 64))))
sys.exit(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (3, "")
