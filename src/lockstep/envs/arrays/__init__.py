"""Array environments: pure, batched physics that NumPy, PyTorch and JAX run from the same lines."""

from __future__ import annotations

from lockstep.envs.arrays.base import Array, ArrayEnvironment, State
from lockstep.envs.arrays.cartpole import CartPole
from lockstep.envs.arrays.pendulum import Pendulum
from lockstep.envs.arrays.push import PushCube

ARRAY_ENVIRONMENTS: dict[str, type[ArrayEnvironment]] = {
    "lockstep/CartPole-v1": CartPole,
    "lockstep/Pendulum-v1": Pendulum,
    "lockstep/PushCube-v0": PushCube,
}

__all__ = ["ARRAY_ENVIRONMENTS", "Array", "ArrayEnvironment", "CartPole", "Pendulum", "PushCube", "State"]
