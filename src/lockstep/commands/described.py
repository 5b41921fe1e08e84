"""Reads the run that ``verify`` and ``bench`` are given, which start runs of their own."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.config.command_line import parse_arguments
from lockstep.config.run import Config, RunOptions
from lockstep.launch.defaults import request_of


def described_run(command: str, target: str, rest: Sequence[str]) -> Config:
    """Reads the config of a run, without what belongs to starting it.

    Args:
        command: that asks.
        target: config file or environment id.
        rest: options of ``lockstep train``.

    Raises:
        ValueError: an option is none that describes the run, or something is wrong with the config; one line.
    """
    given = parse_arguments(rest)
    for key in given.settings:
        if key in RunOptions.model_fields:
            raise ValueError(f"{key}: {command} starts its own runs; give only what describes the run")
    if given.positional:
        raise ValueError(f"{given.positional[0]!r}: one config file or environment id is enough, before the options")
    return request_of([target, *rest]).config
