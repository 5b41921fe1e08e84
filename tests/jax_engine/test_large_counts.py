"""Counters of very long runs in engine jax: one that is resumed counts on from where it was, whatever float32 holds."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from small_programs import arrays_of, opened, small_config, trained

from lockstep.core.episodes import RecentEpisodes
from lockstep.jax_engine.session import resume
from lockstep.jax_engine.state import init_state, load_state_arrays
from lockstep.runs.checkpoint import Checkpoint

STEP = "optimizer/step"
HELD = 1 << 24
"""What float32 counts to by ones."""
ONE_A_TIME = small_config(ppo={"num_epochs": 1, "num_minibatches": 1})


def begun(optimizer_steps):
    """A run that has taken so many optimiser steps, of which an iteration takes one."""
    run = opened(ONE_A_TIME, 1)
    adam: Any = run.state.optimizer
    count = jax.device_put(np.int32(optimizer_steps), adam.count.sharding)
    run.state = run.state._replace(optimizer=adam._replace(count=count))
    return run


def saved(run, iteration, optimizer_steps):
    counters = {"iteration": iteration, "global_step": 128 * iteration, "optimizer_steps": optimizer_steps}
    facts = counters | {"learning_rate": 5e-3, "recent_episodes": RecentEpisodes().to_json()}
    return Checkpoint(arrays_of(run), run.env_arrays(), facts)


def resumed(checkpoint):
    run = opened(ONE_A_TIME, 1)
    session: Any = SimpleNamespace(config=ONE_A_TIME, program=run.program, runner=run, own_loss=None)
    session.counted = session
    resume(session, init_state(ONE_A_TIME, run.program.net, run.program.layout), checkpoint)
    return run


@pytest.mark.parametrize("before", [0, HELD])
def test_a_run_that_was_resumed_has_taken_as_many_optimizer_steps(before):
    whole = begun(before)
    trained(whole)
    again = resumed(saved(whole, 1, before + 1))
    for run in (whole, again):
        trained(run, first=1)
    expected, found = arrays_of(whole), arrays_of(again)
    assert expected[STEP].tolist() == [before + 2]
    assert {name for name in expected if expected[name].tobytes() != found[name].tobytes()} == set()


@pytest.mark.parametrize(
    ("step", "optimizer_steps", "expected"),
    [
        (HELD, HELD + 1, HELD + 1),
        (7, 0, 7),  # of arrays that were trained elsewhere
        (HELD, 5, HELD),
        (2**31, 2**31 + 5, 2**31 - 1),  # where optax's own counter stays
    ],
)
def test_the_step_of_adam_is_the_one_that_was_counted(step, optimizer_steps, expected):
    run = begun(0)
    arrays = arrays_of(run) | {STEP: np.array([step], np.float32)}
    state = init_state(ONE_A_TIME, run.program.net, run.program.layout)
    loaded = load_state_arrays(state, arrays, run.program.layout, optimizer_steps)
    assert loaded.optimizer.count == expected
    assert np.asarray(loaded.optimizer.count).dtype == np.int32
