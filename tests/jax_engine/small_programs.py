"""Small programs for the tests of the JAX engine, on some of this process's devices."""

from typing import Any

import jax
import numpy as np

from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.envs.describe import describe
from lockstep.jax_engine.distributed.mesh import make_mesh
from lockstep.jax_engine.envs.environments import is_jax_environment, make_environment
from lockstep.jax_engine.program.device_program import DeviceProgram
from lockstep.jax_engine.program.fingerprints import Copies
from lockstep.jax_engine.program.iterations import Inputs, Iteration
from lockstep.jax_engine.program.program import Program
from lockstep.jax_engine.program.runner import DeviceRunner
from lockstep.jax_engine.session import parameter_layout
from lockstep.jax_engine.state import check_networks, init_state, state_arrays


def small_config(devices: int = 1, **changes: Any) -> Config:
    """Eight environments of CartPole, 16 steps, two epochs of two minibatches; groups are laid over these."""
    values: dict[str, Any] = {
        "engine": "jax",
        "env": {"id": "lockstep/CartPole-v1"},
        "num_envs": 8,
        "num_steps": 16,
        "total_steps": 128 * 64,
        "network": {"hidden_sizes": (8,)},
        "ppo": {"num_minibatches": 2, "num_epochs": 2, "learning_rate": 5e-3, "schedule": "constant"},
    }
    for name, value in changes.items():
        values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value
    return resolve(Config.model_validate(values), devices)


def program_of(config: Config, devices: int, fsdp: int = 1) -> Program:
    """What a run of this config on so many devices compiles."""
    mesh, description = make_mesh(fsdp, devices), describe(config.env)
    net = check_networks(config, description)
    layout = parameter_layout(config, net, mesh)
    env = make_environment(config.env) if is_jax_environment(config.env) else None
    return Program(config, description, net, layout, mesh, env, everywhere=False)


def opened(config: Config, devices: int, fsdp: int = 1, capacity: int = 1) -> DeviceRunner:
    """A run that has begun, of calls of ``capacity`` iterations."""
    program = program_of(config, devices, fsdp)
    run = DeviceRunner(program, init_state(config, program.net, program.layout), devices)
    run.capacity = capacity
    run.begin()
    return run


def trained(run: DeviceRunner, iterations: int = 1, first: int = 0) -> list[Iteration]:
    """Further iterations of a run."""
    out = []
    for number in range(first, first + iterations):
        out += run.fetch(run.dispatch(number, 1, 0))
    return out


def arrays_of(run: DeviceRunner) -> dict[str, np.ndarray]:
    """Every array of the training state."""
    return state_arrays(run.state, run.program.layout)


def apart(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """The largest difference between two training states."""
    assert {k: v.shape for k, v in one.items()} == {k: v.shape for k, v in other.items()}
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def copies_equal(run: DeviceRunner) -> bool:
    """Whether all devices' copies hold the same bytes."""
    _, rows = Copies.of(run.state, run.program.layout).fingerprints()
    assert len(rows) == run.program.mesh.size
    return bool((rows == rows[0]).all())


def compiled_text(run: DeviceRunner) -> str:
    """The compiled program of one iteration, as the compiler prints it."""
    inputs = Inputs(np.zeros(1, np.int32), np.zeros(1, np.float32))  # pyright: ignore[reportArgumentType]
    stops = np.zeros(run.program.mesh.size, np.int32)
    call = DeviceProgram(run.program).compile_call(run.specs)
    return call.lower(run.state, inputs, stops, run.owned, np.int32(1)).compile().as_text()


def bytes_on_devices(*trees: Any) -> list[int]:
    """Bytes that each device holds of arrays, in the order of devices."""
    held: dict[int, int] = {}
    for leaf in jax.tree.leaves(trees):
        for shard in leaf.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    return [held[device] for device in sorted(held)]
