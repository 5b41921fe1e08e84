"""Draws configs at random and says whether any run depended on more than its config.

``python -m benchmarks.fuzz --configs 200 --seed 1`` draws config after config: environment, spaces, networks,
algorithm, every setting that ``benchmarks/fuzz/options.py`` lists. Each is trained alone, on another number of ranks
where it can be, and once more with faults, after each of which it is resumed on ranks that are drawn anew. Agents, rows
and files must be those of the run that nobody touched. It exits with 1 if anything differs, with 2 if too little was
tried to say anything: nothing was trained, or most configs were refused. ``--out FILE`` keeps the result.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from benchmarks.chaos.__main__ import LIBRARIES
from benchmarks.commit import ROOT, short_commit
from benchmarks.fuzz.draw import drawn_config
from benchmarks.fuzz.trial import Trial, tried
from lockstep.core.machine import cpu_model

JAX_SHARE = 4
"""One config in so many is engine jax's, which compiles each anew for every number of devices."""


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--configs", type=int, default=50, help="configs in all (50)")
    parser.add_argument("--seed", type=int, default=0, help="of the first config; the others count on from it (0)")
    parser.add_argument("--engine", choices=("both", "torch", "jax"), default="both", help="that trains (both)")
    parser.add_argument("--jobs", type=int, default=1, help="configs that are tried at the same time (1)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no config is begun (no limit)")
    parser.add_argument("--show", action="store_true", help="print the configs, and train none")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    arguments = parser.parse_args(argv)
    for name in ("configs", "jobs"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: {getattr(arguments, name)} is below 1")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Tries config after config; see :func:`exit_status`."""
    arguments = read_arguments(argv)
    seeds = [(engine_of(arguments.engine, n), arguments.seed + n) for n in range(arguments.configs)]
    if arguments.show:
        for engine, seed in seeds:
            print(f"{engine} {seed}: {json.dumps(drawn_config(seed, engine).config)}")
        return 0
    if not sys.platform.startswith("linux"):
        print("fuzz: needs Linux, where processes are found through /proc", file=sys.stderr)
        return 2
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        for trial in _all(seeds, arguments, Path(name)):
            trials.append(trial)
            print(f"{trial.name}: {verdict(trial)}", flush=True)
    trials.sort(key=lambda trial: trial.seed)
    print(f"\n{totals(trials)}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(as_json(arguments, trials), indent=1) + "\n")
    if (why := too_little(trials)) is not None:
        print(f"fuzz: {why}", file=sys.stderr)
    return exit_status(trials)


def exit_status(trials: Sequence[Trial]) -> int:
    """0 if every run was a function of its config; 1 if one wasn't; 2 if too few were trained to say so."""
    if any(trial.problems for trial in trials):
        return 1
    return 0 if too_little(trials) is None else 2


def too_little(trials: Sequence[Trial]) -> str | None:
    """Says why the trials show nothing; None: they do."""
    refused = sum(trial.refused is not None for trial in trials)
    if refused == len(trials):
        return f"no config was trained, {refused} were refused"
    return f"{refused} of {len(trials)} configs were refused" if 2 * refused > len(trials) else None


def engine_of(wanted: str, number: int) -> str:
    """The engine of a config, by its place."""
    if wanted != "both":
        return wanted
    return "jax" if number % JAX_SHARE == JAX_SHARE - 1 else "torch"


def _all(seeds: Sequence[tuple[str, int]], arguments: argparse.Namespace, root: Path) -> Iterator[Trial]:
    """Tries all, several at a time, and yields them as they end."""
    ends = time.monotonic() + 60 * arguments.minutes

    def one(engine: str, seed: int) -> Trial | None:
        if time.monotonic() > ends:
            return None
        place = root / f"{engine}_{seed}"
        try:
            return tried(engine, seed, place)
        except Exception as error:
            traceback.print_exc()
            config = drawn_config(seed, engine).config
            problem = f"the driver failed: {type(error).__name__}: {error}"
            return Trial(engine, seed, config, problems=[problem])
        finally:
            shutil.rmtree(place, ignore_errors=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for future in [pool.submit(one, *pair) for pair in seeds]:
            if (trial := future.result()) is not None:
                yield trial


def verdict(trial: Trial) -> str:
    """One trial in a line; a config that broke a promise stands behind it."""
    if trial.refused is not None:
        return f"refused: {trial.refused}"
    if trial.problems:
        return "; ".join(trial.problems) + f"\n    config: {json.dumps(trial.config)}"
    return f"{trial.sessions} sessions, {len(trial.faults)} faults, {trial.seconds} s: the same"


def totals(trials: Sequence[Trial]) -> str:
    """One sentence on all."""
    refused = sum(trial.refused is not None for trial in trials)
    sessions, faults = sum(trial.sessions for trial in trials), sum(len(trial.faults) for trial in trials)
    broken = sum(bool(trial.problems) for trial in trials)
    elsewhere, struck = sum(trial.changes_ranks for trial in trials), sum(bool(trial.faults) for trial in trials)
    return (
        f"{len(trials) - refused} configs ({refused} more were refused), of which {elsewhere} were trained on another "
        f"number of ranks or devices and {struck} met faults, {sessions} sessions, {faults} faults: {broken} configs "
        "whose runs differed"
    )


def as_json(arguments: argparse.Namespace, trials: Sequence[Trial]) -> dict[str, object]:
    """What is kept: when, where, and every config."""
    return {
        "date": str(datetime.date.today()),
        "commit": short_commit(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
        "machine": f"{os.cpu_count()} cores of {cpu_model()}",
        "seed": arguments.seed,
        "totals": totals(trials),
        "trials": [dataclasses.asdict(trial) for trial in trials],
    }


if __name__ == "__main__":
    sys.exit(main())
