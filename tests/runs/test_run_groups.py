"""What is said of a group of seeds as a whole, and what becomes of one that fails at its end."""

import json
from typing import Any, cast

import pytest
from made_runs import make_run, summary_of

from lockstep.config.run import CheckpointConfig, Config, RunOptions
from lockstep.launch.defaults import RunRequest
from lockstep.launch.seeds import group as groups
from lockstep.launch.seeds.group import Speed, has_trained, start_group
from lockstep.launch.seeds.seed_run import SeedRun
from lockstep.launch.world import World
from lockstep.runs.curves import METRIC
from lockstep.runs.directory import RunDirectory, seeds_in
from lockstep.runs.groups import finish_group, status_of, together, together_in_turn
from lockstep.runs.progress import Progress, plain_line
from lockstep.runs.trust import trusted_config


@pytest.mark.parametrize(
    ("seeds", "count", "status"),
    [
        (["finished", "finished"], 2, "finished"),
        (["finished", "stopped by signal 15"], 5, "stopped by signal 15"),
        (["finished", "finished"], 5, "2 of 5 seeds finished"),
    ],
)
def test_a_group_is_finished_if_all_its_seeds_are(seeds, count, status):
    assert status_of(seeds, count) == status


def row(step, mean_return, fps=1000.0):
    return {"global_step": step, METRIC: mean_return, "time/global_fps": fps}


def test_seeds_that_begin_change_neither_the_shown_return_nor_the_speed():
    ended, running = [row(100, 10.0), row(100, 20.0)], [row(50, 5.0), row(1, None)]
    before, after = together_in_turn([], ended, [], 40.0), together_in_turn(running, ended, [], 40.0)
    assert (before[METRIC], after[METRIC]) == (15.0, 15.0)
    assert plain_line(before, 400) == "step 200/400  50%  return 15.00 (2 ended)  40 steps/s  eta 0:00:05"
    assert plain_line(after, 400) == "step 251/400  62%  return 15.00 (2 ended)  40 steps/s  eta 0:00:04"
    assert "return 5.00 (2 running)  –" in plain_line(together_in_turn(running, [], [], None), 400)
    later = together_in_turn(running, [], ended, None)  # of which only the steps count
    assert later["global_step"] == after["global_step"]
    assert "return 5.00 (2 running)  –" in plain_line(later, 400)
    assert together([*ended, *running])["time/global_fps"] == 4000.0  # which is right of one program alone


def test_the_speed_of_a_group_is_a_mean_with_the_start_up_of_its_later_seeds():
    speed = Speed()
    assert speed.of(1000, 7.0) is None
    assert [speed.of(3000, 9.0), speed.of(3000, 14.0), speed.of(5000, 17.0)] == [1000.0, 2000 / 7, 400.0]
    assert speed.of(4000, 18.0) is None  # rows were cut
    assert speed.of(4500, 20.0) == 250.0


def test_a_group_shows_its_seeds_by_whether_they_have_ended(tmp_path):
    shown, paths = [], [make_run(tmp_path / f"seed_{seed}", scale=1.0 + seed) for seed in range(3)]

    class Kept(Progress):
        def update(self, record):
            shown.append(record)

    group = groups.Group(RunDirectory(tmp_path), paths, {}, None, 1, Kept())
    for run in group.runs:
        run.process = cast(Any, "a process")
    group._show()
    group.runs[0].code, group.runs[1].code = 0, 1
    (paths[2] / "metrics.jsonl").unlink()
    group._show()
    group.runs[1].process = None  # it waits, and was trained to its end in an earlier session
    group._shown = 0
    group._show()
    said = [(each["return_of"], each[METRIC]) for each in shown]
    assert said == [("3 running", 80.0), ("1 ended", 40.0), ("2 ended", 60.0)]


def test_incidents_are_said_of_each_seed(tmp_path):
    summaries = {}
    for seed, more in enumerate(({"missing_rows": [[4, 6]]}, {"status": "stopped at step"})):
        facts = summary_of(seed=seed, environment="CartPole-v1", iteration=40, episodes=9, best_checkpoint=None, **more)
        summaries[make_run(tmp_path / f"seed_{seed}", facts)] = facts
    summary = finish_group(RunDirectory(tmp_path), summaries, 2, 1.0, lambda line: None)
    assert summary["status"] == "stopped at step"
    assert [each["missing_rows"] for each in summary["seeds"]] == [[[4, 6]], []]
    assert "missing_rows" not in summary
    assert json.loads((tmp_path / "summary.json").read_text())["world_size"] == 2


def test_a_seeds_summary_is_read_as_it_is(tmp_path):
    assert SeedRun(tmp_path).summary() is None
    run = SeedRun(make_run(tmp_path / "seed_0", summary_of(seed=0)))
    assert run.summary() == summary_of(seed=0)  # in no other words, as a config file's would be
    (run.path / "summary.json").write_text("{")
    assert run.summary() is None


@pytest.mark.parametrize(
    ("code", "signalled", "failed"), [(0, 0, False), (143, 15, False), (-15, 15, False), (-15, 0, True), (-9, 15, True)]
)
def test_a_seed_that_the_groups_signal_met_before_it_listened_was_stopped(tmp_path, code, signalled, failed):
    assert SeedRun(tmp_path, code=code).failed(signalled) == failed


def started(tmp_path, monkeypatch, train):
    """Starts a group whose runs are trained by ``train``; its directory."""
    options = RunOptions(seeds="0,1", name="group", runs_dir=str(tmp_path), quiet=True)
    monkeypatch.setattr(groups.Group, "train", train)
    with pytest.raises(ValueError, match="no good"):
        start_group(RunRequest(Config(num_envs=8), options, {}), None, World(1, 1), "why", None)
    return tmp_path / "group"


def test_a_group_of_which_nothing_was_trained_leaves_nothing(tmp_path, monkeypatch):
    def refuse(self):
        raise ValueError("no good")

    assert not started(tmp_path, monkeypatch, refuse).exists()


def test_what_was_trained_outlives_an_error_at_the_end(tmp_path, monkeypatch):
    def fail_at_the_end(self):
        (self.runs[1].path / "metrics.jsonl").write_text('{"iteration": 1, "global_step": 8}\n')
        raise ValueError("no good")

    assert has_trained(started(tmp_path, monkeypatch, fail_at_the_end))


def test_each_seeds_place_on_a_mirror_is_one_that_its_user_has_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(groups.Group, "train", lambda self: 0)
    config = Config(num_envs=8, checkpoint=CheckpointConfig(mirror="file:///net/runs/"))
    options = RunOptions(seeds="0,1", name="group", runs_dir=str(tmp_path), quiet=True)
    path, code = start_group(RunRequest(config, options, {}), None, World(1, 1), "why", None)
    assert code == 0
    for run in (path, *seeds_in(path)):
        assert trusted_config(run).checkpoint.mirror == (
            "file:///net/runs/" if run == path else "file:///net/runs/group"
        )


def test_a_limit_in_hours_is_of_all_seeds_together(tmp_path, monkeypatch):
    """Trained in turn, each gets what is left; those that find nothing left don't start, and the group says so."""
    now, given = [1000.0], []
    monkeypatch.setattr(groups.time, "monotonic", lambda: now[0])

    def train_for_an_hour(self, file, command):
        given.append(json.loads(file.read_text())["max_hours"])
        now[0] += 3600

    monkeypatch.setattr(SeedRun, "start", train_for_an_hour)
    monkeypatch.setattr(SeedRun, "has_ended", lambda self: True)
    paths = [tmp_path / f"seed_{seed}" for seed in range(4)]
    group = groups.Group(RunDirectory(tmp_path), paths, {"max_hours": 1.5}, None, 1, Progress())
    assert group._loop(tmp_path) == 0
    assert given == [1.5, 0.5]
    assert status_of(["finished", "stopped at time limit"], 4) == "stopped at time limit"
