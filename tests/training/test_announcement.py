"""What a run says before it trains."""

from dataclasses import replace

import pytest
from fake_session import FakeSession

from lockstep.config.run import Config, RunOptions
from lockstep.core.errors import DesyncError
from lockstep.core.fingerprint import sha256_of
from lockstep.training.announcement import grpo_notes, quantity, start_lines


def said_of(session, set_up=(), own=(), **options):
    return start_lines(session, RunOptions(**options), "ranks", set_up, own)


def test_the_line_names_the_set_up_and_the_parameters_that_all_ranks_hold():
    session = FakeSession()
    digest = sha256_of({"policy/w": session.weights})[:8]
    set_up = ["torch", f"{quantity(2, 'rank')} × {quantity(1, 'shard')}"]
    expected = [f"lockstep/CartPole-v1 · torch · 2 ranks × 1 shard · parameters in sync ({digest})"]
    assert said_of(session, set_up) == expected
    session.weights = session.weights + 1
    assert said_of(session, set_up) != expected
    assert session.calls[0] == "at the start"


def test_how_many_workers_were_chosen_is_said_before_the_engines_own_lines():
    session = FakeSession()
    session.workers_note = "env.workers auto: 4 worker processes a rank"
    assert said_of(session)[1:] == [session.workers_note]
    assert said_of(session, own=["fsdp: alone"])[1:] == [session.workers_note, "fsdp: alone"]


def test_ranks_that_differ_are_never_announced():
    session = FakeSession()
    session.desync = True
    with pytest.raises(DesyncError, match="at the start"):
        said_of(session)


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        ({}, {}, []),
        ({"reduction": "fast"}, {}, ["reduction fast: repeatable at this number of ranks"]),
        ({"reduction": "fast", "sync_period": 4}, {}, ["reduction fast", "own", "sync_period 4: ranks train apart"]),
        ({"eval": {"interval": 1, "episodes": 10}}, {}, ["eval.episodes 10: 12 are played, equally many by each of 4"]),
        ({"eval": {"interval": 1, "episodes": 16}}, {}, []),
        ({"eval": {"interval": 0, "episodes": 10}}, {}, []),
        ({}, {"max_hours": 2.0}, ["own", "max-hours: where the run ends depends"]),
    ],
)
def test_what_leaves_the_promise_is_said_and_nothing_else(config, options, said):
    found = said_of(FakeSession(**config), own=["own"] if "own" in said else [], **options)[1:]
    assert len(found) == len(said)
    assert all(line.startswith(start) for line, start in zip(found, said, strict=True))


def test_text_that_the_policy_does_not_see_is_named():
    session = FakeSession()
    session.description = replace(session.description, texts=("mission",))
    assert said_of(session)[1:] == ["observation 'mission' is text, which the policy doesn't see"]


@pytest.mark.parametrize(
    ("algorithm", "limit", "said"),
    [("grpo", 500, "lets them last 500"), ("grpo", None, "has no time limit"), ("grpo", 64, None), ("ppo", 500, None)],
)
def test_episodes_that_may_last_longer_than_an_iteration_are_told(algorithm, limit, said):
    notes = grpo_notes(Config.model_validate({"algorithm": algorithm, "num_steps": 64}), limit)
    assert notes == (
        [] if said is None else [f"grpo: episodes count for num_steps (64) at most; the environment {said}"]
    )
