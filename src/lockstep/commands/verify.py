"""``lockstep verify`` checks that a config gives the same bytes on every world size, or shows where it doesn't."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lockstep.commands.parser import CommandParser, add_target, at_least_one
from lockstep.config.checks import resolve
from lockstep.config.command_line import parse_arguments
from lockstep.config.engines import check_processes_here
from lockstep.config.run import Config
from lockstep.core.process import EXIT_FAILURE
from lockstep.core.user_code.handed import is_handed
from lockstep.launch.request import described_run, split_target
from lockstep.proof.kept import keep, run_of
from lockstep.proof.lengths import first_length, most_iterations
from lockstep.proof.setup import setup_of
from lockstep.proof.verify import Comparison, last_trained, machines_apart, parse_worlds, settled, verify
from lockstep.runs.directory import CONFIG
from lockstep.runs.finding import find_run
from lockstep.runs.stored import stored_config
from lockstep.training.announcement import quantity

ITERATIONS = 5
"""Iterations on each world size, by default."""
SHOWN = 5
"""Names of metrics that weren't compared, of which no more are printed."""


def main(argv: Sequence[str]) -> int:
    """Runs ``lockstep verify CONFIG``: exit status 0 if every world size gives the same bytes, 1 if not.

    If a run was given, the result is written to its ``verify.json``.
    """
    options, words = _parser().parse_known_args(list(argv))
    target, rest = split_target("verify", words)
    run = run_of(target)
    named = run is not None and Path(target).name != CONFIG
    config = described_run("verify", str(run) if named else target, rest)
    _check_names(config)
    worlds = parse_worlds(options.world_sizes, config.engine)
    check_processes_here(config.device, max(processes for _, processes in worlds))
    if options.setup and options.against is not None:
        raise ValueError("against: --setup trains nothing, so that there is nothing to compare; leave one out")
    if options.setup:
        for ranks, processes in worlds:
            print(setup_of(resolve(config, ranks), ranks, processes))
        return 0
    if len(worlds) < 2 and options.against is None:
        raise ValueError(
            f"world-sizes: {options.world_sizes} has nothing to be compared with; give another number too, "
            "such as 1,2 (1,1 trains twice on one rank), or --against RUN"
        )
    against = None if options.against is None else find_run(options.against)[0]
    iterations = _iterations(resolve(config, worlds[0][0]), run, against, options.iterations)
    if run is not None and against is None and "total_steps" not in parse_arguments(rest)[1]:
        length = _length_at_first(resolve(config, worlds[0][0]), run, iterations)
        config = config.model_copy(update={"total_steps": length})
    results = verify(config, worlds, iterations, against)
    if options.json:
        print(json.dumps([_row(result, config.engine) for result in results]))
    else:
        print_table(config, results, iterations)
    trained = settled(config, worlds[0][0], iterations, against)
    for path in {path.resolve(): path for path in (run, against) if path is not None}.values():
        try:
            keep(path, results, trained, iterations)
        except ValueError as error:
            print(f"lockstep: warning: nothing is kept of this beside the run: {error}", file=sys.stderr)
    return 0 if all(result.equal for result in results) else EXIT_FAILURE


def _row(result: Comparison, engine: str) -> dict[str, Any]:
    """Returns what ``--json`` prints of a world size."""
    trace = result.trace
    row: dict[str, Any] = {"world_size": trace.world_size, "equal": result.equal, "difference": result.difference}
    if trace.recorded is not None:
        row["recorded"] = str(trace.recorded)
    if result.not_compared:
        row["not_compared"] = list(result.not_compared)
    return row if engine == "torch" else row | {"processes": trace.processes}


def _iterations(config: Config, run: Path | None, against: Path | None, given: int | None) -> int:
    """Returns how many iterations to train: those given, else :data:`ITERATIONS`, or fewer if schedules end before."""
    if given is not None:
        return given
    most = (
        most_iterations(run, config)
        if against is None
        else most_iterations(against, stored_config(against, warn=False))
    )
    return ITERATIONS if most is None else min(ITERATIONS, most)


def _length_at_first(config: Config, run: Path, iterations: int) -> int:
    """Returns the ``total_steps`` of a run's first iterations; prints a line if the run has another one now."""
    length = first_length(run, config, iterations)
    if length != config.total_steps:
        line = f"total_steps {length}, as in the first iterations of {run}; it has {config.total_steps} now"
        print(f"lockstep: {line}", file=sys.stderr)
    return length


def _check_names(config: Config) -> None:
    """Raises a one-line ``ValueError`` if the config names objects that ``lockstep.train`` was handed."""
    for key, name in (
        ("env.id", config.env.id),
        ("network.custom", config.network.custom),
        ("ppo.loss", config.ppo.loss),
    ):
        if is_handed(name):
            raise ValueError(
                f"{key}: {name} was handed to lockstep.train as an object, which other runs can't import; put it into "
                "a module, and name it as module:name"
            )


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="lockstep verify",
        description="Train a config for some iterations on several world sizes and compare every tensor and metric.",
        allow_abbrev=False,
        epilog="Every option of lockstep train that describes the run is accepted too, e.g. --seed 3 --num-envs 64.",
    )
    add_target(
        parser,
        "CONFIG_FILE_OR_ENV_ID_OR_RUN",
        "what is trained; of a run the result is kept in its verify.json, for lockstep report",
    )
    parser.add_argument(
        "--world-sizes",
        default="1,2,4",
        help="numbers of ranks, the first is the reference (default: 1,2,4); engine jax: of devices, simulated ones on "
        "a CPU, in one process, or 2x1 for two processes of one device each",
    )
    parser.add_argument(
        "--against",
        metavar="RUN",
        help="compare with a run that was recorded before, here or on another machine, in place of the first world "
        "size (lockstep train --proof.trace records)",
    )
    parser.add_argument(
        "--iterations",
        type=at_least_one,
        help=f"iterations of each (default: {ITERATIONS}, or fewer where schedules fall to 0 before)",
    )
    parser.add_argument(
        "--setup",
        action="store_true",
        help="train nothing: show each world size's devices, and which shards and environments each owns",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def print_table(config: Config, results: Sequence[Comparison], iterations: int) -> None:
    """Prints how each world size compares with the first, and the verdict."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    title = f"{config.env.id}, seed {config.seed}, {quantity(iterations, 'iteration')}, reduction {config.reduction}"
    console.print(Text(title), soft_wrap=True)
    table = Table()
    table.add_column("world size" if config.engine == "torch" else "devices", justify="right")
    table.add_column("equal")
    table.add_column("tensors", justify="right")
    table.add_column("first difference", overflow="fold")
    for result in results:
        tensors = str(len(result.trace.tensors[0]) - 1) if result.trace.tensors else "–"
        missing = "failed" if result.trace.failed else "–"
        equal = "yes" if result.equal else "NO" if _differs(result, results[0]) else missing
        table.add_row(result.trace.label, equal, tensors, escape(result.difference))
    console.print(table)
    _print_recorded(results)
    not_compared = list(dict.fromkeys(name for result in results for name in result.not_compared))
    if not_compared:
        more = f" and {len(not_compared) - SHOWN} more" if len(not_compared) > SHOWN else ""
        why = f"because {results[0].trace.recorded} and the runs here don't both have them by the same settings"
        print(f"not compared, {why}: {', '.join(not_compared[:SHOWN])}{more}")
    if all(result.equal for result in results):
        every = "every metric that was compared" if not_compared else "every metric"
        print(f"verified: every tensor and {every} has the same bytes at every iteration")
    elif any(_differs(result, results[0]) for result in results):
        print("NOT VERIFIED: the run depends on its world size, or a rank left the others; see the first difference")
    else:
        failed = ", ".join(result.trace.label for result in results if result.trace.failed)
        print(f"NOT VERIFIED: world size {failed} failed; the table says why")


def _differs(result: Comparison, reference: Comparison) -> bool:
    """Returns whether a world size has other bytes, rather than none that were compared."""
    out_of_sync = result.trace.error is not None and not result.trace.failed
    return out_of_sync or not (result.equal or result.trace.failed or reference.trace.error is not None)


def _print_recorded(results: Sequence[Comparison]) -> None:
    """Prints what may make a recorded run differ: its machine and versions, and environments that began anew."""
    reference = results[0].trace
    if reference.recorded is None:
        return
    if apart := machines_apart(reference, last_trained(results)):
        print(f"{reference.recorded} was recorded elsewhere: {'; '.join(apart)}")
    restarted = reference.facts.get("restarted_environments")
    if isinstance(restarted, list) and restarted and not all(result.equal for result in results):
        began = f"{len(restarted)} of its environments began new episodes"
        print(f"{reference.recorded} was resumed where {began}: from there on it is another run")
