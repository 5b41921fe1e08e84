"""Lists the array environments: pure, batched physics that NumPy, PyTorch and JAX run from the same code."""

from __future__ import annotations

from lockstep.envs.arrays.acrobot import Acrobot
from lockstep.envs.arrays.base import ArrayEnvironment
from lockstep.envs.arrays.cartpole import CartPole
from lockstep.envs.arrays.grid_world import GridWorld, GridWorldPixels
from lockstep.envs.arrays.mountain_car import MountainCar, MountainCarContinuous
from lockstep.envs.arrays.pendulum import Pendulum
from lockstep.envs.arrays.push import PushCube
from lockstep.envs.arrays.snake import Snake

ARRAY_ENVIRONMENTS: dict[str, type[ArrayEnvironment]] = {
    "lockstep/CartPole-v1": CartPole,
    "lockstep/Acrobot-v1": Acrobot,
    "lockstep/MountainCar-v0": MountainCar,
    "lockstep/MountainCarContinuous-v0": MountainCarContinuous,
    "lockstep/Pendulum-v1": Pendulum,
    "lockstep/GridWorld-v0": GridWorld,
    "lockstep/GridWorldPixels-v0": GridWorldPixels,
    "lockstep/PushCube-v0": PushCube,
    "lockstep/Snake-v0": Snake,
}
