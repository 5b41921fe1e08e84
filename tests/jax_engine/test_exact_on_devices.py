"""Training on several devices of one process: the bytes of one device, whatever way devices meet."""

from functools import cache

import pytest
from kinds_of_training import CHANGES
from small_programs import apart, arrays_of, copies_equal, opened, small_config, trained
from variants import variants

pytestmark = pytest.mark.exact

EXACT = (
    *("exact", "exact by xla", "normalized", "grpo", "grpo, steps draw", "kl", "dropout"),
    "recurrent, normalized by shard",
    "recurrent, a step at a time",
)


@cache
def two_iterations(kind: str, devices: int):
    """What two iterations told, and their run."""
    run = opened(small_config(devices, **CHANGES[kind]), devices)
    return trained(run, 2), run


@pytest.mark.parametrize(
    ("kind", "devices"),
    variants([(kind, devices) for kind in EXACT for devices in (3, 5)], [("grpo, steps draw", 3), (EXACT[-1], 3)]),
)
def test_devices_with_different_numbers_of_shards_train_what_one_does(kind, devices):
    expected, one = two_iterations(kind, 1)
    found, run = two_iterations(kind, devices)
    assert apart(arrays_of(one), arrays_of(run)) == 0.0
    assert [iteration.episodes for iteration in found] == [iteration.episodes for iteration in expected]
    assert [iteration.numbers for iteration in found] == [iteration.numbers for iteration in expected]
    assert copies_equal(run)


@pytest.mark.parametrize("kind", variants(["exact", "fast", "periodic", "normalized"], ["exact"]))
def test_the_agent_is_the_same_whatever_way_devices_meet(kind):
    runs = [opened(small_config(4, **CHANGES[name]), 4, capacity=2) for name in (kind, f"{kind} by xla")]
    assert [run.program.transport for run in runs] == ["shared memory", "xla"]
    for run in runs:
        trained(run, 3)
    one, other = map(arrays_of, runs)
    assert apart(one, other) == 0.0
