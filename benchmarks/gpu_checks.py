"""The checks that need a GPU, as data: what is run, what must be seen, and how that is judged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

SCRIPTS = "{root}/benchmarks/gpu_scripts"
CUDA = "--device cuda"
JAX = f"--engine jax {CUDA}"
WIDE, WIDEST = "--network.hidden-sizes 1024 1024", "--network.hidden-sizes 4096 4096"
TENSOR_ENVS, TENSOR_STEPS, TENSOR_ITERATIONS = 4096, 128, 20
LEARNED = 2.0
"""Returns that are this many times those of the first iteration were learned."""
SOLVED = 400.0
"""Return of CartPole-v1, whose best is 500, from which on it is taken as learned."""


@dataclass(frozen=True)
class Outcome:
    """One command that has ended.

    Attributes:
        code: its exit status.
        output: what it printed, errors included.
        summary: ``summary.json`` of the run that ``--name`` or ``--resume`` names, with the rows of a sweep of
            ``bench`` under ``world_sizes``; empty if there is none.
        metrics: its ``metrics.jsonl``.
        timing: its ``timing.jsonl``.
    """

    code: int
    output: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, Any]] = ()
    timing: Sequence[Mapping[str, Any]] = ()

    @property
    def rate(self) -> float:
        """Environment steps a second, after the first quarter of a run: what compiles or captures is in that."""
        skipped = max(1, len(self.metrics) // 4)
        seconds = sum(row.get("time/t_iter", 0.0) for row in self.metrics[skipped:])
        if not seconds:
            return float(self.summary["steps_per_second"])
        return (self.metrics[-1]["global_step"] - self.metrics[skipped - 1]["global_step"]) / seconds

    @property
    def last_line(self) -> str:
        """The last line that was printed."""
        return next((line.strip() for line in reversed(self.output.splitlines()) if line.strip()), "nothing printed")


@dataclass(frozen=True)
class Verdict:
    """Whether what must be seen was seen, and the figures to keep."""

    passed: bool
    figures: str


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


def verdict(check: Check, outcomes: Sequence[Outcome]) -> Verdict:
    """Judges a check's commands; one that failed, or left out what the judge reads, fails the check."""
    for outcome in outcomes:
        if (outcome.code != 0) != check.fails:
            return Verdict(False, f"exit status {outcome.code}: {outcome.last_line}")
    try:
        return check.judge(*outcomes)
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError) as error:
        return Verdict(False, f"what is judged can't be read: {type(error).__name__}: {error}")


def returns(run: Outcome) -> tuple[float, float]:
    """Mean episode return of the first iteration that has one, and the final one."""
    values = (row.get("rollout/episode_return_mean") for row in run.metrics)
    return float(next(value for value in values if value is not None)), float(run.summary["final_return"])


def solves_cartpole(run: Outcome) -> Verdict:
    final = float(run.summary["final_return"])
    on_gpu = "cuda:0" in run.output
    return Verdict(on_gpu and final >= SOLVED, f"final return {final:.1f}, {run.rate:,.0f} steps/s")


def learns(run: Outcome) -> Verdict:
    first, final = returns(run)
    on_gpu = run.summary["platform"] == "gpu"
    return Verdict(on_gpu and final >= LEARNED * first, f"return {first:.1f} → {final:.1f}, {run.rate:,.0f} steps/s")


def rises(run: Outcome) -> Verdict:
    first, final = returns(run)
    return Verdict(final > first, f"return {first:.2f} → {final:.2f}")


def refuses(run: Outcome) -> Verdict:
    lines = [line for line in run.output.splitlines() if line.strip()]
    wanted = run.code == 2 and len(lines) == 1 and "GPUs" in run.output and not run.summary and not run.metrics
    return Verdict(wanted, f"exit status {run.code}: {run.last_line}")


def same_bytes(run: Outcome) -> Verdict:
    rows = json.loads(run.last_line)
    different = [f"{row['world_size']}: {row['difference']}" for row in rows if not row["equal"]]
    sizes = ", ".join(str(row["world_size"]) for row in rows)
    return Verdict(len(rows) > 1 and not different, "; ".join(different) or f"equal on {sizes}")


def same_bytes_by_nccl(verified: Outcome, run: Outcome) -> Verdict:
    found, carrier = same_bytes(verified), run.summary["collectives"]
    return Verdict(found.passed and carrier == "nccl", f"{found.figures}; collectives by {carrier}")


def resumes(stopped: Outcome, resumed: Outcome, whole: Outcome) -> Verdict:
    digests = [outcome.summary["state_sha256"] for outcome in (resumed, whole)]
    went_on = stopped.summary["global_step"] < resumed.summary["global_step"]
    return Verdict(went_on and digests[0] == digests[1], " and ".join(digest[:8] for digest in digests))


def same_state_on_one_gpu(*runs: Outcome) -> Verdict:
    """Of each kind of run, by as many ranks as :data:`SHARING` says."""
    sets, passed, said = len(runs) // len(SHARING), True, []
    for number in range(sets):
        own = runs[number * len(SHARING) : (number + 1) * len(SHARING)]
        digests = [run.summary["state_sha256"] for run in own]
        sizes = tuple(run.summary["world_size"] for run in own)
        on_gpu = all("cuda:0" in run.output for run in own)
        passed &= sizes == SHARING and on_gpu and len(set(digests)) == 1
        said.append(f"{', '.join(digest[:8] for digest in digests)} (shards {own[0].summary['shards_on_a_rank']})")
    return Verdict(passed and sets > 0, "; ".join(said))


def stays_on_gpu(run: Outcome) -> Verdict:
    copies = int(run.last_line.removeprefix("copies "))
    steps = TENSOR_STEPS * TENSOR_ITERATIONS
    return Verdict(0 < copies < steps, f"{copies} copies in {steps} steps")


def never_waits(run: Outcome) -> Verdict:
    updates = int(run.last_line.removeprefix("updates "))
    return Verdict(updates > 0, f"{updates} updates without a wait")


def same_bits_replayed(run: Outcome, base: Outcome) -> Verdict:
    same = run.summary["state_sha256"] == base.summary["state_sha256"]
    return Verdict(same, speeds(run, base).figures + ("" if same else "; the bits are others"))


def speeds(run: Outcome, base: Outcome) -> Verdict:
    return Verdict(True, f"{run.rate:,.0f} against {base.rate:,.0f} steps/s: {run.rate / base.rate:.2f} ×")


def another_precision(run: Outcome, base: Outcome) -> Verdict:
    differs = run.summary["params_sha256"] != base.summary["params_sha256"]
    return Verdict(differs, speeds(run, base).figures + ("" if differs else "; the bits are those of fp32"))


def less_memory(run: Outcome, base: Outcome) -> Verdict:
    peaks = [max(row["peak_gpu_memory_mb"][0] for row in outcome.timing) for outcome in (run, base)]
    return Verdict(0 < peaks[0] < peaks[1], f"peak of a rank {peaks[0]:,.0f} against {peaks[1]:,.0f} MiB")


def names_gpu_memory(run: Outcome) -> Verdict:
    rule = re.search(r"\d+ on a GPU of \d+ GB", run.output)
    return Verdict(rule is not None, rule[0] if rule else "no line names the GPU's memory")


def measures_both(run: Outcome) -> Verdict:
    by_size = {row["world_size"]: row for row in run.summary["world_sizes"]}
    comm, peak = by_size[2]["t_comm"], by_size[2]["peak_gpu_memory_mb"]
    rates = ", ".join(f"{row['steps_per_second']:,.0f} steps/s on {size}" for size, row in by_size.items())
    return Verdict(comm > 0 and peak > 0, f"{rates}; t_comm {1e3 * comm:.1f} ms, peak {peak:,.0f} MiB")


def reduces_gradients(run: Outcome) -> Verdict:
    said = re.findall(r"backend (\w+) difference ([\d.e+-]+|nan)", run.output)
    close = all(float(difference) < 1e-5 for _, difference in said)
    passed = len(said) == 2 and close and {backend for backend, _ in said} == {"nccl"}
    return Verdict(passed, "; ".join(f"{backend}, difference {difference}" for backend, difference in said))


def solves_by_sb3(run: Outcome) -> Verdict:
    means = [float(mean) for mean in re.findall(r"mean return over 20 episodes: ([\d.]+)", run.output)]
    return Verdict(bool(means) and min(means) >= SOLVED, f"mean returns {', '.join(f'{mean:.1f}' for mean in means)}")


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
CARTPOLES = f"CartPole-v1 {JAX} --num-envs 4096 --total-steps"
SHARING = (1, 2, 3, 8)
SHARED = {
    "cartpole": "CartPole-v1 --total-steps 4096",
    "cheetah": "HalfCheetah-v5 --num-steps 64 --total-steps 2048",
    "tensors": (
        "lockstep/CartPole-v1 --env.backend tensor --num-envs 512 --total-steps 65536 --normalize.observations "
        "--normalize.returns"
    ),
}
"""Runs of which each is trained by several numbers of ranks on one GPU, by name."""

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
        (train("with", f"{SHORT} --cuda-graphs"), train("without", f"{SHORT} --no-cuda-graphs")),
        "a replayed optimiser step has the bits of one that is launched; speed with and without",
        same_bits_replayed,
        timed=True,
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
