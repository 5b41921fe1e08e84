"""What processes of the JAX engine tell one another, where it is more than a collective carries at once."""

import mmap
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from lockstep.jax_engine.distributed import processes


class Gathering:
    """``process_allgather`` among threads; ``widths`` are of what the first of them gave."""

    def __init__(self, count):
        self.widths, self._given = [], [np.zeros(0)] * count
        self._barrier, self._own = threading.Barrier(count, timeout=600), threading.local()

    def gathered(self, rank, payload):
        self._own.rank = rank
        return processes.gather_bytes(payload)

    def __call__(self, array):
        self._given[self._own.rank] = array
        self._barrier.wait()
        rows = np.stack(self._given)
        self._barrier.wait()
        if self._own.rank == 0:
            self.widths.append(array.shape[0])
        return rows


@pytest.mark.parametrize(
    ("sizes", "widths"),
    [
        ((0, 0), [256]),
        ((3, 300), [512]),
        ((512, 0), [512]),
        ((513, 20), [512, 256]),
        ((0, 1500), [512, 512, 512]),
        ((1024, 1025), [512, 512, 256]),
    ],
)
def test_more_than_one_collective_carries_travels_in_pieces(monkeypatch, sizes, widths):
    gathering = Gathering(len(sizes))
    monkeypatch.setattr(processes, "MOST_WIDTH", 512)
    monkeypatch.setattr(processes.multihost_utils, "process_allgather", gathering)
    monkeypatch.setattr(processes.jax, "process_count", lambda: len(sizes))
    payloads = [np.random.default_rng(rank).bytes(size) for rank, size in enumerate(sizes)]
    with ThreadPoolExecutor(len(sizes)) as pool:
        found = list(pool.map(gathering.gathered, range(len(sizes)), payloads))
    assert found == [payloads] * len(sizes)
    assert gathering.widths == [2, *widths]


class SizesToldError(Exception):
    """What follows would take the memory."""


def test_a_size_of_two_gibibytes_is_told(monkeypatch):
    told = []

    def stop(array):
        told.append(array)
        raise SizesToldError

    monkeypatch.setattr(processes.multihost_utils, "process_allgather", stop)
    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    payload = mmap.mmap(-1, (1 << 31) + 5)  # no memory is taken until it is read
    with pytest.raises(SizesToldError):
        processes.gather_bytes(payload)  # pyright: ignore[reportArgumentType]
    assert told[0].tolist() == [2, 5]


@pytest.mark.parametrize(("size", "widths"), [(0, []), (512, [512]), (1100, [512, 512, 76])])
def test_what_is_broadcast_travels_in_pieces_too(monkeypatch, size, widths):
    first, sent = np.random.default_rng(0).bytes(size), []

    def broadcast(piece):
        start = sum(sent)
        sent.append(len(piece))
        return np.frombuffer(first[start : start + len(piece)], np.uint8)

    monkeypatch.setattr(processes, "MOST_WIDTH", 512)
    monkeypatch.setattr(processes, "gather_json", lambda length: [size, length])
    monkeypatch.setattr(processes.multihost_utils, "broadcast_one_to_all", broadcast)
    assert processes.broadcast_bytes(b"another's") == first
    assert sent == widths
