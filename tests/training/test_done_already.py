"""What summaries say over all sessions of a run: restarts of each, and of one that finds nothing to do, nothing."""

import json

import pytest
from fake_session import FakeSession

from lockstep.runs.checkpoint import find_checkpoint
from lockstep.runs.directory import RunDirectory
from lockstep.runs.session_facts import SessionFacts
from lockstep.training.recorder import record_training
from lockstep.training.stop import FINISHED, STATUS, STEP_LIMIT, TIME_LIMIT

KILLED, FULL, LOST = ({"why": why, "iteration": 1} for why in ("killed", "out of memory", "lost"))


class Machine(FakeSession):
    """A session on a machine of its own."""

    def __init__(self, world_size=1, **config):
        super().__init__(**config)
        self.world_size = world_size

    def facts(self):
        return {"engine": "none", "world_size": self.world_size}


@pytest.fixture
def train(tmp_path):
    """Trains so many iterations from the newest checkpoint on, or that of a step; returns the summary."""

    def run(iterations, step=None, world_size=1, stop=FINISHED, **told):
        directory, session = RunDirectory(tmp_path, quiet=True, facts=SessionFacts(**told)), Machine(world_size)
        found = list(directory.checkpoints.glob("step_*"))
        checkpoint = find_checkpoint(directory.checkpoints, f"{step or 'latest'}") if found else None
        if checkpoint is not None:
            session.remembered, session.iteration = checkpoint.state, checkpoint.state["iteration"]
            session.global_step, session.wall_time_before = 128 * session.iteration, checkpoint.state["wall_time"]
            session.weights = session.weights + session.iteration

        def loop(session, recorder):
            for _ in range(iterations):
                recorder.log(session.advance())
            return stop

        record_training(directory, 0.0, checkpoint, lambda: session, lambda _: [], loop)
        return json.loads((tmp_path / "summary.json").read_text())

    return run


FIRST = {"command": ("lockstep", "train", "CartPole-v1"), "commit": "0123", "world_size": 2}
AGAIN = {"command": ("lockstep", "train", "--resume", "run"), "commit": "4567", "world_size": 1}
OF_THE_SESSION = ("command", "commit", "world_size", "wall_time", "steps_per_second")


def test_a_session_that_finds_a_run_done_leaves_what_its_summary_says(train, tmp_path):
    before = train(2, restarts=(KILLED,), **FIRST)
    written = (tmp_path / "summary.json").stat().st_mtime_ns
    assert before["steps_per_second"] > 0
    after = [train(0, **AGAIN) for _ in range(2)]
    for name in ("final_return", "episodes"):  # this session remembers no episodes
        after = [{**summary, name: before[name]} for summary in after]
    assert after == [before, before]
    assert (tmp_path / "summary.json").stat().st_mtime_ns > written  # by which the launcher sees that it ended well


def test_what_is_lost_since_is_said_all_the_same(train, tmp_path):
    before = train(3, **FIRST)
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text(rows[0] + rows[2])
    after = train(0, **AGAIN)
    assert after["missing_rows"] == [[2, 2]]
    assert {name: after[name] for name in OF_THE_SESSION} == {name: before[name] for name in OF_THE_SESSION}


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"status": "finished"}'])
def test_a_summary_that_is_missing_or_damaged_is_written_anew(train, tmp_path, text):
    before = train(2, restarts=(KILLED,), **FIRST)
    (tmp_path / "summary.json").unlink()
    if text is not None:
        (tmp_path / "summary.json").write_text(text)
    after = train(0, **AGAIN)
    assert set(after) == set(before)
    assert (after["command"], after["world_size"]) == (list(AGAIN["command"]), 1)
    assert after["restarts"] == [KILLED]


def test_a_run_that_was_stopped_has_the_facts_of_its_last_steps_and_the_status_of_its_last_session(train):
    before = train(2, stop=STEP_LIMIT, **FIRST)
    for stop in (STEP_LIMIT, TIME_LIMIT, FINISHED):
        after = train(0, stop=stop, **AGAIN)
        assert {name: after[name] for name in OF_THE_SESSION} == {name: before[name] for name in OF_THE_SESSION}
        assert after["status"] == STATUS[stop]


@pytest.mark.parametrize("step", [None, 256])
def test_a_run_that_goes_on_has_the_summary_of_its_last_steps(train, step):
    """One that is lengthened, or trained again from an earlier step."""
    train(2, **FIRST)
    train(2, **FIRST)
    after = train(3, step, **AGAIN)
    assert after["global_step"] == 128 * (7 if step is None else 5)
    assert (after["command"], after["commit"], after["world_size"]) == (list(AGAIN["command"]), "4567", 1)
    assert after["steps_per_second"] > 0


def test_restarts_are_of_all_sessions_and_stand_once(train):
    """Ranks that are started again are told of all restarts of their launcher, and go on from a state with some."""
    assert train(1, restarts=(KILLED,))["restarts"] == [KILLED]
    assert train(1, restarts=(KILLED, FULL))["restarts"] == [KILLED, FULL]
    assert train(1)["restarts"] == [KILLED, FULL]
    assert train(1, restarts=(LOST,))["restarts"] == [KILLED, FULL, LOST]
    assert train(0)["restarts"] == [KILLED, FULL, LOST]


def test_restarts_that_are_alike_are_as_many_as_there_were(train):
    assert train(1, restarts=(KILLED, KILLED))["restarts"] == [KILLED, KILLED]
    assert train(1, restarts=(KILLED, KILLED, KILLED))["restarts"] == [KILLED] * 3


def test_a_restart_after_the_last_state_is_known_by_the_summary(train):
    """Of ranks that died once all was saved; and not to who goes on from before it."""
    train(1, restarts=(KILLED,))
    train(1, restarts=(KILLED,))
    assert train(0, restarts=(KILLED, FULL))["restarts"] == [KILLED, FULL]
    assert train(0)["restarts"] == [KILLED, FULL]
    assert train(1, 128)["restarts"] == [KILLED]
