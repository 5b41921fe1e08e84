"""What is said of a group of seeds as a whole, and what becomes of one that fails at its end."""

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from made_runs import make_group, make_run, summary_of

from lockstep.config.checks import resolve
from lockstep.config.run import CheckpointConfig, Config, RunOptions
from lockstep.core.errors import RunError
from lockstep.launch.request import RunRequest, request_of
from lockstep.launch.resume import resumed_config
from lockstep.launch.seeds import group as groups
from lockstep.launch.seeds.group import GroupStart, Speed, start_group
from lockstep.launch.seeds.making import has_trained
from lockstep.launch.seeds.resuming import changed_seeds, settings_of_seeds, write_changes
from lockstep.launch.seeds.seed_run import SeedRun
from lockstep.launch.start import start_run
from lockstep.launch.world import World
from lockstep.runs.curves import METRIC
from lockstep.runs.directory import RunDirectory
from lockstep.runs.finding import seeds_in
from lockstep.runs.groups import begin_group, finish_group, seeds_of, status_of, together, together_in_turn
from lockstep.runs.making import create_run
from lockstep.runs.progress import Progress, plain_line
from lockstep.runs.session_facts import SessionFacts
from lockstep.runs.stored import stored_config
from lockstep.runs.trust import remember_names, trusted_config
from lockstep.training.stop import StopRequest


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


def test_seeds_that_have_come_to_their_end_are_not_said_to_be_running(tmp_path):
    shown, paths = [], [make_run(tmp_path / f"seed_{seed}", scale=1.0 + seed) for seed in range(3)]

    class Kept(Progress):
        def update(self, record):
            shown.append(record["return_of"])

    last = int(json.loads((paths[0] / "metrics.jsonl").read_text().splitlines()[-1])["global_step"])
    lengths = {paths[0]: last, paths[1]: last, paths[2]: last + 1}
    group = groups.Group(RunDirectory(tmp_path), paths, {}, None, 1, Kept(), lengths=lengths)
    for run in group.runs:
        run.process = cast(Any, "a process")
    group._show()
    group.runs[0].code, group._shown = 1, 0  # it has failed since
    group._show()
    assert shown == ["2 ended", "1 ended"]


def test_the_summary_that_an_earlier_session_of_a_failed_seed_left_is_not_told(tmp_path, monkeypatch):
    paths = [
        make_run(tmp_path / f"seed_{seed}", summary_of(seed=seed, environment="CartPole-v1", iteration=40, episodes=9))
        for seed in range(2)
    ]
    group = groups.Group(RunDirectory(tmp_path), paths, {}, None, 1, Progress())
    group.runs[0].code, group.runs[1].code = 0, 1
    monkeypatch.setattr(groups.Group, "_loop", lambda *_: 0)
    with pytest.raises(RunError, match=r"^seed_1: "):
        group.train()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [each["seed"] for each in summary["seeds"]] == [0]
    assert summary["status"] == "1 of 2 seeds finished"


def test_a_signal_while_a_group_draws_its_curves_leaves_a_summary(tmp_path, monkeypatch):
    def end(number, frame):
        raise SystemExit(128 + number)

    def told(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return finish_group(*arguments)

    facts = summary_of(seed=0, environment="CartPole-v1", iteration=40, episodes=9)
    group = groups.Group(RunDirectory(tmp_path), [make_run(tmp_path / "seed_0", facts)], {}, None, 1, Progress())
    group.runs[0].code = 0
    monkeypatch.setattr(groups.Group, "_loop", lambda *_: 0)
    monkeypatch.setattr(groups, "finish_group", told)
    before = signal.signal(signal.SIGTERM, end)
    try:
        assert group.train() == 143
    finally:
        signal.signal(signal.SIGTERM, before)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"


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


def test_a_group_has_its_summary_whatever_becomes_of_the_picture(tmp_path, monkeypatch, capsys):
    """matplotlib needn't import, and a ``matplotlibrc`` may ask it for what isn't there."""
    facts = summary_of(seed=0, environment="CartPole-v1", iteration=40, episodes=9)
    run, there = make_run(tmp_path / "seed_0", facts), []

    def fail(*_):
        there.append((tmp_path / "summary.json").exists())
        raise RuntimeError("no font\nwas found")

    monkeypatch.setattr("lockstep.runs.groups.can_plot", lambda: True)
    for why, patch in (
        (
            "import of matplotlib halted; None in sys.modules",
            lambda each: each.setitem(sys.modules, "matplotlib", None),
        ),
        ("no font was found", lambda each: each.setattr("lockstep.runs.groups.draw_curves", fail)),
    ):
        with monkeypatch.context() as patched:
            patch(patched)
            summary = finish_group(RunDirectory(tmp_path), {run: facts}, 1, 1.0, lambda line: None)
        assert json.loads((tmp_path / "summary.json").read_text()) == summary
        assert capsys.readouterr().err == f"lockstep: warning: {tmp_path / 'curves.png'} isn't written: {why}\n"
    assert there == [True]
    assert (tmp_path / "curves.csv").is_file()


def test_a_seeds_summary_is_read_as_it_is(tmp_path):
    assert SeedRun(tmp_path).summary() is None
    run = SeedRun(make_run(tmp_path / "seed_0", summary_of(seed=0)))
    assert run.summary() == summary_of(seed=0)  # in no other words, as a config file's would be
    (run.path / "summary.json").write_text("{")
    assert run.summary() is None


@pytest.mark.parametrize(
    ("code", "signalled", "failed"),
    [
        *((None, 0, False), (0, 0, False), (143, 15, False), (143, 0, False), (139, 0, True), (137, 15, True)),
        *((-15, 15, False), (-15, 0, True), (-9, 15, True)),
    ],
)
def test_a_seed_has_failed_that_neither_ended_nor_stopped_as_a_signal_asked(tmp_path, code, signalled, failed):
    assert SeedRun(tmp_path, code=code).failed(signalled) == failed


def test_what_a_seed_says_is_kept_where_nobody_reads_it_any_more(tmp_path, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    lines = ["a warning\n", "lockstep: error: no good\n"]
    run = SeedRun(tmp_path, cast(Any, SimpleNamespace(stderr=lines)), code=1)
    monkeypatch.setattr("sys.stderr", Closed())
    run._read()
    assert (run.said, run.error) == (lines, "no good")


def started(tmp_path, monkeypatch, train):
    """Starts a group whose runs are trained by ``train``; its directory."""
    options = RunOptions(seeds="0,1", name="group", runs_dir=str(tmp_path), quiet=True)
    monkeypatch.setattr(groups.Group, "train", train)
    with pytest.raises(ValueError, match="no good"):
        start_group(RunRequest(Config(num_envs=8), options, {}), GroupStart(None, World(1, 1), "why"), None)
    return tmp_path / "group"


def test_a_group_of_which_nothing_was_trained_leaves_nothing(tmp_path, monkeypatch):
    def refuse(self):
        raise ValueError("no good")

    assert not started(tmp_path, monkeypatch, refuse).exists()


def test_a_group_in_a_place_that_is_a_link_leaves_nothing_there(tmp_path, monkeypatch):
    def refuse(self):
        raise ValueError("no good")

    (tmp_path / "disk").mkdir()
    (tmp_path / "group").symlink_to(tmp_path / "disk")
    for _ in range(2):
        assert started(tmp_path, monkeypatch, refuse).is_symlink()
        assert not list((tmp_path / "disk").iterdir())


def test_what_was_trained_outlives_an_error_at_the_end(tmp_path, monkeypatch):
    def fail_at_the_end(self):
        (self.runs[1].path / "metrics.jsonl").write_text('{"iteration": 1, "global_step": 8}\n')
        raise ValueError("no good")

    assert has_trained(started(tmp_path, monkeypatch, fail_at_the_end))


def test_a_groups_progress_counts_to_the_lengths_of_its_seeds(tmp_path, monkeypatch):
    lengths = []
    monkeypatch.setattr(groups.Group, "train", lambda self: 0)
    monkeypatch.setattr(groups, "make_progress", lambda steps, quiet: lengths.append(steps) or Progress())
    config = Config(num_envs=8, total_steps=4000)  # four iterations
    options = RunOptions(seeds="0,1,2", name="group", runs_dir=str(tmp_path), quiet=True)
    path, _ = start_group(RunRequest(config, options, {}), GroupStart(None, World(1, 1), "why"), None)
    seed = seeds_in(path)[0]
    RunDirectory(seed).write_config(stored_config(seed).model_copy(update={"total_steps": 8000}))
    start_group(RunRequest(config, RunOptions(quiet=True), {}), GroupStart(path, World(1, 1), "why"), None)
    assert lengths == [3 * 4096, 8192 + 2 * 4096]


def test_each_seeds_place_on_a_mirror_is_one_that_its_user_has_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(groups.Group, "train", lambda self: 0)
    config = Config(num_envs=8, checkpoint=CheckpointConfig(mirror="file:///net/runs/"))
    options = RunOptions(seeds="0,1", name="group", runs_dir=str(tmp_path), quiet=True)
    path, code = start_group(RunRequest(config, options, {}), GroupStart(None, World(1, 1), "why"), None)
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
    spare_this_process(monkeypatch)
    paths = [tmp_path / f"seed_{seed}" for seed in range(4)]
    group = groups.Group(RunDirectory(tmp_path), paths, {"max_hours": 1.5}, None, 1, Progress())
    assert group._loop(StopRequest()) == 0
    assert given == [1.5, 0.5]
    assert status_of(["finished", "stopped at time limit"], 4) == "stopped at time limit"


def test_a_seed_starts_after_temporary_files_were_tidied_up(tmp_path, monkeypatch):
    given = []

    def train_and_tidy_up(self, file, command):
        given.append(json.loads(file.read_text())["resume"])
        shutil.rmtree(file.parent)

    monkeypatch.setattr(SeedRun, "start", train_and_tidy_up)
    monkeypatch.setattr(SeedRun, "has_ended", lambda self: True)
    spare_this_process(monkeypatch)
    paths = [tmp_path / f"seed_{seed}" for seed in range(3)]
    assert groups.Group(RunDirectory(tmp_path), paths, {}, None, 1, Progress())._loop(StopRequest()) == 0
    assert given == list(map(str, paths))


def spare_this_process(monkeypatch):
    """Keeps a group that a test trains by itself from what it does to the children of its process."""
    for name in ("adopt_orphans", "kill_children"):
        monkeypatch.setattr(groups, name, lambda: None)


@pytest.mark.parametrize(
    ("refusal", "why"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/x.json"), "No space left on device (/tmp/x.json)"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "Resource temporarily unavailable"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
    ],
)
def test_seeds_that_train_finish_if_the_system_refuses_to_start_another(tmp_path, monkeypatch, refusal, why):
    tried, looks = [], []

    def start(self, file, command):
        tried.append(self.path.name)
        if self.path.name == "seed_1":
            raise refusal
        self.process = cast(Any, "a process")

    def has_ended(self):
        looks.append(self)
        if len(looks) < 3:
            return False
        self.code = 0
        return True

    monkeypatch.setattr(SeedRun, "start", start)
    monkeypatch.setattr(SeedRun, "has_ended", has_ended)
    spare_this_process(monkeypatch)
    facts = summary_of(environment="CartPole-v1", iteration=40, episodes=9)
    paths = [make_run(tmp_path / f"seed_{seed}", {**facts, "seed": seed}) for seed in range(3)]
    group = groups.Group(RunDirectory(tmp_path), paths, {}, None, 2, Progress())
    with pytest.raises(RunError) as caught:
        group.train()
    assert str(caught.value) == f"seed_1: can't be started: {why} (--resume {tmp_path} goes on)"
    assert (tried, len(looks)) == (["seed_0", "seed_1"], 3)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "2 of 3 seeds finished"


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_finished_group_whose_seeds_refuse_to_go_on_keeps_its_summary(tmp_path, monkeypatch, at_once):
    closed = []

    class Seen(Progress):
        def close(self):
            closed.append(self)

    def refuse(self):
        self.said, self.code = ["lockstep: error: ppo.gamma: another\n"], 2
        return True

    monkeypatch.setattr(SeedRun, "start", lambda self, file, command: setattr(self, "process", "a process"))
    monkeypatch.setattr(SeedRun, "has_ended", refuse)
    spare_this_process(monkeypatch)
    facts = summary_of(environment="CartPole-v1", iteration=40, episodes=9)
    paths = [make_run(tmp_path / f"seed_{seed}", {**facts, "seed": seed}) for seed in range(2)]
    before = {"status": "2 of 2 seeds finished", "steps_per_second": 7.0, "command": ["lockstep", "train"]}
    (tmp_path / "summary.json").write_text(json.dumps(before))
    group = groups.Group(RunDirectory(tmp_path), paths, {}, None, at_once, Seen())
    with pytest.raises(ValueError, match=r"ppo\.gamma: another"):
        group.train()
    assert json.loads((tmp_path / "summary.json").read_text()) == before
    assert len(closed) == 1


def test_the_display_of_a_group_is_closed_if_a_second_ctrl_c_ends_it(tmp_path, monkeypatch):
    closed = []

    class Seen(Progress):
        def close(self):
            closed.append(self)

    def interrupted(self, request):
        raise KeyboardInterrupt

    monkeypatch.setattr(groups.Group, "_loop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        groups.Group(RunDirectory(tmp_path), [tmp_path / "seed_0"], {}, None, 1, Seen()).train()
    assert len(closed) == 1


SLOW = """
import os, signal, sys, time
def second(*_):
    time.sleep(0.3)
    open(sys.argv[1], "w").close()
    os._exit(130)
def first(*_):
    signal.signal(signal.SIGINT, second)
    open(sys.argv[1] + ".heard", "w").close()
signal.signal(signal.SIGINT, first)
open(sys.argv[1] + ".ready", "w").close()
time.sleep(600)
"""


def test_seeds_have_time_to_write_what_they_have_in_memory_after_a_second_ctrl_c(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "lockstep.launch.seeds.seed_run.command_that_ends_with_us",
        lambda _, file: [sys.executable, "-c", SLOW, str(tmp_path / f"{Path(file).name}.saved")],
    )
    spare_this_process(monkeypatch)
    runs = [tmp_path / f"seed_{seed}" for seed in range(2)]
    for run in runs:
        run.mkdir()
    group = groups.Group(RunDirectory(tmp_path), runs, {}, None, 2, Progress())
    saved = [tmp_path / f"{run.name}.json.saved" for run in runs]

    def press():
        for mark in (".ready", ".heard"):
            while not all(file.with_name(file.name + mark).exists() for file in saved):
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press, daemon=True)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        group.train()
    pressing.join()
    assert all(file.exists() for file in saved)
    assert [run.code for run in group.runs] == [130, 130]


def test_a_seed_whose_output_nobody_can_read_does_not_stay(tmp_path, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    run, made = SeedRun(tmp_path), []
    monkeypatch.setattr(
        "lockstep.launch.seeds.seed_run.command_that_ends_with_us",
        lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"],
    )
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: made.append(popen(*args, **kwargs)) or made[-1])
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError):
        run.start(tmp_path / "file", None)
    assert (run.process, made[0].returncode) == (None, -signal.SIGKILL)


@pytest.fixture
def played(tmp_path, monkeypatch):
    """Trains a group whose seeds end one after the other as they are told; gives which were started, in order."""
    spare_this_process(monkeypatch)
    started, trained = [], []

    def start(self, file, command):
        self.process = cast(Any, "a process")
        self.path.mkdir()
        (self.path / "config.json").touch()
        started.append(self.path.name)

    def play(at_once, seeds):
        def has_ended(self):
            code, error = seeds[self.path.name]
            if code != 2 and self not in trained:  # it has trained, and is seen to end at the next look
                trained.append(self)
                (self.path / "metrics.jsonl").write_text('{"iteration": 1, "global_step": 8}\n')
                return False
            self.said, self.code = [f"lockstep: error: {error}\n"], code
            return True

        monkeypatch.setattr(SeedRun, "start", start)
        monkeypatch.setattr(SeedRun, "has_ended", has_ended)
        monkeypatch.setattr(groups.Group, "_show", lambda self: None)
        group = groups.Group(RunDirectory(tmp_path), [tmp_path / name for name in seeds], {}, None, at_once, Progress())
        assert group._loop(StopRequest()) == 0
        return started

    return play


DONE, ALIKE = (0, ""), (2, "engine: none")


@pytest.mark.parametrize(
    ("at_once", "seeds", "count"),
    [
        (1, [ALIKE, ALIKE, ALIKE], 1),
        (1, [(2, "run group/seed_0 is being written"), DONE, DONE], 3),
        (1, [(2, "run group/seed_0 is being written"), (2, "run group/seed_1 is being written"), DONE], 3),
        (1, [DONE, (2, "licence: none is free"), DONE, DONE], 4),
        (1, [DONE, ALIKE, ALIKE, DONE], 3),
        (2, [(2, "licence: none is free"), DONE, DONE, DONE], 4),  # while nobody knows yet whether the other one trains
        (2, [ALIKE, ALIKE, DONE], 2),
    ],
)
def test_seeds_wait_no_longer_once_they_would_be_refused_as_well(played, at_once, seeds, count):
    named = {f"seed_{number}": each for number, each in enumerate(seeds)}
    assert played(at_once, named) == list(named)[:count]


WORDS = ("CartPole-v1", "--num-envs", "8", "--num-shards", "4", "--name", "group", "--resume", "auto")


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Starts a group by words, but for its training; gives it as it would be trained."""
    found = []
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(groups.Group, "train", lambda self: found.append(self) or 0)

    def start(*words):
        assert start_run(request_of([*words, "--runs-dir", str(tmp_path), "--quiet"])) == 0
        return found[-1]

    return start


def test_a_limit_in_steps_is_measured_by_the_length_that_was_asked_for_in_iterations(asked):
    words = ("CartPole-v1", "--num-envs", "8", "--num-steps", "16", "--seeds", "0-1", "--total-iterations", "1000")
    assert asked(*words, "--name", "group", "--stop-at-step", "128000")._settings["stop_at_step"] == 128_000
    with pytest.raises(ValueError, match=r"^stop_at_step: 128001 is beyond total_steps 128000$"):
        asked(*words, "--name", "other", "--stop-at-step", "128001")


def test_the_same_words_mean_to_each_seed_what_they_meant_when_the_group_began(asked):
    words = (*WORDS, "--seed", "5", "--num-seeds", "2", "--checkpoint.mirror", "file:///net/runs/")
    first = asked(*words)
    before = [stored_config(run.path) for run in first.runs]
    again = asked(*words)
    assert [stored_config(run.path) for run in again.runs] == before
    assert [(each.seed, each.checkpoint.mirror) for each in before] == [(n, "file:///net/runs/group") for n in (5, 6)]
    assert not {"seed", "checkpoint"} & again._settings.keys()


def test_another_mirror_of_a_group_has_a_place_for_its_seeds(asked):
    asked(*WORDS, "--seeds", "0,1")
    group = asked("--resume", "group", "--checkpoint.mirror", "file:///other")
    assert stored_config(group.directory.path).checkpoint.mirror == "file:///other"
    for run in group.runs:
        assert trusted_config(run.path).checkpoint.mirror == "file:///other/group"


def test_the_same_words_go_on_with_a_group_on_another_account(asked, tmp_path, monkeypatch):
    words = ("paced:PacedCartPole-v0", *WORDS[1:], "--seeds", "0,1", "--checkpoint.mirror", "file:///net/runs")
    before = [stored_config(run.path) for run in asked(*words).runs]
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another"))
    with pytest.raises(ValueError, match=r"group/config.json names paced:PacedCartPole-v0, which would be imported"):
        asked("--resume", "group")
    theirs = tmp_path / "group" / "seed_1" / "config.json"
    kept = theirs.read_text()
    theirs.write_text(kept.replace("file:///net/runs/group", "file:///theirs"))
    with pytest.raises(ValueError, match=r"^env\.id: .*group/config.json names paced:PacedCartPole-v0"):
        asked("--resume", "group", "--checkpoint.keep-last", "2")
    theirs.write_text(json.dumps(json.loads(kept) | {"log": json.loads(kept)["log"] | {"jsonl": "/theirs"}}))
    with pytest.raises(ValueError, match=r"seed_1/config.json names /theirs, which would be written"):
        asked(*words)
    theirs.write_text(kept)
    again = asked(*words)
    assert [stored_config(run.path) for run in again.runs] == before
    for run in again.runs:  # which each process reads by itself
        assert trusted_config(run.path).checkpoint.mirror == "file:///net/runs/group"


@pytest.mark.parametrize("given", ["file:///own", "file:///net/runs/own"])
def test_a_copy_of_a_group_leaves_the_originals_mirror_alone(asked, tmp_path, capsys, given):
    words = (*WORDS[:5], "--seeds", "5-7", "--name", "many", "--checkpoint.mirror", "file:///net/runs/")
    original = [stored_config(run.path) for run in asked(*words).runs]
    shutil.copytree(tmp_path / "many", tmp_path / "many2")
    own = tmp_path / "many2" / "seed_7" / "config.json"
    own.write_text(own.read_text().replace("file:///net/runs/many", given))
    remember_names(stored_config(own.parent))
    for more in ((), ("--checkpoint.keep-last", "2")):
        capsys.readouterr()
        copies = asked("--resume", "many2", *more).runs
        places = [stored_config(run.path).checkpoint.mirror for run in copies]
        assert places == ["file:///net/runs/many2", "file:///net/runs/many2", given]
        said = "lockstep: checkpoint.mirror: seeds are copied to file:///net/runs/many2 from here on; what is at "
        assert capsys.readouterr().err.count(f"{said}file:///net/runs/many stays\n") == (not more)
    assert [stored_config(run.path) for run in asked("--resume", "many").runs] == original


@pytest.mark.parametrize(
    "overrides",
    [{"seed": 5, "checkpoint": {"mirror": "s3://b/m/", "interval": 3}}, {"seed": 5, "checkpoint.mirror": "s3://b/m/"}],
)
def test_settings_of_a_group_are_each_seeds_but_for_its_seed_and_its_place(tmp_path, overrides):
    config = Config(seed=5, checkpoint=CheckpointConfig(mirror="s3://b/m/"))
    mirrored = overrides.get("checkpoint", {}) | {"mirror": f"s3://b/m/{tmp_path.name}"}
    assert settings_of_seeds(tmp_path, config, overrides) == {"checkpoint": mirrored}


def lose_all_but_the_config(group):
    for seed in seeds_in(group):
        shutil.rmtree(seed)
    (group / "group.json").unlink()


def lose_the_seeds(group):
    for seed in seeds_in(group):
        shutil.rmtree(seed)


def lose_some(group):
    shutil.rmtree(group / "seed_2")
    (group / "seed_1" / "config.json").rename(group / "seed_1" / ".config.json.tmp")


@pytest.mark.parametrize("lose", [lose_all_but_the_config, lose_the_seeds, lose_some])
def test_a_group_killed_while_it_was_made_goes_on_with_all_its_seeds_by_the_same_words(asked, lose):
    group = asked(*WORDS, "--seeds", "0-3").directory.path
    before = [stored_config(seed) for seed in seeds_in(group)]
    lose(group)
    paths = [run.path for run in asked(*WORDS, "--seeds", "0-3").runs]
    assert paths == seeds_in(group) == [group / f"seed_{seed}" for seed in range(4)]
    assert [stored_config(seed) for seed in paths] == before


def test_a_group_goes_on_with_all_its_seeds_by_its_name(asked):
    group = asked(*WORDS, "--seeds", "0-3").directory.path
    lose_some(group)
    assert len(asked("--resume", "group").runs) == len(seeds_in(group)) == 4


def test_a_group_killed_while_its_config_was_written_begins_by_the_same_words(asked, tmp_path):
    (tmp_path / "group").mkdir()
    (tmp_path / "group" / ".config.json.tmp").write_text('{"env": {')
    paths = [run.path for run in asked(*WORDS, "--seeds", "0-1").runs]
    assert paths == seeds_in(tmp_path / "group")
    assert sorted(each.name for each in (tmp_path / "group").iterdir()) == [
        *("config.json", "group.json", "seed_0", "seed_1"),
    ]


def test_a_request_that_is_refused_makes_no_group_of_a_run_that_has_trained_nothing(asked, tmp_path, monkeypatch):
    run = create_run(str(tmp_path), "single", request_of(["CartPole-v1", "--num-envs", "8"]).config)
    run.unlock()
    with pytest.raises(ValueError, match=r"^ppo\.gamma: run .*single was started with .* can't be resumed with 0\.5"):
        asked("--resume", "single", "--seeds", "0-2", "--ppo.gamma", "0.5")
    assert [each.name for each in run.path.iterdir()] == ["config.json"]

    def refuse(self):
        raise ValueError("no good")

    with monkeypatch.context() as patch:
        patch.setattr(groups.Group, "train", refuse)
        with pytest.raises(ValueError, match="no good"):
            asked("--resume", "single", "--seeds", "0-2", "--total-steps", "4096")
    assert [each.name for each in run.path.iterdir()] == ["config.json"]
    assert stored_config(run.path).total_steps != 4096
    group = asked("--resume", "single", "--seeds", "0-2", "--total-steps", "4096")
    assert [stored_config(each.path).total_steps for each in group.runs] == [4096] * 3


def test_a_batch_size_that_a_resumed_run_cannot_have_is_refused_with_those_that_fit_its_shards(tmp_path):
    words = ["CartPole-v1", "--num-envs", "8", "--num-steps", "128"]
    run = create_run(str(tmp_path), "single", resolve(request_of(words).config))
    run.unlock()
    with pytest.raises(ValueError, match=r"^ppo\.batch_size: 3 .* = 1024 samples; nearest that work: 8 or 16$"):
        resumed_config(run.path, {"ppo": {"batch_size": 3}})


def test_groups_of_before_are_of_the_seeds_they_have(asked):
    group = asked(*WORDS, "--seeds", "0-2").directory.path
    (group / "group.json").unlink()
    assert seeds_of(group) == [0, 1, 2]
    assert seeds_of(group / "seed_0") == []
    (group / "group.json").write_text('{"seeds": [0, 1, "2", ')
    assert [run.path for run in asked("--resume", "group").runs] == seeds_in(group)
    assert len(seeds_in(group)) == 3


def test_what_changes_in_a_resumed_group_is_written_for_seeds_that_wait_for_their_turn(asked, capsys):
    asked(*WORDS, "--seeds", "0-2", "--total-steps", "1024")
    group = asked("--resume", "group", "--total-steps", "4096")
    assert [stored_config(run.path).total_steps for run in group.runs] == [4096] * 3
    assert capsys.readouterr().err.count("total_steps was 1024 and is 4096 from here on") == 1


def test_a_seed_that_was_trained_further_by_itself_stays_so(asked, tmp_path):
    group = asked(*WORDS, "--seeds", "0-2", "--total-steps", "1024").directory.path
    config = stored_config(group / "seed_1").model_copy(update={"total_steps": 2048})
    RunDirectory(group / "seed_1").write_config(config)
    runs = asked("--resume", "group").runs
    assert [stored_config(run.path).total_steps for run in runs] == [1024, 2048, 1024]


def test_a_resumed_group_whose_seeds_refuse_is_as_it_was(asked, monkeypatch):
    path = asked(*WORDS, "--seeds", "0-2", "--total-steps", "1024").directory.path
    files = [each / "config.json" for each in (path, *seeds_in(path))]
    before = [file.read_text() for file in files]

    def refuse(self):
        raise ValueError("no good")

    monkeypatch.setattr(groups.Group, "train", refuse)
    with pytest.raises(ValueError, match="no good"):
        asked("--resume", "group", "--total-steps", "4096")
    assert [file.read_text() for file in files] == before


def test_a_group_that_a_seed_is_kept_from_is_refused_before_anything_is_written(asked):
    path = asked(*WORDS, "--seeds", "0-2", "--total-steps", "1024").directory.path
    held, before = RunDirectory(path / "seed_2"), (path / "config.json").read_text()
    held.lock()
    try:
        with pytest.raises(ValueError, match=r"^run .*seed_2 is being written by another process"):
            asked("--resume", "group", "--total-steps", "4096")
    finally:
        held.unlock()
    assert [(each / "config.json").read_text() for each in (path,)] == [before]
    assert stored_config(path / "seed_0").total_steps == 1024


def test_a_session_of_a_group_is_as_fast_as_what_it_trained_and_the_group_as_old_as_all_of_them(tmp_path):
    group, summaries = RunDirectory(tmp_path), {}
    for seed in range(2):
        facts = summary_of(seed=seed, environment="CartPole-v1", iteration=40, episodes=9, best_checkpoint=None)
        summaries[path := make_run(tmp_path / f"seed_{seed}", facts)] = facts
        (path / "checkpoints" / "step_240").mkdir(parents=True)
        facts["global_step"] = 240 + 1000 * seed

    def session(seconds):
        before = begin_group(group, list(summaries))
        return finish_group(group, summaries, 2, seconds, lambda line: None, before)

    first = session(10.0)
    assert (first["steps_per_second"], first["wall_time"]) == (100.0, 10.0)
    begin_group(group, list(summaries))  # a session that is killed
    assert not (tmp_path / "summary.json").exists()
    assert session(5.0)["wall_time"] == 15.0


@pytest.mark.parametrize(
    ("status", "taken", "kept"), [("finished", 0, True), ("finished", 80, False), ("stopped at step", 0, False)]
)
def test_a_group_that_is_done_already_keeps_what_its_last_steps_left(tmp_path, status, taken, kept):
    facts = summary_of(seed=0, environment="CartPole-v1", iteration=40, episodes=9, best_checkpoint=None)
    run, facts["status"], facts["global_step"] = make_run(tmp_path / "seed_0", facts), status, 240

    def session(seconds, command):
        group = RunDirectory(tmp_path, facts=SessionFacts(command=command))
        before = begin_group(group, [run])
        summary = finish_group(group, {run: facts}, 1, seconds, lambda line: None, before)
        return {name: summary[name] for name in ("command", "wall_time", "steps_per_second")}

    first = session(10.0, ("lockstep", "train"))
    (run / "checkpoints" / "step_240").mkdir(parents=True)
    facts["global_step"] += taken
    again = {"command": ["lockstep", "again"], "wall_time": 15.0, "steps_per_second": taken / 5.0}
    assert session(5.0, ("lockstep", "again")) == (first if kept else again)
    begin_group(RunDirectory(tmp_path), [run])  # without the summary there is nothing to keep
    assert session(5.0, ("lockstep", "again"))["command"] == ["lockstep", "again"]


@pytest.mark.parametrize(("reduction", "told"), [("fast", 1), ("exact", 0)])
def test_a_group_is_told_once_what_changes_the_order_of_sums(tmp_path, capsys, reduction, told):
    group = make_group(tmp_path / "many")
    for run in (group, *group.glob("seed_*")):
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps({**config, "reduction": reduction}))
        (run / "summary.json").unlink(missing_ok=True)  # they have no checkpoints, so they have trained nothing
    overrides = {"fsdp": True, "collectives": "backend"}
    config = resumed_config(group, overrides)
    changed = changed_seeds(group, config, overrides, RunOptions())
    assert len(changed) == 3
    write_changes(changed, trust=False)
    said = capsys.readouterr().err
    follows = "from here on; with reduction fast the order of sums follows it\n"
    assert said.count(f"lockstep: warning: fsdp was false and is true {follows}") == told
    assert said.count(f"lockstep: warning: collectives was auto and is backend {follows}") == told
