"""``lockstep clone`` trains a policy that imitates recorded episodes, as a run like any other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.commands.parser import CommandParser, add_runs_dir, add_trust, at_least_one, seed_number
from lockstep.launch.request import config_named
from lockstep.policies.cloning import EPOCHS, STEPS, CloneSettings, clone
from lockstep.runs.listing import printable

LARGEST_RATE = 1e37
"""Adam's first step computes ten times the rate, which a float32 has to hold."""


def main(argv: Sequence[str]) -> int:
    """Runs ``lockstep clone EPISODES --out RUN``: trains a config's networks on recorded actions."""
    default = CloneSettings()
    parser = CommandParser(prog="lockstep clone", description="Train a policy to do what was done in episodes.")
    parser.add_argument("episodes", type=Path, help="file of lockstep record")
    parser.add_argument("--out", type=Path, required=True, help="run directory to make, e.g. runs/clone")
    parser.add_argument("--like", help="config file, run or environment id whose networks to take (default: recorded)")
    passes = f"passes (default: {EPOCHS}, or as many as {STEPS:,} steps of the optimiser take)"
    parser.add_argument("--epochs", type=at_least_one, help=passes)
    parser.add_argument("--batch", type=at_least_one, default=default.batch, help="steps at once (default: 512)")
    parser.add_argument("--learning-rate", type=float, default=default.learning_rate, help="Adam's (default: 1e-3)")
    parser.add_argument("--seed", type=seed_number, default=0, help="of parameters and minibatches (default: 0)")
    parser.add_argument("--validation", type=float, default=default.validation, help="share of episodes (default: 0.1)")
    add_runs_dir(parser)
    add_trust(parser)
    options = parser.parse_args(argv)
    if not 0 <= options.validation < 1:
        raise ValueError(f"validation: {options.validation} of the episodes; use 0 up to, but not, 1")
    if not 0 < options.learning_rate < LARGEST_RATE:
        raise ValueError(f"learning_rate: {options.learning_rate}; use a number above 0 and below {LARGEST_RATE:g}")
    settings = CloneSettings(options.epochs, options.batch, options.learning_rate, options.seed, options.validation)
    like = None if options.like is None else config_named(options.like, options.runs_dir, options.trust)
    network = None if like is None else like.network
    found = clone(options.episodes, options.out, settings, network, options.trust)
    share = f", {found['accuracy']:.1%} of actions alike" if found.get("accuracy") is not None else ""
    policy = printable(str(found["policy"]))
    print(f"{found['environment']}: {found['recorded_steps']:,} steps of {policy}{share} → {options.out}")
    return 0
