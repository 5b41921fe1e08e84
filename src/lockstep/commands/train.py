"""From a request to a running run: everything that can be wrong is found before any process is started."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.config.checks import resolve
from lockstep.config.command_line import Request, merge, read_file, read_request
from lockstep.config.engines import check_engine_options
from lockstep.config.help import print_train_help
from lockstep.config.keys import FREE, validate
from lockstep.config.run import Config, RunOptions
from lockstep.core.topology import Topology, available_cores
from lockstep.envs.batched.envpool import check_envpool_options
from lockstep.envs.batched.twins import stepped_inside
from lockstep.envs.describe import describe
from lockstep.envs.tensor import check_tensor_options
from lockstep.launch.jax_start import start_jax
from lockstep.launch.rank import Assignment, engine_module, run_rank
from lockstep.launch.seeds import check_seeds, seeds_next_steps
from lockstep.launch.sizing import Resources, available_memory, size
from lockstep.launch.spawn import RankServer, rank_server, threads_of
from lockstep.launch.supervise import supervise
from lockstep.launch.world import World, topology_of, world_of
from lockstep.runs.checkpoint import checkpoints_in, find_checkpoint
from lockstep.runs.directory import (
    CHECKPOINTS,
    CONFIG,
    SUMMARY,
    RunDirectory,
    create_run,
    find_run,
    is_writer,
    open_run,
)
from lockstep.runs.trackers import check_trackers

STOPPED_BY_SIGNAL = (130, 143)

# Settings that a resumed run may change: they don't decide the agent's bytes up to total_steps.
CHANGEABLE = (
    "total_steps",
    "checkpoint.",
    "eval.",
    "log.",
    "proof.",
    "env.workers",
    "env.timeout",
    "collectives",
    "fsdp",
)


def _differences(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    out: list[tuple[str, Any, Any]] = []
    for key in a:
        whole = f"{prefix}{key}" in FREE  # a table of the user's own
        if isinstance(a[key], dict) and isinstance(b[key], dict) and not whole:
            out += _differences(a[key], b[key], f"{prefix}{key}.")
        elif a[key] != b[key]:
            out.append((prefix + key, a[key], b[key]))
    return out


def resumed_config(path: Path, overrides: dict[str, Any]) -> Config:
    """A run's own config with the overrides that a resumed run may have.

    Raises:
        ValueError: an override would change what the run is a function of.
    """
    stored: Config = validate(Config, read_file(path / CONFIG), str(path / CONFIG))
    settings = stored.model_dump(mode="json")
    changed: Config = validate(Config, merge(stored.model_dump(mode="json"), overrides), "command line")
    if changed.env.id != stored.env.id:  # the id that the run was asked for with
        changed, _ = stepped_inside(changed)
    for key, old, new in _differences(settings, changed.model_dump(mode="json")):
        if not key.startswith(CHANGEABLE):
            raise ValueError(
                f"{key}: run {path} was started with {old} and can't be resumed with {new}; start a new run"
            )
    return changed


def sized_for_machine(config: Config, world: World) -> tuple[Config, str | None]:
    """``num_envs_per_rank: auto`` as a number for this machine, and the line that says so; others as they are."""
    if not isinstance(config.num_envs_per_rank, str):
        return config, None
    device_memory = None
    if config.device != "cpu":
        engine = engine_module(config.engine)
        engine.check_device(config.device, world.ranks_here)
        device_memory = engine.device_memory(config.device)
    resources = Resources(available_cores(), available_memory(), device_memory)
    return size(config, world.ranks, world.ranks_here, resources, lambda: describe(config.env))


def _check_machine(config: Config, ranks_here: int) -> None:
    if config.device != "cpu":
        engine_module(config.engine).check_device(config.device, ranks_here)
    check_tensor_options(config)
    check_envpool_options(config)
    engine_module(config.engine).check_networks(config, describe(config.env))


def check_machine(config: dict[str, Any], ranks_here: int) -> None:
    """Check in a child of the server of ranks what needs the engine; ``config`` is resolved, as JSON."""
    _check_machine(Config.model_validate(config), ranks_here)


def _with_reference(config: Config, runs_dir: str) -> Config:
    """GRPO's reference policy as the path of one checkpoint, which is what the run is a function of.

    Raises:
        ValueError: there is no such run or checkpoint, or observations are normalised; one line.
    """
    if config.algorithm != "grpo" or config.grpo.reference is None:
        return config
    name = config.grpo.reference
    if not config.grpo.kl_coef:
        raise ValueError(f"grpo.reference: {name}, but grpo.kl_coef is 0; give it a weight, e.g. 0.05")
    path, which = find_run(name, runs_dir)
    theirs: Config = validate(Config, read_file(path / CONFIG), str(path / CONFIG))
    for whose, normalize in (("it", theirs.normalize), ("this run", config.normalize)):
        if normalize.observations:
            raise ValueError(
                f"grpo.reference: {name}, but {whose} normalises observations by statistics of its own, so the two "
                "policies would see different ones; use runs without normalize.observations"
            )
    found = find_checkpoint(path / CHECKPOINTS, which)
    return config.model_copy(update={"grpo": config.grpo.model_copy(update={"reference": str(found.path)})})


def _check_company(config: Config, writer: bool) -> None:
    """What the rank that writes needs beside the run itself: trackers' packages, pictures of the environment."""
    if not writer:
        return
    check_trackers(config.log)
    if config.eval.record_video:
        from lockstep.policies.videos import check_video

        check_video(config.env)


def _check_options(options: RunOptions, config: Config) -> None:
    if options.resume is not None and options.name is not None:
        raise ValueError(f"name: {options.name} with --resume {options.resume}; a resumed run keeps its name")
    stop = options.stop_at_step
    if options.resume is None and stop is not None and stop > config.total_steps:
        raise ValueError(f"stop_at_step: {stop} is beyond total_steps {config.total_steps}")


def _check_second_log(path: Path, config: Config) -> None:
    """A second metrics.jsonl that this run did not write before must be new: it would be cut and appended to."""
    stored = read_file(path / CONFIG).get("log", {}).get("jsonl")
    second = config.log.jsonl
    if second is not None and second != stored and Path(second).is_file() and Path(second).stat().st_size:
        raise ValueError(f"log.jsonl: {second} already holds another run's records; give another path or remove it")


def _warn_of_new_length(path: Path, config: Config, writer: bool) -> None:
    before = read_file(path / CONFIG).get("total_steps")
    if writer and before != config.total_steps:
        change = f"total_steps was {before} and is {config.total_steps} from here on"
        note = "schedules follow it, so a new run of this config.json is another run"
        print(f"lockstep: warning: {change}; {note}", file=sys.stderr)


def _open_directory(
    request: Request, config: Config, path: Path | None, which: str | None, writer: bool
) -> tuple[RunDirectory, str | None]:
    """The run's directory, locked if this process writes it, and the checkpoint to resume from."""
    options = request.options
    if path is None:
        if not writer:
            return RunDirectory(Path(options.runs_dir), is_writer=False), None
        return create_run(options.runs_dir, options.name, config, options.num_seeds), None
    if not checkpoints_in(path / CHECKPOINTS):
        which = None  # it ended before its first checkpoint: it begins again
        if writer and not options.quiet:
            print(f"run {path} has no checkpoint yet; it begins again")
    else:
        found = find_checkpoint(path / CHECKPOINTS, which or "latest", warn=False)
        if found.state.get("cloned"):
            raise ValueError(
                f"resume: {path} is a cloned policy, which has no environments to go on with; eval, play, compare and "
                "record read it"
            )
    _check_second_log(path, config)
    _warn_of_new_length(path, config, writer)
    return (open_run(path, config) if writer else RunDirectory(path, is_writer=False)), which


def _prepare(
    request: Request, topology: Topology, stack: contextlib.ExitStack
) -> tuple[Assignment, RunDirectory, World, RankServer | None]:
    """Resolve and check everything; make the run directory if this process is the one to write it."""
    options, writer = request.options, is_writer(topology)
    path, which = (None, None) if options.resume is None else find_run(options.resume, options.runs_dir)
    config = request.config if path is None else resumed_config(path, request.overrides)
    check_engine_options(options, config)
    start_jax(config.env, config.model_dump(), options)
    world = world_of(options, config, topology)
    server = None
    if not topology.launched and world.processes > 1:
        server = stack.enter_context(rank_server(config))
    config, rule = sized_for_machine(config, world)
    if rule is not None and writer and not options.quiet:
        print(rule)
    per_rank = config.num_envs_per_rank
    config = resolve(config, world.ranks)
    if per_rank is not None and writer and not options.quiet:
        ranks = "rank" if world.devices is None else "device"
        ranks += "s" if world.ranks > 1 else ""
        print(
            f"num_envs_per_rank {per_rank} on {world.ranks} {ranks}: num_envs {config.num_envs}; on another number of "
            f"{ranks.rstrip('s')}s it is another run"
        )
    if request.note is not None and path is None and writer and not options.quiet:
        print(request.note)
    _check_options(options, config)
    check_seeds(options, config, world.processes)
    _check_company(config, writer)
    config = _with_reference(config, options.runs_dir)
    if server is not None and config.engine == "torch":
        settings = config.model_dump(mode="json")
        server.check("lockstep.commands.train", "check_machine", config=settings, ranks_here=world.ranks_here)
    else:
        _check_machine(config, world.ranks_here)
    run, which = _open_directory(request, config, path, which, writer)
    settled = options.model_copy(update={"devices": world.devices})
    return Assignment(config, run.path, settled, which), run, world, server


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
    lines.append(f"evaluate:  {command} eval {path} --episodes 20")
    lines.append(f"watch:     {command} play {path} --video out.mp4")
    if (path / "tensorboard").is_dir():
        lines.append(f"curves:    {_tensorboard()} --logdir {path / 'tensorboard'}")
    return "\n".join(lines)


def start_run(request: Request) -> int:
    """Run a request on as many ranks as it asks for, or this rank's part under a launcher; returns the exit code.

    Raises:
        ValueError: one line, before any process is started.
    """
    topology = topology_of(request.options)
    with contextlib.ExitStack() as stack:
        assignment, run, world, server = _prepare(request, topology, stack)
        stack.callback(run.unlock)
        code = run_rank(assignment, topology) if server is None else _train(assignment, server, run, world.processes)
    if is_writer(topology) and code in (0, *STOPPED_BY_SIGNAL):
        _report(assignment, code)
    return code


def _train(assignment: Assignment, server: RankServer, run: RunDirectory, nproc: int) -> int:
    words, threads = assignment.to_json(), threads_of(assignment.config)
    run.hand_over()
    return supervise(lambda logs: server.start(nproc, logs, assignment=words, environment=threads))


def _report(assignment: Assignment, code: int) -> None:
    """What came of a run that ended well or was stopped; the summary is there only if it ended by itself."""
    path = assignment.path / SUMMARY
    if not path.is_file():
        return
    if not assignment.options.quiet:
        print(next_steps(assignment.path, read_file(path)), flush=True)
    if code in STOPPED_BY_SIGNAL:
        print("lockstep: stopped by a signal, with a checkpoint", file=sys.stderr)


def main(argv: Sequence[str]) -> int:
    """Runs ``lockstep train ARGV``: exit status 0, 1 (failed), 2 (bad input) or 128 + n (stopped by signal n)."""
    if "--help" in argv or "-h" in argv:
        print_train_help([word for word in argv if word not in ("--help", "-h")])
        return 0
    return start_run(read_request(argv))
