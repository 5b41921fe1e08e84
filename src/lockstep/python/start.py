"""Runs ``lockstep train`` for a caller in Python, in a separate process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.command_line import read_request
from lockstep.config.on_off import switch
from lockstep.config.run import AUTO, Config, RunOptions
from lockstep.config.sections import is_url
from lockstep.core.files import new_directory
from lockstep.core.temporary import temporary_directory
from lockstep.python.arguments import in_plain_words
from lockstep.python.callbacks import Conversation, checked_callbacks
from lockstep.python.command import run_command
from lockstep.python.handed import Handed, variables_for
from lockstep.python.words import in_python
from lockstep.runs.directory import writing
from lockstep.runs.finding import find_run
from lockstep.runs.making import default_name
from lockstep.runs.mirror.place import split_url
from lockstep.runs.trust import handed_over, names_in
from lockstep.training.audience import COMMAND_VARIABLE

if TYPE_CHECKING:
    from lockstep.python.run import Run

SETTINGS = "settings.json"
CALLER = "lockstep.train"
NO_ENVIRONMENT = 'env: none is given; give an id, or what makes an environment, as in lockstep.train("CartPole-v1")'


def start(
    asked: dict[str, Any],
    given: Sequence[Handed],
    run_at: Callable[[Path, Collection[str], bool], Run],
    callbacks: Any,
    observe_only: bool,
    named: Collection[str] = (),
) -> Run:
    """Runs ``lockstep train`` with nested settings, and calls callbacks meanwhile.

    Args:
        asked: nested settings; gets the run's name.
        given: environment, network and loss that were given as objects.
        run_at: makes the :class:`Run` from its directory, the names of code and places in its config, and ``trust``.
        callbacks: as :func:`lockstep.train` takes them.
        observe_only: likewise.
        named: names of code and places that are trusted already.

    Raises:
        Exception: as :func:`lockstep.train`.
    """
    callbacks, observes = checked_callbacks(callbacks), switch("observe_only", observe_only)
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(temporary_directory())
        variables = stack.enter_context(variables_for(given))
        file = directory / SETTINGS
        with _in_callers_words(file):
            asked = in_plain_words(asked)
            file.write_text(json.dumps(asked))
            request = read_request([str(file)], needs_env=False)
            if request.options.resume in (None, AUTO) and not _names_environment(asked):
                raise ValueError(NO_ENVIRONMENT)
            if callbacks and request.options.is_group:
                count = len(request.options.seeds_from(request.config.seed))
                raise ValueError(f"callbacks: with {count} seeds; train each seed by itself")
            path, asked["name"] = _place_of(request.options, request.config, stack)
            file.write_text(json.dumps({k: x for k, x in asked.items() if x is not None or k != "name"}))
            run = run_at(path, names_in(request.config), request.options.trust)
        from_python = {**variables, **handed_over(named), COMMAND_VARIABLE: "null"}
        # In memory the path is short, as a socket's must be (107 bytes); but there may be no room for files.
        place = stack.enter_context(temporary_directory(in_memory=True)) if callbacks else directory
        with Conversation(run, callbacks, observes, place) as talk, _in_callers_words(file, talk):
            told, quiet = from_python | talk.variables, request.options.quiet
            run_command(["train", str(file)], told, quiet, talk.listen, talk.break_off)
    talk.raise_failure()
    return run


def _names_environment(asked: dict[str, Any]) -> bool:
    env = asked.get("env")
    return bool(env.get("id") if isinstance(env, dict) else env)


def _place_of(options: RunOptions, config: Config, stack: contextlib.ExitStack) -> tuple[Path, str | None]:
    """Returns the directory where a request's run will be, and the name to give the run; None if it is resumed.

    A default name is reserved by making the directory; ``stack`` removes it again if the run leaves it empty.

    Raises:
        ValueError: there is no such run; one line.
    """
    runs_dir, resume = Path(options.runs_dir).absolute(), options.resume
    if resume is not None and is_url(resume):
        return runs_dir / split_url(resume)[1], None
    if resume not in (None, AUTO):
        return find_run(resume, options.runs_dir, single=False)[0].absolute(), None
    if options.name is not None:
        return runs_dir / options.name, options.name
    path = runs_dir / default_name(config, options.seeds_from(config.seed))
    for missing in reversed([place for place in (runs_dir, *runs_dir.parents) if not place.exists()]):
        stack.callback(_remove_empty, missing)
    with writing(path):
        runs_dir.mkdir(parents=True, exist_ok=True)
        path = new_directory(path)
    stack.callback(_remove_empty, path)
    return path, path.name


def _remove_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


@contextlib.contextmanager
def _in_callers_words(file: Path, talk: Conversation | None = None) -> Iterator[None]:
    """Rewrites a ``ValueError`` of the block to name :data:`CALLER` and its arguments, not ``file`` and options.

    What a callback of ``talk`` raised stays as it is.
    """
    try:
        yield
    except ValueError as error:
        if talk is not None and talk.failed_by(error):
            raise
        message = str(error).replace(f"{file}: ", "").replace(str(file), CALLER)
        error.args = (in_python(message),)
        raise
