"""Runs whose environments are in the compiled program."""

import jax
import numpy as np
import pytest
from jax_engine.small_programs import opened, small_config, trained
from variants import variants

from lockstep.jax_engine.distributed.mesh import SHARDED, named_sharding


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
