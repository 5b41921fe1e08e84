"""``lockstep train --help``: every setting with its type, default and meaning, laid out by tyro."""

from __future__ import annotations

from collections.abc import Sequence

import tyro
from pydantic import ConfigDict, create_model

from lockstep.config.command_line import read_request
from lockstep.config.run import Config, RunOptions

_EPILOG = """\
CONFIG_FILE_OR_ENV_ID is a YAML, JSON or TOML file, a run directory, or an environment id whose preset is the start.
--env.kwargs '{"g": 9.8}' gives the environment arguments, as JSON (default: {}).
--network.custom-kwargs likewise gives the custom network's.
--amp is --precision bf16.
Aliases: --total-timesteps, --n-envs, --n-steps, --n-epochs, --learning-rate, --lr, --gamma, --gae-lambda, --ent-coef,
--target-kl, --max-grad-norm, --log-jsonl, --env-id, --world-size."""


class Train(Config, RunOptions):
    """Train an agent: lockstep train CONFIG_FILE_OR_ENV_ID [options]."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def print_train_help(argv: Sequence[str]) -> None:
    """Print the options; defaults are those that the rest of the command line leads to (``train Hopper-v5 --help``)."""
    ordered = create_model("Train", __base__=Train, __doc__=f"{Train.__doc__}\n\n{_EPILOG}")
    defaults = {}
    if argv:
        request = read_request(argv, needs_env=False)
        defaults = {name: getattr(request.config, name) for name in Config.model_fields}
        defaults |= {name: getattr(request.options, name) for name in RunOptions.model_fields}
    try:
        tyro.cli(ordered, args=["--help"], default=ordered(**defaults), prog="lockstep train CONFIG_FILE_OR_ENV_ID")
    except SystemExit:
        return
