"""Writes the lines printed after a run: its result, where its files are, and what to do next."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from lockstep.config.run import Config, EnvConfig
from lockstep.core.files import quoted
from lockstep.core.user_code.handed import loading
from lockstep.envs.describe import says_it_draws
from lockstep.envs.description import stepped_as_arrays
from lockstep.runs.curves import CURVES_CSV, CURVES_PNG, single_seed, what_few_cover
from lockstep.runs.groups import seeds_of
from lockstep.runs.progress import last_episodes
from lockstep.runs.shown.numerals import format_number


def next_steps(path: Path, summary: dict[str, Any], config: Config | None = None) -> str:
    """Returns the lines for a run, from its summary.

    The config tells whether its environment can be shown, and whether only Python can load what it names.
    """
    again = None if config is None else loading(path, config.env.id, config.network.custom, config.ppo.loss)
    if "seeds" in summary:
        return _of_seeds(path, summary, _command(), again)
    final = summary["final_return"]
    result = "no episode ended yet"
    if final is not None:
        result = f"mean return of {last_episodes(summary['episodes'])} {format_number(final)}"
    how = "" if summary["status"] == "finished" else f" ({summary['status']})"
    command = _command()
    lines = [
        f"{result} after {summary['global_step']:,} steps, {summary['wall_time']:.1f} s{how}",
        f"run: {path}   parameters sha256 {summary['params_sha256'][:16]}…",
    ]
    if "mirror" in summary:
        lines.append(f"mirror:    {summary['mirror']['url']}")
    if again is not None:
        return "\n".join([*lines, f"go on:     {again} has resume(), evaluate(), policy"])
    if summary["status"] != "finished":
        lines.append(f"continue:  {command} train --resume {quoted(path)}")
    lines.append(f"evaluate:  {command} eval {quoted(path)} --episodes 20")
    if config is None or _may_be_drawn(config.env):
        lines.append(f"watch:     {command} play {quoted(path)} --video out.mp4")
    if (path / "tensorboard").is_dir():
        lines.append(f"curves:    {_tensorboard()} --logdir {quoted(path / 'tensorboard')}")
    return "\n".join(lines)


def _may_be_drawn(env: EnvConfig) -> bool:
    """Returns whether ``lockstep play`` can show an environment: EnvPool and simulators on tensors have no pictures.

    Others tell when they are described; what wasn't in this process may be drawn if it isn't the user's own.
    """
    if env.backend == "envpool" or (env.backend == "tensor" and not stepped_as_arrays(env)):
        return False
    said = says_it_draws(env.id)
    return ":" not in env.id if said is None else said


def _of_seeds(path: Path, summary: dict[str, Any], command: str, again: str | None) -> str:
    """Returns the lines for a run of several seeds."""
    final, seeds = summary["final_return"], summary["seeds"]
    result = "some seed has finished no episode yet"
    if final is not None:
        what = f"interquartile mean over {len(seeds)} seeds of the return"
        if len(seeds) == 1:
            what = f"return of {single_seed(seeds[0]['directory'], len(seeds_of(path)))}"
        result = f"{what} {format_number(final)}"
        if summary["final_return_interval"] is not None:
            low, high = map(format_number, summary["final_return_interval"])
            result += f", 95 % interval {low} … {high}{what_few_cover(len(seeds))}"
    how = "" if summary["status"] == "finished" else f" ({summary['status']})"
    first = seeds[0]["directory"]
    furthest = max(each["global_step"] for each in seeds)
    steps = f"{summary['global_step']:,} steps{' of each' if len(seeds) > 1 else ''}"
    if furthest != summary["global_step"]:
        steps = f"{summary['global_step']:,} steps, which each has taken (the furthest {furthest:,})"
    lines = [
        f"{result} after {steps}, {summary['wall_time']:.1f} s, "
        f"{summary['steps_per_second']:,.0f} steps/s together{how}",
        f"run: {path}   curves: {path / (CURVES_PNG if (path / CURVES_PNG).is_file() else CURVES_CSV)}",
    ]
    if again is not None:
        return "\n".join([*lines, f"go on:     {again} has resume() and seeds, each with evaluate() and policy"])
    if summary["status"] != "finished":
        lines.append(f"continue:  {command} train --resume {quoted(path)}")
    lines.append(f"evaluate:  {command} eval {quoted(path / first)} --episodes 20")
    lines.append(f"report:    {command} report {quoted(path)}")
    return "\n".join(lines)


def _command() -> str:
    """Returns how the user can call Lockstep: by name if the shell finds it, else by the path that was used."""
    if shutil.which("lockstep"):
        return "lockstep"
    called = Path(sys.argv[0])
    return _beside(called) if called.name == "lockstep" else f"{_beside(sys.executable)} -m lockstep"


def _tensorboard() -> str:
    """Returns how the user can call TensorBoard: by name if the shell finds it, else from this environment."""
    if shutil.which("tensorboard"):
        return "tensorboard"
    beside = Path(sys.executable).with_name("tensorboard")
    return _beside(beside) if beside.is_file() else f"{_beside(sys.executable)} -m tensorboard.main"


def _beside(program: str | Path) -> str:
    return quoted(os.path.relpath(program))
