"""``lockstep bench`` measures how a config scales over ranks, compared with linear and with what the machine can do."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from lockstep.commands.parser import CommandParser, add_target, from_home
from lockstep.config.engines import engine_module
from lockstep.config.keys import validate
from lockstep.config.run import RunOptions
from lockstep.core.process import EXIT_FAILURE, EXIT_INTERRUPTED, report_failure
from lockstep.core.topology import available_cores
from lockstep.envs.describe import describe
from lockstep.envs.registry import check_environment_options
from lockstep.launch.jax_start import look_with_cpu
from lockstep.launch.request import described_run, split_target
from lockstep.runs.curves import MISSING_PLOT, can_plot
from lockstep.scaling.ledger import Ledger, locked_directory, measure_job, open_ledger, sweep_directory, write_results
from lockstep.scaling.measure import Outcome
from lockstep.scaling.plan import MODES, Job, Plan, parse_world_sizes
from lockstep.scaling.summarize import Row, run_row
from lockstep.scaling.tables import print_numbers
from lockstep.training.announcement import quantity
from lockstep.training.reference_policy import with_reference


def main(argv: Sequence[str]) -> int:
    """Runs ``lockstep bench CONFIG``: exit status 0 if every run ended well, 1 if one failed, 130 if interrupted."""
    plan, options = _read_plan(argv)
    path = sweep_directory(plan, options.name, Path(options.runs_dir))
    directory = locked_directory(path)
    try:
        ledger = open_ledger(path, plan)
        _announce(plan, ledger)
        try:
            _measure_all(plan, ledger)
        except KeyboardInterrupt:
            report_failure("interrupted; the same command continues it")
            return EXIT_INTERRUPTED
        rows, summary = write_results(plan, ledger)
        _print_summary(plan, summary)
        print(f"bench: {path}")
    finally:
        directory.unlock()
    failed = [row for row in rows if row["status"] != "ok"]
    if failed:
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        report_failure(f"{failed[0]['run']}{more} failed: {failed[0]['error']}; the same command tries again")
    return EXIT_FAILURE if failed else 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="lockstep bench",
        description="Measure how a config scales over ranks: fresh processes for every run, repeats interleaved over "
        "world sizes, warm-up left out. The same command continues an interrupted sweep.",
        allow_abbrev=False,
        epilog="Every option of lockstep train that describes the run is accepted too, e.g. --num-envs 64. Written to "
        "RUNS_DIR/NAME: logs/*.jsonl, per_run.csv and .json, summary.csv and .json, plots.png. "
        "Exit status: 0, 1 (a run failed; its row says why), 2 (bad input).",
    )
    add_target(parser, "CONFIG_FILE_OR_ENV_ID", "of the run that is measured")
    parser.add_argument(
        "--world-sizes",
        default="1,2,4",
        help="numbers of ranks (engine jax: devices of one process); the smallest is the base (default: %(default)s)",
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of each world size (default: %(default)s)")
    parser.add_argument(
        "--warmup-iters", type=int, default=5, help="first iterations of each run, left out (default: %(default)s)"
    )
    parser.add_argument(
        "--iters", type=int, default=30, help="iterations of each run that are measured (default: %(default)s)"
    )
    parser.add_argument(
        "--mode",
        default="weak",
        help=f"{' or '.join(MODES)}; weak: every rank has the config's num_envs, strong: the ranks share them "
        "(default: %(default)s)",
    )
    parser.add_argument("--no-ceiling", action="store_true", help="don't measure N independent runs at once")
    parser.add_argument("--name", help="of the sweep's directory (default: bench-, environment, mode and time)")
    parser.add_argument(
        "--runs-dir", type=from_home, default="runs", help="where that directory is made (default: %(default)s)"
    )
    return parser


def _read_plan(argv: Sequence[str]) -> tuple[Plan, argparse.Namespace]:
    """Reads the sweep that a command line asks for, and checks what can be checked without starting it."""
    options, words = _parser().parse_known_args(list(argv))
    config = described_run("bench", *split_target("bench", words))
    validate(RunOptions, {"name": options.name, "runs_dir": options.runs_dir}, "command line")
    plan = Plan(
        config,
        options.mode,
        parse_world_sizes(options.world_sizes),
        options.repeats,
        options.warmup_iters,
        options.iters,
        not options.no_ceiling,
    )
    plan.check()
    grpo = with_reference(plan.sized(plan.world_sizes[0]), options.runs_dir).grpo  # the runs are made elsewhere
    plan = replace(plan, config=config.model_copy(update={"grpo": grpo}))
    if config.device != "cpu":
        engine_module(config.engine).check_device(config.device, plan.world_sizes[-1])
    look_with_cpu(config)
    for world_size in plan.world_sizes:
        check_environment_options(plan.sized(world_size))
    describe(config.env)
    return plan, options


def _announce(plan: Plan, ledger: Ledger) -> None:
    """Prints what will be measured and how much is done already."""
    jobs, missing = plan.jobs(), ledger.missing(plan)
    print(f"{plan} · {ledger.path}")
    if len(missing) < len(jobs):
        print(f"{len(jobs) - len(missing)} of {len(jobs)} runs are there already")
    threads, cores = plan.world_sizes[-1] * plan.config.threads, available_cores()
    if plan.config.device == "cpu" and threads > cores:
        most = plan.world_sizes[-1]
        print(
            f"note: {quantity(most, 'rank')} want{'' if most > 1 else 's'} {threads} cores and "
            f"there {'are' if cores > 1 else 'is'} {cores}; see the ceiling"
        )
    if not can_plot():
        print(f"note: {MISSING_PLOT.format('plots.png')}")
    sys.stdout.flush()


def _measure_all(plan: Plan, ledger: Ledger) -> None:
    jobs = plan.jobs()
    numbers = {job: f"[{number}/{len(jobs)}] {job}" for number, job in enumerate(jobs, 1)}
    console = Console()
    for job in ledger.missing(plan):
        with console.status(numbers[job], refresh_per_second=2) as status:  # rarely: it disturbs the measurement

            def show(done: int, wanted: int, text: str = numbers[job], status=status) -> None:
                status.update(f"{text}: iteration {done}/{wanted}")

            outcome = measure_job(job, plan, ledger, show)
        print(f"{numbers[job]}: {_in_short(job, plan, outcome)}", flush=True)


def _in_short(job: Job, plan: Plan, outcome: Outcome) -> str:
    row = run_row(job, plan, outcome)
    if row["status"] != "ok":
        return f"FAILED: {row['error']}"
    return f"{row['steps_per_second']:,.0f} steps/s, {1000 * row['t_iter']:,.1f} ms an iteration"


def _print_summary(plan: Plan, summary: Sequence[Row]) -> None:
    """Prints the summary as a table, with times in milliseconds."""
    failed = ["failed"] if any(row["failed"] for row in summary) else []
    heads = ["ranks", "steps/s", "speed-up", "of ideal", "of ceiling", "t_iter", "rollout", "learn", "comm", "wait"]
    heads += ["other", "memory", "calls", "sent", *failed]
    rows = []
    for row in summary:
        times = [
            _number(row[key], 1000, 1) for key in ("t_iter", "t_rollout", "t_learn", "t_comm", "t_wait", "t_other")
        ]
        rows.append(
            [
                str(row["world_size"]),
                _number(row["steps_per_second"]),
                _number(row["speedup"], 1, 2),
                _share(row, "efficiency"),
                _share(row, "ceiling_efficiency"),
                *times,
                _number(row["peak_memory_mb"]),
                _number(row["collectives"]),
                _number(row["bytes"], 1 / 1024),
                *(str(row[name]) for name in failed),
            ]
        )
    title = f"{plan.config.env.id}, {plan.mode} scaling: means over repeats [95 % confidence], ms, MiB, KiB"
    print_numbers(title, heads, rows)


def _number(value: float | None, factor: float = 1.0, digits: int = 0) -> str:
    return "–" if value is None else f"{factor * value:,.{digits}f}"


def _share(row: Row, name: str) -> str:
    value, low, high = row[name], row[f"{name}_low"], row[f"{name}_high"]
    if value is None:
        return "–"
    return f"{value:.0%}" if low is None else f"{value:.0%} [{100 * low:.0f}–{100 * high:.0f}]"
