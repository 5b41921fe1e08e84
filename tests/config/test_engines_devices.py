"""The default number of devices of a JAX process, and what is said where devices and shards don't fit."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.engines import check_devices, check_existing, default_devices

SHARDS = st.sampled_from([1, 2, 4, 8, 16, 64])


@pytest.mark.parametrize(
    ("num_shards", "processes_here", "cores", "devices"),
    [
        (8, 1, 1, 1),
        (8, 1, 2, 2),
        (8, 1, 3, 2),
        (8, 1, 6, 4),
        (8, 1, 64, 8),
        (2, 1, 8, 2),
        (1, 1, 8, 1),
        (8, 2, 8, 4),
        (8, 2, 2, 1),
        (8, 4, 2, 1),
        (None, 1, 6, 4),
        (None, 2, 6, 2),
    ],
)
def test_one_device_a_core_as_far_as_the_shards_divide(num_shards, processes_here, cores, devices):
    assert default_devices(num_shards, processes_here, cores) == devices


def test_the_processes_of_other_machines_share_the_shards_but_not_the_cores():
    assert default_devices(8, 1, 8, processes=1) == 8
    assert default_devices(8, 1, 8, processes=4) == 2
    assert default_devices(8, 2, 8, processes=4) == 2
    assert default_devices(8, 1, 8, processes=3) == 1  # nothing fits: check_devices says so


@given(SHARDS, st.sampled_from([1, 2, 4]), st.integers(1, 200))
def test_the_default_fits_and_nothing_larger_does(num_shards, processes, cores):
    devices = default_devices(num_shards, processes, cores)
    if processes <= num_shards:
        check_devices(processes * devices, num_shards, num_shards)
    larger = range(devices + 1, cores // processes + 1)
    assert [n for n in larger if num_shards % (processes * n) == 0] == []


@given(st.integers(-2, 70), SHARDS)
def test_numbers_of_devices_that_an_error_offers_work(devices, num_shards):
    try:
        check_devices(devices, 3 * num_shards, num_shards)
    except ValueError as error:
        offered = re.findall(r"\d+", str(error).partition("nearest that work: ")[2].partition("devices")[0])
        assert offered
        for number in offered:
            check_devices(int(number), 3 * num_shards, num_shards)
    else:
        assert devices > 0
        assert num_shards % devices == 0


def test_devices_that_do_not_divide_the_environments():
    with pytest.raises(ValueError, match=r"^devices: 3 can't share 10 environments in 2 shards equally") as caught:
        check_devices(3, 10, 2)
    assert "\n" not in str(caught.value)


def test_a_cpu_has_as_many_devices_as_cores():
    check_existing(2, 2)
    with pytest.raises(ValueError, match=r"^devices: 3 asked for .* CPU has 2 .* --simulate-devices 3$"):
        check_existing(3, 2)


@pytest.mark.parametrize(("devices", "processes", "works"), [(64, 1, False), (8, 1, True), (8, 2, False), (4, 2, True)])
def test_simulated_devices_are_named_only_where_they_can_share_the_shards(devices, processes, works):
    with pytest.raises(ValueError, match=r"use --devices 2") as caught:
        check_existing(devices, 2, processes, 8)
    assert (f"--simulate-devices {devices}" in str(caught.value)) is works
