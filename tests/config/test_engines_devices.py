"""The default number of devices of a JAX process, and what is said where a machine has fewer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.engines import check_existing, default_devices
from lockstep.core.shards import check_world_size
from lockstep.core.tree import tree_of

SHARDS = st.integers(1, 40)


@pytest.mark.parametrize(
    ("num_shards", "cores", "processes", "devices"),
    [
        (8, 1, 1, 1),
        (8, 2, 1, 2),
        (8, 3, 1, 3),
        (8, 6, 1, 4),
        (8, 7, 1, 4),
        (8, 64, 1, 8),
        (7, 6, 1, 4),
        (12, 5, 1, 4),
        (12, 6, 1, 6),
        (2, 8, 1, 2),
        (1, 8, 1, 1),
        (8, 4, 2, 4),
        (8, 1, 2, 1),
        (8, 1, 4, 1),
        (None, 6, 1, 6),
        (None, 3, 2, 3),
        (8, 0, 4, 1),
        (None, 0, 4, 1),
    ],
)
def test_one_device_a_core_unless_fewer_leave_nobody_more_shards(num_shards, cores, processes, devices):
    assert default_devices(num_shards, cores, processes) == devices


def test_the_processes_of_other_machines_share_the_shards_but_not_the_cores():
    assert default_devices(8, 8, processes=1) == 8
    assert default_devices(8, 8, processes=4) == 2
    assert default_devices(8, 4, processes=4) == 2
    assert default_devices(8, 8, processes=3) == 2
    assert default_devices(8, 8, processes=9) == 1  # too many: check_world_size says so


@given(SHARDS, st.sampled_from([1, 2, 3, 4]), st.integers(1, 200))
def test_the_default_fits_and_no_other_leaves_the_busiest_device_less(num_shards, processes, cores):
    devices = default_devices(num_shards, cores, processes)
    if processes > num_shards:
        assert devices == 1
        return
    check_world_size(processes * devices, num_shards)

    def busiest(n):
        return tree_of(num_shards, processes * n).most_shards

    possible = [n for n in range(1, cores + 1) if processes * n <= num_shards]
    assert busiest(devices) == min(map(busiest, possible))
    assert devices == min(n for n in possible if busiest(n) == busiest(devices))


def test_a_cpu_has_as_many_devices_as_cores():
    check_existing(2, 2)
    with pytest.raises(ValueError, match=r"^devices: 3 asked for .* CPU has 2 .* --simulate-devices 3$"):
        check_existing(3, 2)


@pytest.mark.parametrize(("devices", "processes", "works"), [(9, 1, False), (5, 1, True), (5, 2, False), (4, 2, True)])
def test_simulated_devices_are_named_only_where_they_can_share_the_shards(devices, processes, works):
    with pytest.raises(ValueError, match=r"use --devices 2") as caught:
        check_existing(devices, 2, processes, 8)
    assert (f"--simulate-devices {devices}" in str(caught.value)) is works
