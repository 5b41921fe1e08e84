"""The benchmark cases, and every program that is timed on them: ours, the peers, and figures that are only quoted."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any, Literal

from benchmarks.peer_environment import PEERS, PYTHON

Framework = Literal["torch", "jax"]
Reduction = Literal["exact", "fast"]

LEARNING_RATE = 2.5e-4
ARRAY_CARTPOLE = "lockstep/CartPole-v1"


@dataclass(frozen=True)
class Case:
    """One workload: the same for all programs.

    Attributes:
        env: the Gymnasium id that peers run.
        iterations: rollouts with their updates in one run, the same for all, so that episodes are as long for all.
        target: steps/s wanted, as a multiple of the best peer's.
        engine: ours that runs it; with JAX the environment is part of the program, on all cores of two.
    """

    name: str
    env: str
    num_envs: int
    num_steps: int
    num_epochs: int
    num_minibatches: int
    iterations: int
    target: float
    entropy_coef: float = 0.0
    normalize: bool = False
    engine: Framework = "torch"

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps of one iteration."""
        return self.num_envs * self.num_steps

    @property
    def title(self) -> str:
        """One line that says what it is."""
        normalised = ", observations and returns normalised" if self.normalize else ""
        return (
            f"{self.name}: {self.env}, {self.num_envs} envs × {self.num_steps} steps, {self.num_epochs} epochs × "
            f"{self.num_minibatches} minibatches{normalised}"
        )


T1 = Case("T1", "CartPole-v1", 8, 128, 4, 4, iterations=100, target=3.0, entropy_coef=0.01)
T2 = Case("T2", "CartPole-v1", 64, 128, 4, 4, iterations=40, target=2.5, entropy_coef=0.01)
T3 = Case("T3", "HalfCheetah-v5", 8, 256, 10, 32, iterations=16, target=2.0, normalize=True)
J1 = replace(T2, name="J1", iterations=200, target=1.7, engine="jax")
J2 = replace(J1, name="J2", num_envs=2048, iterations=20, target=1.8)
J3 = replace(J1, name="J3", num_envs=8, iterations=1200, target=1.3)
CASES = (T1, T2, T3, J1, J2, J3)

WEAK = "two ranks, 64 envs each"
STRONG = "two ranks, 32 envs each"
COPIES = "two independent runs, 64 envs each"
WEAK_TARGET = 1.8
REJAX_CALLS = 40
"""Calls of rejax's compiled program, each of which is one line; ``peers/rejax_ppo.py`` has the same number."""
JAX_SHARDS = 2
"""With JAX a case has as many shards as the devices that it is measured on."""


@dataclass(frozen=True)
class Program:
    """One row: how to start it, and how much one of its iterations is.

    Attributes:
        case: name of the case.
        label: what the row is called.
        env: the environment it steps.
        command: words; ``{lines}`` is the pipe for its once-per-iteration lines, ``{work}`` a directory for what it
            leaves and ``{config}`` a file that holds ``config``.
        steps_per_iteration: environment steps between two lines of one copy.
        config: ours only.
        reduction: ours only.
        copies: of it that run at once.
        package: a peer's distribution; ``framework`` what it computes with.
        devices: ours with JAX only: CPU devices.
        scaling: ours only: what is shown by more than one process, or None.
    """

    case: str
    label: str
    env: str
    command: tuple[str, ...]
    steps_per_iteration: int
    config: dict[str, Any] | None = None
    reduction: Reduction | None = None
    copies: int = 1
    package: str | None = None
    framework: Framework = "torch"
    scaling: str | None = None
    devices: int | None = None

    @property
    def is_ours(self) -> bool:
        """Whether this is Lockstep."""
        return self.package is None


@dataclass(frozen=True)
class Quoted:
    """A peer that pip can't install: figures measured elsewhere, for orientation; no ratio is taken to them here."""

    label: str
    steps_per_second: dict[str, float]


QUOTED = (
    Quoted("CleanRL", {"T1": 17_000, "T2": 54_000, "T3": 3_400}),
    Quoted("LeanRL, compiled", {"T3": 4_700}),
    Quoted("PureJaxRL", {"J1": 267_000, "J2": 259_000, "J3": 279_000}),
    Quoted("SBX (JAX), host environments", {"J1": 65_000, "J3": 16_000}),
)


def our_config(case: Case, env: str, reduction: Reduction) -> dict[str, Any]:
    """A config file of ours for a case; everything that bears on speed is spelled out, nothing left to presets."""
    return {
        "engine": case.engine,
        "env": {"id": env},
        "total_steps": case.steps_per_iteration * case.iterations,
        "num_envs": case.num_envs,
        "num_steps": case.num_steps,
        **({"num_shards": JAX_SHARDS} if case.engine == "jax" else {}),
        "reduction": reduction,
        "threads": 1,
        "ppo": {
            "learning_rate": LEARNING_RATE,
            "schedule": "constant",
            "gamma": 0.99,
            "gae_lambda": 0.95,
            "num_epochs": case.num_epochs,
            "num_minibatches": case.num_minibatches,
            "clip_range": 0.2,
            "value_clip_range": None,
            "entropy_coef": case.entropy_coef,
            "value_coef": 0.5,
            "max_grad_norm": 0.5,
            "target_kl": None,
        },
        "network": {"hidden_sizes": [64, 64], "activation": "tanh"},
        "normalize": {"observations": case.normalize, "returns": case.normalize},
    }


def ours(
    case: Case, env: str, reduction: Reduction, nproc: int = 1, copies: int = 1, scaling: str | None = None
) -> Program:
    """``lockstep train`` on a case, its own logging as it comes; the lines are a second ``metrics.jsonl``."""
    command = [sys.executable, "-m", "lockstep", "train", "{config}", "--runs-dir", "{work}", "--nproc", str(nproc)]
    return Program(
        case=case.name,
        label=f"Lockstep, {reduction}",
        env=env,
        command=(*command, "--log.jsonl", "{lines}"),
        steps_per_iteration=case.steps_per_iteration,
        config=our_config(case, env, reduction),
        reduction=reduction,
        copies=copies,
        scaling=scaling,
    )


def ours_with_jax(case: Case, reduction: Reduction, devices: int) -> Program:
    """``lockstep train --engine jax`` on a case, on so many CPU devices."""
    one = ours(case, ARRAY_CARTPOLE, reduction)
    command = tuple(word for word in one.command if word not in ("--nproc", "1"))
    label = f"{one.label}, {devices} device{'s' if devices > 1 else ''}"
    command = (*command, "--simulate-devices", str(devices))
    return replace(one, label=label, command=command, framework="jax", devices=devices)


def peer(
    case: Case, label: str, script: str, package: str, framework: Framework, normalize: bool | None = None
) -> Program:
    """A script of ``benchmarks/peers`` on a case."""
    words = ["--env", case.env, "--num-envs", case.num_envs, "--num-steps", case.num_steps]
    words += ["--num-epochs", case.num_epochs, "--num-minibatches", case.num_minibatches]
    words += ["--iterations", case.iterations, "--learning-rate", LEARNING_RATE, "--entropy-coef", case.entropy_coef]
    if case.normalize if normalize is None else normalize:
        words.append("--normalize")
    return Program(
        case=case.name,
        label=label,
        env=case.env,
        command=(str(PYTHON), str(PEERS / script), *map(str, words), "--lines", "{lines}"),
        steps_per_iteration=case.steps_per_iteration,
        package=package,
        framework=framework,
    )


def programs_of(case: Case) -> list[Program]:
    """Ours and the peers on one case."""
    sb3 = "stable-baselines3"
    if case.engine == "jax":
        rejax = peer(case, "rejax", "rejax_ppo.py", "rejax", "jax")
        rows = [replace(rejax, steps_per_iteration=case.steps_per_iteration * max(1, case.iterations // REJAX_CALLS))]
        variants: list[tuple[Reduction, int]] = [("exact", JAX_SHARDS), ("fast", JAX_SHARDS), ("exact", 1), ("fast", 1)]
        return rows + [ours_with_jax(case, *variant) for variant in variants]
    if case.normalize:
        rows = [
            peer(case, "Stable-Baselines3", "sb3_ppo.py", sb3, "torch"),
            peer(case, "Stable-Baselines3, nothing normalised", "sb3_ppo.py", sb3, "torch", normalize=False),
        ]
    else:
        rows = [
            peer(case, "Stable-Baselines3", "sb3_ppo.py", sb3, "torch"),
            peer(case, "skrl", "skrl_ppo.py", "skrl", "torch"),
            peer(case, "SBX (JAX)", "sbx_ppo.py", "sbx-rl", "jax"),
        ]
    envs = [ARRAY_CARTPOLE, case.env] if case.env == "CartPole-v1" else [case.env]
    return rows + [ours(case, env, reduction) for env in envs for reduction in ("exact", "fast")]


def scaling_programs(case: Case = T2) -> list[Program]:
    """Two ranks of one thread each, and two runs that know nothing of each other: the machine's ceiling.

    What they are compared with is the single rank that stands in the case's own table.
    """
    double = replace(case, num_envs=2 * case.num_envs)
    return [
        ours(double, ARRAY_CARTPOLE, "exact", nproc=2, scaling=WEAK),
        ours(double, ARRAY_CARTPOLE, "fast", nproc=2, scaling=WEAK),
        ours(case, ARRAY_CARTPOLE, "exact", nproc=2, scaling=STRONG),
        ours(case, ARRAY_CARTPOLE, "exact", copies=2, scaling=COPIES),
        ours(double, case.env, "exact", nproc=2, scaling=WEAK),
        ours(case, case.env, "exact", copies=2, scaling=COPIES),
    ]


def operations_per_step(case: Case) -> float:
    """Floating-point operations in the matrix products of one environment step's share of an iteration.

    Actor during the rollout, actor and critic once more for values, and for each epoch forward and twice that backward.
    """
    actor, critic = (2 * (4 * 64 + 64 * 64 + 64 * heads) for heads in (2, 1))
    return actor + critic + 3 * case.num_epochs * (actor + critic)


def shortened(case: Case) -> Case:
    """The case for a quick look: a few iterations, which is enough to see that everything runs."""
    return replace(case, iterations=max(8, case.iterations // 4))
