"""Hosts for tests, which are skipped where there can be none."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks import network_hosts
from benchmarks.network_hosts import Host, NoHostsError


@contextmanager
def joined_hosts(number: int) -> Iterator[list[Host]]:
    """Gives :func:`benchmarks.network_hosts.joined_hosts`, or skips the test."""
    try:
        with network_hosts.joined_hosts(number) as hosts:
            yield hosts
    except NoHostsError as error:
        pytest.skip(str(error))
