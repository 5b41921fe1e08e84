"""Starts a run; checks everything before it makes the run's directory or starts a process."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.config.engines import check_engine_options
from lockstep.config.redact import without_secrets
from lockstep.config.run import Config, RunOptions
from lockstep.core.process import EXIT_INTERRUPTED, leave_at_once, say
from lockstep.core.temporary import sweep_temporary
from lockstep.core.topology import Topology
from lockstep.envs.describe import describe
from lockstep.envs.description import EnvDescription
from lockstep.launch.checks import check_limits, check_machine, check_writer_needs
from lockstep.launch.jax_start import start_jax
from lockstep.launch.mirrored import Mirrors, mirrors
from lockstep.launch.one_program import why_not_one_program
from lockstep.launch.rank import Assignment, run_rank
from lockstep.launch.ray.cluster import RAY, Cluster, check_ray, connected, with_devices
from lockstep.launch.ray.ranks import RayServer
from lockstep.launch.request import RunRequest
from lockstep.launch.restart import Restarts
from lockstep.launch.resume import FinishedError, LostCheckpointsError, facts_of_own_loss, is_finished, open_directory
from lockstep.launch.seeds.checks import check_resumed_seeds, check_seeds
from lockstep.launch.seeds.group import GroupStart, start_group
from lockstep.launch.seeds.places import resumed_run, say_move
from lockstep.launch.seeds.words import words_of_seed
from lockstep.launch.serving.kills import EarlyKills
from lockstep.launch.sizing import resolved_here
from lockstep.launch.spawn import RankServer, rank_server, threads_of
from lockstep.launch.supervise import supervise
from lockstep.launch.world import World, available_processes, topology_of, wait_for_master, world_of
from lockstep.runs.directory import SEED, SUMMARY, RunDirectory, is_writer
from lockstep.runs.finding import find_run
from lockstep.runs.groups import seeds_of
from lockstep.runs.lock import UnwritableError
from lockstep.runs.mirror.copier import FAILED_SECONDS, LAST_SECONDS, Mirror
from lockstep.runs.session_facts import SessionFacts, commit_of
from lockstep.runs.stored import stored_config
from lockstep.runs.trust import names_in, remember_names
from lockstep.training.reference_policy import with_reference
from lockstep.training.run_history import utc_date
from lockstep.training.stop import stop_requests

STOPPED_BY_SIGNAL = (129, EXIT_INTERRUPTED, 143)


@dataclass(frozen=True)
class Prepared:
    """A run that is checked and can be trained.

    Attributes:
        assignment: of each rank.
        run: the run's directory.
        world: of the run.
        server: starts the ranks; None if this process is the rank.
        early: servers that were killed before this one.
    """

    assignment: Assignment
    run: RunDirectory
    world: World
    server: RankServer | RayServer | None
    early: EarlyKills


def start_run(
    request: RunRequest,
    held: Mirrors | None = None,
    command: Sequence[str] | None = None,
    report: Callable[[Path, RunOptions, int], None] = lambda *_: None,
) -> int:
    """Runs a request on as many ranks as it asks for, or this rank's part under a launcher; returns the exit code.

    Args:
        request: with a complete config.
        held: the places on mirrors that this process holds.
        command: the words after ``lockstep`` on the command line; None if there was none.
        report: is called by the process that wrote a run that ended well or was stopped, with the run's directory, the
            options and the exit code.

    Raises:
        ValueError: the request can't be run; one line, before any rank is started.
    """
    started, topology = utc_date(), topology_of(request.options)
    wait_for_master(topology)
    sweep_temporary()
    with contextlib.ExitStack() as stack:
        request, group = group_of(request, topology)
        if group is not None:
            path, code = start_group(request, group, command)
            report(path, request.options, code)
            return code
        held = held or stack.enter_context(mirrors())
        try:
            prepared = prepare(request, topology, stack, held.named)
        except FinishedError:  # open_directory has said how many steps it has done
            return 0
        assignment, run, server = prepared.assignment, prepared.run, prepared.server
        commit = commit_of(Path.cwd()) if run.is_writer else None
        facts = replace(assignment.facts, started=started, commit=commit, **commands_of(assignment, command))
        assignment = replace(assignment, facts=facts)
        stack.callback(run.unlock)
        if server is not None:
            stack.callback(server.close)  # before the run is unlocked
        before = _last_written(assignment.path)
        mirror = held.open(assignment.config, run, assignment.resume_from, is_new=request.options.resume is None)
        if mirror is not None:
            say_move(assignment.path, assignment.config)
        code = _train(replace(prepared, assignment=assignment), topology, stack)
        if mirror is not None:
            finish_copying(mirror, code, topology)
    if is_writer(topology) and code in (0, *STOPPED_BY_SIGNAL) and _last_written(assignment.path) != before:
        report(assignment.path, request.options, code)
    if code and topology.launched and topology.world_size > 1:
        leave_at_once(code)  # at exit JAX would wait half a minute for a process that is gone
    return code


def finish_copying(mirror: Mirror, code: int, topology: Topology) -> None:
    """Finishes the copy of a run that has ended with exit code ``code``, within a time limit.

    Stop signals are ignored meanwhile, because training has ended already, except for a second Ctrl-C. A launcher may
    repeat the first one, so that it doesn't count under a launcher.
    """
    with stop_requests() as request:
        if code == EXIT_INTERRUPTED and not topology.launched:
            request.signal = signal.SIGINT
        mirror.finish(LAST_SECONDS if code in (0, *STOPPED_BY_SIGNAL) else FAILED_SECONDS)


def commands_of(assignment: Assignment, words: Sequence[str] | None) -> dict[str, Any]:
    """Returns the facts of a session that keep the command line, and that of each seed of one program.

    ``words`` are those after ``lockstep``; secrets are left out.
    """
    if words is None:
        return {}
    options, found = assignment.options, dict[int, tuple[str, ...]]()
    for seed in options.seeds_from(assignment.config.seed) if options.is_group else ():
        own = words_of_seed(words, options, assignment.path / f"{SEED}{seed}")
        found[seed] = without_secrets(["lockstep", *own])
    return {"command": without_secrets(["lockstep", *words]), "commands": found}


def group_of(request: RunRequest, topology: Topology) -> tuple[RunRequest, GroupStart | None]:
    """Decides whether a request is for a group whose seeds are separate runs in separate processes.

    Returns:
        The request, with the first of a new group's seeds; and the group, or None for one run in one program.

    Raises:
        ValueError: the seeds asked for can't be trained, or callbacks are given for a group; one line.
    """
    options, config = request.options, request.config
    if options.is_group:
        check_seeds(request, topology)
    if options.is_group and options.resume is None:
        config = config.model_copy(update={"seed": options.seeds_from(config.seed)[0]})
        request = replace(request, config=config)
        world = world_of(options, config, topology)
        why = why_not_one_program(options, config, world.processes)
        return request, None if why is None else GroupStart(None, world, why)
    if options.resume is None or topology.launched:
        return request, None
    path, _ = find_run(options.resume, options.runs_dir, single=False)
    seeds = check_resumed_seeds(path, options.seeds_from(config.seed)) if options.is_group else seeds_of(path)
    if not seeds:
        return request, None
    if request.audience is not None:
        raise ValueError(f"callbacks: {path} is a group of {len(seeds)} seeds; resume each seed by itself")
    config = stored_config(path)
    return request, GroupStart(path, world_of(options, config, topology), "as they are resumed")


def prepare(
    request: RunRequest, topology: Topology, stack: contextlib.ExitStack, named: Collection[str] = ()
) -> Prepared:
    """Resolves and checks everything, once; makes or opens the run directory if this process writes it.

    Args:
        request: with a complete config.
        topology: of this process.
        stack: closes the server of the ranks.
        named: names that the user has given by hand, besides those in the request.

    Raises:
        ValueError: something is wrong with the request; one line.
        FinishedError: nothing is left to do for ``resume: auto``, and the run can't be written or has no checkpoints.
    """
    options, writer = request.options, is_writer(topology)
    path, which = (None, None) if options.resume is None else find_run(options.resume, options.runs_dir)
    named = {*named, *names_in(request.config)}
    config = request.config if path is None else resumed_run(path, request.overrides, options.trust, writer, named)
    check_engine_options(options, config)
    cluster = None
    if options.launcher == RAY:
        check_ray(config, topology)
        options, cluster = with_devices(options, config), stack.enter_context(connected())
    start_jax(config, options, topology)
    world = world_of(options, config, topology) if cluster is None else cluster.world(options, config, topology)
    early = EarlyKills(options.max_restarts)
    server = _open_server(config, options, topology, world, cluster, stack)
    description = functools.cache(lambda: request.description or describe(config.env))
    notes = [request.note if path is None else None, None if cluster is None else cluster.note]
    config = _resolve(config, world, description, notes, says=writer and not options.quiet)
    check_limits(options, config)
    if writer:
        check_writer_needs(config, path)
    config = with_reference(config, options.runs_dir, path)
    check = functools.partial(early.check, another=lambda: stack.enter_context(rank_server(config)))
    server = _check_machine(config, world, server, check, description, facts_of_own_loss(config, path, which))
    try:
        run, which = open_directory(config, options, path, which, writer)
    except (UnwritableError, LostCheckpointsError) as error:
        if path is None or not request.begun or topology.launched or not is_finished(path, config):
            raise
        raise FinishedError from error
    if topology.local_rank == 0 and not options.trust:  # each host may have its own home
        remember_names(config)
    settled = options.model_copy(update={"devices": world.devices})
    assignment = Assignment(config, run.path, settled, which, facts=SessionFacts(audience=request.audience))
    return Prepared(assignment, run, world, server, early)


def _open_server(
    config: Config,
    options: RunOptions,
    topology: Topology,
    world: World,
    cluster: Cluster | None,
    stack: contextlib.ExitStack,
) -> RankServer | RayServer | None:
    """Opens what starts a run's ranks, until ``stack`` closes; returns None if this process is the rank."""
    if cluster is not None:
        return stack.enter_context(RayServer(cluster, config, options))
    if not topology.launched and (world.processes > 1 or options.max_restarts):
        return stack.enter_context(rank_server(config))
    return None


def _resolve(
    config: Config,
    world: World,
    description: Callable[[], EnvDescription],
    notes: Sequence[str | None],
    says: bool,
) -> Config:
    """Resolves a config for its world; prints what was decided for the user and ``notes`` if this process ``says``."""
    config, lines = resolved_here(config, world, description)
    lines += [note for note in notes if note is not None]
    if lines and says:
        say("\n".join(lines), sys.stdout)
    return config


def _check_machine(
    config: Config,
    world: World,
    server: RankServer | RayServer | None,
    check: Callable[..., tuple[RankServer | RayServer, bool]],
    description: Callable[[], EnvDescription],
    before: Mapping[str, Any] | None,
) -> RankServer | RayServer | None:
    """Checks the machine in the process that starts ranks if that has loaded PyTorch, else in this one.

    ``check`` is :meth:`EarlyKills.check` without the server. Returns the server, or the one that has replaced it.
    """
    if server is not None and config.engine == "torch":
        facts = {"settings": config.model_dump(mode="json"), "ranks_here": world.ranks_here, "before": before}
        server, is_checked = check(server, module="lockstep.launch.checks", function="check_settings", **facts)
        if is_checked:
            return server
    sees_devices = not isinstance(server, RayServer)
    check_machine(config, world.ranks_here, description, sees_devices=sees_devices, before=before)
    return server


def _train(prepared: Prepared, topology: Topology, stack: contextlib.ExitStack) -> int:
    """Trains a run in this process if that is its rank, else in ranks that its server starts; returns the exit code."""
    assignment, server = prepared.assignment, prepared.server
    if server is None:
        return run_rank(assignment, topology)
    config, nproc = assignment.config, prepared.world.processes
    words, threads = assignment.to_json(), threads_of(config.threads)
    prepared.run.hand_over()
    if assignment.options.max_restarts:
        make = server.another if isinstance(server, RayServer) else functools.partial(rank_server, config)
        places = server.places if isinstance(server, RayServer) else functools.partial(available_processes, config)
        hold_on = prepared.run.hold_on
        early = prepared.early.found
        return Restarts(assignment, server, lambda: stack.enter_context(make()), places, hold_on, early).train(nproc)
    return supervise(lambda logs: server.start(nproc, logs, assignment=words, environment=threads), trains=True)


def _last_written(run: Path) -> int | None:
    """Returns when a run's summary was written, which a session does at its end; None if there is none."""
    try:
        return (run / SUMMARY).stat().st_mtime_ns
    except OSError:
        return None
