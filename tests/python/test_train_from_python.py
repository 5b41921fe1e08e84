"""``lockstep.train``: the command line's run, in processes of its own, for a caller who keeps everything as it was."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import handed_envs
import imageio
import numpy as np
import pytest
import torch
from command_line import NEEDS_PROC, wait_until
from command_line import train as command_line_train

import lockstep
from lockstep.config.run import Config, RunOptions
from lockstep.core.errors import RunError
from lockstep.core.machine import SELDOM, USUAL
from lockstep.python import start
from lockstep.python.arguments import in_plain_words
from lockstep.python.handed import handed
from lockstep.python.start import _place_of

SMALL = {"num_steps": 16, "total_steps": 1024, "quiet": True}
WORDS = ("CartPole-v1", "--num-steps", 16, "--total-steps", 1024)


class Local(handed_envs.Counting):
    """No other process finds this one by a module that it could import under this name."""


Local.__module__ = "__main__"


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def test_a_run_has_the_policy_and_the_config_of_now(runs):
    run = lockstep.train("CartPole-v1", name="now", stop_at_step=512, **SMALL)
    first, config = run.policy, run.config
    assert run.policy is first
    assert (first.global_step, config.total_steps) == (512, 1024)
    watched = lockstep.load_run("now")
    assert watched.policy.global_step == 512
    assert run.resume(total_steps=2048).summary["global_step"] == 2048
    for each in (run, watched):
        assert (each.policy.global_step, each.config.total_steps) == (2048, 2048)


@NEEDS_PROC
def test_what_an_environment_has_started_does_not_hold_its_caller_up(runs, tmp_path, monkeypatch):
    """It ends with the run; what it has put into a session of its own may go on, and say what nobody hears."""
    left = tmp_path / "left"
    monkeypatch.setenv("LEFT", str(left))

    def running():
        said = [Path(f"/proc/{pid}/cmdline") for pid in left.read_text().split()]
        return [int(file.parent.name) for file in said if file.exists() and file.read_bytes()]

    try:
        run = lockstep.train("lingering:Lingering", name="left", num_steps=16, total_steps=128, quiet=True)
        assert run.status == "finished"
        assert "over" not in left.read_text()
        wait_until(lambda: len(running()) == 1, "the end of what it has started in its session")
    finally:
        for pid in running():
            os.killpg(pid, signal.SIGKILL)


def test_an_environments_settings_stand_beside_a_config_or_a_resumed_run(runs):
    run = lockstep.train(config={"env": "CartPole-v1"}, env={"workers": 1}, name="section", stop_at_step=512, **SMALL)
    assert (run.config.env.id, run.config.env.workers) == ("CartPole-v1", 1)
    assert lockstep.train(resume="section", env={"workers": 2}, quiet=True).config.env.workers == 2
    whole = lockstep.train(env={"id": "CartPole-v1", "workers": 0}, name="id", stop_at_step=512, **SMALL)
    assert whole.config.env.workers == 0


@pytest.mark.started
def test_the_run_is_the_command_lines(runs, tmp_path):
    run = lockstep.train("CartPole-v1", nproc=2, name="python", **SMALL)
    other = command_line_train(tmp_path, *WORDS, name="words")
    assert run.path == runs / "python"
    assert (run.status, run.summary["world_size"]) == ("finished", 2)
    for key in ("params_sha256", "state_sha256"):
        assert run.summary[key] == other.summary[key]
    assert [row["global_step"] for row in run.metrics] == list(range(128, 1025, 128))
    assert run.dataframe()["rollout/episode_return_mean"].iloc[-1] == run.metrics[-1]["rollout/episode_return_mean"]
    assert run.final_return == run.summary["final_return"]
    assert run.policy([0.0, 0.0, 0.0, 0.0]) in (0, 1)
    another = lockstep.train("CartPole-v1", seed=1, name="another", **SMALL)
    assert another.summary["state_sha256"] != run.summary["state_sha256"]
    going_on = lockstep.load_run("python").resume(2048, quiet=True)
    assert (going_on.path, going_on.summary["global_step"]) == (run.path, 2048)


def test_options_of_a_config_file_count(runs, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"env": "CartPole-v1", "nproc": 2, "runs_dir": "elsewhere", "total_steps": 256}))
    run = lockstep.train(file, name="file", num_steps=16, quiet=True)
    assert (run.path, run.summary["world_size"]) == (tmp_path / "elsewhere" / "file", 2)
    run = lockstep.train(file, name="mine", nproc=1, runs_dir="runs", num_steps=16, quiet=True)
    assert (run.path, run.summary["world_size"]) == (runs / "mine", 1)


@pytest.mark.long
def test_a_config_in_any_form_is_the_same_run(runs, tmp_path):
    settings = {"env": "CartPole-v1", "ppo": {"num_epochs": 2}, "num_steps": 16, "total_steps": 256}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(settings))
    mapping = lockstep.train(settings, name="mapping", quiet=True)
    config = mapping.config
    assert (config.ppo.num_epochs, config.num_steps) == (2, 16)
    ended = {"mapping": mapping, "file": lockstep.train(file, name="file", quiet=True)}
    ended["config"] = lockstep.train(config=config, name="config", quiet=True)
    ended["over"] = lockstep.train("CartPole-v1", config=file, ppo={"num_epochs": 3}, name="over", quiet=True)
    hashes = {name: run.summary["state_sha256"] for name, run in ended.items()}
    assert hashes["mapping"] == hashes["file"] == hashes["config"] != hashes["over"]


def test_an_environment_may_be_an_object(runs):
    """Of a module, of the caller's script, or a lambda: they are the same environment."""
    named = lockstep.train("handed_envs:Counting", name="named", **SMALL)
    ended = {
        "class": lockstep.train(handed_envs.Counting, nproc=2, name="class", **SMALL),
        "script": lockstep.train(Local, nproc=2, name="script", **SMALL),
        "lambda": lockstep.train(lambda length=10: handed_envs.Counting(length), name="lambda", **SMALL),
    }
    assert {name: run.config.env.id for name, run in ended.items()} == {
        "class": "handed_envs:Counting",
        "script": "python:Local",
        "lambda": "python:lambda",
    }
    assert {run.summary["state_sha256"] for run in ended.values()} == {named.summary["state_sha256"]}
    shorter = lockstep.train(handed_envs.short, name="short", **SMALL)
    assert shorter.summary["state_sha256"] != named.summary["state_sha256"]
    script = ended["script"]
    assert script.evaluate(3)["length_mean"] == 10
    assert lockstep.load_run("script", env=Local).evaluate(2)["per_episode"]["length"] == [10, 10]
    with pytest.raises(ValueError, match=r"python:Local was handed to lockstep\.train as an object"):
        lockstep.load_run("script").evaluate(2)


class LocalDrawn(handed_envs.Wrapped):
    """A class without a module that draws what it does."""


LocalDrawn.__module__ = "__main__"


def test_episodes_of_an_object_are_recorded(runs, tmp_path, monkeypatch):
    run = lockstep.train(LocalDrawn, name="drawn", **SMALL)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    assert run.record_video("~/out.gif") == tmp_path / "home" / "out.gif"
    assert run.report("~/report.html") == tmp_path / "home" / "report.html"
    assert {"out.gif", "report.html"} <= set(os.listdir(tmp_path / "home"))
    assert run.record_video(tmp_path / "out.gif") == tmp_path / "out.gif"
    frames = np.stack([frame[..., :3] for frame in imageio.mimread(tmp_path / "out.gif")])
    assert len(frames) > 5
    assert np.abs(frames[0].astype(int) - frames[-1]).max() > 20
    with pytest.raises(ValueError, match=r"^episodes: '2\.0' is no whole number$"):
        run.evaluate(episodes=2.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"out\.avi"):
        run.record_video(tmp_path / "out.avi")
    with pytest.raises(ValueError, match=r"python:LocalDrawn was handed to lockstep\.train as an object"):
        lockstep.load_run("drawn").record_video(tmp_path / "other.gif")


def test_what_cant_be_taken_along_is_one_line():
    lock = threading.Lock()
    with pytest.raises(
        ValueError, match=r"'.*<lambda>' can't be taken to another process .* as 'module:name'"
    ) as caught:
        handed("env.id", lambda: lock and handed_envs.Counting())
    assert "\n" not in str(caught.value)
    assert handed("env.id", handed_envs.Counting).pickled is None
    assert handed("env.id", Local).pickled is not None


def test_what_a_config_can_say_is_put_into_words():
    settings = {
        "a": np.int64(3),
        "b": (np.float32(0.5), [True]),
        "c": np.zeros(2),
        "d": Path("x"),
        "e": {"f": range(2)},
    }
    assert in_plain_words(settings) == {"a": 3, "b": [0.5, [True]], "c": [0.0, 0.0], "d": "x", "e": {"f": [0, 1]}}


def test_a_group_of_seeds_has_no_metrics_of_its_own(runs):
    group = lockstep.train("CartPole-v1", seeds=[3], name="group", **SMALL)
    with pytest.raises(ValueError, match=r"holds a run for each of 1 seeds; see those of run\.seeds"):
        group.metrics  # noqa: B018
    assert len(group.seeds[0].metrics) == 8


def test_settings_of_the_environment_stand_beside_it(runs):
    run = lockstep.train(handed_envs.Counting, env={"kwargs": {"length": np.int64(4)}}, name="settings", **SMALL)
    assert (run.config.env.id, run.metrics[-1]["rollout/episode_length_mean"]) == ("handed_envs:Counting", 4.0)
    assert lockstep.train(env="CartPole-v1", name="by_name", **SMALL).config.env.id == "CartPole-v1"


def test_an_id_that_this_process_alone_knows_is_explained(runs):
    cases: list[tuple[str, Any, str]] = [
        ("HereByName-v0", "handed_envs:Counting", "'handed_envs:HereByName-v0' imports handed_envs first"),
        ("HereByObject-v0", Local, "'module:Id' imports one, or give the class itself"),
    ]
    for env_id, entry, way in cases:
        gym.register(env_id, entry_point=entry)
        try:
            with pytest.raises(ValueError, match=f"'{env_id}' is registered in this process alone.*{way}"):
                lockstep.train(env_id, **SMALL)
        finally:
            del gym.registry[env_id]
    assert not runs.exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((["CartPole-v1"], {"ppo": {"learning_rat": 1}}), "ppo.learning_rat: unknown key; did you mean"),
        (
            (["CartPole-v1"], {"num_envs": np.int64(7), "num_shards": 3}),
            "num_shards: 7 environments can't be cut into 3",
        ),
        ((["NoSuch-v0"], {}), "no environment 'NoSuch-v0' is registered"),
        (
            ([handed_envs.Counting()], {}),
            "Counting is one environment, and a run makes several; give what makes one: a class",
        ),
        (([gym.make("CartPole-v1")], {}), "give what makes one: 'CartPole-v1', or a class, a function, a lambda"),
        (([gym.make_vec("CartPole-v1", 3)], {}), "is many environments; give what makes one of them, and num_envs=3"),
        (([[handed_envs.Counting] * 4], {}), "a list of 4; give what makes one environment, and num_envs=4"),
        (([7], {}), "7 is no id, config or callable"),
        ((["CartPole-v1"], {"env": "Acrobot-v1"}), "env: given twice"),
        ((["CartPole-v1"], {"learning_rate": lambda left: left * 1e-3}), "a number is wanted; ppo.schedule is linear"),
        ((["CartPole-v1"], {"network": {"activation": Local}}), "network.activation: Local: its name is wanted"),
        ((["CartPole-v1"], {"network": {"custom": Local}}), "python:Local is no torch.nn.Module class"),
        ((["CartPole-v1"], {"callback": Local()}), "lockstep.train takes callbacks=[…]"),
        (
            (["CartPole-v1"], {"env": {"kwargs": {"map": Local}}}),
            "env.kwargs.map: Local can't be written into a config;",
        ),
        ((["CartPole-v1"], {"num_envs": [1j]}), "num_envs: complex can't be written into a config"),
        (
            (["CartPole-v1"], {"env": {"kwargs": {"tasks": {"push", "pick"}}}}),
            "env.kwargs.tasks: a set has no order; give a list",
        ),
        ((["CartPole-v1"], {"log": {"tags": frozenset("a")}}), "log.tags: a set has no order; give a list"),
        (([{"env": "CartPole-v1"}], {"config": {}}), "config: given twice"),
        (([{"env": "CartPole-v1"}], {"env": "Acrobot-v1"}), "env: given twice; give the config as config="),
        ((["NoSuch-v0"], {"runs_dir": "runs/of/mine"}), "no environment 'NoSuch-v0' is registered"),
        ((["CartPole-v1"], {"seeds": 5}), 'seeds: 5 is no list of seeds; give range(5), [3, 7] or "0-4"'),
        (([], {}), 'env: none is given; give an id, or what makes an environment, as in lockstep.train("CartPole-v1")'),
        (([{"total_steps": 5}], {}), "env: none is given; "),
        (([], {"resume": "auto", "name": "a"}), "env: none is given; "),
        (([], {"total_step": 5}), "total_step: unknown key; did you mean"),
        (
            (["CartPole-v1"], {"config": 5}),
            "config: 5 is no config; give a file's path, a mapping of settings, or a Config",
        ),
        ((["CartPole-v1"], {"config": b"a.yaml"}), "config: b'a.yaml' is no config; "),
        (([gym.spec("CartPole-v1")], {}), "is what an id stands for; give the id, 'CartPole-v1'"),
        (([], {"resume": "nothing"}), "neither nothing nor runs/nothing is a run directory"),
    ],
)
def test_bad_input_is_a_value_error_before_anything_is_made(runs, arguments, line):
    words, settings = arguments
    with pytest.raises(ValueError, match=re.escape(line)) as caught:
        lockstep.train(*words, quiet=True, **settings)
    assert "\n" not in str(caught.value)
    assert "settings.json" not in str(caught.value)
    assert not runs.exists()


def test_settings_may_be_numpys_and_paths():
    given = {"a": np.float32(0.5), "b": [np.int64(3), np.arange(2)], "c": Path("x/y.jsonl")}
    assert in_plain_words(given) == {"a": 0.5, "b": [3, [0, 1]], "c": "x/y.jsonl"}


def test_callers_at_the_same_time_have_runs_of_their_own(tmp_path, monkeypatch):
    """Two threads of one process, or two processes, which ask within a second."""
    monkeypatch.setattr(start, "default_name", lambda config, seeds: "CartPole-v1")
    options, found = RunOptions(runs_dir=str(tmp_path / "runs")), []
    with contextlib.ExitStack() as stack:
        found = [_place_of(options, Config(), stack) for _ in range(3)]
        (found[1][0] / "config.json").touch()
    names = ["CartPole-v1", "CartPole-v1-2", "CartPole-v1-3"]
    assert found == [(tmp_path / "runs" / name, name) for name in names]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["CartPole-v1-2"]  # the others never began


@pytest.mark.started
def test_a_failure_is_a_run_error(runs):
    class Failing(handed_envs.Counting):
        def step(self, action):
            raise OSError("out of order")

    with pytest.raises(RunError, match="out of order") as caught:
        lockstep.train(Failing, nproc=2, name="failing", **SMALL)
    assert "\n" not in str(caught.value)
    assert lockstep.load_run("failing").status == "not finished"


def test_random_numbers_of_the_caller_arent_drawn_by_what_is_imported():
    """In a process that has imported nothing yet, as a script's."""
    code = (
        "import random, lockstep; before = random.getstate(); lockstep.train, lockstep.load_run, lockstep.load_policy"
    )
    subprocess.run([sys.executable, "-c", f"{code}; assert random.getstate() == before"], check=True)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_caller_stays_as_it_was(runs, two_threads):
    def around():
        return (
            [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
            dict(os.environ),
            random.getstate(),
            str(np.random.get_state()),
            os.getcwd(),
            torch.get_num_threads(),
        )

    before, threads = around(), set(threading.enumerate())  # those of other tests may end meanwhile
    ended = []
    thread = threading.Thread(target=lambda: ended.append(lockstep.train("CartPole-v1", name="thread", **SMALL)))
    thread.start()
    thread.join()
    assert ended[0].status == "finished"
    ended[0].policy(np.zeros(4))
    assert around() == before
    wait_until(lambda: set(threading.enumerate()) <= threads, "threads are left")


def test_cycles_are_looked_for_as_usual_once_engine_jax_has_started(runs, tmp_path):
    seen = tmp_path / "seen"
    env = {"kwargs": {"file": str(seen)}}
    lockstep.train(handed_envs.Collected, env=env, engine="jax", name="collected", **SMALL)
    thresholds = seen.read_text().splitlines()
    assert str(SELDOM) in thresholds
    assert thresholds[-1] == str(USUAL)
