"""Runs whose environments are in the compiled program."""

import jax
import numpy as np
import pytest
from jax_engine.small_programs import arrays_of, opened, small_config, trained
from refusals import error_of
from variants import variants

from lockstep.jax_engine.distributed.mesh import SHARDED, named_sharding
from lockstep.runs.checkpoint import pack, unpack


def compiled(function):
    """How many programs JAX compiles on the way."""
    names = []

    def note(event: str, duration_secs: float, **_: str | int) -> None:
        names.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        function()
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    return sum(name.endswith("backend_compile_duration") for name in names)


def on_the_host(tree):
    return jax.tree.map(np.asarray, tree)


@pytest.mark.parametrize("devices", variants([1, 2], [2]))
def test_a_run_that_goes_on_from_arrays_compiles_its_call_once(devices):
    config = small_config(devices, normalize={"observations": True})
    run = opened(config, devices)
    trained(run)
    assert compiled(lambda: trained(run, first=1)) == 0
    run.begin_with(on_the_host(run.state))
    assert compiled(lambda: trained(run, first=2)) == 0
    assert run.state.envs is not None
    assert run.state.envs.discounted.sharding == named_sharding(run.program.mesh, SHARDED)


def odd(**kwargs):
    return small_config(1, env={"id": "corridors:Odd", "backend": "jax", "kwargs": kwargs, "max_episode_steps": 5})


def saved(run):
    return {shard: unpack(pack(arrays)) for shard, arrays in run.env_arrays().items()}


def test_states_of_any_dtypes_and_names_go_on_from_what_was_saved():
    run = opened(odd(), 1)
    trained(run)
    arrays, state = saved(run), on_the_host(run.state._replace(envs=None))
    assert all(len(x) == len(jax.tree.leaves(run.state.envs)) for x in arrays.values())
    trained(run, first=1)
    other = opened(odd(), 1)
    other.restore(state, arrays)
    trained(other, first=1)
    for mine, theirs in zip(saved(run).values(), saved(other).values(), strict=True):
        assert {name: x.tobytes() for name, x in mine.items()} == {name: x.tobytes() for name, x in theirs.items()}
    assert all(np.array_equal(x, arrays_of(other)[name]) for name, x in arrays_of(run).items())


@pytest.mark.parametrize(
    ("then", "now", "line"),
    [
        (None, "int32", "state.more is missing there and int32[1] here"),
        ("int32", None, "state.more is int32[1] there and missing here"),
        ("int32", "float32", "state.more is int32[1] there and float32[1] here"),
        ("uint8", "bfloat16", "state.more is uint8[1] there and bfloat16[1] here"),
    ],
)
def test_states_of_an_edited_environment_are_refused_in_one_line(then, now, line):
    run, other = opened(odd(more=then), 1), opened(odd(more=now), 1)
    state = on_the_host(run.state._replace(envs=None))
    assert error_of(other.restore, state, saved(run)) == f"the checkpoint doesn't fit this environment: {line}"
