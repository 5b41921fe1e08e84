import contextlib
import errno
import json
import math
import os

import numpy as np
import pytest
from tracker_files import RETURN, log_all, make_record, read_csv, read_jsonl

from lockstep.core.errors import RunError
from lockstep.core.life import life
from lockstep.runs.trackers.csv import CsvTracker, check_csv, cut_csv, mend_csv
from lockstep.runs.trackers.files import replacing
from lockstep.runs.trackers.jsonl import (
    JsonlTracker,
    RecordFile,
    check_jsonl,
    cut_jsonl,
    iterations_of,
    last_global_step_of,
)
from lockstep.runs.trackers.jsonl import read_jsonl as records_in

# ---- JSON lines


def test_jsonl_keeps_every_digit_and_the_order_of_keys(tmp_path):
    values = {
        "train/a": 0.1 + 0.2,
        "train/b": np.float32(0.1),
        "train/c": np.float64(1) / 3,
        "train/d": np.int64(2**60),
    }
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(make_record(0, **values))
    line = (tmp_path / "metrics.jsonl").read_text()  # flushed: readable before the tracker is closed
    tracker.close()
    read = json.loads(line)
    assert list(read) == ["iteration", "global_step", RETURN, *values]
    assert read["train/a"] == 0.30000000000000004
    assert read["train/b"] == float(np.float32(0.1))
    assert read["train/c"] == 1 / 3
    assert read["train/d"] == 2**60


def test_jsonl_writes_null_for_what_json_has_no_token_for(tmp_path):
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    tracker.log({"iteration": 0, "a": None, "b": math.nan, "c": np.float32("nan"), "d": math.inf, "e": -math.inf})
    tracker.close()
    assert read_jsonl(tmp_path / "m.jsonl") == [{"iteration": 0, "a": None, "b": None, "c": None, "d": None, "e": None}]


def test_cut_jsonl_removes_later_iterations_and_continues(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log_all(JsonlTracker(path), range(5))
    path.chmod(0o640)
    kept = path.read_bytes().splitlines(keepends=True)[:3]
    cut_jsonl(path, last_iteration=2)
    assert path.read_bytes() == b"".join(kept)
    assert path.stat().st_mode & 0o777 == 0o640
    log_all(JsonlTracker(path), [3, 4])
    assert [record["iteration"] for record in read_jsonl(path)] == [0, 1, 2, 3, 4]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("tail", [b'{"iteration": 2, "global_st', b'{"iteration": 2, "x": "\xc3', b"\0\0\0\0", b"1"])
def test_cut_jsonl_removes_a_torn_tail(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    log_all(JsonlTracker(path), range(2))
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    with pytest.raises(ValueError, match="half a line"):
        JsonlTracker(path)
    cut_jsonl(path, last_iteration=9)
    assert path.read_bytes() == whole


def test_cut_jsonl_keeps_a_whole_record_that_lacks_only_its_newline(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log_all(JsonlTracker(path), range(2))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    cut_jsonl(path, last_iteration=1)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("broken", [b'{"iteration": \n', b"[1]\n", b'{"global_step": 1}\n', b'{"iteration": "1"}\n'])
def test_cut_jsonl_names_a_broken_line_in_the_middle_and_changes_nothing(tmp_path, broken):
    path = tmp_path / "metrics.jsonl"
    content = b'{"iteration": 0}\n' + broken + b'{"iteration": 2}\n'
    path.write_bytes(content)
    with pytest.raises(ValueError, match="line 2 is no metrics record"):
        cut_jsonl(path, last_iteration=0)
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


ZEROS = b"\0" * 4096


ZEROS_IN_ROWS = b"\0" * 9


@pytest.mark.parametrize(
    ("tracker", "check", "cut", "broken", "rest"),
    [
        *(
            (JsonlTracker, check_jsonl, cut_jsonl, broken, b'{"iteration": 4}\n{"iteration": 5, "glo')
            for broken in (ZEROS + b"\n", b'{"iteration": 3, "x\n', ZEROS + b'{"iteration": 9}\n')
        ),
        *(
            (CsvTracker, check_csv, cut_csv, broken, b"4,500,1.5\n5,60")
            for broken in (ZEROS_IN_ROWS + b"\n", b"3,4\n", ZEROS_IN_ROWS + b"9,9,1.5\n")
        ),
    ],
)
def test_what_follows_the_first_broken_row_behind_a_checkpoint_is_cut(
    tmp_path, tracker, check, cut, broken, rest, capsys
):
    path = tmp_path / "metrics"
    log_all(tracker(path), range(1, 3))
    whole = path.read_bytes()
    path.write_bytes(whole + broken + rest)
    check(path, last_iteration=2)
    assert cut(path, last_iteration=2) == {1, 2}
    assert path.read_bytes() == whole
    assert capsys.readouterr().err == ""


def test_cut_jsonl_drops_zeros_before_a_checkpoint_and_says_so(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    log_all(JsonlTracker(path), range(1, 6))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], ZEROS + lines[2], *lines[3:]]))
    check_jsonl(path, last_iteration=4)
    assert cut_jsonl(path, last_iteration=4) == {1, 4}
    assert path.read_bytes() == lines[0] + lines[3]
    said = f"lockstep: warning: {path}: line 2 held zeros, as a power loss leaves them, and was removed\n"
    assert capsys.readouterr().err == said


def test_reading_leaves_out_a_torn_last_line_and_names_another_one(tmp_path):
    path = tmp_path / "fingerprints.jsonl"
    path.write_text('{"iteration": 1}\n{"iteration": 2}\n{"iteration": 3, "policy/')
    assert records_in(path) == [{"iteration": 1}, {"iteration": 2}]
    path.write_text('{"iteration": 1}\n{"iteration": 2\n{"iteration": 3}\n')
    with pytest.raises(ValueError, match=r"fingerprints\.jsonl: line 2 is no metrics record"):
        records_in(path)


# ---- CSV


def test_csv_has_exact_floats_and_empty_cells_for_what_is_missing(tmp_path):
    path = tmp_path / "metrics.csv"
    tracker = CsvTracker(path)
    tracker.log({"iteration": 0, "global_step": 10, "train/loss": np.float64(1) / 3, "train/kl": math.nan})
    tracker.log({"iteration": 1, "global_step": 20, "train/kl": None})
    assert path.read_text() == "iteration,global_step,train/loss,train/kl\n0,10,0.3333333333333333,\n1,20,,\n"
    tracker.close()


def test_csv_extends_the_header_for_a_new_key_in_the_middle(tmp_path):
    path = tmp_path / "metrics.csv"
    tracker = CsvTracker(path)
    tracker.log(make_record(0))
    tracker.log({"iteration": 1, "global_step": 200, "eval/return_mean": 7.0, RETURN: 2.0, "eval/n, all": 3})
    tracker.log(make_record(2))
    tracker.close()
    header = path.read_text().splitlines()[0]
    assert header == f'iteration,global_step,{RETURN},eval/return_mean,"eval/n, all"'
    rows = read_csv(path)
    assert [row["iteration"] for row in rows] == ["0", "1", "2"]
    assert [row["eval/return_mean"] for row in rows] == ["", "7.0", ""]
    assert [row["eval/n, all"] for row in rows] == ["", "3", ""]
    assert [row[RETURN] for row in rows] == ["1.5", "2.0", "1.5"]
    assert os.listdir(tmp_path) == ["metrics.csv"]


def test_csv_continues_with_the_header_of_an_existing_file(tmp_path):
    path = tmp_path / "metrics.csv"
    log_all(CsvTracker(path), [0])
    tracker = CsvTracker(path)
    tracker.log({RETURN: 9.0, "iteration": 1, "global_step": 200})  # another order
    tracker.close()
    assert path.read_text() == f"iteration,global_step,{RETURN}\n0,100,1.5\n1,200,9.0\n"


@pytest.mark.parametrize("tail", ["2,3", "2,300,1.", '"2', "\0\0\0"])
def test_cut_csv_removes_later_rows_and_a_torn_tail(tmp_path, tail):
    path = tmp_path / "metrics.csv"
    log_all(CsvTracker(path), range(4))
    with path.open("a") as file:
        file.write(tail)
    with pytest.raises(ValueError, match="half a line"):
        CsvTracker(path)
    cut_csv(path, last_iteration=1)
    assert path.read_text() == f"iteration,global_step,{RETURN}\n0,100,1.5\n1,200,1.5\n"
    log_all(CsvTracker(path), [2])
    assert [row["iteration"] for row in read_csv(path)] == ["0", "1", "2"]


def test_cut_csv_of_a_torn_header_leaves_an_empty_file_to_begin_again(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("iteration,glob")
    cut_csv(path, last_iteration=5)
    assert path.read_bytes() == b""
    log_all(CsvTracker(path), [0])
    assert read_csv(path)[0]["global_step"] == "100"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("iteration,global_step\n0,100\n1\n2,300\n", "line 3 does not fit the header"),
        ("iteration,global_step\nzero,100\n", "line 2 does not fit the header"),
        ("name,price\nscrew,3\n", "no column named iteration"),
    ],
)
def test_cut_csv_refuses_what_is_no_table_of_metrics_and_changes_nothing(tmp_path, content, message):
    path = tmp_path / "metrics.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        cut_csv(path, last_iteration=5)
    assert path.read_text() == content
    assert os.listdir(tmp_path) == ["metrics.csv"]


@pytest.mark.parametrize("place", [0, 2, 5])
def test_cut_csv_drops_zeros_before_a_checkpoint(tmp_path, place):
    path = tmp_path / "metrics.csv"
    log_all(CsvTracker(path), range(1, 6))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:place], b"\0" * 200_000 + lines[place], *lines[place + 1 :]]))
    check_csv(path, last_iteration=5)
    assert cut_csv(path, last_iteration=5) == (set() if place == 0 else {1, 2, 3, 4, 5} - {place})
    assert b"\0" not in path.read_bytes()


@pytest.mark.parametrize("kept", [None, 0, 1, 3, 4])
def test_a_table_that_misses_rows_of_the_records_is_written_anew_byte_for_byte(tmp_path, kept):
    table, records = tmp_path / "metrics.csv", tmp_path / "metrics.jsonl"
    odd = {"train/big": 10**30, "train/said": 'a "b", c', "train/on": True, "train/tiny": 1e-05, "train/none": None}
    for tracker in (CsvTracker(table), JsonlTracker(records)):
        tracker.log(make_record(1))
        tracker.log({"iteration": 2, "global_step": 300, "eval/return_mean": 1 / 3, RETURN: math.nan, "eval/n, all": 3})
        tracker.log(make_record(3) | odd)
        tracker.close()
    whole = table.read_bytes()
    if kept is None:
        table.unlink()
    else:
        table.write_bytes(b"".join(whole.splitlines(keepends=True)[:kept]))
    said = mend_csv(table, records, cut_csv(table, 3), cut_jsonl(records, 3))
    assert table.read_bytes() == whole
    missing = 3 - max((kept or 0) - 1, 0)
    wanted = f"{table} misses {missing} of 3 rows that metrics.jsonl has; it was written anew" if missing else None
    assert said == wanted


def test_a_table_with_rows_that_the_records_lack_stays_as_it_is(tmp_path):
    table, records = tmp_path / "metrics.csv", tmp_path / "metrics.jsonl"
    log_all(CsvTracker(table), [1, 2])
    log_all(JsonlTracker(records), [2, 3])
    before = table.read_bytes()
    assert mend_csv(table, records, {1, 2}, {2}) is None
    said = mend_csv(table, records, {1, 2}, {2, 3})
    assert said == f"{table} misses 1 of 2 rows that metrics.jsonl has, and has others; it stays as it is"
    assert table.read_bytes() == before


# ---- atomic replacement


def test_replacing_leaves_the_old_file_when_writing_fails(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail_half_way():
        with replacing(path) as file:
            file.write(b"ne")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail_half_way()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_replacing_names_the_file_when_the_disk_is_full(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as caught, replacing(path) as file:
        file.write(b"new")
    assert str(caught.value) == f"[Errno 28] No space left on device: '{path}'"
    assert os.listdir(tmp_path) == ["file"]


def test_replacing_follows_a_link(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "far" / "file")
    with replacing(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "far" / "file").read_bytes() == b"new"


# ---- long runs


@pytest.mark.parametrize(
    "read",
    [
        lambda path: check_jsonl(path, 4),
        lambda path: cut_jsonl(path, 4),
        iterations_of,
        last_global_step_of,
        lambda path: check_csv(path.with_suffix(".csv"), 4),
        lambda path: cut_csv(path.with_suffix(".csv"), 4),
    ],
)
def test_reading_the_rows_of_a_long_run_is_progress(tmp_path, read):
    """Other ranks wait for the writer, and end when nobody makes progress."""
    log_all(JsonlTracker(tmp_path / "metrics.jsonl"), range(5))
    log_all(CsvTracker(tmp_path / "metrics.csv"), range(5))
    before = life.sign().count
    read(tmp_path / "metrics.jsonl")
    assert life.sign().count >= before + 5


def test_a_file_beside_the_metrics_is_named_if_its_disk_is_full(tmp_path):
    rows = RecordFile(tmp_path / "fingerprints.jsonl")
    rows.log({"iteration": 1})
    rows._file.close()
    rows._file = open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(RunError, match=r"fingerprints\.jsonl can't be written: the disk is full$"):
        rows.log({"iteration": 2})
    with contextlib.suppress(OSError):
        rows.close()
    assert (tmp_path / "fingerprints.jsonl").read_text() == '{"iteration": 1}\n'
