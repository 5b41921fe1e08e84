"""A watch on a training loop in the test's own process."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.doctor.watch.schedule import Schedule
from lockstep.doctor.watch.side_store import SideWriter


@pytest.fixture
def watch(tmp_path: Path) -> Iterator:
    from lockstep.doctor.watch.torch.hooks import TorchWatch  # PyTorch: not for tests that don't need it

    gc.collect()
    made = TorchWatch(SideWriter(tmp_path, 0), Schedule(first=3, interval=5))
    yield made
    made.remove()
