"""Ports that tests give to processes are still free when these bind them."""

import socket

import pytest
from free_ports import KERNELS, LOWEST, free_port


@pytest.mark.skipif(not KERNELS.exists(), reason="asks the kernel which ports it hands out")
def test_ports_of_processes_are_none_that_the_kernel_hands_out():
    first, last = map(int, KERNELS.read_text().split())
    if first - LOWEST < 1000:
        pytest.skip("the kernel hands out all ports from a low one on")
    found = [free_port() for _ in range(100)]
    assert len(set(found)) == 100
    assert not [port for port in found if first <= port <= last]


def test_a_port_that_somebody_has_is_passed_over():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port() + 2))
        assert free_port() not in (taken.getsockname()[1], taken.getsockname()[1] - 1)
