"""The benchmark cases: workloads that are the same for every program which is timed on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Framework = Literal["torch", "jax"]
Reduction = Literal["exact", "fast"]

LEARNING_RATE = 2.5e-4
ARRAY_CARTPOLE = "lockstep/CartPole-v1"
BREAKOUT = "BreakoutNoFrameskip-v4"


@dataclass(frozen=True)
class Case:
    """One workload: the same for all programs.

    Attributes:
        env: the Gymnasium id that peers run.
        iterations: rollouts with their updates in one run, the same for all, so that episodes are as long for all.
        engine: ours that runs it; with JAX the environment is part of the program.
        cores: that every program may use.
        images: pictures of an Atari game, wrapped as in ``AtariWrapper`` and stacked by four; Mnih et al.'s network.
        lstm: units of the LSTM before the hidden layers of actor and critic, or None.
    """

    name: str
    env: str
    num_envs: int
    num_steps: int
    num_epochs: int
    num_minibatches: int
    iterations: int
    entropy_coef: float = 0.0
    normalize: bool = False
    engine: Framework = "torch"
    cores: int = 1
    images: bool = False
    lstm: int | None = None

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps of one iteration."""
        return self.num_envs * self.num_steps

    @property
    def title(self) -> str:
        """One line that says what it is."""
        extras = [
            ", observations and returns normalised" if self.normalize else "",
            f", LSTM of {self.lstm} units" if self.lstm else "",
            ", four 84 × 84 frames, Nature CNN" if self.images else "",
            ", both cores" if self.cores > 1 and self.engine == "torch" else "",
            ", JAX on both cores" if self.engine == "jax" else "",
        ]
        return (
            f"{self.name}: {self.env}, {self.num_envs} envs × {self.num_steps} steps, {self.num_epochs} epochs × "
            f"{self.num_minibatches} minibatches{''.join(extras)}"
        )


T1 = Case("T1", "CartPole-v1", 8, 128, 4, 4, iterations=128, entropy_coef=0.01)
T2 = Case("T2", "CartPole-v1", 64, 128, 4, 4, iterations=48, entropy_coef=0.01)
T3 = Case("T3", "HalfCheetah-v5", 8, 256, 10, 32, iterations=14, normalize=True)
A1 = Case("A1", BREAKOUT, 8, 128, 4, 4, iterations=4, entropy_coef=0.01, images=True)
R1 = Case("R1", "CartPole-v1", 8, 128, 4, 4, iterations=36, entropy_coef=0.01, lstm=64)
T2_BOTH = replace(T2, name="T2x2", iterations=40, cores=2)
T3_BOTH = replace(T3, name="T3x2", cores=2)
A1_BOTH = replace(A1, name="A1x2", cores=2)
J1 = replace(T2, name="J1", iterations=160, engine="jax", cores=2)
J2 = replace(J1, name="J2", num_envs=2048, iterations=6)
J3 = replace(J1, name="J3", num_envs=8, iterations=800)
ONE_THREAD = {T2_BOTH.name: T2.name, T3_BOTH.name: T3.name, A1_BOTH.name: A1.name}
"""The case with one thread of those on both cores: who may use both in any way may as well use one."""
CASES = (T1, T2, T3, A1, R1, T2_BOTH, T3_BOTH, A1_BOTH, J1, J2, J3)


def operations_per_step(case: Case) -> float:
    """Floating-point operations in the matrix products of one environment step's share of an iteration.

    Actor during the rollout, actor and critic once more for values, and for each epoch forward and twice that backward.
    """
    actor, critic = (2 * (4 * 64 + 64 * 64 + 64 * heads) for heads in (2, 1))
    return actor + critic + 3 * case.num_epochs * (actor + critic)


def shortened(case: Case) -> Case:
    """The case for a quick look, which shows that everything runs: a few iterations, of images short ones."""
    iterations = min(case.iterations, max(8, case.iterations // 4))
    return replace(case, iterations=iterations, num_steps=32 if case.images else case.num_steps)
