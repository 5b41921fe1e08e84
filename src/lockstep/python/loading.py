"""Provides ``lockstep.load_run``, which opens a run."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

from lockstep.config.on_off import switch
from lockstep.core.files import path_of
from lockstep.python.handed import handed_again
from lockstep.python.run import Run
from lockstep.runs.finding import find_run
from lockstep.runs.stored import stored_config


def load_run(
    run: str | PathLike[str],
    *,
    runs_dir: str | Path = "runs",
    env: Callable[..., Any] | str | None = None,
    network: type | str | None = None,
    loss: Callable[..., Any] | str | None = None,
    trust: bool = False,
) -> Run:
    """Opens a run.

    Args:
        run: a run's name or directory, or a :class:`Run`, whose own objects and ``trust`` apply unless given here.
        runs_dir: the directory of runs that are given by name.
        env: what makes the environment, if the run was trained with an object that can't be imported; its name and
            module may have changed since. If the run finds its environment by an id, no other one is accepted.
        network: the class of its network, likewise.
        loss: its loss, likewise, except that its name must be the same; only :meth:`Run.resume` needs it.
        trust: whether to import code that the run names (``module:attribute``), even if the user never trained with it.

    Raises:
        ValueError: there is no such run, it was trained with something other than what is given, or ``trust`` is
            neither True nor False; one line.
    """
    trust = switch("trust", trust)
    path, checkpoint = find_run(path_of(run), str(runs_dir), single=False)
    if checkpoint != "latest":
        raise ValueError(f"run: {run} is a checkpoint, and load_run takes a run; lockstep.load_policy takes both")
    again = {"env.id": env, "network.custom": network, "ppo.loss": loss}
    given = []
    if any(each is not None for each in again.values()):
        config = stored_config(path)
        recorded = {"env.id": config.env.id, "network.custom": config.network.custom, "ppo.loss": config.ppo.loss}
        found = [handed_again(key, each, recorded[key], path) for key, each in again.items() if each is not None]
        given = [each for each in found if each is not None]
    if not isinstance(run, Run):
        return Run(path.absolute(), given, trust)
    kept = [each for each in run.given if each.key not in {new.key for new in given}]
    return Run(path.absolute(), [*kept, *given], trust or run.trust, run.named)
