"""What chaos and fuzz compare of two runs, and that each part of it is looked at."""

import json
import shutil

import numpy as np
import pytest

from benchmarks.chaos.campaign import newest_checkpoint
from benchmarks.chaos.compared import differences, differing, result_of
from lockstep.core.fingerprint import sha256_of
from lockstep.runs.checkpoint import to_files
from lockstep.runs.checkpoint_writer import write_directory

ARRAYS = {"policy/a": np.arange(6, dtype=np.float32), "optimizer/step": np.array([3])}
SUMMARY = {
    "params_sha256": sha256_of({"policy/a": ARRAYS["policy/a"]}), "state_sha256": sha256_of(ARRAYS), "episodes": 7,
    "final_return": 3.5, "best_evaluation": {"step": 128, "return_mean": float("nan")}, "best_checkpoint": 256,
    "last_evaluation": {"step": 256, "return_mean": 1.0},
}  # fmt: skip
CONFIG = {"eval": {"interval": 1}, "checkpoint": {"keep_best": True}}
CSV = "iteration,loss,time/fps,eval/return\n1,0.5,{},\n2,0.25,{},1.0\n"


def write_run(run, speed=1.0):
    """Writes what a finished run leaves, whose times alone are its own."""
    run.mkdir()
    write_directory(run / "checkpoints" / "step_256", to_files(ARRAYS, {}, {"global_step": 256}), {"step": 256})
    (run / "summary.json").write_text(json.dumps(SUMMARY))
    (run / "config.json").write_text(json.dumps(CONFIG))
    rows = [{"iteration": n, "loss": 0.5 / n, "time/fps": speed} for n in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "metrics.csv").write_text(CSV.format(speed, speed))
    (run / "fingerprints.jsonl").write_text('{"iteration": 1, "policy/a": "00"}\n{"iteration": 2, "policy/a": "11"}\n')
    return run


@pytest.fixture
def finished(tmp_path):
    """A finished run directory, what it must hold, and an empty directory for temporary files."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    reference = write_run(tmp_path / "reference", speed=2.0)
    return write_run(tmp_path / "run"), (result_of(reference), {p.name for p in reference.iterdir()}), temporary


def test_a_run_that_is_as_if_nothing_had_been(finished):
    assert differences(*finished) == []
    assert newest_checkpoint(finished[0]) == 256


def replace_in(name, before, after):
    """A damage: other text in a file of the run."""

    def damage(run, _):
        text = (run / name).read_text()
        assert before in text
        (run / name).write_text(text.replace(before, after))

    return damage


def other_arrays(run, _):
    """A damage: a checkpoint that is whole, and of another state than the summary says."""
    arrays = ARRAYS | {"policy/a": ARRAYS["policy/a"] + 1}
    write_directory(run / "checkpoints" / "step_256", to_files(arrays, {}, {"global_step": 256}), {"step": 256})


def torn(run, _):
    """A damage: a checkpoint that isn't whole."""
    path = run / "checkpoints" / "step_256" / "policy.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda run, _: (run / "metrics.jsonl").write_text('{"iteration": 1, "loss": 0.5}\n'),
            "metrics.jsonl: 1 rows instead of 2",
        ),
        (replace_in("metrics.jsonl", "0.25", "0.3"), "metrics.jsonl: 1 rows differ, the first is number 2"),
        (replace_in("metrics.csv", "0.25", "0.3"), "metrics.csv: 1 rows differ, the first is number 3"),
        (replace_in("metrics.csv", "eval/return", "eval/other"), "metrics.csv: 1 rows differ, the first is number 1"),
        (replace_in("fingerprints.jsonl", "11", "22"), "fingerprints.jsonl: 1 rows differ, the first is number 2"),
        (
            replace_in("summary.json", SUMMARY["params_sha256"], "c" * 64),
            "params_sha256: cccccccccccccccc… instead of ",
        ),
        (replace_in("summary.json", SUMMARY["state_sha256"], "c" * 64), "state_sha256: cccccccccccccccc… instead of "),
        (replace_in("summary.json", "3.5", "3.25"), "final_return: 3.25 instead of 3.5"),
        (replace_in("summary.json", '"episodes": 7', '"episodes": 6'), "episodes: 6 instead of 7"),
        (replace_in("summary.json", '"step": 128', '"step": 256'), "best_evaluation: {"),
        (replace_in("summary.json", '"return_mean": 1.0', '"return_mean": 2.0'), "last_evaluation: {"),
        (
            replace_in("summary.json", '"best_checkpoint": 256', '"best_checkpoint": 128'),
            "best_checkpoint: 128 instead of 256",
        ),
        (other_arrays, "arrays of the newest checkpoint are "),
        (other_arrays, "policy.safetensors: "),
        (torn, "what came of it can't be read: CheckpointError: "),
        (
            lambda run, _: shutil.rmtree(run / "checkpoints" / "step_256"),
            "what came of it can't be read: CheckpointError: ",
        ),
        (lambda run, _: (run / ".lock").touch(), "left in the run directory: .lock"),
        (lambda run, _: (run / "checkpoints" / ".step_3.9.tmp").mkdir(), "left among the checkpoints: .step_3.9.tmp"),
        (lambda _, temporary: (temporary / "lockstep-x").mkdir(), "left in TMPDIR: lockstep-x"),
    ],
)
def test_what_is_lost_changed_or_left_is_said(finished, damage, said):
    damage(finished[0], finished[2])
    assert [problem for problem in differences(*finished) if problem.startswith(said)], differences(*finished)


def test_the_best_checkpoint_counts_where_the_config_alone_decides_which_it_is(finished):
    run = finished[0]
    assert result_of(run)["best_checkpoint"] == 256
    for changes in ({"eval": {"interval": 0}}, {"checkpoint": {"keep_best": False}}):
        (run / "config.json").write_text(json.dumps(CONFIG | changes))
        assert "best_checkpoint" not in result_of(run)


def test_what_is_no_number_is_the_same_as_itself_and_as_nothing_else():
    nan = float("nan")
    assert differing({"a": nan, "b": [nan], "c": 1}, {"a": float("nan"), "b": [float("nan")], "c": 1}) == []
    assert differing({"a": nan, "c": 2}, {"a": 1.0, "b": [1], "c": 2}) == ["a", "b"]
