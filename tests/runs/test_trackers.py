import csv
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from tracker_files import RETURN, log_all, make_record, read_csv, read_jsonl, read_scalars

from lockstep.runs.trackers import OPTIONAL_TRACKERS, RunTrackers, Tracker, _reason, cut_trackers


def below_a_file(tmp_path) -> Path:
    (tmp_path / "file").write_text("in the way")
    return tmp_path / "file" / "run"


class Recorder(Tracker):
    """An optional tracker that keeps what it gets and fails from the `fails_at`-th record on."""

    def __init__(self, fails_at=math.inf):
        self.records, self.fails_at, self.closed = [], fails_at, 0

    def log(self, record):
        if len(self.records) >= self.fails_at:
            raise ConnectionError("no route to\n  host")
        self.records.append(dict(record))

    def close(self):
        self.closed += 1


def test_run_trackers_write_every_format_and_cut_them_together(tmp_path):
    run, extra = tmp_path / "run", tmp_path / "elsewhere" / "copy.jsonl"
    trackers = RunTrackers(run, extra_jsonl=extra)
    trackers.text("config", "seed: 1")
    log_all(trackers, range(4))
    cut_trackers(run, last_iteration=1, last_global_step=200, extra_jsonl=extra)
    log_all(RunTrackers(run, extra_jsonl=extra), range(2, 5))
    assert [record["iteration"] for record in read_jsonl(run / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert extra.read_bytes() == (run / "metrics.jsonl").read_bytes()
    assert [row["iteration"] for row in read_csv(run / "metrics.csv")] == ["0", "1", "2", "3", "4"]
    assert [step for step, _ in read_scalars(run / "tensorboard")[RETURN]] == [100, 200, 300, 400, 500]


ODD = [
    {},
    {"eval/return_mean": 2.5},  # a column more
    {"train/a": 1e-05, "train/%s": 1e300, "train/loss": math.nan, "train/on": True},
    {"train/big": 10**400, "train/said": 'a "b", c', "train/n": np.int64(3), "train/x": np.float32(0.1)},
]


@pytest.mark.parametrize("names", [("tensorboard",), ()])
def test_records_that_are_logged_together_are_written_as_one_by_one(tmp_path, names):
    records = [make_record(i, 0.1 * i, **more) for i, more in enumerate(ODD if not names else ODD[:3])]
    together, alone = (RunTrackers(tmp_path / name, names) for name in ("together", "alone"))
    together.log_all(records)
    for record in records:
        alone.log(record)
    for name in ("metrics.jsonl", "metrics.csv"):  # before they are closed
        assert (tmp_path / "together" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    if names:
        scalars = read_scalars(tmp_path / "together" / "tensorboard")
        assert scalars == read_scalars(tmp_path / "alone" / "tensorboard")
        assert scalars["train/%s"] == [(300, math.inf)]
        assert scalars[RETURN] == [(100, 0.0), (200, pytest.approx(0.1)), (300, pytest.approx(0.2))]
    together.close()
    alone.close()


def test_values_are_written_as_python_writes_them(tmp_path):
    records = [make_record(i, 0.1 * i, **more) for i, more in enumerate(ODD)]
    trackers = RunTrackers(tmp_path, names=())
    trackers.log_all(records)
    plain = [
        {k: None if v != v else v.item() if isinstance(v, np.generic) else v for k, v in r.items()} for r in records
    ]
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(json.dumps(record) + "\n" for record in plain)
    header = list(dict.fromkeys(key for record in plain for key in record))
    with (tmp_path / "expected.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, header, lineterminator="\n")
        rows.writeheader()
        rows.writerows(plain)
    assert (tmp_path / "metrics.csv").read_bytes() == (tmp_path / "expected.csv").read_bytes()
    trackers.close()


def test_the_runs_own_record_is_at_most_one_ahead_of_a_service(tmp_path):
    seen = []

    class Service(Tracker):
        def log(self, record):
            seen.append((record["iteration"], len(read_jsonl(tmp_path / "metrics.jsonl"))))

    trackers = RunTrackers(
        tmp_path, ("tensorboard", "service"), available={**OPTIONAL_TRACKERS, "service": lambda _: Service()}
    )
    trackers.log_all([make_record(iteration) for iteration in range(3)])
    assert seen == [(0, 1), (1, 2), (2, 3)]
    trackers.close()


def test_an_optional_tracker_that_fails_among_records_costs_the_others_nothing(tmp_path, capsys):
    bad, good = Recorder(fails_at=1), Recorder()
    trackers = RunTrackers(tmp_path, ("bad", "good"), available={"bad": lambda _: bad, "good": lambda _: good})
    trackers.log_all([make_record(iteration) for iteration in range(3)])
    assert [record["iteration"] for record in bad.records] == [0]
    assert [record["iteration"] for record in good.records] == [0, 1, 2]
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 3
    assert capsys.readouterr().err.count("tracker bad failed") == 1
    trackers.close()


def test_without_optional_trackers_only_the_record_is_written(tmp_path):
    log_all(RunTrackers(tmp_path, names=()), [0])
    assert sorted(os.listdir(tmp_path)) == ["metrics.csv", "metrics.jsonl"]


def test_a_failing_optional_tracker_warns_once_and_the_others_go_on(tmp_path, capsys):
    bad, good = Recorder(fails_at=1), Recorder()
    trackers = RunTrackers(tmp_path, ("bad", "good"), available={"bad": lambda _: bad, "good": lambda _: good})
    log_all(trackers, range(3))
    expected = "tracker bad failed: no route to host; it is switched off, training goes on\n"
    assert capsys.readouterr().err == expected
    assert [record["iteration"] for record in bad.records] == [0]
    assert [record["iteration"] for record in good.records] == [0, 1, 2]
    assert [record["iteration"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert [row["iteration"] for row in read_csv(tmp_path / "metrics.csv")] == ["0", "1", "2"]
    assert (bad.closed, good.closed) == (1, 1)


def test_an_error_without_a_telling_message_is_named_by_its_class(tmp_path, capsys):
    trackers = RunTrackers(tmp_path)
    trackers.log({"iteration": 0})  # TensorBoard needs the step
    trackers.close()
    assert capsys.readouterr().err.startswith("tracker tensorboard failed: KeyError: 'global_step'; ")


def test_a_failing_record_is_raised(tmp_path):
    good = Recorder()
    trackers = RunTrackers(tmp_path, ("good",), available={"good": lambda _: good})
    trackers.log(make_record(0))
    (tmp_path / "metrics.csv").unlink()
    with pytest.raises(FileNotFoundError):  # the rewrite for a new key finds no file
        trackers.log(make_record(1, **{"eval/return_mean": 1.0}))
    trackers.close()
    assert good.closed == 1


def test_a_full_disk_is_raised(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    trackers = RunTrackers(tmp_path, names=())
    with pytest.raises(OSError, match="No space left"):
        trackers.log(make_record(0))
    with pytest.raises(OSError, match="No space left"):
        trackers.close()
    trackers.close()


def test_close_closes_each_tracker_once(tmp_path):
    good = Recorder()
    trackers = RunTrackers(tmp_path, ("good",), available={"good": lambda _: good})
    trackers.close()
    trackers.close()
    assert good.closed == 1


def assert_one_line(info, start):
    message = str(info.value)
    assert message.startswith(start)
    assert "\n" not in message


def test_an_unwritable_directory_stops_the_run_with_one_line(tmp_path):
    with pytest.raises(ValueError) as info:
        RunTrackers(below_a_file(tmp_path))
    assert_one_line(info, "tracker jsonl cannot start: [Errno 20] Not a directory")


def test_an_unwritable_extra_jsonl_stops_the_run_with_one_line(tmp_path):
    with pytest.raises(ValueError) as info:
        RunTrackers(tmp_path / "run", extra_jsonl=below_a_file(tmp_path) / "copy.jsonl")
    assert_one_line(info, "tracker extra jsonl cannot start: ")


def test_an_unwritable_tensorboard_directory_stops_the_run_with_one_line(tmp_path):
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(ValueError) as info:
        RunTrackers(tmp_path)
    assert_one_line(info, "tracker tensorboard cannot start: ")


def test_a_tracker_that_cannot_start_stops_the_run_and_closes_the_others(tmp_path):
    def fail(_):
        raise ImportError("No module named\n 'wandb'")

    good = Recorder()
    with pytest.raises(ValueError) as info:
        RunTrackers(tmp_path, ("good", "wandb"), available={"good": lambda _: good, "wandb": fail})
    assert str(info.value) == (
        "tracker wandb cannot start: ImportError: No module named 'wandb'; --log.no-wandb goes on without it"
    )
    assert good.closed == 1


def test_what_a_service_says_of_its_url_has_no_password():
    """MLflow quotes the URL that it was given."""
    error = RuntimeError("request to https://user:geheim@host/api failed")
    assert _reason(error) == "RuntimeError: request to https://***@host/api failed"


def test_an_unknown_tracker_is_refused_with_those_there_are(tmp_path):
    with pytest.raises(ValueError, match=r"tracker tensorbord cannot start: .* choose from mlflow, tensorboard, "):
        RunTrackers(tmp_path, names=("tensorbord",))


def test_a_new_run_does_not_mix_into_another_runs_extra_jsonl(tmp_path):
    extra = tmp_path / "copy.jsonl"
    log_all(RunTrackers(tmp_path / "first", names=(), extra_jsonl=extra), [0])
    before = extra.read_bytes()
    with pytest.raises(ValueError, match=r"tracker extra jsonl .* already holds another run's records"):
        RunTrackers(tmp_path / "second", names=(), extra_jsonl=extra, is_new=True)
    assert extra.read_bytes() == before


def test_the_tracker_of_other_ranks_does_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trackers = Tracker()
    trackers.text("config", "seed: 1")
    log_all(trackers, range(2))
    assert os.listdir(tmp_path) == []


def test_cut_of_files_that_are_not_there_makes_none(tmp_path):
    cut_trackers(tmp_path, 3, 300, extra_jsonl=tmp_path / "extra.jsonl")
    assert os.listdir(tmp_path) == []


def test_mlflow_gives_up_on_a_silent_server_soon_unless_it_is_told_otherwise(monkeypatch):
    pytest.importorskip("mlflow")
    from lockstep.runs.trackers.mlflow import RETRIES, _few_retries

    monkeypatch.delenv(RETRIES, raising=False)
    with _few_retries():
        assert os.environ[RETRIES] == "2"
    assert RETRIES not in os.environ
    monkeypatch.setenv(RETRIES, "9")
    with _few_retries():
        assert os.environ[RETRIES] == "9"
    assert os.environ[RETRIES] == "9"
