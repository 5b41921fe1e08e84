"""Starts the command line's run for a caller in Python, in a process of its own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.command_line import read_request
from lockstep.config.run import AUTO, Config, RunOptions
from lockstep.config.sections import is_url
from lockstep.core.temporary import temporary_directory
from lockstep.python.arguments import in_plain_words
from lockstep.python.callbacks import Conversation, checked_callbacks
from lockstep.python.command import run_command
from lockstep.python.environments import Handed, variables_for
from lockstep.runs.directory import default_name, find_run
from lockstep.runs.mirror.place import split_url
from lockstep.training.audience import COMMAND_VARIABLE

if TYPE_CHECKING:
    from lockstep.python.run import Run

SETTINGS = "settings.json"
CALLER = "lockstep.train"


def start(
    asked: dict[str, Any],
    env: Handed | None,
    run_at: Callable[[Path], Run],
    callbacks: Any,
    observe_only: bool,
) -> Run:
    """Runs ``lockstep train`` with nested settings, and answers it with callbacks.

    ``run_at`` makes a run of its directory; errors are :func:`lockstep.train`'s.
    """
    callbacks, asked = checked_callbacks(callbacks), in_plain_words(asked)
    with temporary_directory() as directory, variables_for(env) as variables:
        file = directory / SETTINGS
        with _in_callers_words(file):
            file.write_text(json.dumps(asked))
            request = read_request([str(file)])
            if callbacks and request.options.is_group:
                count = len(request.options.seeds_from(request.config.seed))
                raise ValueError(f"callbacks: with {count} seeds; train each seed by itself")
            path, asked["name"] = _place_of(request.options, request.config)
            file.write_text(json.dumps({key: value for key, value in asked.items() if value is not None}))
            run = run_at(path)
            from_python = {**variables, COMMAND_VARIABLE: "null"}
            with Conversation(run, callbacks, observe_only, directory) as talk:
                run_command(["train", str(file)], from_python | talk.variables, request.options.quiet, talk.listen)
    talk.raise_failure()
    return run


def _place_of(options: RunOptions, config: Config) -> tuple[Path, str | None]:
    """Where a request's run will be, and the name to give it there."""
    runs_dir, resume = Path(options.runs_dir), options.resume
    if resume is not None and is_url(resume):
        return (runs_dir / split_url(resume)[1]).absolute(), None
    if resume not in (None, AUTO):
        return find_run(resume, options.runs_dir, single=False)[0].absolute(), None
    name = options.name
    if name is None:
        stem, suffix = default_name(config, options.seeds_from(config.seed)), 1
        name = stem
        while (runs_dir / name).exists():
            suffix += 1
            name = f"{stem}-{suffix}"
    return (runs_dir / name).absolute(), name


@contextlib.contextmanager
def _in_callers_words(file: Path) -> Iterator[None]:
    """Names this function, not a file that nobody knows, where a setting can't be."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        if str(file) not in message:
            raise
        raise type(error)(message.replace(f"{file}: ", "").replace(str(file), CALLER)) from None
