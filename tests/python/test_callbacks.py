"""Callbacks: called in the caller's process, answered at the boundary of an iteration, on every number of ranks."""

import contextlib
import errno
import json
import os
import pickle
import signal
import socket
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import handed_envs
import numpy as np
import pytest
from command_line import wait_until
from high_descriptors import high_descriptors

import lockstep
from lockstep.core import temporary
from lockstep.python import callbacks as callbacks_module
from lockstep.python.answers import answer_of
from lockstep.python.callbacks import BaseCallback, Conversation, checked_callbacks

SMALL = {"num_steps": 16, "total_steps": 2048, "quiet": True, "checkpoint": {"interval": 4}}


class Watching(lockstep.BaseCallback):
    """Notes what it is told, and says False after an iteration."""

    def __init__(self, last=None):
        self.last, self.told, self.process = last, [], os.getpid()

    def on_start(self, run):
        self.told.append(("start", run.path.name))

    def on_iteration(self, record):
        assert os.getpid() == self.process
        self.told.append(("iteration", record["iteration"]))
        return False if record["iteration"] == self.last else {"mine/double": 2 * record["iteration"]}

    def on_evaluation(self, record):
        self.told.append(("evaluation", record["iteration"], record["eval/return_mean"] > 0))

    def on_checkpoint(self, path):
        self.told.append(("checkpoint", path.name))

    def on_end(self, run):
        self.told.append(("end", run.status))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


ENGINES = [("torch", {"nproc": 1}), ("torch", {"nproc": 2}), ("jax", {"simulate_devices": 2})]
TWO_PROCESSES = pytest.param("jax", {"nproc": 2, "devices": 1}, marks=pytest.mark.long)


@pytest.mark.parametrize(("engine", "ranks"), [*ENGINES, TWO_PROCESSES])
def test_false_ends_the_run_with_the_state_of_that_iteration(engine, ranks):
    watching = Watching(last=6)
    run = lockstep.train("CartPole-v1", engine=engine, callbacks=[watching], name="stopped", **ranks, **SMALL)
    assert run.status == "stopped by a callback"
    assert [row["iteration"] for row in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert [row.get("mine/double") for row in run.metrics] == [2, 4, 6, 8, 10, None]
    assert list(run.metrics[0])[:2] == ["iteration", "global_step"]
    assert list(run.metrics[0])[-1] == "mine/double"
    limited = lockstep.train("CartPole-v1", engine=engine, stop_at_step=768, name="limited", **SMALL)
    assert run.summary["state_sha256"] == limited.summary["state_sha256"]
    assert [told for told in watching.told if told[0] == "iteration"] == [("iteration", n) for n in range(1, 7)]
    assert (watching.told[0], watching.told[-1]) == (("start", "stopped"), ("end", "stopped by a callback"))
    assert [told[1] for told in watching.told if told[0] == "checkpoint"] == ["step_512", "step_768"]
    undisturbed = lockstep.train("CartPole-v1", engine=engine, name="undisturbed", **SMALL)
    assert undisturbed.resume(callbacks=[idle := Watching()], quiet=True).status == "finished"
    assert idle.told == [("end", "finished")]  # nothing was left to train
    assert run.resume(quiet=True).summary["state_sha256"] == undisturbed.summary["state_sha256"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_environments_do_not_see_who_listens(tmp_path, ranks):
    """Or the command that one of them starts would call this process too."""
    seen = tmp_path / "seen"
    env = {"kwargs": {"file": str(seen)}}
    lockstep.train(handed_envs.overhearing, env=env, nproc=ranks, callbacks=[Watching(last=1)], **SMALL)
    assert "LOCKSTEP_CALLBACKS" not in seen.read_text().split()


def test_evaluations_are_told_apart(tmp_path, monkeypatch):
    """Also where temporary files lie deeper than a socket can."""
    (tmp_path / ("deep" * 30)).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("deep" * 30)))
    monkeypatch.setattr(tempfile, "tempdir", None)
    watching = Watching()
    lockstep.train("CartPole-v1", callbacks=[watching], eval={"interval": 8, "episodes": 8}, **SMALL)
    assert [told for told in watching.told if told[0] == "evaluation"] == [
        ("evaluation", 8, True),
        ("evaluation", 16, True),
    ]


def test_observers_are_not_waited_for():
    watching = Watching(last=2)
    run = lockstep.train("CartPole-v1", callbacks=[watching], observe_only=True, **SMALL)
    assert run.status == "finished"
    assert len([told for told in watching.told if told[0] == "iteration"]) == 16
    assert "mine/double" not in run.metrics[0]


@pytest.fixture
def memory():
    """A place with a short path, as ``/dev/shm`` has: that of a socket has 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        yield Path(place)


def test_only_the_socket_lies_in_memory_where_there_may_be_no_room(memory, monkeypatch):
    """In a container, say, whose ``/dev/shm`` is full."""
    write_text = Path.write_text

    def written(path, *words, **more):
        if path.is_relative_to(memory):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_text(path, *words, **more)

    monkeypatch.setattr(temporary, "_MEMORY", memory)
    monkeypatch.setattr(Path, "write_text", written)
    watching = Watching()
    assert lockstep.train("CartPole-v1", callbacks=watching, **SMALL).status == "finished"
    assert not list(memory.iterdir())


def test_a_caller_may_have_opened_more_files_than_select_knows():
    watching = Watching(last=2)
    with high_descriptors():
        run = lockstep.train("CartPole-v1", callbacks=watching, **SMALL)
    assert run.status == "stopped by a callback"
    assert watching.told[-1] == ("end", "stopped by a callback")


def test_an_exception_ends_the_run_with_a_checkpoint_and_its_own_traceback():
    class Failing:
        def on_iteration(self, record):
            if record["iteration"] == 3:
                json.loads("--name x")

    before, after = Watching(), Watching()
    with pytest.raises(json.JSONDecodeError, match="Expecting value") as caught:
        lockstep.train("CartPole-v1", nproc=2, callbacks=[before, Failing(), after], name="failing", **SMALL)
    assert caught.value.doc == "--name x"
    assert "in on_iteration" in "".join(traceback.format_exception(caught.value))
    run = lockstep.load_run("failing")
    assert run.status == "stopped by a callback"
    assert [path.name for path in run.checkpoints] == ["step_384"]
    last = [("checkpoint", "step_384"), ("end", "stopped by a callback")]
    iterations = [("iteration", 1), ("iteration", 2)]
    assert before.told == [("start", "failing"), *iterations, ("iteration", 3), *last]
    assert after.told == [("start", "failing"), *iterations, *last]


@pytest.mark.parametrize("method", ["on_start", "on_checkpoint", "on_end"])
def test_others_hear_what_a_callback_failed_at_and_the_first_exception_is_raised(method):
    def failing(text):
        def fail(self, _):
            raise OSError(text)

        return type("Failing", (), {method: fail})()

    watching = Watching(last=5)
    with pytest.raises(OSError, match="the first") as caught:
        lockstep.train(
            "CartPole-v1", callbacks=[failing("the first"), failing("the second"), watching], name="failing", **SMALL
        )
    assert caught.value.__notes__ == ["then Failing raised OSError: the second"]
    run = lockstep.load_run("failing")
    told = [("start", "failing"), *(("checkpoint", path.name) for path in reversed(run.checkpoints))]
    assert len(told) > 1
    assert [each for each in watching.told if each[0] != "iteration"] == [*told, ("end", "stopped by a callback")]


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_an_exception_of_an_observer_ends_the_run_at_once(engine):
    class Failing:
        seen = 0

        def on_iteration(self, record):
            self.seen += 1
            if record["iteration"] == 3:
                raise OSError("the disk is full")

    failing, watching, settings = Failing(), Watching(), {**SMALL, "total_steps": 10**8}
    callbacks = [failing, watching]
    with pytest.raises(OSError, match="the disk is full") as caught:
        lockstep.train(
            "lockstep/CartPole-v1", engine=engine, callbacks=callbacks, observe_only=True, name="failing", **settings
        )
    assert "in on_iteration" in "".join(traceback.format_exception(caught.value))
    run = lockstep.load_run("failing")
    assert (failing.seen, run.status) == (3, f"stopped by signal {signal.SIGTERM:d}")
    assert run.checkpoints[0].name == f"step_{run.metrics[-1]['global_step']}"
    assert watching.told[-2:] == [("checkpoint", run.checkpoints[0].name), ("end", run.status)]


@pytest.mark.parametrize("observes", [False, True], ids=["waited for", "observing"])
def test_a_value_error_of_a_callback_is_raised_as_it_is(observes):
    class Failing:
        def on_iteration(self, record):
            raise ValueError("give --seed 3", {"code": 7})

    with pytest.raises(ValueError, match="give --seed 3") as caught:
        lockstep.train("CartPole-v1", callbacks=[Failing()], observe_only=observes, **SMALL)
    assert caught.value.args == ("give --seed 3", {"code": 7})


@pytest.mark.parametrize(
    ("said", "error"),
    [({"mine": "nine"}, "a callback's metric 'mine' is 'nine'"), ("stop", "a callback said 'stop'")],
)
def test_what_a_callback_may_not_say_ends_the_run(said, error):
    class Saying:
        def on_iteration(self, record):
            return said

    with pytest.raises(TypeError, match=error):
        lockstep.train("CartPole-v1", callbacks=[Saying()], name="saying", **SMALL)
    assert lockstep.load_run("saying").status == "stopped by a callback"


def test_a_metric_of_the_runs_own_name_is_refused():
    record = {"iteration": 1, "train/value_loss": 0.5}
    with pytest.raises(ValueError, match="metric 'train/value_loss' is one of the run's own; log yours by another"):
        answer_of(lambda record: {"mine": 1, "train/value_loss": 3.0}, record)
    assert answer_of(lambda record: {"mine": 1}, record) == {"mine": 1.0}


@pytest.mark.parametrize(
    "name", ["eval/return_mean", "eval/mine", "rollout/success_rate", "rollout/metrics/height", "time/waited_for"]
)
def test_so_is_one_that_the_run_has_not_logged_yet(name):
    with pytest.raises(ValueError, match=f"metric '{name}' is one of the run's own; log yours by another name"):
        answer_of(lambda record: {name: 1.0}, {"iteration": 1, "rollout/episodes": 3})


@pytest.mark.parametrize(("name", "shown"), [("a\nb", r"'a\\nb'"), ("\0", r"'\\x00'"), ("x\ud800", r"'x\\ud800'")])
def test_a_name_that_files_cannot_hold_is_refused(name, shown):
    with pytest.raises(ValueError, match=f"metric {shown} has a control character or half a letter in its name"):
        answer_of(lambda record: {name: 1.0}, {"iteration": 1})


def test_a_number_that_no_float_holds_is_named():
    with pytest.raises(ValueError, match=r"metric 'states' is too large for a float, which ends at 1\.8e308"):
        answer_of(lambda record: {"states": 10**400}, {"iteration": 1})


def test_names_that_only_resemble_the_runs_own_are_free():
    mine = {"evaluation": 1.0, "rollout/success": 0.5, "train/mine": 2.0, "time/mine": 3.0, "größe/ß %d": 4.0}
    assert answer_of(lambda record: mine, {"iteration": 1}) == mine


def test_a_comparison_of_numpy_ends_a_run_too():
    class Comparing:
        def on_iteration(self, record):
            return np.float64(record["iteration"]) < 2

    run = lockstep.train("CartPole-v1", callbacks=[Comparing()], **SMALL)
    assert [row["iteration"] for row in run.metrics] == [1, 2]


def test_an_interrupt_leaves_a_checkpoint():
    class Interrupting:
        def on_iteration(self, record):
            if record["iteration"] == 3:
                os.kill(os.getpid(), signal.SIGINT)

        def on_end(self, run):
            raise OSError("no room")

    watching, settings = Watching(), {**SMALL, "total_steps": 10**8}
    callbacks = [Interrupting(), watching]
    with pytest.raises(KeyboardInterrupt) as caught:
        lockstep.train("CartPole-v1", nproc=2, callbacks=callbacks, name="interrupted", **settings)
    run = lockstep.load_run("interrupted")
    assert run.status.startswith("stopped by")
    assert run.checkpoints[0].name == f"step_{run.summary['global_step']}"
    assert watching.told[-2:] == [("checkpoint", run.checkpoints[0].name), ("end", run.status)]
    assert caught.value.__notes__ == ["then Interrupting raised OSError: no room"]


def test_an_iteration_that_is_done_again_is_asked_about_once(tmp_path):
    """A rank that is killed and started again tells what it has told before: the answer is the one it got."""

    class Killing(Watching):
        def on_iteration(self, record):
            answer = super().on_iteration(record)
            if record["iteration"] == 6:
                (rank,) = ranks_of(self.run)
                os.kill(rank, signal.SIGKILL)
            return answer

        def on_start(self, run):
            super().on_start(run)
            self.run = run

    watching = Killing()
    run = lockstep.train("CartPole-v1", callbacks=[watching], max_restarts=3, name="killed", **SMALL)
    assert (run.status, len(run.summary["restarts"])) == ("finished", 1)
    assert [told for told in watching.told if told[0] == "iteration"] == [("iteration", n) for n in range(1, 17)]
    assert [row["mine/double"] for row in run.metrics] == [2 * n for n in range(1, 17)]
    undisturbed = lockstep.train("CartPole-v1", name="undisturbed", **SMALL)
    assert run.summary["state_sha256"] == undisturbed.summary["state_sha256"]


def ranks_of(run):
    """Process ids of the ranks that have a run's metrics open."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            name = Path(f"/proc/{entry}/comm").read_text()
            opened = {os.readlink(f"/proc/{entry}/fd/{fd}") for fd in os.listdir(f"/proc/{entry}/fd")}
        except OSError:
            continue
        if name.startswith("lockstep rank") and str(run.path / "metrics.jsonl") in opened:
            found.append(int(entry))
    return found


def test_an_observer_hears_what_a_killed_rank_had_sent(tmp_path):
    heard = []

    class Watching(BaseCallback):
        def on_iteration(self, record):
            heard.append(record["iteration"])

    def send(rank, *iterations):
        rank.sendall(b"".join(json.dumps({"iteration": n, "global_step": n}).encode() + b"\n" for n in iterations))

    run: Any = SimpleNamespace(checkpoints=[])
    with Conversation(run, [Watching()], True, tmp_path) as conversation:
        address = conversation.variables["LOCKSTEP_CALLBACKS"].removeprefix("observe:")
        with socket.socket(socket.AF_UNIX) as killed, socket.socket(socket.AF_UNIX) as restarted:
            killed.connect(address)
            send(killed, 1)
            conversation.listen()
            send(killed, *range(2, 8))
            killed.close()
            restarted.connect(address)
            send(restarted, 6, 7, 8)
            conversation.listen()
    assert heard == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_caller_sees_what_else_has_happened_though_there_is_always_another_record(tmp_path):
    heard, most = [], 50_000

    class Sending(BaseCallback):
        def on_iteration(self, record):
            heard.append(record["iteration"])
            if len(heard) < most:
                send(len(heard) + 1)

    def send(number):
        rank.sendall(json.dumps({"iteration": number, "global_step": number}).encode() + b"\n")

    run: Any = SimpleNamespace(checkpoints=[])
    with Conversation(run, [Sending()], True, tmp_path) as conversation, socket.socket(socket.AF_UNIX) as rank:
        rank.connect(conversation.variables["LOCKSTEP_CALLBACKS"].removeprefix("observe:"))
        send(1)
        while not heard:
            conversation.listen()
        assert len(heard) < most
        most = 0


def test_an_observer_that_is_late_hears_of_the_first_checkpoints_of_a_session(tmp_path):
    """Which are there already when the first record is read, as those of earlier sessions are."""
    watching, run = Watching(), SimpleNamespace(path=tmp_path, status="finished")
    run.checkpoints = [tmp_path / f"step_{step}" for step in (48, 32, 16)]
    given: Any = run
    with Conversation(given, [watching], True, tmp_path) as conversation, socket.socket(socket.AF_UNIX) as rank:
        rank.connect(conversation.variables["LOCKSTEP_CALLBACKS"].removeprefix("observe:"))
        record = {"iteration": 2, "global_step": 32}
        rank.sendall(json.dumps(record).encode() + b"\n")
        conversation.listen()
    assert [told[1] for told in watching.told if told[0] == "checkpoint"] == ["step_32", "step_48"]


def test_the_answers_to_the_last_thousand_iterations_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(callbacks_module, "MOST_ANSWERS", 3)
    watching, run = Watching(), SimpleNamespace(path=tmp_path, status="finished", checkpoints=[])
    given: Any = run
    with Conversation(given, [watching], False, tmp_path) as conversation, socket.socket(socket.AF_UNIX) as rank:
        rank.connect(conversation.variables["LOCKSTEP_CALLBACKS"])
        rank.setblocking(False)

        def answered():
            conversation.listen()
            with contextlib.suppress(BlockingIOError):
                return json.loads(rank.recv(1 << 16))

        for iteration in (1, 2, 3, 4, 5, 3, 4, 5, 1):
            rank.sendall(json.dumps({"iteration": iteration, "global_step": iteration}).encode() + b"\n")
            answer = wait_until(answered, "no answer comes")
            assert answer == {"go_on": True, "metrics": {"mine/double": 2.0 * iteration}}
    assert [told[1] for told in watching.told if told[0] == "iteration"] == [1, 2, 3, 4, 5, 1]


def test_several_seeds_have_no_callbacks():
    with pytest.raises(ValueError, match="callbacks: with 2 seeds"):
        lockstep.train("CartPole-v1", engine="jax", num_seeds=2, callbacks=[Watching()], **SMALL)


def test_nor_has_a_group_that_is_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    group = lockstep.train("CartPole-v1", num_seeds=2, stop_at_step=512, name="many", **SMALL)
    before = [seed.summary for seed in group.seeds]
    with pytest.raises(ValueError, match=r"callbacks: .*many is a group of 2 seeds; resume each seed by itself"):
        group.resume(callbacks=[Watching()])
    assert [seed.summary for seed in group.seeds] == before
    assert group.seeds[0].resume(callbacks=[Watching()]).status == "finished"


class OfAnotherLibrary(lockstep.BaseCallback):
    def _on_step(self):
        return False


class Uploading(Watching):
    async def on_checkpoint(self, path):
        self.told.append(("uploaded", path.name))


def yielding(record):
    yield record


class Later:
    async def __call__(self, run):
        return None


@pytest.mark.parametrize(
    ("callbacks", "line"),
    [
        (Uploading(), "Uploading.on_checkpoint is async, which would never run; make it a plain def"),
        (SimpleNamespace(on_evaluation=yielding), "SimpleNamespace.on_evaluation is a generator"),
        (SimpleNamespace(on_end=Later()), "SimpleNamespace.on_end is async"),
        ([lambda record: False], "<lambda> has none of the methods that are called: on_start, on_iteration"),
        (lambda record: False, "<lambda> has none of the methods"),
        ([OfAnotherLibrary()], "OfAnotherLibrary has none .*; what Stable-Baselines3 calls after a step"),
        ([Watching(), lockstep.BaseCallback()], "BaseCallback has none"),
        ([Watching], r"Watching is a class; give an object of it, Watching\(\)"),
        (Watching, "Watching is a class"),
    ],
)
def test_what_would_never_be_called_is_refused(callbacks, line):
    with pytest.raises(ValueError, match=f"callbacks: {line}") as caught:
        lockstep.train("CartPole-v1", callbacks=callbacks, **SMALL)
    assert "\n" not in str(caught.value)
    assert not Path("runs").exists()


def test_one_callback_needs_no_list():
    watching = Watching(last=1)
    assert lockstep.train("CartPole-v1", callbacks=watching, **SMALL).status == "stopped by a callback"
    assert watching.told
    assert checked_callbacks(None) == checked_callbacks(()) == []


def test_what_a_record_lacks_is_told():
    record = {"iteration": 1, "rollout/episode_return_mean": None, "train/entropy": 0.5}
    with pytest.raises(KeyError) as caught:
        answer_of(lambda record: record["rollout/ep_rew_mean"], record)
    assert "did you mean 'rollout/episode_return_mean'?" in caught.value.__notes__[0]
    with pytest.raises(TypeError) as caught:
        answer_of(lambda record: record["rollout/episode_return_mean"] < 100, record)
    assert caught.value.__notes__ == ["None until an episode has ended: rollout/episode_return_mean"]
    with pytest.raises(KeyError) as caught:
        answer_of(lambda record: {}["mine"], {"mine": 1.0})  # of a dict of its own
    assert not hasattr(caught.value, "__notes__")
    with pytest.raises(KeyError) as caught:
        answer_of(lambda record: {}["lr"], record)
    assert not hasattr(caught.value, "__notes__")
    with pytest.raises(KeyError) as caught:
        answer_of(lambda record: record[3], record)
    assert caught.value.__notes__[0].startswith("3 is no key of a record; There are: iteration, ")


def test_a_record_is_a_dict_like_any_other():
    record, seen = {"iteration": 1, "train/entropy": 0.5}, []

    def keep(given):
        seen.append(given)
        given["mine"] = 2

    assert answer_of(keep, record) is True
    (given,) = seen
    assert isinstance(given, dict)
    assert given == record | {"mine": 2}
    assert given.get("lr") is None
    assert repr(given) == repr({**given}) == repr(json.loads(json.dumps(given)))
    assert [type(copy) for copy in (pickle.loads(pickle.dumps(given)), given.copy())] == [dict, dict]
    assert "mine" not in record
