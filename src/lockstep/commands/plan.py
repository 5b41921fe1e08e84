"""``lockstep plan`` predicts a run before it is started: whether it fits, how fast it is and why."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from lockstep import __version__
from lockstep.commands.parser import CommandParser, add_target, at_least_one, from_home
from lockstep.config.keys import validate
from lockstep.config.run import RunOptions
from lockstep.core.files import check_writable, replace_text
from lockstep.core.machine import cpu_model
from lockstep.core.topology import available_cores
from lockstep.launch.request import described_run, split_target
from lockstep.planning.hardware import TABLE, parse_rate, parse_target
from lockstep.planning.outlook import outlooks
from lockstep.planning.plot import write_plot
from lockstep.planning.prediction import Outlook
from lockstep.planning.report import print_outlook
from lockstep.planning.request import PlanRequest, prices, world_sizes
from lockstep.runs.curves import MISSING_PLOT, can_plot
from lockstep.runs.directory import writing
from lockstep.runs.trackers.service import flattened
from lockstep.scaling.plan import MODES

PLAN, PICTURE = "plan.json", "plan.png"


def main(argv: Sequence[str]) -> int:
    """Runs ``lockstep plan CONFIG --on TARGET``: exit status 0, even if a run doesn't fit."""
    request, path = _read_request(argv)
    found = []
    with Console(stderr=True).status("planning") as status:
        for outlook in outlooks(request, status.update):
            print_outlook(outlook)
            found.append(outlook)
    _write(path, request, found)
    print(f"plan: {path}")
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="lockstep plan",
        description="Say what a run will take on devices that needn't be here: whether it fits, its speed with a "
        "range, what limits it, and its cost. Nothing is trained but short runs of one rank for --on cpu:N.",
        allow_abbrev=False,
        epilog="Every option of lockstep train that describes the run is accepted too, e.g. --num-envs 4096. Written "
        "to RUNS_DIR/NAME: plan.json, plan.png.",
    )
    add_target(parser, "CONFIG_FILE_OR_ENV_ID", "of the run that is planned")
    parser.add_argument(
        "--on",
        action="append",
        default=[],
        metavar="TARGET",
        help="devices: h100:8, h200:N, a100:N, l40:N, tpu:v5e:16x16, tpu:v5p:2x2x2, tpu:v6e:2x4, cpu:2 (ranks of this "
        "machine), cpu:2x1 (hosts like it x ranks); again for another",
    )
    parser.add_argument("--world-sizes", help="numbers of devices (default: powers of two up to all that can be used)")
    parser.add_argument(
        "--mode",
        default="strong",
        help=f"{' or '.join(reversed(MODES))}; strong: the devices share the run, weak: each has the config's num_envs "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--price",
        action="append",
        default=[],
        help="$ an hour of a target: 98.32, or h100:8=98.32 if there are several",
    )
    parser.add_argument(
        "--link", help="rate of a host's network to others, e.g. 100Mbit or 25Gbit (default: the table of chips)"
    )
    parser.add_argument(
        "--iters", type=at_least_one, default=20, help="iterations measured for each number of ranks (cpu; default: 20)"
    )
    parser.add_argument("--name", help="of the plan's directory (default: plan-, environment and time)")
    parser.add_argument(
        "--runs-dir", type=from_home, default="runs", help="where that directory is made (default: %(default)s)"
    )
    return parser


def _read_request(argv: Sequence[str]) -> tuple[PlanRequest, Path]:
    """Reads what a command line asks for, and checks what can be checked without measuring or compiling."""
    options, words = _parser().parse_known_args(list(argv))
    targets = tuple(parse_target(text) for text in options.on)
    if options.mode not in MODES:
        raise ValueError(f"mode: {options.mode!r} is none of {', '.join(MODES)}")
    validate(RunOptions, {"name": options.name, "runs_dir": options.runs_dir}, "command line")
    request = PlanRequest(
        config=described_run("plan", *split_target("plan", words)),
        targets=targets,
        sizes=world_sizes(options.world_sizes),
        mode=options.mode,
        prices=prices(options.price, targets),
        network=None if options.link is None else parse_rate(options.link),
        iters=options.iters,
    )
    request.check()
    return request, _directory(options, request)


def _directory(options: argparse.Namespace, request: PlanRequest) -> Path:
    """Chooses the plan's directory; raises a one-line ``ValueError`` if it holds no plan or can't be made."""
    environment = request.config.env.id.rpartition(":")[2].replace("/", "-")
    path = Path(options.runs_dir) / (options.name or f"plan-{environment}-{time.strftime('%Y%m%d-%H%M%S')}")
    if path.exists() and not (path / PLAN).is_file():
        raise ValueError(f"name: {path} exists already and is no plan; choose another --name")
    check_writable(path, "runs_dir")
    return path


def _write(path: Path, request: PlanRequest, outlooks: Sequence[Outlook]) -> None:
    """Writes ``plan.json``, and ``plan.png`` if matplotlib is installed."""
    content: dict[str, Any] = {
        "lockstep": __version__,
        "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": f"{cpu_model()}, {available_cores()} cores",
        "mode": request.mode,
        "config": flattened(request.config.model_dump(mode="json")),
        "targets": [outlook.to_json() for outlook in outlooks],
        "table": json.loads(TABLE.read_text()),
    }
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        replace_text(path / PLAN, json.dumps(content, indent=2, allow_nan=False) + "\n")
        if can_plot():
            write_plot(path / PICTURE, f"{request.config.env.id}: planned, {request.mode} scaling", outlooks)
    if not can_plot():
        print(f"note: {MISSING_PLOT.format(PICTURE)}", file=sys.stderr)
