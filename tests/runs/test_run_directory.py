import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lockstep.config.checks import resolve
from lockstep.config.run import CheckpointConfig, Config, EnvConfig, LogConfig
from lockstep.core.topology import Topology
from lockstep.launch.request import request_of
from lockstep.runs import checkpoint_writer
from lockstep.runs.checkpoint import CheckpointError, pack, to_files
from lockstep.runs.checkpoint_writer import CheckpointWriter, commit
from lockstep.runs.directory import FINGERPRINTS, TIMING, RunDirectory, is_writer
from lockstep.runs.finding import find_run
from lockstep.runs.lock import RunLock, is_held
from lockstep.runs.making import create_run, default_name

CONFIG = resolve(Config(seed=3))
FILES = to_files({"policy/w": np.ones(2)}, {0: pack({"x": np.ones(1)})}, {"iteration": 1})


def complaint(action, *arguments):
    with pytest.raises(ValueError) as caught:
        action(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def create(tmp_path, name: str | None = "a", config=CONFIG):
    run = create_run(str(tmp_path / "runs"), name, config)
    run.unlock()
    return run.path


def save_checkpoint(path, step=100):
    run = RunDirectory(path)
    (path / "metrics.jsonl").touch()
    writer = run.open_checkpoints(CheckpointConfig())
    assert isinstance(writer, CheckpointWriter)
    writer.save(step, FILES, None)
    writer.wait()


def record(iteration):
    return {"iteration": iteration, "global_step": 10 * iteration, "rollout/episode_return_mean": 1.0}


def everything_in(path):
    return sorted(str(p.relative_to(path)) for p in path.rglob("*"))


# ---- making one


def test_a_new_run_holds_its_config_and_nothing_else(tmp_path):
    path = create(tmp_path)
    assert path == tmp_path / "runs" / "a"
    assert everything_in(path) == ["config.json"]
    assert request_of([str(path)]).config == CONFIG


def test_a_run_without_a_name_is_named_after_environment_and_seed(tmp_path):
    config = CONFIG.model_copy(update={"env": EnvConfig(id="my.module:lockstep/CartPole-v1")})
    paths = [create(tmp_path, None, config) for _ in range(3)]
    for path in paths:
        (path / "metrics.jsonl").write_text("{}\n")
        assert path.name.startswith("lockstep-CartPole-v1-seed3-")
    assert len(set(paths)) == 3
    assert default_name(CONFIG).startswith("CartPole-v1-seed3-")


@pytest.mark.parametrize("trace", ["metrics", "checkpoint", "foreign", "file"])
def test_a_name_that_is_taken_is_refused_and_left_as_it_is(tmp_path, trace):
    path = tmp_path / "runs" / "a"
    if trace == "file":
        path.parent.mkdir()
        path.write_text("a file")
    elif trace == "foreign":
        path.mkdir(parents=True)
        (path / "thesis.tex").write_text("mine")
    else:
        create(tmp_path)
        if trace == "metrics":
            (path / "metrics.jsonl").write_text('{"iteration": 1}\n')
        else:
            save_checkpoint(path)
    before = everything_in(tmp_path)
    text = complaint(create, tmp_path, "a", resolve(Config(seed=4)))
    assert text.startswith(f"name: run {path} exists already")
    assert "--name" in text
    assert everything_in(tmp_path) == before
    if trace in ("metrics", "checkpoint"):
        assert f"--resume {path}" in text
        assert json.loads((path / "config.json").read_text())["seed"] == 3


def test_of_a_taken_name_with_another_seed_it_is_said_how_to_train_several(tmp_path):
    path = create(tmp_path)
    save_checkpoint(path)
    stored = json.loads((path / "config.json").read_text())
    for changed, helps in (({"seed": 4}, True), ({}, False), ({"seed": 4, "num_steps": 7}, False)):
        text = complaint(create, tmp_path, "a", Config.model_validate(stored | changed))
        assert text.endswith("; several seeds of a name are --seeds 0-4") == helps


def test_a_run_that_never_got_anywhere_may_be_started_again(tmp_path):
    path = create(tmp_path)
    (path / "metrics.jsonl").touch()
    (path / "checkpoints").mkdir()
    assert create(tmp_path, "a", resolve(Config(seed=4))) == path
    assert json.loads((path / "config.json").read_text())["seed"] == 4


def test_a_new_run_is_not_the_failed_one_at_a_service(tmp_path):
    path = create(tmp_path)
    (path / "metrics.jsonl").touch()
    (path / "trackers.json").write_text('{"mlflow": {"id": "of the failed run"}}')
    assert create(tmp_path) == path
    assert not (path / "trackers.json").exists()


@pytest.mark.parametrize("torn", [".config.json.tmp", ".group.json.tmp"])
def test_a_run_whose_beginning_was_killed_while_it_was_written_may_be_started_again(tmp_path, torn):
    """By its name, or by a supervisor's words; a run that is no group keeps nothing of one."""
    path = tmp_path / "runs" / "a"
    path.mkdir(parents=True)
    (path / torn).write_text('{"env": {')
    (path / ".lock").touch()
    words = ["CartPole-v1", "--runs-dir", str(path.parent), "--name", "a", "--resume", "auto"]
    assert request_of(words).options.resume is None
    assert everything_in(create(tmp_path)) == ["config.json"]
    assert request_of(words).options.resume == str(path)


def test_a_directory_that_is_no_run_is_not_said_to_be_one_that_goes_on(tmp_path):
    path = tmp_path / "runs" / "a"
    path.mkdir(parents=True)
    (path / "thesis.tex").write_text("mine")
    text = complaint(create, tmp_path)
    assert text == f"name: run {path} exists already, with files that are no run's; choose another --name"


def test_a_run_that_cannot_begin_leaves_nothing_behind_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a").symlink_to(tmp_path / "disk")
    for _ in range(2):
        create_run(str(tmp_path / "runs"), "a", CONFIG).discard()
        assert everything_in(tmp_path / "disk") == []


def test_an_empty_directory_may_become_a_run(tmp_path):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    assert everything_in(create(tmp_path)) == ["config.json"]


def test_a_run_in_its_first_iteration_is_not_started_again_over_its_head(tmp_path):
    """It has logged nothing yet, but a process holds its lock: its config must stay what that process runs."""
    path = create(tmp_path)
    running = RunDirectory(path)
    running.lock()
    complaint(create, tmp_path, "a", resolve(Config(seed=4)))
    assert json.loads((path / "config.json").read_text())["seed"] == 3
    running.unlock()


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "runs").write_text("a file")
    text = complaint(create, tmp_path)
    assert text == f"runs_dir: {tmp_path / 'runs'} is a file; give a directory, in which run directories are made"
    text = complaint(create, tmp_path / "runs")
    assert text == f"runs_dir: {tmp_path / 'runs' / 'runs' / 'a'} can't be written: Not a directory"


# ---- finding one


def test_a_run_is_found_by_name_and_by_path(tmp_path, monkeypatch):
    path = create(tmp_path)
    assert find_run("a", str(tmp_path / "runs")) == (path, "latest")
    assert find_run(str(path), "elsewhere") == (path, "latest")
    assert find_run(f"{path}/", "elsewhere") == (path, "latest")
    monkeypatch.chdir(tmp_path)
    assert find_run("a")[0].resolve() == path
    assert find_run("runs/a")[0].resolve() == path


def test_a_run_is_found_by_one_of_its_checkpoints(tmp_path):
    path = create(tmp_path)
    save_checkpoint(path, 100)
    assert find_run(str(path / "checkpoints" / "step_100")) == (path, "step_100")
    assert find_run("a/checkpoints/step_100", str(tmp_path / "runs")) == (path, "step_100")
    complaint(find_run, str(path / "checkpoints" / "step_200"))


def test_a_run_that_is_not_there(tmp_path):
    runs = str(tmp_path / "runs")
    text = complaint(find_run, "b", runs)
    assert "neither b nor " in text
    assert text.endswith(f"{runs} holds no runs")
    create(tmp_path, "a")
    create(tmp_path, "c")
    (tmp_path / "runs" / "no-run").mkdir()
    assert complaint(find_run, "b", runs).endswith(f"in {runs} there are: a, c")


def test_of_many_runs_five_are_named_and_the_one_that_is_called_nearly_so(tmp_path):
    runs = str(tmp_path)
    for name in ("aa", "bb", "cc", "dd", "ee", "ff", "walker-7"):
        create_run(runs, name, CONFIG).unlock()
    assert complaint(find_run, "zz", runs).endswith(f"in {runs} there are: aa, bb, cc, dd, ee and 2 more")
    assert complaint(find_run, "walker7", runs).endswith("; did you mean walker-7?")


# ---- one writer


LOCK = """
import pathlib, sys
from lockstep.runs.lock import RunLock
from lockstep.runs.making import create_run, default_name
from lockstep.runs.directory import RunDirectory
run = RunDirectory(pathlib.Path(sys.argv[1]))
run.lock()
print("locked", flush=True)
sys.stdin.read()
"""


def other_process(path, **keywords):
    return subprocess.Popen(
        [sys.executable, "-c", LOCK, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **keywords,
    )


def test_a_second_process_is_kept_out_until_the_first_lets_go(tmp_path):
    path = create(tmp_path)
    run = RunDirectory(path)
    run.lock()
    with other_process(path) as other:
        out, err = other.communicate(timeout=600)
    assert "locked" not in out
    assert f"run {path} is being written by another process" in err
    run.unlock()
    assert everything_in(path) == ["config.json"]
    with other_process(path) as other:
        out, _ = other.communicate(timeout=600)
    assert out == "locked\n"


def test_a_rank_that_fails_leaves_the_run_to_its_launcher(tmp_path):
    path = create(tmp_path)
    launcher = RunDirectory(path)
    launcher.lock()
    launcher.hand_over()
    rank = RunLock(path / ".lock")
    rank._keep((path / ".lock").open("ab"))  # as take_over does, in another process
    rank._release_own()
    assert (path / ".lock").exists()
    launcher.unlock()
    assert everything_in(path) == ["config.json"]


def test_a_run_that_ends_while_it_is_asked_about_is_not_held(tmp_path, monkeypatch):
    path, is_file = create(tmp_path), Path.is_file
    (path / ".lock").touch()

    def ends_after(asked):
        found = is_file(asked)
        if asked.name == ".lock":
            asked.unlink()
        return found

    monkeypatch.setattr(Path, "is_file", ends_after)
    assert not is_held(path / ".lock")
    assert not is_held(path / ".lock" / "inside")


def test_who_lets_go_late_takes_nobody_elses_lock_away(tmp_path):
    path = create(tmp_path)
    first = RunDirectory(path)
    first.lock()
    (path / ".lock").unlink()
    (path / ".lock").write_text("another run's")
    first.unlock()
    assert (path / ".lock").exists()


def test_a_process_that_is_killed_leaves_no_lock(tmp_path):
    path = create(tmp_path)
    with other_process(path) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        assert "being written by another process" in complaint(RunDirectory(path).lock)
        other.kill()
        other.wait(timeout=600)
    run = RunDirectory(path)
    run.lock()
    assert "being written" in complaint(RunDirectory(path).lock)
    run.unlock()


def test_who_was_kept_out_cannot_open_the_door_for_others(tmp_path):
    path = create(tmp_path)
    run, second = RunDirectory(path), RunDirectory(path)
    run.lock()
    complaint(second.lock)
    second.unlock()
    assert "being written" in complaint(RunDirectory(path).lock)
    run.unlock()


def test_what_killed_writers_left_goes_with_the_next_cut(tmp_path):
    run = create_run(str(tmp_path), "left", CONFIG)
    left = (".rewrite-a", "tensorboard/.rewrite-b", "videos/.step_9.7.unfinished.mp4", "videos/step_9.mp4")
    for name in left:
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).touch()
    (run.path / "videos" / "mine.mp4").touch()
    run.cut_after(9, 9, LogConfig())
    assert [name for name in left if (run.path / name).exists()] == ["videos/step_9.mp4"]
    assert (run.path / "videos" / "mine.mp4").exists()
    run.unlock()


# ---- writing


def use_every_writer(run):
    run.lock()
    run.write_config(CONFIG)
    run.write_summary({"final_return": 1.0})
    trackers = run.open_trackers(Config(log=LogConfig(jsonl=str(run.path / "second.jsonl"))))
    trackers.log(record(1))
    trackers.text("config", "text")
    trackers.close()
    fingerprints = run.open_records(FINGERPRINTS)
    fingerprints.log({"iteration": 1})
    fingerprints.close()
    timing = run.open_records(TIMING)
    timing.log({"iteration": 1, "t_wait": [0.5, 0.0]})
    timing.close()
    checkpoints = run.open_checkpoints(CheckpointConfig())
    checkpoints.save(1, FILES, None)
    checkpoints.wait()
    run.cut_after(0, 1, LogConfig(jsonl=str(run.path / "second.jsonl")))
    run.open_progress(100).close()
    run.warn("something")
    run.unlock()


def test_only_the_writer_writes(tmp_path, capsys):
    path = create(tmp_path)
    before = {name: (path / name).read_text() for name in everything_in(path)}
    use_every_writer(RunDirectory(path, is_writer=False))
    assert {name: (path / name).read_text() for name in everything_in(path)} == before
    assert capsys.readouterr() == ("", "")
    use_every_writer(RunDirectory(path, is_writer=True, quiet=True))
    assert capsys.readouterr().err == "lockstep: warning: something\n"
    written = everything_in(path)
    for name in (
        "summary.json",
        "metrics.jsonl",
        "metrics.csv",
        "second.jsonl",
        "fingerprints.jsonl",
        "timing.jsonl",
        "tensorboard",
    ):
        assert name in written
    assert "checkpoints/step_1/manifest.json" in written
    assert not any(name.endswith(".tmp") or name == ".lock" for name in written)


def test_of_all_ranks_one_writes():
    assert [is_writer(Topology(rank, 4, rank % 2, 2)) for rank in range(4)] == [True, False, False, False]


def test_a_rank_that_does_not_write_needs_no_directory(tmp_path):
    use_every_writer(RunDirectory(tmp_path / "nowhere" / "a", is_writer=False))
    assert everything_in(tmp_path) == []


def test_trackers_are_those_that_the_config_asks_for(tmp_path):
    path = create(tmp_path)
    trackers = RunDirectory(path).open_trackers(Config(log=LogConfig(tensorboard=False)))
    trackers.log(record(1))
    trackers.close()
    assert everything_in(path) == ["config.json", "metrics.csv", "metrics.jsonl"]


def test_summary_and_config_replace_the_ones_before(tmp_path):
    run = RunDirectory(create(tmp_path))
    run.write_summary({"final_return": 1.0})
    run.write_summary({"final_return": None})
    assert json.loads((run.path / "summary.json").read_text()) == {"final_return": None}
    run.write_config(resolve(Config(seed=9)))
    assert request_of([str(run.path)]).config.seed == 9
    assert everything_in(run.path) == ["config.json", "summary.json"]


def test_logs_are_cut_to_the_checkpoint(tmp_path):
    run = RunDirectory(create(tmp_path))
    log = LogConfig(jsonl=str(tmp_path / "second.jsonl"), tensorboard=False)
    trackers, fingerprints = run.open_trackers(Config(log=log)), run.open_records(FINGERPRINTS)
    timing = run.open_records(TIMING)
    for iteration in range(1, 6):
        trackers.log(record(iteration))
        fingerprints.log({"iteration": iteration, "policy/w": iteration})
        timing.log({"iteration": iteration, "t_wait": [0.5, 0.0]})
    trackers.close()
    fingerprints.close()
    timing.close()
    run.cut_after(3, 30, log)
    own = [run.path / f"{name}.jsonl" for name in ("metrics", "fingerprints", "timing")]
    for file in (*own, tmp_path / "second.jsonl"):
        assert [json.loads(line)["iteration"] for line in file.read_text().splitlines()] == [1, 2, 3], file
    assert len((run.path / "metrics.csv").read_text().splitlines()) == 1 + 3
    run.cut_after(3, 30, log)
    assert len((run.path / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("config", [{"proof": {"trace": True}}, {"log": {"timing": True}}, {"proof": 3}, [], None])
def test_records_that_are_gone_are_said_if_the_checkpoint_counts_on_them(tmp_path, capsys, config):
    run = RunDirectory(create(tmp_path))
    commit(run.checkpoints, 40, {}, None, {"config": config})
    run.cut_after(4, 40, LogConfig(tensorboard=False))
    for name in (FINGERPRINTS, TIMING):
        run.open_records(name).close()
    files = {"proof": FINGERPRINTS, "log": TIMING}
    gone = [run.path / files[name] for name, section in dict(config or {}).items() if isinstance(section, dict)]
    said = [f"lockstep: warning: {file} has no rows of iterations 1 to 4" for file in gone]
    assert capsys.readouterr().err.splitlines() == said
    run.cut_after(0, 0, LogConfig(tensorboard=False))
    assert capsys.readouterr().err == ""


def test_fingerprints_that_lost_their_tail_are_said_once_where_they_are_gone_on_with(tmp_path, capsys):
    for name in (FINGERPRINTS, TIMING):
        run = RunDirectory(create(tmp_path, name=name.partition(".")[0]))
        file = run.path / name
        file.write_text('{"iteration": 1}\n{"iteration": 2}\n{"iteration": 3, "polic')
        run.cut_after(4, 40, LogConfig())
        assert capsys.readouterr().err == ""
        records = run.open_records(name)
        assert capsys.readouterr().err == f"lockstep: warning: {file} has no rows of iterations 3 to 4\n"
        for iteration in (5, 6):
            records.log({"iteration": iteration})
        records.close()
        again = RunDirectory(run.path)
        again.cut_after(6, 60, LogConfig())
        again.open_records(name).close()
        assert capsys.readouterr().err == ""


def test_a_checkpoint_waits_for_the_rows_that_it_counts_on(tmp_path, monkeypatch):
    path, order = create(tmp_path), []
    there = ("metrics.csv", FINGERPRINTS)  # and no timing
    for name in there:
        (path / name).touch()
    for name, function in (("sync_path", checkpoint_writer.sync_path), ("commit", checkpoint_writer.commit)):
        monkeypatch.setattr(checkpoint_writer, name, lambda *a, n=name, f=function: (order.append((n, a[0])), f(*a))[1])
    save_checkpoint(path)
    for name in ("metrics.jsonl", *there):
        assert order.index(("sync_path", path / name)) < order.index(("commit", path / "checkpoints"))
    assert ("sync_path", path / TIMING) not in order


def test_without_them_there_is_no_checkpoint(tmp_path):
    path = create(tmp_path)
    writer = RunDirectory(path).open_checkpoints(CheckpointConfig())
    writer.save(100, FILES, None)
    with pytest.raises(
        CheckpointError, match=r"metrics.jsonl can't be written: No such file .*; the run counts on it$"
    ):
        writer.wait()
    assert not any((path / "checkpoints").iterdir())
