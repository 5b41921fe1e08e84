"""Holds the commands' parser, which reports errors in one line, and options that several commands share."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from lockstep.policies.policy import Policy


def add_target(parser: argparse.ArgumentParser, metavar: str, said: str) -> None:
    """Documents what a command is about, which stands anywhere among its options and those of ``lockstep train``.

    The parser can't take it: it doesn't know which options of ``lockstep train`` have values. See
    :func:`lockstep.launch.request.split_target`.
    """
    parser.usage = f"{parser.prog} [options] {metavar}"
    parser.add_argument_group(metavar, said)


def whole_number(text: str) -> int:
    """Parses a whole number of at most 64 bits; for ``type=``."""
    number = _whole(text)
    if abs(number) > sys.maxsize:
        raise argparse.ArgumentTypeError(f"{text} is beyond {sys.maxsize}")
    return number


def seed_number(text: str) -> int:
    """Parses a seed, which may have as many digits as that of a run; for ``type=``."""
    from lockstep.config.sections import MOST_SEED

    number = _whole(text)
    if abs(number) > MOST_SEED:
        raise argparse.ArgumentTypeError(f"{text} has more than {len(str(MOST_SEED))} digits")
    return number


def at_least_one(text: str) -> int:
    """Parses a count of at least 1; for ``type=``."""
    number = whole_number(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


LATEST = "latest"
"""The checkpoint to use if none is named."""
UNKNOWN = "unrecognized arguments: "
INSTEAD = {
    "--n-eval-episodes": "write --episodes",
    "--n-episodes": "write --episodes",
    "--num-episodes": "write --episodes",
    "--eval-episodes": "write --episodes",
    "--deterministic": "the most likely actions are the default; leave it out (--stochastic samples)",
    "--load-best": "write --checkpoint best",
    "--load-checkpoint": "write --checkpoint STEP",
}
"""Options that other libraries have, and what to write for them here."""


def from_home(text: str) -> str:
    """Expands ``~`` in a path, which no shell does in ``--option=~/file``; for ``type=``."""
    return os.path.expanduser(text)


class CommandParser(argparse.ArgumentParser):
    """An argument parser that raises ``ValueError`` on errors and expands a leading ``~`` in ``Path`` arguments."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register("type", Path, lambda text: Path(from_home(text)))
        self.register("type", int, whole_number)
        self.register("type", float, _number)

    def error(self, message: str) -> NoReturn:
        """Raises ``ValueError`` instead of printing the usage; for another library's option, says what to write."""
        unknown = message.removeprefix(UNKNOWN).split() if message.startswith(UNKNOWN) else []
        for word in unknown:
            if (said := INSTEAD.get(word.partition("=")[0].replace("_", "-"))) is not None:
                raise ValueError(f"{word}: {said}")
        raise ValueError(f"{message} ({self.prog} --help)")


def add_policy_options(parser: argparse.ArgumentParser, seed: int | None = None) -> None:
    """Adds options for the checkpoint, the runs directory, the seed of episodes, sampled actions, and trust.

    The option ``seed`` is None if it isn't given: it then means this ``seed``, or the run's if that is None, too.
    """
    add_checkpoint(parser)
    said = "the run's" if seed is None else seed
    parser.add_argument("--seed", type=seed_number, help=f"of the episodes' starts (default: {said})")
    parser.add_argument("--stochastic", action="store_true", help="sample actions instead of taking the most likely")
    add_trust(parser)


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Adds options for the checkpoint and the runs directory."""
    parser.add_argument("--checkpoint", default=LATEST, help="latest, best or a step number (default: latest)")
    add_runs_dir(parser)


def add_runs_dir(parser: argparse.ArgumentParser) -> None:
    """Adds the option for the directory of runs."""
    parser.add_argument(
        "--runs-dir", type=from_home, default="runs", help="where runs given by name lie (default: runs)"
    )


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Adds the option that allows importing what a run names."""
    parser.add_argument(
        "--trust", action="store_true", help="import what the run names, though you haven't trained with it"
    )


def policy_of(run: str | Path, checkpoint: str, options: argparse.Namespace) -> Policy:
    """Loads a policy for a command, and lets this process compute as a rank that trained it did.

    PyTorch has as many threads as the policy's config says, every BLAS has one, and JAX's variables don't count.

    Raises:
        ValueError: one line, as in :func:`lockstep.load_policy`.
    """
    from lockstep.config.engines import engine_module
    from lockstep.core.machine import one_blas_thread, torch_threads
    from lockstep.policies.policy import load_policy

    policy = load_policy(run, checkpoint, options.runs_dir, trust=options.trust)
    config = policy.config
    if config.engine == "torch":
        torch_threads(config.threads)
    if config.engine == "jax" or config.env.jax_only:
        engine_module("jax").settle_numbers(config.device)
    one_blas_thread()
    return policy


def add_script_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments ``[-m] SCRIPT ARGS``, with or without ``--`` before them."""
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name, as with python -m")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS", help="the program and its arguments")
