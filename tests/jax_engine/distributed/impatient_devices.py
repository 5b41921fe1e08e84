"""Collectives in memory that go wrong, in a process that waits five seconds; ``test_compiled_memory.py`` starts it."""

import os
import re
import signal
import subprocess
import time

import jax
import pytest

from lockstep.jax_engine.distributed import reductions, shared_memory
from lockstep.jax_engine.distributed.reductions import device_index, sum_shards

shared_memory.FLAGS = (*shared_memory.FLAGS, "-DPATIENCE_S=5")

from test_memory_of_devices import fetched, over, rows  # noqa: E402


def said_by_two(function, x):
    """What each of two devices fails with: one may only see that the other has."""
    said = []
    for shard in over(function, 2)(x).addressable_shards:
        with pytest.raises(jax.errors.JaxRuntimeError) as error:
            jax.block_until_ready(shard.data)
        said.append(str(error.value))
    return said


def test_a_device_that_does_not_come_is_not_waited_for_for_ever():
    def of_a_device(x):
        return jax.lax.cond(device_index() == 0, lambda x: sum_shards(x), lambda x: x[0], x)

    with pytest.raises(Exception, match="device 0 of 2 has waited 5 s for the others"):
        jax.block_until_ready(over(of_a_device, 2)(rows(2, 4)))


def test_time_for_which_the_process_is_stopped_is_no_waiting():
    """The device that comes late does so because all are stopped; the others wake before it goes on."""

    def stop(x):
        time.sleep(1.5)
        waker = subprocess.Popen(["sh", "-c", f"sleep 7; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        waker.wait()
        time.sleep(0.5)
        return x

    def of_a_device(x):
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        late = jax.lax.cond(device_index() == 1, lambda x: jax.pure_callback(stop, like, x), lambda x: x, x)
        return sum_shards(late)

    x = rows(2, 4)
    assert fetched(over(of_a_device, 2)(x)).tobytes() == fetched(over(sum_shards, 2)(x)).tobytes()


def test_devices_that_are_in_different_collectives_are_told():
    """Of the same size, so that they would exchange what isn't meant for one another."""

    def of_a_device(x):
        return jax.lax.cond(device_index() == 0, lambda x: sum_shards(x), lambda x: sum_shards(-x), x)

    said = said_by_two(of_a_device, rows(2, 4))
    assert "met in different collectives" in " ".join(said), said


def test_devices_that_bring_messages_of_different_sizes_are_told(monkeypatch):
    monkeypatch.setattr(reductions, "_number_in_memory", lambda: 7)

    def of_a_device(x):
        long = lambda x: sum_shards(x).sum()  # noqa: E731
        return jax.lax.cond(device_index() == 0, long, lambda x: long(x[:, :2]), x)

    said = said_by_two(of_a_device, rows(2, 4))
    assert re.search("met with messages of (16 and 8|8 and 16) bytes", " ".join(said)), said


def test_after_that_programs_run_as_before():
    x = rows(8, 12)
    assert fetched(over(sum_shards, 2)(x)).tobytes() == fetched(over(sum_shards, 1)(x)).tobytes()
