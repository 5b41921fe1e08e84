"""What the recorder decides: when checkpoints are saved, by what score, what a summary says, what an end leaves."""

import contextlib
import errno
import json
import os
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from fake_session import FakeSession

from lockstep import __version__
from lockstep.core.errors import DesyncError, RunError
from lockstep.core.fingerprint import sha256_of
from lockstep.runs import checkpoint_writer
from lockstep.runs.checkpoint import Checkpoint, checkpoints_in, find_checkpoint, manifest_of, step_of
from lockstep.runs.directory import RunDirectory
from lockstep.runs.session_facts import SessionFacts
from lockstep.runs.trackers import OPTIONAL_TRACKERS
from lockstep.runs.trackers.service import Ending, Tracker
from lockstep.training.audience import Answer
from lockstep.training.recorder import Recorder, record_training
from lockstep.training.stop import FINISHED, KEEP, RUNNING, SAVE, TIME_LIMIT


@pytest.fixture
def recorder_of(tmp_path):
    """Makes a recorder of a session in a run directory of its own; closes it."""
    opened = []

    def make(session, told=None, memory=None, **options):
        run = RunDirectory(tmp_path, quiet=True, memory=memory, facts=SessionFacts(**(told or {})))
        recorder = Recorder(session, run, 0.0, **options)
        opened.append(recorder)
        return recorder

    yield make
    for recorder in opened:
        recorder.close()


def episodes(*returns):
    return np.array([[r, 5.0, 0.0, np.nan] for r in returns])


def saved(path):
    return [int(p.name.removeprefix("step_")) for p in sorted(checkpoints_in(path / "checkpoints"))]


def recorded(session, run, loop, checkpoint=None):
    return record_training(run, 0.0, checkpoint, lambda: session, lambda session: ["begun"], loop)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_checkpoints_are_saved_at_their_dates_and_once(recorder_of, tmp_path):
    session = FakeSession(checkpoint={"interval": 3, "keep_last": 10})
    recorder = recorder_of(session)
    for _ in range(7):
        recorder.log(session.advance())
        recorder.save_checkpoint()
        recorder.save_checkpoint()
    recorder.checkpoints.wait()
    assert saved(tmp_path) == [3 * 128, 6 * 128]
    assert session.calls.count("files") == 2


@pytest.mark.parametrize(("iterations", "files"), [(7, 3), (6, 2)])
def test_the_last_checkpoint_is_saved_whatever_its_date_and_not_twice(recorder_of, tmp_path, iterations, files):
    session = FakeSession(checkpoint={"interval": 3, "keep_last": 10})
    recorder = recorder_of(session)
    for _ in range(iterations):
        session.advance()
        recorder.save_checkpoint()
    recorder.finish(FINISHED)
    assert saved(tmp_path)[-1] == iterations * 128
    assert session.calls.count("files") == files


def test_without_an_interval_only_the_end_is_saved(recorder_of, tmp_path):
    session = FakeSession(checkpoint={"interval": 0})
    recorder = recorder_of(session)
    for _ in range(3):
        session.advance()
        recorder.save_checkpoint()
    assert "files" not in session.calls
    recorder.finish(FINISHED)
    assert saved(tmp_path) == [384]


# --- the score --------------------------------------------------------------------------------------------------------


def test_without_evaluations_the_last_episodes_are_the_score(recorder_of):
    session = FakeSession()
    recorder = recorder_of(session)
    assert recorder.history.score is None
    recorder.log(session.advance(returns=4.0))
    recorder.log(session.advance(returns=8.0))
    assert recorder.history.score == 6.0
    assert not recorder.evaluation_due()


def test_an_evaluation_is_the_score_until_the_next_one(recorder_of):
    session = FakeSession(eval={"interval": 2, "episodes": 2})
    recorder = recorder_of(session)
    recorder.log(session.advance(returns=100.0))
    assert (recorder.history.score, recorder.evaluation_due()) == (None, False)
    session.advance()
    assert recorder.evaluation_due()
    record = recorder.evaluated(episodes(1.0, 3.0), lambda: pytest.fail("no video is wanted"))
    assert record["eval/return_mean"] == recorder.history.score == 2.0
    recorder.log(session.advance(returns=100.0))
    assert recorder.history.score == 2.0


def test_a_resumed_run_begins_with_its_checkpoints_score_and_says_its_config_once(recorder_of, monkeypatch):
    session = FakeSession(eval={"interval": 5})
    session.remembered = {"score": 7.5}
    resumed = recorder_of(session, checkpoint=Checkpoint({}, {}, {"score": 7.5}))
    assert resumed.history.score == 7.5
    new = recorder_of(session)
    for recorder, texts in ((resumed, []), (new, ["config"])):
        said = []
        monkeypatch.setattr(recorder.trackers, "text", lambda tag, text, said=said: said.append(tag))
        recorder.begin([])
        assert said == texts


def test_the_config_that_trackers_get_is_without_what_is_secret(recorder_of, monkeypatch):
    recorder, said = recorder_of(FakeSession(checkpoint={"mirror": "ftp://me:geheim@host/runs"}, seed=41)), []
    monkeypatch.setattr(recorder.trackers, "text", lambda _, text: said.append(text))
    recorder.begin([])
    assert "ftp://***@host/runs" in said[0]
    assert '"seed": 41' in said[0]
    assert "geheim" not in said[0]


def test_the_score_stands_in_the_checkpoint(recorder_of, tmp_path):
    session = FakeSession()
    recorder = recorder_of(session)
    recorder.log(session.advance(returns=4.0))
    recorder.finish(FINISHED)
    assert find_checkpoint(tmp_path / "checkpoints").state["score"] == 4.0


# --- what is said -----------------------------------------------------------------------------------------------------


def test_environments_that_began_anew_are_warned_of(recorder_of, capsys):
    session = FakeSession()
    recorder_of(session).begin(["a line"])
    assert "warning" not in capsys.readouterr().err
    session.restarted = [3, 5]
    recorder_of(session).begin(["a line"])
    assert (
        "environments [3, 5] couldn't be restored exactly and began a new episode: from here on the agent isn't that "
        "of an uninterrupted run (docs/environments.md, Resuming exactly)"
    ) in capsys.readouterr().err


def test_a_record_that_cannot_be_written_ends_the_run_with_one_line(recorder_of, monkeypatch):
    session = FakeSession()
    recorder = recorder_of(session)

    def full(records):
        raise OSError(errno.ENOSPC, "No space left on device", "runs/x/metrics.jsonl")

    recorder.log(session.advance())
    monkeypatch.setattr(recorder.trackers, "log_all", full)
    with pytest.raises(RunError, match=r"^runs/x/metrics\.jsonl can't be written: the disk is full$"):
        recorder.log(session.advance())


@pytest.mark.parametrize("listens", [True, False])
def test_listeners_are_told_of_a_record_once_those_before_it_are_written(recorder_of, monkeypatch, listens):
    session, order = FakeSession(), []
    recorder = recorder_of(session)
    monkeypatch.setattr(type(recorder.audience), "listens", listens)
    monkeypatch.setattr(recorder.audience, "tell", lambda record: order.append("told") or Answer())
    monkeypatch.setattr(recorder.trackers, "log_all", lambda records: order.append(len(records)))
    recorder.log(session.advance(), session.advance())
    assert order == (["told", 1, "told", 1] if listens else ["told", "told", 2])


def test_fingerprints_are_written_where_they_are_traced(recorder_of, tmp_path):
    silent, traced = FakeSession(), FakeSession(proof={"trace": True})
    recorder_of(silent).trace()
    assert silent.calls == []
    assert not (tmp_path / "fingerprints.jsonl").exists()
    recorder = recorder_of(traced)
    for _ in range(2):
        traced.advance()
        recorder.trace()
    rows = [json.loads(line) for line in (tmp_path / "fingerprints.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2]
    assert rows[0]["policy/w"] != rows[1]["policy/w"]


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_summary_says_what_the_run_is_and_how_it_ended(recorder_of, tmp_path):
    session = FakeSession(seed=3)
    session.wall_time_before = 1000.0
    session.restarted_before, session.restarted = [1], [4]
    told = {"started": "2026-01-31T12:00:00+00:00", "command": ("lockstep", "train"), "commit": "0123-dirty"}
    recorder = recorder_of(session, told)
    recorder.log(session.advance(returns=4.0))
    result = recorder.finish(TIME_LIMIT)
    assert (result.status, result.signal) == ("stopped at time limit", None)
    assert json.loads((tmp_path / "summary.json").read_text()) == result.summary
    arrays = session.arrays()
    expected = {
        "status": "stopped at time limit",
        "environment": "lockstep/CartPole-v1",
        "seed": 3,
        "iteration": 1,
        "global_step": 128,
        "final_return": 4.0,
        "episodes": 1,
        "params_sha256": sha256_of({"policy/w": arrays["policy/w"]}),
        "state_sha256": sha256_of(arrays),
        "num_shards": 4,
        "reduction": "exact",
        "restarted_environments": [1, 4],
        "missing_rows": [],
        "restarts": [],
        "lengths": [],
        "orders": [],
        "first_machine": {"lockstep": __version__},
        "first_machine_until": None,
        "started": "2026-01-31T12:00:00+00:00",
        "command": ["lockstep", "train"],
        "commit": "0123-dirty",
        "best_evaluation": None,
        "last_evaluation": None,
        "best_checkpoint": 128,
        "engine": "none",
        "world_size": 1,
    }
    assert {name: result.summary[name] for name in expected} == expected
    assert set(result.summary) == {*expected, "wall_time", "steps_per_second", "lockstep"}
    assert result.summary["wall_time"] > 1000.0


def test_a_summary_names_the_best_checkpoint_and_the_evaluations(recorder_of, tmp_path):
    session = FakeSession(eval={"interval": 1}, checkpoint={"interval": 1, "keep_last": 1})
    recorder = recorder_of(session)
    for number in (5.0, 9.0, 7.0):
        record = session.advance()
        recorder.log(record | recorder.evaluated(episodes(number), lambda: pytest.fail("no video is wanted")))
        recorder.save_checkpoint()
    summary = recorder.finish(FINISHED).summary
    assert summary["best_evaluation"] == {"step": 256, "return_mean": 9.0}
    assert summary["last_evaluation"] == {"step": 384, "return_mean": 7.0}
    assert summary["best_checkpoint"] == 256 != saved(tmp_path)[-1]
    assert (summary["command"], summary["started"][-6:]) == (None, "+00:00")
    checkpoint = find_checkpoint(tmp_path / "checkpoints")
    session.remembered = checkpoint.state
    resumed = recorder_of(session, {"started": "2030-01-01T00:00:00+00:00"}, checkpoint=checkpoint)
    names = ("started", "best_evaluation", "last_evaluation")
    assert {n: resumed.summarize("finished")[n] for n in names} == {n: summary[n] for n in names}


def test_a_summary_keeps_the_machine_and_versions_with_which_the_run_began(recorder_of, tmp_path, monkeypatch):
    session, began = FakeSession(), {"torch": "2.12.0", "lockstep": __version__}
    monkeypatch.setattr(session, "facts", lambda: {"world_size": 1, "torch": "2.12.0"})
    recorder = recorder_of(session)
    recorder.log(session.advance())
    assert recorder.finish(FINISHED).summary["first_machine"] == began
    checkpoint = find_checkpoint(tmp_path / "checkpoints")
    session.remembered = checkpoint.state
    monkeypatch.setattr(session, "facts", lambda: {"world_size": 2, "torch": "2.13.0"})
    recorder = recorder_of(session, checkpoint=checkpoint)
    recorder.log(session.advance())
    summary = recorder.finish(FINISHED).summary
    assert (summary["torch"], summary["first_machine"], summary["first_machine_until"]) == ("2.13.0", began, 128)


def evaluated_every_other(recorder_of, returns, **checkpoint):
    """A recorder that was there for two iterations for each return, the second of which is evaluated."""
    session = FakeSession(eval={"interval": 2}, checkpoint=checkpoint)
    recorder = recorder_of(session)
    for value in returns:
        for evaluates in (False, True):
            record = session.advance()
            if evaluates:
                record |= recorder.evaluated(episodes(value), lambda: pytest.fail("no video is wanted"))
            recorder.log(record)
            recorder.save_checkpoint()
    return recorder


def test_the_best_checkpoint_is_one_that_was_evaluated(recorder_of, tmp_path):
    """And not a later one, before the next evaluation, whose policy nobody has seen."""
    recorder = evaluated_every_other(recorder_of, (5.0, 9.0, 7.0, 8.0), interval=1, keep_last=1)
    assert recorder.finish(FINISHED).summary["best_checkpoint"] == 4 * 128
    assert set(saved(tmp_path)) == {4 * 128, 8 * 128}


def test_the_best_evaluation_is_saved_where_no_checkpoint_is_due(recorder_of, tmp_path):
    recorder = evaluated_every_other(recorder_of, (5.0, 9.0, 7.0), interval=0)
    recorder.checkpoints.wait()
    assert saved(tmp_path) == [2 * 128, 4 * 128]
    assert recorder.finish(FINISHED).summary["best_checkpoint"] == 4 * 128


@pytest.mark.parametrize("found", [True, False], ids=["on this host", "on another host"])
def test_ranks_agree_on_what_is_the_best_wherever_the_run_lies(recorder_of, tmp_path, found):
    """To save it is a collective; a host without the run has no checkpoint of its own."""
    evaluated_every_other(recorder_of, (9.0,), interval=0).finish(FINISHED)
    checkpoint = find_checkpoint(tmp_path / "checkpoints")
    session = FakeSession(eval={"interval": 2}, checkpoint={"interval": 0})
    session.remembered, session.iteration, session.global_step = checkpoint.state, 2, 256
    recorder = recorder_of(session, checkpoint=checkpoint if found else None)
    for value in (7.0, 10.0):
        session.advance()
        recorder.log(session.advance() | recorder.evaluated(episodes(value), lambda: pytest.fail("no video is wanted")))
        recorder.save_checkpoint()
    assert session.calls.count("files") == 1


def test_without_the_best_to_keep_only_what_is_due_is_saved(recorder_of, tmp_path):
    recorder = evaluated_every_other(recorder_of, (5.0, 9.0, 7.0), interval=5, keep_best=False)
    recorder.checkpoints.wait()
    assert saved(tmp_path) == [5 * 128]


@pytest.mark.parametrize("asked", [RUNNING, SAVE, KEEP])
def test_a_state_in_which_ranks_differ_is_saved_nowhere(recorder_of, tmp_path, asked):
    """Whoever went on from it would have the mistake on every rank, where nothing shows it any more."""
    session = FakeSession(checkpoint={"interval": 1 if asked == RUNNING else 0}, proof={"interval": 0})
    recorder = recorder_of(session, memory=memory_in(tmp_path))
    session.advance()
    session.desync = True
    with pytest.raises(DesyncError, match="after iteration 1"):
        recorder.save_checkpoint(asked=asked)
    assert "files" not in session.calls
    session.desync = False
    recorder.save_checkpoint(asked=asked)
    assert session.calls.count("files") == 1


def test_ranks_are_compared_once_after_an_iteration(recorder_of):
    session = FakeSession(checkpoint={"interval": 1})
    recorder = recorder_of(session)
    for _ in range(2):
        session.advance()
        recorder.save_checkpoint()
    recorder.finish(FINISHED)
    compared = [call for call in session.calls if "iteration" in call or "end" in call]
    assert compared == ["after iteration 1", "after iteration 2"]


def memory_in(tmp_path):
    memory = tmp_path / "memory"
    memory.mkdir()
    return memory


def test_a_state_in_memory_waits_for_a_checkpoint_that_is_being_written(recorder_of, tmp_path, monkeypatch):
    """A restart would go on from the former, and the latter would never be there."""
    recorder, writing = recorder_of(FakeSession(), memory=memory_in(tmp_path)), threading.Event()
    monkeypatch.setattr(recorder.keeper, "asks", lambda: KEEP)
    assert recorder.asks() == KEEP
    monkeypatch.setattr(checkpoint_writer, "commit", lambda *_: writing.wait(600))
    recorder.session.advance()
    recorder.log(recorder.session.advance())
    recorder.save_checkpoint(force=True)
    try:
        assert recorder.asks() == RUNNING
        monkeypatch.setattr(recorder.keeper, "asks", lambda: SAVE)
        assert recorder.asks() == SAVE
    finally:
        writing.set()  # closing waits for it
    recorder.checkpoints.wait()
    monkeypatch.setattr(recorder.keeper, "asks", lambda: KEEP)
    assert recorder.asks() == KEEP


def test_only_what_the_config_asks_for_is_planned(recorder_of, tmp_path):
    recorder = recorder_of(FakeSession(checkpoint={"interval": 3}), memory=memory_in(tmp_path))
    for asked in (SAVE, KEEP, KEEP):  # the third is due
        recorder.log(recorder.session.advance())
        recorder.save_checkpoint(asked=asked)
    recorder.checkpoints.wait()
    recorder.memory.wait()
    planned = [
        [(step_of(path), manifest["planned"]) for path in checkpoints_in(folder) if (manifest := manifest_of(path))]
        for folder in (tmp_path / "checkpoints", tmp_path / "memory")
    ]
    assert planned == [[(3 * 128, True), (128, False)], [(2 * 128, False)]]


@pytest.mark.parametrize(("iterations", "stop", "planned"), [(10, FINISHED, True), (9, TIME_LIMIT, False)])
def test_the_end_of_the_run_is_planned_and_that_of_a_session_is_not(recorder_of, tmp_path, iterations, stop, planned):
    recorder = recorder_of(FakeSession(checkpoint={"interval": 4}))  # of ten iterations
    for _ in range(iterations):
        recorder.log(recorder.session.advance())
    recorder.finish(stop)
    (last,) = checkpoints_in(tmp_path / "checkpoints")
    manifest = manifest_of(last)
    assert manifest is not None
    assert (step_of(last), manifest["planned"]) == (128 * iterations, planned)


def test_the_best_is_planned_where_no_checkpoint_is_due(recorder_of, tmp_path):
    evaluated_every_other(recorder_of, [2.0], interval=0, keep_best=True).checkpoints.wait()
    (best,) = checkpoints_in(tmp_path / "checkpoints")
    manifest = manifest_of(best)
    assert manifest is not None
    assert manifest["planned"]


def test_where_the_memory_is_gone_states_are_kept_no_more_and_the_run_goes_on(recorder_of, tmp_path, capsys):
    """As that of a user is who has logged out."""
    recorder = recorder_of(FakeSession(), memory=memory_in(tmp_path))
    (tmp_path / "memory").rmdir()
    recorder.session.advance()
    recorder.save_checkpoint(asked=KEEP)
    assert "no more states are kept in memory, and restarts go on from checkpoints" in capsys.readouterr().err
    recorder.run.cut_after(1, 128, recorder.config.log)
    recorder.log(recorder.session.advance())
    assert recorder.finish(FINISHED).summary["iteration"] == 2


def test_where_a_session_ended_doesnt_decide_which_checkpoint_is_the_best(recorder_of, tmp_path):
    """Its last one counts only as long as there is none that the config asked for."""
    session = FakeSession(checkpoint={"interval": 2, "keep_last": 9})
    recorder = recorder_of(session)
    returns = iter((9.0, 1.0, 3.0, 2.0))
    for _ in range(1):
        recorder.log(session.advance(next(returns)))
    assert recorder.finish(TIME_LIMIT).summary["best_checkpoint"] == 128
    for value in returns:
        recorder.log(session.advance(value))
        recorder.save_checkpoint()
    recorder.checkpoints.wait()
    assert saved(tmp_path) == [128, 2 * 128, 4 * 128]
    assert recorder.finish(FINISHED).summary["best_checkpoint"] == 2 * 128


def test_a_success_rate_is_in_the_summary_where_episodes_say_it(recorder_of):
    session = FakeSession()
    session.recent.extend_newest([(1.0, 5, 1), (1.0, 5, -1)], 2)
    assert recorder_of(session).summarize("finished")["final_success_rate"] == 0.5


def test_ranks_that_differ_at_the_end_leave_no_summary(recorder_of, tmp_path):
    session = FakeSession()
    session.desync = True
    with pytest.raises(DesyncError, match="at the end"):
        recorder_of(session).finish(FINISHED)
    assert not (tmp_path / "summary.json").exists()
    assert "files" not in session.calls


def test_closing_never_hides_what_the_run_failed_of(recorder_of, monkeypatch):
    recorder = recorder_of(FakeSession(proof={"trace": True}, log={"tensorboard": False, "timing": True}))

    def fails(*args):
        raise OSError(errno.EIO, "broken")

    closed = []
    monkeypatch.setattr(recorder.progress, "close", fails)
    monkeypatch.setattr(recorder.audience, "close", lambda: closed.append("audience"))
    monkeypatch.setattr(recorder.checkpoints, "wait", fails)
    monkeypatch.setattr(recorder.trackers, "close", fails)
    monkeypatch.setattr(recorder.fingerprints, "close", fails)
    monkeypatch.setattr(recorder.timing, "close", lambda: closed.append("timing"))
    recorder.close()
    assert closed == ["audience", "timing"]


@pytest.mark.parametrize(
    ("stop", "ending"),
    [
        (FINISHED, Ending.FINISHED),
        (TIME_LIMIT, Ending.FINISHED),
        (128 + signal.SIGTERM, Ending.STOPPED),
        (None, Ending.FAILED),
    ],
)
def test_a_service_is_told_how_the_run_ended(tmp_path, monkeypatch, stop, ending):
    told = []

    class Service(Tracker):
        def close(self):
            told.append(self.ending)

    def loop(*_):
        if stop is None:
            raise RunError("a rank failed")
        return stop

    monkeypatch.setitem(OPTIONAL_TRACKERS, "wandb", lambda _: Service())
    session = FakeSession(log={"tensorboard": False, "wandb": True})
    session.advance()
    with contextlib.suppress(RunError):
        recorded(session, RunDirectory(tmp_path, quiet=True), loop)
    assert told == [ending]


def test_a_loop_that_fails_closes_the_files_and_leaves_no_summary(tmp_path, monkeypatch):
    session, closed = FakeSession(), []
    monkeypatch.setattr(Recorder, "close", lambda recorder: closed.append(recorder))

    def loop(session, recorder):
        recorder.log(session.advance())
        raise RunError("the ranks are tired")

    with pytest.raises(RunError, match="tired"):
        recorded(session, RunDirectory(tmp_path, quiet=True), loop)
    assert len(closed) == 1
    assert session.calls == ["close"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    assert not (tmp_path / "summary.json").exists()


def test_a_start_that_fails_touches_nothing_of_the_run(tmp_path):
    session = FakeSession()
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 9, "global_step": 1152}\n')

    def out_of_sync(session):
        raise DesyncError("ranks are out of sync at the start")

    with pytest.raises(DesyncError, match="at the start"):
        record_training(RunDirectory(tmp_path), 0.0, None, lambda: session, out_of_sync, lambda *args: FINISHED)
    assert session.calls == ["close"]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert (tmp_path / "metrics.jsonl").read_text()


def test_what_lies_after_the_beginning_is_cut_before_anything_is_written(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"iteration": 1, "global_step": 128}\n{"iteration": 2, "global_step": 256}\n'
    )
    session = FakeSession()
    session.advance()

    def loop(session, recorder):
        recorder.log(session.advance())
        return FINISHED

    result = recorded(session, RunDirectory(tmp_path, quiet=True), loop, Checkpoint({}, {}, {}))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2]
    assert "rollout/episodes" in rows[1]
    assert result.summary["steps_per_second"] > 0


def test_a_resumed_run_counts_its_own_steps_for_its_rate(tmp_path, monkeypatch):
    """Not those of earlier sessions, whose time isn't counted either."""
    session, now = FakeSession(), [1000.0]
    monkeypatch.setattr("lockstep.training.recorder.time", SimpleNamespace(monotonic=lambda: now[0]))
    for _ in range(3):
        session.advance()

    def loop(session, recorder):
        recorder.log(session.advance())
        now[0] += 4.0
        return TIME_LIMIT

    run, checkpoint = RunDirectory(tmp_path, quiet=True), Checkpoint({}, {}, {})
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"iteration": n, "global_step": 128 * n}) + "\n" for n in (1, 2, 3))
    )
    summary = record_training(run, 1000.0, checkpoint, lambda: session, lambda session: [], loop).summary
    assert (summary["global_step"], summary["steps_per_second"]) == (512, 32.0)


@pytest.mark.parametrize(("at", "stays"), [(128, True), (256, False)])
def test_a_summary_stays_if_the_rows_cant_be_cut_unless_it_covers_more(tmp_path, monkeypatch, at, stays):
    session = FakeSession()
    session.advance()
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "global_step": 128}\n')
    (tmp_path / "summary.json").write_text(json.dumps({"global_step": at}))

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"metrics\.jsonl can't be written: the disk is full"):
        recorded(session, RunDirectory(tmp_path, quiet=True), lambda *_: FINISHED, Checkpoint({}, {}, {}))
    assert (tmp_path / "summary.json").exists() == stays


def test_a_rank_that_doesnt_write_takes_part_and_leaves_nothing(tmp_path):
    session = FakeSession(checkpoint={"interval": 1}, proof={"trace": True})

    def loop(session, recorder):
        recorder.log(session.advance())
        recorder.trace()
        recorder.save_checkpoint()
        return FINISHED

    run = RunDirectory(tmp_path / "nothing", is_writer=False)
    assert recorded(session, run, loop).status == "finished"
    assert session.calls == ["arrays", "after iteration 1", "files", "arrays", "arrays", "close"]
    assert not (tmp_path / "nothing").exists()
