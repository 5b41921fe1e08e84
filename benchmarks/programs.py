"""Every program that is timed on the benchmark cases: ours, and the peers."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.cases import ARRAY_CARTPOLE, LEARNING_RATE, T2, Case, Framework, Reduction
from benchmarks.peer_environment import PEERS, PYTHON

WEAK = "two ranks, 64 envs each"
STRONG = "two ranks, 32 envs each"
COPIES = "two independent runs, 64 envs each"
CALLS = 40
"""Calls of a program that JAX compiled, each of which is one line: at least so many if it has as many iterations.

``peers/settings.py`` has the same number.
"""
MANY_ENVS = 64
"""So many CartPoles are stepped faster as arrays than by CleanRL in a pool, by a tenth to a half on both cores."""
SEQUENCE = 32
"""Steps of a training sequence of a recurrent policy of ours, the default; sb3-contrib's end with episodes alone."""
JAX_SHARDS = 2
"""With JAX a case has as many shards as the devices that it is measured on."""
SB3, CONTRIB, ENVPOOL = "stable-baselines3", "sb3-contrib", "EnvPool"
ENTRY_POINT = ", Gymnasium's vector entry point"
CLEANRL = "CleanRL (written down again)"
PUREJAXRL = "PureJaxRL (written down again)"


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
        threads: of each of its processes.
        batched: a peer's: whether its environments are stepped all at once, as arrays or in a pool of C++, and not as
            Python objects.
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
    threads: int = 1
    batched: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether this is Lockstep."""
        return self.package is None


def our_config(case: Case, env: str, reduction: Reduction) -> dict[str, Any]:
    """A config file of ours for a case; everything that bears on speed is spelled out, nothing left to presets."""
    pictures = {"atari": {"enabled": True}, "frame_stack": 4, "reward_sign": True} if case.images else {}
    network: dict[str, Any] = {"hidden_sizes": [64, 64], "activation": "tanh"}
    if case.images:
        network = {"hidden_sizes": [], "activation": "relu", "shared": True, "image": {"kind": "nature"}}
    if case.lstm:
        network |= {"recurrent": "lstm", "recurrent_size": case.lstm, "sequence_length": SEQUENCE}
    return {
        "engine": case.engine,
        "env": {"id": env, **pictures},
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
        "network": network,
        "normalize": {"observations": case.normalize, "returns": case.normalize},
    }


def ours(
    case: Case, env: str, reduction: Reduction, nproc: int = 1, copies: int = 1, scaling: str | None = None
) -> Program:
    """``lockstep train`` on a case, its own logging as it comes; the lines are a second ``metrics.jsonl``."""
    command = [sys.executable, "-m", "lockstep", "train", "{config}", "--runs-dir", "{work}", "--nproc", str(nproc)]
    return Program(
        case=case.name,
        label=f"Lockstep, {reduction}" + (f", {nproc} ranks" if nproc > 1 and scaling is None else ""),
        env=env,
        command=(*command, "--log.jsonl", "{lines}"),
        steps_per_iteration=case.steps_per_iteration,
        config=our_config(case, env, reduction),
        reduction=reduction,
        copies=copies,
        scaling=scaling,
    )


def changed(program: Program, said: str, **settings: Any) -> Program:
    """One of our programs with other settings, named by section; its label says so."""
    config = dict(program.config or {})
    for name, value in settings.items():
        config[name] = {**config[name], **value} if isinstance(value, dict) else value
    return replace(program, label=f"{program.label}, {said}", config=config)


def ours_with_jax(case: Case, env: str, reduction: Reduction, devices: int) -> Program:
    """``lockstep train --engine jax`` on a case, on so many CPU devices."""
    one = ours(replace(case, engine="jax"), env, reduction)
    command = tuple(word for word in one.command if word not in ("--nproc", "1"))
    label = f"{one.label}, {devices} device{'s' if devices > 1 else ''}"
    command = (*command, "--simulate-devices", str(devices))
    return replace(one, label=label, command=command, framework="jax", devices=devices)


def peer(
    case: Case,
    label: str,
    script: str,
    package: str,
    framework: Framework = "torch",
    *,
    normalize: bool | None = None,
    vector: str = "sync",
) -> Program:
    """A script of ``benchmarks/peers`` on a case; ``vector`` says who steps the environments."""
    words = ["--env", case.env, "--num-envs", case.num_envs, "--num-steps", case.num_steps]
    words += ["--num-epochs", case.num_epochs, "--num-minibatches", case.num_minibatches]
    words += ["--iterations", case.iterations, "--learning-rate", LEARNING_RATE, "--entropy-coef", case.entropy_coef]
    words += ["--threads", case.cores, "--vector", vector]
    if case.normalize if normalize is None else normalize:
        words.append("--normalize")
    if case.images:
        words.append("--images")
    if case.lstm:
        words += ["--lstm", case.lstm]
    return Program(
        case=case.name,
        label=label,
        env=pool_of(case.env) if vector == "envpool" else case.env,
        command=(str(PYTHON), str(PEERS / script), *map(str, words), "--lines", "{lines}"),
        steps_per_iteration=case.steps_per_iteration,
        package=package,
        framework=framework,
        threads=case.cores,
        batched=vector in ("entry-point", "envpool"),
    )


def pool_of(env: str) -> str:
    """What EnvPool's own environment of an id is called in the tables."""
    return f"{env.replace('NoFrameskip-v4', '-v5')} of {ENVPOOL}"


def cleanrl(case: Case, said: str = "", vector: str = "sync") -> Program:
    """CleanRL isn't on a package index: its single files, written down again from what they publish."""
    return peer(case, CLEANRL + said, "cleanrl_ppo.py", "torch", vector=vector)


def stable_baselines3(case: Case, said: str = "", *, normalize: bool | None = None, vector: str = "sync") -> Program:
    """Stable-Baselines3's PPO; ``said`` is what its label adds."""
    return peer(case, "Stable-Baselines3" + said, "sb3_ppo.py", SB3, normalize=normalize, vector=vector)


def skrl(case: Case, said: str = "", vector: str = "sync") -> Program:
    """skrl's PPO; ``said`` is what its label adds."""
    return peer(case, "skrl" + said, "skrl_ppo.py", "skrl", vector=vector)


def sbx(case: Case, said: str = "", vector: str = "sync") -> Program:
    """SBX's PPO, whose update is JAX's; ``said`` is what its label adds."""
    return peer(case, "SBX (JAX)" + said, "sbx_ppo.py", "sbx-rl", "jax", vector=vector)


def all_programs(cases: Iterable[Case]) -> list[Program]:
    """All programs of the cases; the scaling comes right after the single ranks that it is compared with."""
    out = []
    for case in cases:
        out += programs_of(case)
        if case.name == T2.name:
            out += scaling_programs(case)
    return out


def programs_of(case: Case) -> list[Program]:
    """Ours and the peers on one case."""
    if case.engine == "jax":
        return _in_one_program(case)
    if case.cores > 1:
        return _with_both_cores(case)
    rows = _peers_on_one_core(case)
    envs = [ARRAY_CARTPOLE, case.env] if case.env == "CartPole-v1" and not case.lstm else [case.env]
    rows += [ours(case, env, reduction) for env in envs for reduction in ("exact", "fast")]
    if case.lstm:
        said = f"2 shards, sequences of {case.num_steps}"
        rows.append(changed(rows[-2], said, num_shards=2, network={"sequence_length": case.num_steps}))
    return rows


def _peers_on_one_core(case: Case) -> list[Program]:
    """Everybody else with one thread, in the ways in which they can use it."""
    if case.lstm:
        rows = [peer(case, "sb3-contrib, RecurrentPPO", "recurrent_ppo.py", CONTRIB)]
        return [*rows, peer(case, "skrl, PPO_RNN", "skrl_recurrent.py", "skrl")]
    if case.images:
        pooled = [ways(case, f", {ENVPOOL}", vector="envpool") for ways in (stable_baselines3, cleanrl)]
        return [stable_baselines3(case), cleanrl(case), *pooled, sbx(case)]
    if case.normalize:
        plain = stable_baselines3(case, ", nothing normalised", normalize=False)
        pooled = [ways(case, f", {ENVPOOL}", vector="envpool") for ways in (stable_baselines3, sbx)]
        return [stable_baselines3(case), plain, cleanrl(case), sbx(case), *pooled]
    pooled = [sbx(case, f", {ENVPOOL}", vector="envpool")]
    if case.num_envs < MANY_ENVS:
        pooled.append(cleanrl(case, f", {ENVPOOL}", vector="envpool"))
    arrays = skrl(case, ENTRY_POINT, vector="entry-point")
    return [stable_baselines3(case), skrl(case), arrays, cleanrl(case), sbx(case), *pooled]


def _in_one_program(case: Case) -> list[Program]:
    """Environment, policy and update in one program that JAX compiled."""
    line = case.steps_per_iteration * max(1, case.iterations // CALLS)
    rows = [peer(case, "rejax", "rejax_ppo.py", "rejax", "jax")]
    rows += [peer(case, PUREJAXRL, "purejaxrl_ppo.py", "gymnax", "jax")]
    variants: list[tuple[Reduction, int]] = [("exact", JAX_SHARDS), ("fast", JAX_SHARDS), ("exact", 1), ("fast", 1)]
    rows = [replace(row, steps_per_iteration=line) for row in rows]
    return rows + [ours_with_jax(case, ARRAY_CARTPOLE, *variant) for variant in variants]


def _with_both_cores(case: Case) -> list[Program]:
    """Everybody with the whole machine, in the ways in which they can use it."""
    here = stable_baselines3(case, ", 2 threads")
    one_by_one = cleanrl(case, ", 2 threads")
    late_reset = cleanrl(case, f", {ENVPOOL}, 2 threads", vector="envpool")
    ranks = [ours(case, case.env, reduction, nproc=2) for reduction in ("exact", "fast")]
    workers = changed(ours(case, case.env, "exact"), "2 workers", env={"workers": 2})
    processes = stable_baselines3(case, ", SubprocVecEnv, 2 threads", vector="processes")
    pooled = stable_baselines3(case, f", {ENVPOOL}, 2 threads", vector="envpool")
    if case.images:
        two_shards = changed(ranks[0], "2 shards", num_shards=2)
        devices = replace(ours_with_jax(case, case.env, "exact", 2), label="Lockstep, exact, JAX on 2 devices")
        return [processes, here, pooled, one_by_one, late_reset, *ranks, two_shards, devices]
    both = [sbx(case, ", both cores"), sbx(case, f", {ENVPOOL}, both cores", vector="envpool")]
    if case.normalize:
        plain = stable_baselines3(case, ", nothing normalised, 2 threads", normalize=False)
        return [processes, here, plain, pooled, one_by_one, *both, *ranks, workers]
    pools = replace(changed(ranks[0], ENVPOOL, env={"backend": "envpool"}), env=pool_of(case.env))
    return [
        here,
        skrl(case, ", 2 threads"),
        skrl(case, f"{ENTRY_POINT}, 2 threads", vector="entry-point"),
        one_by_one,
        late_reset,
        *both,
        *ranks,
        workers,
        pools,
    ]


def scaling_programs(case: Case = T2) -> list[Program]:
    """Two ranks of one thread each, and two runs that know nothing of each other: the machine's ceiling.

    What they are compared with is the single rank that stands in the case's own table.
    """
    double = replace(case, num_envs=2 * case.num_envs)
    envs = (ARRAY_CARTPOLE, case.env)
    weak = [ours(double, env, reduction, nproc=2, scaling=WEAK) for env in envs for reduction in ("exact", "fast")]
    copies = [ours(case, env, "exact", copies=2, scaling=COPIES) for env in envs]
    return [*weak, ours(case, ARRAY_CARTPOLE, "exact", nproc=2, scaling=STRONG), *copies]
