"""The checks that need a GPU, as data: what is run, what must be seen, and how that is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.gpu_judges import (
    SHARING,
    TENSOR_ITERATIONS,
    TENSOR_STEPS,
    Outcome,
    Verdict,
    another_precision,
    learns,
    less_memory,
    measures_both,
    names_gpu_memory,
    never_waits,
    reduces_gradients,
    refuses,
    resumes,
    rises,
    same_bits_in_branches,
    same_bits_replayed,
    same_bytes,
    same_bytes_by_nccl,
    same_state_on_one_gpu,
    solves_by_sb3,
    solves_cartpole,
    speeds,
    stays_on_gpu,
)

BRANCHES = 8
"""Of a graph, as engine torch has them: :data:`lockstep.torch_engine.setup.accelerator.BRANCHES`."""
SCRIPTS = "{root}/benchmarks/gpu_scripts"
CUDA = "--device cuda"
JAX = f"--engine jax {CUDA}"
WIDE, WIDEST = "--network.hidden-sizes 1024 1024", "--network.hidden-sizes 4096 4096"
TENSOR_ENVS = 4096


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: for ``--only``.
        commands: run one after the other in one directory; ``{root}`` is the repository's.
        seen: what must be seen.
        judge: gets the commands' outcomes in order.
        gpus: that it needs.
        engine: that must see them.
        modules: that must be installed besides.
        environment: variables for the commands.
        fails: whether its commands must end with another exit status than 0.
        timed: whether its figures are speeds, for which it has to run alone.
    """

    name: str
    commands: tuple[str, ...]
    seen: str
    judge: Callable[..., Verdict]
    gpus: int = 1
    engine: Literal["torch", "jax"] = "torch"
    modules: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    fails: bool = False
    timed: bool = False

    @property
    def measures(self) -> bool:
        """Whether there is nothing that could be seen otherwise: it takes speeds, and passes if its commands do."""
        return self.judge is speeds


def verdict(check: Check, outcomes: Sequence[Outcome]) -> Verdict:
    """Judges a check's commands; one that failed, or left out what the judge reads, fails the check."""
    for outcome in outcomes:
        if (outcome.code != 0) != check.fails:
            return Verdict(False, f"exit status {outcome.code}: {outcome.last_line}")
    try:
        return check.judge(*outcomes)
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError) as error:
        return Verdict(False, f"what is judged can't be read: {type(error).__name__}: {error}")


def train(name: str, words: str) -> str:
    """A command line that trains a run of this name."""
    return f"lockstep train {words} --name {name}"


def pair(words: str, more: str) -> tuple[str, str]:
    """A run with some more options, and one without them."""
    return train("with", f"{words} {more}"), train("without", words)


SHORT = f"CartPole-v1 {CUDA} --total-steps 20480"
CHEETAH = f"HalfCheetah-v5 {CUDA} --total-steps 40960"
TENSORS = (
    f"lockstep/CartPole-v1 {CUDA} --env.backend tensor --num-envs {TENSOR_ENVS} --num-steps {TENSOR_STEPS} "
    f"--total-steps {TENSOR_ENVS * TENSOR_STEPS * TENSOR_ITERATIONS}"
)
FEW_TENSORS = (
    f"lockstep/CartPole-v1 {CUDA} --env.backend tensor --num-envs 256 --num-steps 32 --total-steps 24576 "
    "--normalize.observations --normalize.returns --network.recurrent gru --ppo.num-epochs 1"
)
CARTPOLES = f"CartPole-v1 {JAX} --num-envs 4096 --total-steps"
SHARED = {
    "cartpole": "CartPole-v1 --total-steps 4096",
    "cheetah": "HalfCheetah-v5 --num-steps 64 --total-steps 2048",
    "tensors": (
        "lockstep/CartPole-v1 --env.backend tensor --num-envs 512 --total-steps 65536 --normalize.observations "
        "--normalize.returns"
    ),
    "wide": f"CartPole-v1 --total-steps 2048 {WIDE}",
}
"""Runs of which each is trained by several numbers of ranks on one GPU, by name."""
LSTM = "--network.recurrent lstm --network.recurrent-size 128"
BRANCHED = (
    f"CartPole-v1 {CUDA} --total-steps 10240 {WIDE}",
    f"CartPole-v1 {CUDA} --total-steps 10240 {WIDE} --precision bf16",
    f"CartPole-v1 {CUDA} --total-steps 4096 {LSTM}",
    f"ALE/Pong-v5 {CUDA} --total-steps 8192",
)
"""Runs whose shards an H200 takes one by one, each trained with branches of graphs and with one."""

CHECKS: tuple[Check, ...] = (
    Check(
        "trains",
        (train("run", f"CartPole-v1 {CUDA}"),),
        "it learns; the start line says cuda:0",
        solves_cartpole,
        timed=True,
    ),
    Check(
        "update-without-waits",
        (f"python {SCRIPTS}/without_waits.py train {SHORT} --no-cuda-graphs --name run",),
        "no update waits for the GPU: PyTorch raises where one does",
        never_waits,
    ),
    Check(
        "graphs",
        (
            f"python {SCRIPTS}/replayed_steps.py train {SHORT} --cuda-graphs --name with",
            train("without", f"{SHORT} --no-cuda-graphs"),
        ),
        "graphs of sampling and of optimiser steps are captured and replayed, with the bits of what is launched; speed "
        "with and without",
        same_bits_replayed,
        timed=True,
    ),
    Check(
        "graphs-of-environments",
        (
            f"python {SCRIPTS}/replayed_steps.py train {FEW_TENSORS} --cuda-graphs --name with",
            train("without", f"{FEW_TENSORS} --no-cuda-graphs"),
        ),
        "the same of a step of environments on the GPU, normalised and with a GRU",
        same_bits_replayed,
        timed=True,
    ),
    Check(
        "branches",
        tuple(
            f"python {SCRIPTS}/branches.py {branches} train {words} --name {name}-{number}"
            for number, words in enumerate(BRANCHED)
            for name, branches in (("with", BRANCHES), ("without", 1))
        ),
        "shards that are taken one by one are branches of a graph, with the bits of one after the other; speed of both",
        same_bits_in_branches,
        timed=True,
        modules=("ale_py",),
    ),
    Check(
        "too-few-gpus",
        (train("run", f"CartPole-v1 {CUDA} --nproc 2"),),
        "on one GPU: one error line, nothing started",
        refuses,
        environment={"CUDA_VISIBLE_DEVICES": "0"},
        fails=True,
    ),
    Check(
        "verify",
        (f"lockstep verify CartPole-v1 {CUDA} --world-sizes 1,2 --json", train("run", f"CartPole-v1 {CUDA} --nproc 2")),
        "the same bytes on one GPU and two; NCCL carries the collectives",
        same_bytes_by_nccl,
        gpus=2,
    ),
    Check(
        "ranks-of-one-gpu",
        tuple(
            f"torchrun --standalone --nproc-per-node {ranks} {SCRIPTS}/ranks_of_one_gpu.py train {words} {CUDA} "
            f"--backend gloo --name {name}-{ranks}"
            for name, words in SHARED.items()
            for ranks in SHARING
        ),
        "the state_sha256 of 1, 2, 3 and 8 ranks that share a GPU and meet through the host",
        same_state_on_one_gpu,
        modules=("mujoco",),
    ),
    Check(
        "resume",
        (
            train("a", f"{CHEETAH} --stop-at-step 20480"),
            "lockstep train --resume a",
            train("b", CHEETAH),
        ),
        "a resumed run has the state_sha256 of an uninterrupted one",
        resumes,
        modules=("mujoco",),
    ),
    Check(
        "tensor-environments",
        (f"python {SCRIPTS}/copies_per_step.py train {TENSORS} --name run",),
        "the rollout stays on the GPU: no copy per step",
        stays_on_gpu,
    ),
    Check(
        "images",
        pair(f"ALE/Pong-v5 {CUDA} --total-steps 16384", "--reduction fast"),
        "frames/s of fast against exact, which takes images shard by shard",
        speeds,
        timed=True,
        modules=("ale_py",),
    ),
    Check(
        "exact",
        pair(TENSORS, "--reduction fast"),
        "steps/s of fast against exact, environments on the GPU",
        speeds,
        timed=True,
    ),
    Check(
        "bf16",
        pair(f"{SHORT} {WIDE}", "--precision bf16"),
        "other bits than fp32's; speed against fp32",
        another_precision,
        timed=True,
    ),
    Check(
        "compile",
        (
            train("with", f"{SHORT} {WIDE} --reduction fast --compile --cuda-graphs"),
            train("without", f"{SHORT} {WIDE} --reduction fast --no-cuda-graphs"),
        ),
        "whether compiling and CUDA graphs pay at this size",
        speeds,
        timed=True,
    ),
    Check(
        "fsdp",
        pair(f"CartPole-v1 {CUDA} --nproc 2 --reduction fast {WIDEST} --log.timing", "--fsdp"),
        "a rank holds less memory than without it",
        less_memory,
        gpus=2,
    ),
    Check(
        "envs-per-rank",
        (train("run", f"{SHORT} --num-envs-per-rank auto"),),
        "the rule's line names the GPU's memory",
        names_gpu_memory,
    ),
    Check(
        "bench",
        (f"lockstep bench CartPole-v1 {CUDA} --world-sizes 1,2 --name run",),
        "t_comm and the allocator's peak are measured",
        measures_both,
        timed=True,
        gpus=2,
    ),
    Check(
        "attach",
        (f"torchrun --standalone --nproc-per-node 2 {SCRIPTS}/attached_gradients.py cuda",),
        "NCCL carries the gradients, which are those of one rank with all data",
        reduces_gradients,
        gpus=2,
    ),
    Check(
        "sb3",
        ("torchrun --standalone --nproc-per-node 2 {root}/examples/sb3_cartpole.py sb3 cuda",),
        "each rank on its own GPU, CartPole solved",
        solves_by_sb3,
        gpus=2,
        modules=("stable_baselines3",),
    ),
    Check(
        "jax-trains",
        (train("run", f"{CARTPOLES} 10_000_000"),),
        "it learns on the GPU",
        learns,
        timed=True,
        engine="jax",
    ),
    Check(
        "jax-resume",
        (
            train("a", f"{CARTPOLES} 4_000_000 --stop-at-step 2_000_000"),
            "lockstep train --resume a",
            train("b", f"{CARTPOLES} 4_000_000"),
        ),
        "a resumed run has the state_sha256 of an uninterrupted one",
        resumes,
        engine="jax",
    ),
    Check(
        "jax-verify",
        (f"lockstep verify CartPole-v1 {JAX} --world-sizes 1,2 --json",),
        "the same bytes (deterministic kernels and highest matmul precision are set)",
        same_bytes,
        gpus=2,
        engine="jax",
    ),
    Check(
        "jax-images",
        (train("run", f"lockstep/GridWorldPixels-v0 {JAX}"),),
        "it learns with XLA's own convolutions, not those for the CPU",
        rises,
        engine="jax",
    ),
    Check(
        "jax-exact",
        pair(f"{CARTPOLES} 10_000_000", "--reduction fast"),
        "steps/s of fast against exact, which takes one shard after the other",
        speeds,
        timed=True,
        engine="jax",
    ),
    Check(
        "jax-bf16",
        pair(f"CartPole-v1 {JAX} --num-envs 256 --total-steps 409_600 {WIDE}", "--precision bf16"),
        "other bits than fp32's; speed against fp32",
        another_precision,
        timed=True,
        engine="jax",
    ),
    Check(
        "jax-fsdp",
        pair(f"CartPole-v1 {JAX} --reduction fast {WIDEST} --log.timing", "--fsdp"),
        "a device holds less memory than without it",
        less_memory,
        gpus=2,
        engine="jax",
    ),
    Check(
        "walking",
        (f"python {{root}}/examples/walking.py playground {CUDA} --total-steps 10_000_000 --name run",),
        "HumanoidWalk's return rises",
        rises,
        engine="jax",
        modules=("mujoco_playground",),
    ),
)
