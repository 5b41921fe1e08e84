import io
import math
import struct

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow
from tensorboard.summary.writer.record_writer import RecordWriter
from tracker_files import RETURN, log_all, make_record, read_scalars

from lockstep.core.life import life
from lockstep.runs.trackers.tensorboard import (
    FLOAT32_LIMIT,
    Scalars,
    TensorBoardTracker,
    cut_tensorboard,
    framed,
)


def test_tensorboard_writes_all_metrics_but_no_counters_at_the_global_step(tmp_path):
    tracker = TensorBoardTracker(tmp_path)
    tracker.log(make_record(0, **{"train/kl": math.nan, "train/loss": None, "train/n": np.int64(3), "mine": 0.5}))
    tracker.log(make_record(1, 2.5, **{"train/kl": np.float32(0.25)}))
    expected = {RETURN: [(100, 1.5), (200, 2.5)], "train/kl": [(200, 0.25)], "train/n": [(100, 3.0)]}
    expected["mine"] = [(100, 0.5)]  # as a callback may call it
    assert read_scalars(tmp_path) == expected  # flushed: readable before the tracker is closed
    tracker.close()


@pytest.mark.parametrize(
    "values",
    [
        {"a/b": 0.0},
        {"a/b": 1.5, "c/ü": -2},
        {f"train/{n}": n / 7 for n in range(40)},
        {"a/big": 1e300, "a/low": -1e39},
        {},
    ],
)
def test_scalars_are_serialised_as_the_library_does(values):
    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
    step, expected = Event(step=7), Event(step=7, summary=summary).SerializeToString()
    scalars = Scalars(values)
    for _ in range(2):
        assert step.SerializeToString() + scalars.with_values(values.values()) == expected


def test_the_largest_float32_is_no_infinity_and_the_next_number_is():
    scalars = Scalars(["a/b"])
    largest = float(np.finfo(np.float32).max)
    assert scalars.with_values([largest]).endswith(struct.pack("<f", largest))
    assert scalars.with_values([FLOAT32_LIMIT]).endswith(struct.pack("<f", math.inf))
    assert scalars.with_values([-(10**400)]).endswith(struct.pack("<f", -math.inf))
    below = math.nextafter(FLOAT32_LIMIT, 0)
    assert scalars.with_values([below]).endswith(struct.pack("<f", largest))


def test_tensorboard_keeps_metrics_apart_that_come_and_go(tmp_path):
    tracker = TensorBoardTracker(tmp_path)
    for iteration, more in enumerate([{"train/a": 1.0}, {"train/b": 2.0}, {"train/a": 3.0, "train/b": 4.0}, {}]):
        tracker.log(make_record(iteration, float(iteration), **more))
    tracker.close()
    expected = {"train/a": [(100, 1.0), (300, 3.0)], "train/b": [(200, 2.0), (300, 4.0)]}
    assert read_scalars(tmp_path) == {RETURN: [(100, 0.0), (200, 1.0), (300, 2.0), (400, 3.0)], **expected}


def test_tensorboard_keeps_text_for_the_text_tab(tmp_path):
    tracker = TensorBoardTracker(tmp_path)
    tracker.text("config", "# num_envs: 8 – é")
    log_all(tracker, range(3))
    cut_tensorboard(tmp_path, last_global_step=100)
    log_all(TensorBoardTracker(tmp_path), [1])
    accumulator = EventAccumulator(str(tmp_path)).Reload()
    assert list(accumulator.PluginTagToContent("text")) == ["config"]
    (event,) = accumulator.Tensors("config")
    assert event.step == 0
    assert event.tensor_proto.string_val[0].decode() == "# num_envs: 8 – é"
    assert [event.step for event in accumulator.Scalars(RETURN)] == [100, 200]


def test_a_run_that_begins_again_has_its_text_once(tmp_path):
    for said in ("first", "second"):
        cut_tensorboard(tmp_path, last_global_step=0)
        tracker = TensorBoardTracker(tmp_path)
        tracker.text("config", said)
        log_all(tracker, range(2))
    accumulator = EventAccumulator(str(tmp_path), purge_orphaned_data=False).Reload()
    assert [event.tensor_proto.string_val[0].decode() for event in accumulator.Tensors("config")] == ["second"]
    assert [event.step for event in accumulator.Scalars(RETURN)] == [100, 200]
    assert len(list(tmp_path.iterdir())) == 2


def test_tensorboard_sees_each_step_once_after_cuts_and_continued_writing(tmp_path):
    log_all(TensorBoardTracker(tmp_path), range(6))
    cut_tensorboard(tmp_path, last_global_step=300)
    assert [step for step, _ in read_scalars(tmp_path)[RETURN]] == [100, 200, 300]
    log_all(TensorBoardTracker(tmp_path), range(3, 8))
    cut_tensorboard(tmp_path, last_global_step=500)
    log_all(TensorBoardTracker(tmp_path), range(5, 7))
    assert [step for step, _ in read_scalars(tmp_path)[RETURN]] == [100, 200, 300, 400, 500, 600, 700]
    # The cut is in the files, not in a marker that TensorBoard obeys when it reads them.
    reader = EventAccumulator(str(tmp_path), purge_orphaned_data=False).Reload()
    assert [event.step for event in reader.Scalars(RETURN)] == [100, 200, 300, 400, 500, 600, 700]
    assert all(path.name.startswith("events.out.tfevents.") for path in tmp_path.iterdir())


def test_a_tensorboard_that_is_open_during_the_resume_sees_each_step_once(tmp_path):
    log_all(TensorBoardTracker(tmp_path), range(6))
    reader = EventAccumulator(str(tmp_path)).Reload()
    assert len(reader.Scalars(RETURN)) == 6
    cut_tensorboard(tmp_path, last_global_step=300)
    tracker = TensorBoardTracker(tmp_path)
    tracker.log(make_record(3, 8.0))
    tracker.close()
    assert [(e.step, e.value) for e in reader.Reload().Scalars(RETURN)] == [
        (100, 1.5),
        (200, 1.5),
        (300, 1.5),
        (400, 8.0),
    ]


@pytest.mark.parametrize("bytes_lost", [1, 4, 30])
def test_cut_tensorboard_drops_a_torn_record(tmp_path, bytes_lost):
    log_all(TensorBoardTracker(tmp_path), range(4))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-bytes_lost])
    cut_tensorboard(tmp_path, last_global_step=9999)
    log_all(TensorBoardTracker(tmp_path), [3])
    assert [step for step, _ in read_scalars(tmp_path)[RETURN]] == [100, 200, 300, 400]
    (first, _) = sorted(tmp_path.iterdir())
    whole = first.read_bytes()
    cut_tensorboard(tmp_path, last_global_step=9999)
    assert first.read_bytes() == whole  # what stays is copied byte for byte


def test_tensorboard_file_names_sort_after_those_of_other_writers(tmp_path):
    (tmp_path / "events.out.tfevents.1700000000.host.1.0").write_bytes(b"")
    (tmp_path / "events.out.tfevents.odd").write_bytes(b"")
    TensorBoardTracker(tmp_path).close()
    assert (tmp_path / "events.out.tfevents.1700000001.lockstep").is_file()


@pytest.mark.parametrize("data", [b"", b"a", bytes(range(256)) * 3])
def test_records_are_framed_as_tensorboard_frames_them(data):
    theirs = io.BytesIO()
    RecordWriter(theirs).write(data)
    assert framed(data) == theirs.getvalue()


def steps_in(path):
    return [event.step for event in EventAccumulator(str(path), purge_orphaned_data=False).Reload().Scalars(RETURN)]


@pytest.mark.parametrize("place", [2, 9, 40, -2])
def test_cut_tensorboard_ends_a_file_at_a_damaged_record(tmp_path, place):
    """In the length, its checksum, the event, and the checksum of that."""
    log_all(TensorBoardTracker(tmp_path), range(2))
    (path,) = tmp_path.iterdir()
    before = path.stat().st_size
    log_all(TensorBoardTracker(tmp_path), [])
    tracker = TensorBoardTracker(tmp_path / "more")
    tracker.log(make_record(2))
    tracker.log(make_record(3))
    tracker.close()
    (more,) = (tmp_path / "more").iterdir()
    further = bytearray(more.read_bytes())
    first = 8 + 4 + struct.unpack("<Q", further[:8])[0] + 4  # the file's version
    third, fourth = further[first:][: len(further[first:]) // 2], further[first:][len(further[first:]) // 2 :]
    third[place] ^= 1
    path.write_bytes(path.read_bytes() + third + fourth)
    cut_tensorboard(tmp_path, last_global_step=9999)
    assert path.stat().st_size == before


def test_cut_tensorboard_believes_no_length_beyond_the_file(tmp_path):
    log_all(TensorBoardTracker(tmp_path), range(2))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for length in (2**40, 2**63, 2**64 - 1):
        head = struct.pack("<Q", length)
        path.write_bytes(whole + head + framed(head)[-4:] + b"event")
        cut_tensorboard(tmp_path, last_global_step=9999)
        assert path.read_bytes() == whole


def test_cutting_the_events_of_a_long_run_is_progress_and_computes_nothing_in_python(tmp_path, monkeypatch):
    """Other ranks wait for the writer, and end when nobody makes progress; TensorBoard's own reader is slow."""
    log_all(TensorBoardTracker(tmp_path), range(5))
    monkeypatch.setattr(pywrap_tensorflow, "masked_crc32c", pytest.fail)
    before = life.sign().count
    cut_tensorboard(tmp_path, last_global_step=300)
    monkeypatch.undo()
    assert life.sign().count >= before + 5
    assert steps_in(tmp_path) == [100, 200, 300]
