"""Lockstep and its peers on the same cases in one run, interleaved: ``python -m benchmarks.side_by_side [--quick]``.

Prints the tables, and writes them to ``peers.md``, every figure to ``peers.json`` and a picture of them to
``peers.png``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import bars, peer_environment
from benchmarks.cases import CASES, Case, shortened
from benchmarks.comparison import Row
from benchmarks.programs import ENVPOOL, Program, all_programs, programs_of
from benchmarks.report import Results, markdown
from benchmarks.steadiness import loop_seconds, steadiness
from benchmarks.steady_rate import MeasurementError, measure, variables
from lockstep.core.machine import instruction_set, kernel_variables, openblas_kernel, processor
from lockstep.runs.session_facts import commit_of

ROOT = Path(__file__).resolve().parent.parent
PROFILED = 8
"""Iterations under a profile."""
OUR_PACKAGES = ("lockstep-rl", "torch", "jax", "numpy", "gymnasium", "mujoco", "ale-py", "envpool")
PEER_PACKAGES = (
    "stable-baselines3",
    "sb3-contrib",
    "skrl",
    "sbx-rl",
    "rejax",
    "gymnax",
    "flax",
    "envpool",
    "ale-py",
    "torch",
    "jax",
    "numpy",
    "gymnasium",
    "mujoco",
)


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Lockstep and its peers, side by side.")
    parser.add_argument("--quick", action="store_true", help="one short repetition: does everything run?")
    parser.add_argument("--repeats", type=int, help="repetitions of everything, interleaved (3; 1 with --quick)")
    parser.add_argument(
        "--cases",
        default=",".join(c.name for c in CASES),
        help="T1,T2,T3,A1,R1: PyTorch, one thread; T2x2,T3x2,A1x2: both cores; J1,J2,J3: JAX; T2 brings the scaling",
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which a run is given up")
    parser.add_argument("--out", type=Path, help="directory (benchmarks/results; build/benchmarks with --quick)")
    arguments = parser.parse_args(argv)
    known = {case.name: case for case in CASES}
    names = arguments.cases.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--cases: {unknown[0]!r} is no case; there are {', '.join(known)}")
    arguments.cases = [shortened(known[name]) if arguments.quick else known[name] for name in names]
    if arguments.repeats is None:
        arguments.repeats = 1 if arguments.quick else 3
    if arguments.repeats < 1:
        parser.error(f"--repeats: {arguments.repeats} is below 1")
    arguments.out = arguments.out or ROOT / ("build/benchmarks" if arguments.quick else "benchmarks/results")
    return arguments


def facts(arguments: argparse.Namespace) -> dict[str, str]:
    """What a reader has to know to judge the figures."""

    def listed(python: Path, packages: tuple[str, ...]) -> str:
        found = peer_environment.versions(python, packages)
        return ", ".join(f"{name} {version}" for name, version in found.items())

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = ", ".join(f"{x:.2f}" for x in os.getloadavg())
    repetitions = (
        "1 repetition" if arguments.repeats == 1 else f"medians of {arguments.repeats} interleaved repetitions"
    )
    how = f"{repetitions}; steps/s by the wall clock between iterations, the "
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit_of(ROOT) or "unknown",
        "machine": f"{processor()}, {instruction_set()}, {cores} cores, {platform.system()} {platform.machine()}",
        "kernels": f"{openblas_kernel() or 'none'} of NumPy's OpenBLAS; variables that choose kernels: "
        + (kernel_variables() or "none"),
        "load before the start (1, 5, 15 minutes)": load + "; figures taken on a busy machine mean little",
        "Lockstep's environment": f"Python {platform.python_version()}, {listed(Path(sys.executable), OUR_PACKAGES)}",
        "the peers' environment": listed(peer_environment.PYTHON, PEER_PACKAGES),
        "how": how
        + "first quarter left out; T1, T2, T3, A1 and R1 in one process with one thread, all others on both cores"
        + (" (quick look)" if arguments.quick else ""),
        "CPU s a million steps": "CPU time of all processes of a program in the steady state",
        "memory": "most that all processes of a program hold at a time, pages that they share counted once; what "
        "JAX compiles is compiled anew by each, and what that takes is in it",
        "cores": "CPU time over wall time of a whole run, start-up included",
    }


def run_interleaved(
    programs: Sequence[Program], repeats: int, timeout: float, between: Callable[[], None] = lambda: None
) -> list[Row]:
    """Every program once, then every program again, in the reverse order: what drifts hits all alike.

    ``between`` is called before each.
    """
    rows = [Row.of(program) for program in programs]
    for repeat in range(repeats):
        pairs = list(zip(programs, rows, strict=True))
        for number, (program, row) in enumerate(pairs if repeat % 2 == 0 else reversed(pairs), 1):
            name = f"{program.case} {program.label} {program.env}" + (f" ({row.scaling})" if row.scaling else "")
            print(f"[{repeat + 1}/{repeats} {number}/{len(rows)}] {name}: ", end="", flush=True)
            between()
            try:
                row.add(measure(program, timeout))
                print(f"{row.rates[-1]:,.0f} steps/s", flush=True)
            except MeasurementError as error:
                row.failures.append(str(error))
                print(f"failed: {error}", flush=True)
    return rows


def run_module(module: str, words: Sequence[str], timeout: float) -> str:
    """What a module of ours prints.

    Raises:
        MeasurementError: it failed; its last line.
    """
    command = [sys.executable, "-m", module, *words]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | variables() | {"PYTHONPATH": os.pathsep.join(paths)}
    try:
        with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as work:  # where simulators leave their logs
            result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=work, env=environment)
    except subprocess.TimeoutExpired:
        raise MeasurementError(f"killed after {timeout:.0f} s") from None
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        raise MeasurementError(lines[-1].strip() if lines else f"exit status {result.returncode}")
    return result.stdout


def single_ranks(results: Results) -> list[Case]:
    """The cases in which ours is one process of PyTorch's."""
    return [case for case in results.cases if case.engine == "torch" and case.cores == 1]


def ours_of(case: Case) -> list[tuple[Program, dict[str, Any]]]:
    """Our programs of a case, with their configs."""
    return [(program, program.config) for program in programs_of(case) if program.config is not None]


def add_product_rate(results: Results, timeout: float) -> None:
    """Measure what a core can multiply, if there are cases with JAX."""
    if any(case.engine == "jax" for case in results.cases):
        try:
            results.product_rate = float(run_module("benchmarks.product_rate", [], timeout))
        except MeasurementError as error:
            results.product_rate = str(error)


def add_ceilings(results: Results, rounds: int, timeout: float) -> None:
    """Measure the environments alone, each once a round."""
    sections = {}
    for case in single_ranks(results):
        sections |= {(p.env, case.num_envs): json.dumps(config["env"]) for p, config in ours_of(case)}
    for _ in range(rounds):
        for key, section in sections.items():
            so_far = results.ceilings.setdefault(key, {})
            if isinstance(so_far, str):
                continue
            try:
                found = json.loads(run_module("benchmarks.env_ceiling", [section, str(key[1])], timeout))
                for who, rate in found.items():
                    so_far.setdefault(who, []).append(rate)
            except MeasurementError as error:
                results.ceilings[key] = str(error)


def add_splits(results: Results, timeout: float) -> None:
    """Profile our single ranks with `exact`, one short run each; what JAX compiles is one program without clocks."""
    for case in single_ranks(results):
        steps = case.steps_per_iteration * min(case.iterations, PROFILED)
        for program, config in (one for one in ours_of(case) if one[0].reduction == "exact"):
            what = program.label.removeprefix("Lockstep, ")
            results.splits[case.name, program.env, what] = split(config | {"total_steps": steps}, timeout)


def split(config: dict[str, Any], timeout: float) -> dict[str, float] | str:
    """Seconds of a mean iteration by part, or why there are none."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as directory:
        file, out = Path(directory) / "config.json", Path(directory) / "split.json"
        file.write_text(json.dumps(config))
        try:
            run_module("benchmarks.profile_split", [str(file), str(out)], timeout)
            return json.loads(out.read_text())
        except MeasurementError as error:
            return str(error)


def write(results: Results, directory: Path) -> None:
    """The report, all figures, and their picture, which is not worth a run's end where it can't be drawn."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results.as_json(), indent=1) + "\n"
    (directory / "peers.md").write_text(markdown(results))
    (directory / "peers.json").write_text(text)
    try:
        bars.draw(text, directory / "peers.png")
    except ImportError as error:
        print(f"no peers.png: {error}; pip install 'lockstep-rl[plot]' and python -m benchmarks.bars {directory}")


def broken(rows: Sequence[Row]) -> list[Row]:
    """Rows of ours that failed, but for those of EnvPool, which needn't be there."""
    return [row for row in rows if row.ours and row.failures and not row.env.endswith(ENVPOOL)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything; 1 if a run of ours failed, whatever the peers did."""
    arguments, started = read_arguments(argv), time.monotonic()
    problems = peer_environment.prepare()
    results = Results(facts(arguments), arguments.cases, problems=problems)
    loops: list[float] = []
    results.rows = run_interleaved(
        all_programs(arguments.cases), arguments.repeats, arguments.timeout, lambda: loops.append(loop_seconds())
    )
    results.facts["steadiness of the machine"] = steadiness(loops)
    results.facts["took"] = f"{(time.monotonic() - started) / 60:.0f} minutes"
    write(results, arguments.out)  # what follows may be interrupted
    print("environments alone, and where the time goes", flush=True)
    add_product_rate(results, arguments.timeout)
    add_ceilings(results, arguments.repeats, arguments.timeout)
    add_splits(results, arguments.timeout)
    results.facts["took"] = f"{(time.monotonic() - started) / 60:.0f} minutes"
    write(results, arguments.out)
    print(f"\n{markdown(results)}\nwritten to {arguments.out}/peers.md, peers.json and peers.png")
    return 1 if broken(results.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
