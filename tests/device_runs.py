"""Runs of the JAX engine that several tests look at: eight short iterations, on some number of devices."""

from typing import Any

from command_line import SMALL, Run

JAX = ("--engine", "jax")
CARTPOLE = ("lockstep/CartPole-v1", *SMALL, *JAX)
EVALUATED = (*CARTPOLE, "--eval.interval", 4)
PENDULUM = ("lockstep/Pendulum-v1", *SMALL, *JAX, "--normalize.observations", "--normalize.returns")
ON_THE_HOST = ("gated:GatedCartPole-v0", *SMALL, *JAX)  # without a gate it is Gymnasium's CartPole
CHEETAH = (
    *("HalfCheetah-v5", *SMALL, *JAX, "--env.max-episode-steps", 40, "--network.activation", "elu"),
    *("--normalize.observations", "--normalize.returns"),
)


def inside(name: str) -> tuple[Any, ...]:
    """CartPole by one of the functions of ``tests/modules/mishaps.py``, stepped inside the program."""
    return (f"mishaps:{name}", "--env.backend", "jax", *SMALL, *JAX)


def devices(number: int) -> tuple[Any, ...]:
    """One process with so many devices."""
    return ("--simulate-devices", number)


TWO_PROCESSES = ("--nproc", 2, "--simulate-devices", 1)


def same_agent(a: Run, b: Run) -> None:
    """Parameters, optimiser state, normalisers and every metric of every iteration are the same."""
    assert a.metrics == b.metrics
    assert a.agent == b.agent
    assert a.metrics
