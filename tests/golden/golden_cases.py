"""Short runs whose bits are written down in ``golden.json``; ``python tests/golden/golden_cases.py`` writes it.

Only a change that is meant to change bits, and says so in the changelog, may write the file again.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden.json"
MODULES = Path(__file__).parents[1] / "modules"

SHORT = (
    *("--num-envs", 8, "--num-steps", 16, "--total-steps", 384, "--ppo.num-epochs", 2, "--ppo.num-minibatches", 2),
    *("--ppo.learning-rate", 5e-3, "--network.hidden-sizes", 16, 16, "--checkpoint.interval", 0, "--eval.interval", 0),
    *("--log.no-tensorboard", "--seed", 7),
)
"""Three iterations of 128 steps, with everything said that a preset might set."""
NORMALIZED = ("--normalize.observations", "--normalize.returns", "--env.max-episode-steps", 10)
LSTM = ("--network.recurrent", "lstm", "--network.recurrent-size", 8, "--network.sequence-length", 8)
IMAGES = ("--network.image.kind", "simple", "--network.image.width", 0.25, "--network.image.depth", 1)
GRPO = (
    *("--algorithm", "grpo", "--grpo.group-size", 2, "--grpo.kl-coef", 0.1, "--num-envs", 16),
    *("--env.max-episode-steps", 12, "--total-steps", 768),
)
BFLOAT16 = ("--precision", "bf16", "--network.activation", "silu")
MASKED = ("--env.action-mask", "info", "--normalize.observations")
JAX = ("--engine", "jax")


def devices(number: int) -> tuple:
    """Options for that many devices of one process."""
    return (*JAX, "--simulate-devices", number)


CASES: dict[str, tuple] = {
    "torch CartPole, 1 rank": ("CartPole-v1", *SHORT),
    "torch CartPole, 2 ranks": ("CartPole-v1", *SHORT, "--nproc", 2),
    "torch CartPole, 8 ranks": ("CartPole-v1", *SHORT, "--nproc", 8),
    "torch HalfCheetah normalised, 2 ranks": ("HalfCheetah-v5", *SHORT, *NORMALIZED, "--nproc", 2),
    "torch LSTM, 2 ranks": ("CartPole-v1", *SHORT, *LSTM, "--nproc", 2),
    "torch images, 1 rank": ("lockstep/GridWorldPixels-v0", *SHORT, *IMAGES),
    "torch GRPO, 2 ranks": ("lockstep/PushCube-v0", *SHORT, *GRPO, "--nproc", 2),
    "torch masks, 2 ranks": ("small_worlds:Doors-v0", *SHORT, *MASKED, "--nproc", 2),
    "torch fast, 2 ranks": ("CartPole-v1", *SHORT, "--reduction", "fast", "--nproc", 2),
    "torch FSDP, 2 ranks": ("CartPole-v1", *SHORT, "--reduction", "fast", "--fsdp", "--nproc", 2),
    "torch bfloat16, 2 ranks": ("CartPole-v1", *SHORT, *BFLOAT16, "--nproc", 2),
    "torch tensor environments, 1 rank": ("lockstep/CartPole-v1", *SHORT, "--env.backend", "tensor"),
    "jax CartPole, 1 device": ("lockstep/CartPole-v1", *SHORT, *devices(1)),
    "jax CartPole, 2 devices": ("lockstep/CartPole-v1", *SHORT, *devices(2)),
    "jax CartPole, 8 devices": ("lockstep/CartPole-v1", *SHORT, *devices(8)),
    "jax HalfCheetah normalised, 2 devices": ("HalfCheetah-v5", *SHORT, *NORMALIZED, *devices(2)),
    "jax LSTM, 2 devices": ("lockstep/CartPole-v1", *SHORT, *LSTM, *devices(2)),
    "jax images, 2 devices": ("lockstep/GridWorldPixels-v0", *SHORT, *IMAGES, *devices(2)),
    "jax GRPO, 2 devices": ("lockstep/PushCube-v0", *SHORT, *GRPO, *devices(2)),
    "jax masks, 2 devices": ("small_worlds:Doors-v0", *SHORT, *MASKED, *devices(2)),
    "jax bfloat16, 1 device": ("lockstep/CartPole-v1", *SHORT, *BFLOAT16, *devices(1)),
    "jax bfloat16, 2 devices": ("lockstep/CartPole-v1", *SHORT, *BFLOAT16, *devices(2)),
    "jax fast, 2 devices": ("lockstep/CartPole-v1", *SHORT, "--reduction", "fast", *devices(2)),
    "jax FSDP, 2 devices": ("lockstep/CartPole-v1", *SHORT, "--reduction", "fast", "--fsdp", *devices(2)),
}
"""Command lines of ``lockstep train``; what is one agent on 1, 2 and 8 ranks has one hash in the file three times."""

STOPPED_AT = 256
KEPT = {
    "torch_cartpole": "torch CartPole, 1 rank",
    "torch_cheetah": "torch HalfCheetah normalised, 2 ranks",
    "torch_lstm": "torch LSTM, 2 ranks",
    "jax_cartpole": "jax CartPole, 2 devices",
    "jax_cheetah": "jax HalfCheetah normalised, 2 devices",
}
"""Run directories in ``runs/``, each a case that was stopped after ``STOPPED_AT`` of its 384 steps."""

PACKAGES = ("torch", "jax", "jaxlib", "numpy", "gymnasium", "mujoco", "equinox", "optax")


def surroundings() -> dict[str, str]:
    """What the bits hold for: versions, processor and kernels of NumPy's products that they were written down with."""
    from lockstep.core.machine import instruction_set, openblas_kernel, processor

    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return (
        {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
        | versions
        | {
            "instruction_set": instruction_set(),
            "processor": processor(),
            "openblas": openblas_kernel(),
        }
    )


def fitting(written: list[dict[str, Any]], here: dict[str, str], case: str) -> list[dict[str, Any]]:
    """The bits of a case for these surroundings; without any those for a processor of which only the name was kept.

    Engine jax doesn't multiply by NumPy, so the kernels of NumPy's products decide nothing there.
    """

    def facts(holds_for: dict[str, str]) -> dict[str, str]:
        return {name: fact for name, fact in holds_for.items() if name != "openblas" or not case.startswith("jax")}

    named = {**here, "processor": here["processor"].partition(" (")[0]}
    exact, alike = (
        [each for each in written if case in each["bits"] and facts(each["holds_for"]) == facts(wanted)]
        for wanted in (here, named)
    )
    return exact or alike


def bits_of(words: tuple, directory: Path, name: str) -> dict[str, str]:
    """Train a case; the two hashes of its ``summary.json``."""
    paths = os.pathsep.join([str(MODULES), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "lockstep", "train", *map(str, words), "--name", name]
    done = subprocess.run(
        command, cwd=directory, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr}")
    summary: dict[str, Any] = json.loads((directory / "runs" / name / "summary.json").read_text())
    return {key: summary[key] for key in ("params_sha256", "state_sha256")}


def main() -> None:
    """Write this processor's bits into ``golden.json``."""
    with tempfile.TemporaryDirectory() as directory:
        bits = {}
        for number, (case, words) in enumerate(CASES.items()):
            bits[case] = bits_of(words, Path(directory), f"case_{number}")
            print(case, bits[case]["params_sha256"][:12], bits[case]["state_sha256"][:12], flush=True)
    golden, here = json.loads(GOLDEN.read_text()), surroundings()
    others = [written for written in golden["written"] if written["holds_for"] != here]
    golden["written"] = [*others, {"holds_for": here, "bits": bits}]
    GOLDEN.write_text(json.dumps(golden, indent=2) + "\n")


if __name__ == "__main__":
    main()
