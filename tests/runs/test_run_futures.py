"""A run has one name, one writer and one future."""

import json

import pytest

from lockstep.config.checks import resolve
from lockstep.config.command_line import read_request
from lockstep.config.run import Config, LogConfig
from lockstep.runs.checkpoint import to_files
from lockstep.runs.checkpoint_writer import commit
from lockstep.runs.directory import CONFIG
from lockstep.runs.finding import find_run
from lockstep.runs.making import create_run

SMALL = resolve(Config())


def test_a_directory_that_is_not_ours_is_left_as_it_is(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / CONFIG).write_text('{"my": "own"}')
    with pytest.raises(ValueError, match="exists already"):
        create_run(str(tmp_path), "mine", SMALL)
    assert json.loads((mine / CONFIG).read_text()) == {"my": "own"}
    (mine / CONFIG).write_text(SMALL.model_dump_json())
    (mine / "notes.txt").write_text("precious")
    with pytest.raises(ValueError, match="exists already"):
        create_run(str(tmp_path), "mine", SMALL)
    (mine / "notes.txt").unlink()
    create_run(str(tmp_path), "mine", SMALL).unlock()


def test_a_second_start_of_a_name_is_refused_while_the_first_holds_it(tmp_path):
    first = create_run(str(tmp_path), "a", SMALL)
    with pytest.raises(ValueError, match="being written by another process"):
        create_run(str(tmp_path), "a", resolve(Config(seed=2)))
    assert json.loads((first.path / CONFIG).read_text())["seed"] == 0
    first.unlock()
    create_run(str(tmp_path), "a", resolve(Config(seed=2))).unlock()
    assert json.loads((first.path / CONFIG).read_text())["seed"] == 2


def test_runs_without_a_name_never_share_a_directory(tmp_path):
    runs = [create_run(str(tmp_path), None, SMALL) for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    for run in runs:
        run.unlock()


def test_what_comes_after_the_checkpoint_that_is_resumed_is_removed(tmp_path):
    run = create_run(str(tmp_path), "a", SMALL)
    for step in (100, 200, 300):
        commit(run.checkpoints, step, to_files({}, {}, {}), None)
    (run.path / "metrics.jsonl").write_text("".join(json.dumps({"iteration": i}) + "\n" for i in (1, 2, 3)))
    run.cut_after(2, 200, LogConfig())
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step_100", "step_200"]
    assert (run.path / "metrics.jsonl").read_text().count("\n") == 2
    run.unlock()


def test_a_run_that_is_not_there_is_answered_with_the_nearest_name(tmp_path):
    create_run(str(tmp_path), "demo", SMALL).unlock()
    with pytest.raises(ValueError, match="did you mean demo"):
        find_run("nodemo", str(tmp_path))
    with pytest.raises(ValueError, match="there are: demo"):
        find_run("xyz", str(tmp_path))


def test_whole_numbers_may_be_written_with_an_exponent(tmp_path):
    assert read_request(["CartPole-v1", "--total-steps", "2e5"]).config.total_steps == 200_000
    (tmp_path / "a.yaml").write_text("env: CartPole-v1\ntotal_steps: 1e6\n")
    assert read_request([str(tmp_path / "a.yaml")]).config.total_steps == 1_000_000
    with pytest.raises(ValueError, match="total_steps"):
        read_request(["CartPole-v1", "--total-steps", "1.5e0"])


def test_a_checkpoint_is_no_config(tmp_path):
    run = create_run(str(tmp_path), "a", SMALL)
    path = commit(run.checkpoints, 100, to_files({}, {}, {}), None)
    run.unlock()
    with pytest.raises(ValueError, match=f"--resume {path}"):
        read_request([str(path)])


def test_arguments_of_an_environment_are_json():
    with pytest.raises(ValueError, match=r"env\.kwargs"):
        resolve(Config.model_validate({"env": {"id": "a", "kwargs": {"table": {0: 2.0}}}}))
    assert resolve(Config.model_validate({"env": {"id": "a", "kwargs": {"table": {"0": 2.0}}}})).env.kwargs
