"""When the host needs the training state, and what devices' copies of it are compared with."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep.config.run import Config
from lockstep.core.errors import DesyncError
from lockstep.jax_engine.nets.parameters import VectorLayout
from lockstep.jax_engine.program.fingerprints import Copies, check_copies
from lockstep.jax_engine.program.schedule import Schedule

ITERATIONS = 24


def schedule(devices=2, processes=1, traced=False, stop_at_step=None, first=0, **groups: Any):
    values: dict[str, Any] = {"num_envs": 8, "num_steps": 16, "num_shards": 8, "total_steps": 128 * ITERATIONS}
    values |= {"env": {"id": "lockstep/CartPole-v1"}, "eval": {"interval": 0}, "checkpoint": {"interval": 0}}
    return Schedule(Config.model_validate(values | groups), first, stop_at_step, devices, processes, traced)


def when(test):
    return [n for n in range(1, ITERATIONS + 1) if test(n)]


def test_a_comparison_ends_a_call_and_nobody_waits_for_it():
    found = schedule(proof={"interval": 10})
    assert when(found.ends) == [10, 20, 24]
    assert when(found.compares) == [10, 20]
    assert when(found.due) == [24]


def test_several_processes_wait_for_their_comparison():
    assert when(schedule(processes=2, proof={"interval": 10}).due) == [10, 20, 24]


def test_one_device_has_nothing_to_compare():
    found = schedule(devices=1, proof={"interval": 10})
    assert when(found.compares) == []
    assert when(found.ends) == [24]


@pytest.mark.parametrize("found", [schedule(eval={"interval": 9}), schedule(checkpoint={"interval": 9})])
def test_what_needs_the_state_is_waited_for(found):
    assert when(found.due) == [9, 18, 24]


def test_a_trace_needs_every_iteration():
    assert when(schedule(traced=True).due) == when(lambda n: True)


@pytest.mark.parametrize(("stop_at_step", "first", "last"), [(None, 0, 24), (300, 0, 3), (300, 7, 7), (10**6, 0, 24)])
def test_a_session_ends_at_its_limit_and_never_before_its_beginning(stop_at_step, first, last):
    found = schedule(stop_at_step=stop_at_step, first=first, proof={"interval": 0})
    assert found.last == last
    assert found.due(last)


# --- copies -----------------------------------------------------------------------------------------------------------


def on_devices(*copies):
    """An array that each device holds a copy of, as far as anybody looks at one."""
    shards = [SimpleNamespace(device=SimpleNamespace(id=n), data=np.asarray(x)) for n, x in enumerate(copies)]
    return SimpleNamespace(addressable_shards=shards)


def state_of(*vectors) -> Any:
    moments = SimpleNamespace(mu=on_devices(*vectors), nu=on_devices(*vectors), count=on_devices(*[np.int32(3)] * 2))
    rate = on_devices(np.float32(1e-3), np.float32(1e-3))
    return SimpleNamespace(
        parameters=on_devices(*vectors),
        optimizer=moments,
        learning_rate=rate,
        observation_normalizer=None,
        return_normalizer=None,
    )


LAYOUT = VectorLayout({"actor.0.weight": (2, 2), "actor.0.bias": (2,)}, True)


def test_copies_are_compared_byte_by_byte_and_the_first_that_differs_is_named():
    vector = np.arange(6, dtype=np.float32)
    nan = np.array([0, 1, 2, 3, 4, np.nan], np.float32)
    for same in (vector, nan):
        check_copies(Copies.of(state_of(same, same.copy()), LAYOUT), "now")
    zeros = vector.copy()
    zeros[0] = -0.0  # equal, but other bytes
    with pytest.raises(DesyncError, match=r"out of sync now: rank 1 of 2 .* first policy/actor\.0\.weight"):
        check_copies(Copies.of(state_of(vector, zeros), LAYOUT), "now")
    with pytest.raises(DesyncError, match=r"first policy/actor\.0\.bias"):
        check_copies(Copies.of(state_of(vector, nan), LAYOUT), "now")


def test_copies_that_are_kept_outlive_the_state():
    held = np.zeros(6, np.float32)
    kept, seen = (Copies.of(state_of(held, np.zeros(6, np.float32)), LAYOUT, keep=keep) for keep in (True, False))
    held[:] = 1  # a program has taken it over
    check_copies(kept, "then")
    with pytest.raises(DesyncError, match="out of sync"):
        check_copies(seen, "now")
