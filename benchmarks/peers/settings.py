"""What every peer is told, and how it reports: one line into a pipe after each iteration."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TextIO

CALLS = 40
"""Calls of a program that JAX compiled whole; each is a line. At least so many if it has as many iterations."""


@dataclass(frozen=True)
class Settings:
    """A benchmark case, as a peer's command line gives it."""

    env: str
    num_envs: int
    num_steps: int
    num_epochs: int
    num_minibatches: int
    iterations: int
    learning_rate: float
    entropy_coef: float
    threads: int
    vector: str
    normalize: bool
    images: bool
    lstm: int | None
    lines: TextIO

    @property
    def batch_size(self) -> int:
        """Samples of a minibatch."""
        return self.num_envs * self.num_steps // self.num_minibatches

    @property
    def total_steps(self) -> int:
        """Environment steps of the whole run."""
        return self.num_envs * self.num_steps * self.iterations

    @property
    def iterations_per_call(self) -> int:
        """Iterations of a call of a program that JAX compiled whole."""
        return max(1, self.iterations // CALLS)

    def iteration_done(self) -> None:
        """Tell whoever measures that one more iteration is over."""
        print("iteration", file=self.lines, flush=True)


def read_settings() -> Settings:
    """Reads the command line; registers Atari's ids where they are needed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", required=True)
    for name in ("num-envs", "num-steps", "num-epochs", "num-minibatches", "iterations"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--entropy-coef", type=float, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vector", choices=("sync", "processes", "entry-point", "envpool"), default="sync")
    parser.add_argument("--normalize", action="store_true", help="observations and returns")
    parser.add_argument("--images", action="store_true", help="an Atari game's")
    parser.add_argument("--lstm", type=int, help="units")
    parser.add_argument("--lines", type=argparse.FileType("w"), required=True, help="where iterations are reported")
    settings = Settings(**vars(parser.parse_args()))
    if settings.images and settings.vector != "envpool":
        import ale_py
        import gymnasium

        gymnasium.register_envs(ale_py)
    return settings


def read_torch_settings() -> Settings:
    """Reads the command line and sets PyTorch to its threads; peers that need no PyTorch don't load it."""
    import torch

    settings = read_settings()
    torch.set_num_threads(settings.threads)
    return settings
