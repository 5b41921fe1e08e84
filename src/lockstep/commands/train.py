"""``lockstep train``: everything that can be wrong is found before a run directory is made or a process started."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.commands.seeds import check_seeds, seeds_next_steps
from lockstep.config.checks import resolve
from lockstep.config.command_line import Request
from lockstep.config.engines import check_engine_options
from lockstep.config.files import config_text, read_file
from lockstep.config.help import train_help
from lockstep.config.run import RunOptions
from lockstep.core.network import wait_for_name
from lockstep.core.process import end_with_parent, leave_at_once
from lockstep.core.temporary import sweep_temporary
from lockstep.core.topology import Topology, started_by_torchrun
from lockstep.envs.describe import describe
from lockstep.launch.checks import check_company, check_limits, check_machine, with_reference
from lockstep.launch.defaults import RunRequest, request_of
from lockstep.launch.jax_start import start_jax
from lockstep.launch.mirrored import Mirrors, mirrors
from lockstep.launch.rank import Assignment, run_rank
from lockstep.launch.ray.cluster import RAY, check_ray, connected, with_devices
from lockstep.launch.ray.ranks import RayServer
from lockstep.launch.redact import without_secrets
from lockstep.launch.restart import Restarts
from lockstep.launch.resume import open_directory, resumed_config
from lockstep.launch.sizing import resolved_here
from lockstep.launch.spawn import RankServer, rank_server, threads_of
from lockstep.launch.supervise import supervise
from lockstep.launch.world import World, available_processes, topology_of, world_of
from lockstep.runs.directory import SUMMARY, RunDirectory, find_run, is_writer
from lockstep.runs.mirror.copier import FAILED_SECONDS, LAST_SECONDS
from lockstep.runs.trust import remember_names
from lockstep.training.audience import ADDRESS_VARIABLE, PYTHON_VARIABLE
from lockstep.training.past import utc_date

STOPPED_BY_SIGNAL = (129, 130, 143)
_HELP, _PRINT = ("-h", "--help", "--help-all"), "--print-config"


def main(argv: Sequence[str]) -> int:
    """Runs ``lockstep train ARGV``: exit status 0, 1 (failed), 2 (bad input) or 128 + n (stopped by signal n)."""
    words = [word for word in argv if word not in (*_HELP, _PRINT)]
    if len(words) == len(argv):
        with mirrors() as held:
            command = None if os.environ.pop(PYTHON_VARIABLE, None) else ["train", *argv]
            return start_run(request_of(argv, bring=functools.partial(_brought, held)), held, command)
    if _PRINT in argv:
        request = request_of(words)
        if not isinstance(request.config.num_envs_per_rank, str):  # else what the machine can hold decides
            resolve(request.config, request.options.nproc if isinstance(request.options.nproc, int) else 1)
        print(config_text(request.config), end="")
        return 0
    request = request_of(words, needs_env=False)
    print(train_help(request.config, request.options, everything=_HELP[-1] in argv))
    return 0


def _brought(held: Mirrors, request: Request) -> RunOptions:
    """The options of a request, of a run that was brought here if a mirror has it."""
    return held.resolved(request.options, request.config.checkpoint.mirror, is_writer(topology_of(request.options)))


def start_run(request: RunRequest, held: Mirrors | None = None, command: Sequence[str] | None = None) -> int:
    """Runs a request on as many ranks as it asks for, or this rank's part under a launcher; returns the exit code.

    ``held`` are the places on mirrors that this process writes, ``command`` the words after ``lockstep`` that asked.

    A request that can't be run raises a one-line ``ValueError`` before any process is started.
    """
    started, topology = utc_date(), topology_of(request.options)
    if started_by_torchrun():
        end_with_parent(os.getppid())  # else it trains on beside those that another agent starts in its place
    if topology.launched and not topology.loopback:
        wait_for_name(topology.master_addr)
    sweep_temporary()
    with contextlib.ExitStack() as stack:
        held = held or stack.enter_context(mirrors())
        assignment, run, world, server = prepare(request, topology, stack, held.named)
        words = None if command is None else without_secrets(["lockstep", *command])
        assignment = replace(assignment, started=started, command=words)
        stack.callback(run.unlock)
        if server is not None:
            stack.callback(server.close)  # before the run is left to others
        before = _last_written(assignment.path)
        mirror = held.open(assignment.config, run, assignment.resume_from, is_new=request.options.resume is None)
        code = run_rank(assignment, topology) if server is None else _train(assignment, server, run, world, stack)
        if mirror is not None:
            mirror.finish(LAST_SECONDS if code in (0, *STOPPED_BY_SIGNAL) else FAILED_SECONDS)
    if is_writer(topology) and code in (0, *STOPPED_BY_SIGNAL) and _last_written(assignment.path) != before:
        _report(assignment, code)
    if code and topology.launched and topology.world_size > 1:
        leave_at_once(code)  # on its way out JAX would wait half a minute for a process that is gone
    return code


def prepare(
    request: RunRequest, topology: Topology, stack: contextlib.ExitStack, named: Collection[str] = ()
) -> tuple[Assignment, RunDirectory, World, RankServer | RayServer | None]:
    """Resolves and checks everything, once; makes the run directory if this process is the one to write it.

    ``stack`` closes the server of the ranks, where several are to be started; ``named`` is what the user has named by
    hand besides.
    """
    options, writer = request.options, is_writer(topology)
    path, which = (None, None) if options.resume is None else find_run(options.resume, options.runs_dir)
    config = request.config if path is None else resumed_config(path, request.overrides, options.trust, writer, named)
    check_engine_options(options, config)
    server, cluster = None, None
    if options.launcher == RAY:
        check_ray(options, config, topology)
        options, cluster = with_devices(options, config), stack.enter_context(connected())
    start_jax(config, options)
    world = world_of(options, config, topology) if cluster is None else cluster.world(options, config, topology)
    if cluster is not None:
        server = stack.enter_context(RayServer(cluster, config, options))
    elif not topology.launched and (world.processes > 1 or options.max_restarts):
        server = stack.enter_context(rank_server(config))
    description = functools.cache(lambda: request.description or describe(config.env))
    config, lines = resolved_here(config, world, description)
    if request.note is not None and path is None:
        lines.append(request.note)
    if lines and writer and not options.quiet:
        print("\n".join(lines))
    check_limits(options, config)
    check_seeds(options, config, world.processes)
    if writer:
        check_company(config)
    config = with_reference(config, options.runs_dir)
    checked = False
    if server is not None and config.engine == "torch":
        settings = config.model_dump(mode="json")
        checked = server.check(
            "lockstep.launch.checks", "check_settings", settings=settings, ranks_here=world.ranks_here
        )
    if not checked:
        check_machine(config, world.ranks_here, description, sees_devices=cluster is None)
    run, which = open_directory(config, options, path, which, writer)
    if writer and not options.trust:
        remember_names(config)
    settled = options.model_copy(update={"devices": world.devices})
    audience = os.environ.pop(ADDRESS_VARIABLE, None)  # for these ranks, not for what environments start
    return Assignment(config, run.path, settled, which, audience=audience), run, world, server


def _train(
    assignment: Assignment,
    server: RankServer | RayServer,
    run: RunDirectory,
    world: World,
    stack: contextlib.ExitStack,
) -> int:
    config, nproc = assignment.config, world.processes
    words, threads = assignment.to_json(), threads_of(config.threads)
    run.hand_over()
    if assignment.options.max_restarts:
        make = server.another if isinstance(server, RayServer) else functools.partial(rank_server, config)
        places = server.places if isinstance(server, RayServer) else functools.partial(available_processes, config)
        return Restarts(assignment, server, lambda: stack.enter_context(make()), places).train(nproc)
    return supervise(lambda logs: server.start(nproc, logs, assignment=words, environment=threads), trains=True)


def _last_written(run: Path) -> int | None:
    """When a run's summary was written, which a session does that ended by itself; None: there is none."""
    try:
        return (run / SUMMARY).stat().st_mtime_ns
    except OSError:
        return None


def _report(assignment: Assignment, code: int) -> None:
    """Says what came of a run that ended well or was stopped."""
    path = assignment.path / SUMMARY
    if not path.is_file():
        return
    if not assignment.options.quiet:
        print(next_steps(assignment.path, read_file(path)), flush=True)
    if code in STOPPED_BY_SIGNAL:
        print("lockstep: stopped by a signal, with a checkpoint", file=sys.stderr)


def _command() -> str:
    """How this user calls us: by name if the shell finds it, else by the path that was used."""
    if shutil.which("lockstep"):
        return "lockstep"
    called = Path(sys.argv[0])
    return os.path.relpath(called) if called.name == "lockstep" else f"{os.path.relpath(sys.executable)} -m lockstep"


def _tensorboard() -> str:
    """How this user calls TensorBoard: by name if the shell finds it, else the one of this environment."""
    if shutil.which("tensorboard"):
        return "tensorboard"
    beside = Path(sys.executable).with_name("tensorboard")
    return os.path.relpath(beside) if beside.is_file() else f"{os.path.relpath(sys.executable)} -m tensorboard.main"


def next_steps(path: Path, summary: dict[str, Any]) -> str:
    """What a finished run tells its user: the result, where it lies, what to do next."""
    if "seeds" in summary:
        return seeds_next_steps(path, summary, _command())
    final = summary["final_return"]
    result = "no episode ended yet" if final is None else f"mean return of the last 100 episodes {final:,.1f}"
    how = "" if summary["status"] == "finished" else f" ({summary['status']})"
    command = _command()
    lines = [
        f"{result} after {summary['global_step']:,} steps, {summary['wall_time']:.1f} s{how}",
        f"run: {path}   parameters sha256 {summary['params_sha256'][:16]}…",
    ]
    if summary["status"] != "finished":
        lines.append(f"continue:  {command} train --resume {path}")
    if "mirror" in summary:
        lines.append(f"mirror:    {summary['mirror']['url']}")
    lines.append(f"evaluate:  {command} eval {path} --episodes 20")
    lines.append(f"watch:     {command} play {path} --video out.mp4")
    if (path / "tensorboard").is_dir():
        lines.append(f"curves:    {_tensorboard()} --logdir {path / 'tensorboard'}")
    return "\n".join(lines)
