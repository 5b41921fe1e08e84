"""``lockstep train`` reads the request, starts the run, and reports its result."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.commands.next_steps import next_steps
from lockstep.config.checks import resolve
from lockstep.config.command_line import Request
from lockstep.config.files import config_text
from lockstep.config.help import train_help
from lockstep.config.run import Config, RunOptions
from lockstep.core.errors import one_line
from lockstep.core.machine import slow_down_gc
from lockstep.core.process import end_with_parent, exempt_present_children, say, started_by_command
from lockstep.core.topology import started_by_torchrun
from lockstep.launch.mirrored import Mirrors, mirrors
from lockstep.launch.request import RunRequest, request_of
from lockstep.launch.seeds.places import resumed_run
from lockstep.launch.start import STOPPED_BY_SIGNAL, start_run
from lockstep.launch.variables import variable_lines
from lockstep.launch.world import topology_of
from lockstep.report.packages import check_installed
from lockstep.runs.directory import REPORT, SUMMARY, is_writer
from lockstep.runs.finding import find_run
from lockstep.runs.listing import read_object
from lockstep.runs.stored import stored_config
from lockstep.runs.trust import names_in, take_handed_over
from lockstep.training.audience import ADDRESS_VARIABLE, COMMAND_VARIABLE

_HELP, _PRINT, _ENVIRONMENT = ("-h", "--help", "--help-all"), "--print-config", "--print-environment"


def main(argv: Sequence[str]) -> int:
    """Runs ``lockstep train ARGV``: exit status 0, 1 (failed), 2 (bad input) or 128 + n (stopped by signal n)."""
    words = [word for word in argv if word not in (*_HELP, _PRINT, _ENVIRONMENT)]
    if len(words) == len(argv):
        exempt_present_children()
        if started_by_torchrun():
            end_with_parent(os.getppid())  # else it trains on beside its replacement after a restart
        take_handed_over()
        slow_down_gc()  # while engine jax may be loaded and traced; see run_rank
        with mirrors() as held:
            said = os.environ.pop(COMMAND_VARIABLE, None)
            if said is not None:
                started_by_command.set()
            command = ["train", *argv] if said is None else json.loads(said)
            audience = os.environ.pop(ADDRESS_VARIABLE, None)  # environments' own processes must not inherit it
            bring = functools.partial(_brought, held)
            request = replace(request_of(argv, bring=bring, trains=True), audience=audience)
            if request.options.report:
                check_installed()
            return start_run(request, held, command, report)
    if _PRINT in argv:
        return _show(config_text(_config_of(request_of(words))).removesuffix("\n"))
    if _ENVIRONMENT in argv:
        request = request_of(words)
        return _show("\n".join(variable_lines(request.config, request.options)))
    request = request_of(words, needs_env=False)
    return _show(train_help(request.config, request.options, everything=_HELP[-1] in argv))


def _config_of(request: RunRequest) -> Config:
    """Returns the config that a request would train with; raises a one-line ``ValueError`` if it couldn't."""
    if request.undescribed is not None:
        raise request.undescribed
    options = request.options
    if options.resume is not None:
        return _resumed_config_of(request)
    if not isinstance(request.config.num_envs_per_rank, str):  # if it is, the machine's memory decides
        resolve(request.config, options.nproc if isinstance(options.nproc, int) else 1)
    return request.config


def _resumed_config_of(request: RunRequest) -> Config:
    """Returns the config that a run or group would resume with; fetches only the config if it is on a mirror."""
    with mirrors() as held:
        options = held.resolved(request.options, request.config.checkpoint.mirror, writer=False)
        assert options.resume is not None
        path, _ = find_run(options.resume, options.runs_dir, single=False)
        named = {*held.named, *names_in(request.config)}
        return resumed_run(path, request.overrides, options.trust, named=named)


def _show(text: str) -> int:
    """Prints a text instead of training; returns the exit status."""
    with contextlib.suppress(BrokenPipeError):  # the reader closed the pipe
        print(text, flush=True)
    return 0


def _brought(held: Mirrors, request: Request) -> RunOptions:
    """Returns a request's options, after fetching the run from a mirror if it is there."""
    return held.resolved(request.options, request.config.checkpoint.mirror, is_writer(topology_of(request.options)))


def report(path: Path, options: RunOptions, code: int) -> None:
    """Prints the result of a run, or a group of seeds, that ended well or was stopped, and may write its page."""
    if not (path / SUMMARY).is_file():
        return
    if not options.quiet:
        say(next_steps(path, read_object(path / SUMMARY), stored_config(path, warn=False)), sys.stdout)
    if options.report:
        _write_page(path, options.quiet)
    if code in STOPPED_BY_SIGNAL:
        say("lockstep: stopped by a signal, with a checkpoint")


def _write_page(run: Path, quiet: bool) -> None:
    """Writes the run's page; a failure is only a warning, because the run is done."""
    path = run / REPORT
    try:
        from lockstep.report.page import write_report  # imports matplotlib, which is slow

        write_report([(run, run.name)], path)
    except Exception as error:
        say(f"lockstep: warning: {path} isn't written: {one_line(error)}")
        return
    if not quiet:
        say(f"report:    {path}", sys.stdout)
