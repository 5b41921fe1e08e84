"""What is freed stays with the process: arrays of each iteration aren't mapped and filled with zeros anew."""

import os
import platform
import subprocess
import sys

import pytest

from lockstep.core.machine import HEAP_VARIABLES, MALLOC_VARIABLES, keep_freed_memory

GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
FAULTS = """
import ctypes, resource, sys, threading
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no huge pages, of which each costs one fault
from lockstep.core.machine import keep_freed_memory
how, where, *sizes = sys.argv[1:]
if how != "leave":
    assert keep_freed_memory(one_heap=how == "one heap")
def make():
    arrays = [b"1" * int(size) for size in sizes]
    del arrays
def round():
    if where == "here":
        return make()
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
for _ in range(3):
    round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


NINE = (1 << 20,) * 9
LARGE = (48 << 20,)


def faults(
    how: str, where: str = "here", sizes: tuple[int, ...] = NINE, variables: dict[str, str] | None = None
) -> int:
    """Page faults of twenty rounds of the same bytes."""
    set_here = (*MALLOC_VARIABLES, *HEAP_VARIABLES)
    plain = {name: value for name, value in os.environ.items() if name not in set_here} | (variables or {})
    found = subprocess.run(
        [sys.executable, "-c", FAULTS, how, where, *map(str, sizes)],
        env=plain,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(found.stdout)


@GLIBC
def test_the_same_arrays_again_cost_no_page():
    pages = 20 * (9 << 20) // os.sysconf("SC_PAGESIZE")
    assert faults("keep") < pages // 50
    assert faults("leave") > pages // 4  # the negative: without it they do


@GLIBC
def test_one_heap_keeps_what_threads_take_at_a_time():
    pages = 20 * LARGE[0] // os.sysconf("SC_PAGESIZE")
    assert faults("one heap", "in threads", LARGE) < pages // 50
    assert faults("keep", "in threads", LARGE) > pages // 4  # the negative: each is mapped anew


@GLIBC
@pytest.mark.parametrize("name", HEAP_VARIABLES)
def test_a_users_own_heaps_stay_and_what_is_small_is_kept(name):
    pages = 20 * LARGE[0] // os.sysconf("SC_PAGESIZE")
    assert faults("one heap", "in threads", LARGE, {name: "64"}) > pages // 4
    assert faults("one heap", variables={name: "64"}) < 20 * (9 << 20) // os.sysconf("SC_PAGESIZE") // 50


@pytest.mark.parametrize("name", MALLOC_VARIABLES)
def test_a_users_own_choice_stays(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert not keep_freed_memory()


def test_elsewhere_nothing_is_done(monkeypatch):
    for name in MALLOC_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("lockstep.core.machine.sys.platform", "darwin")
    assert not keep_freed_memory()
