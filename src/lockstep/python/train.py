"""Provides ``lockstep.train``, which trains from Python what ``lockstep train`` trains."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard

from lockstep.config.files import names_config
from lockstep.config.run import Config
from lockstep.python.asked import settings_asked
from lockstep.python.environments import refusal, registered_here_alone
from lockstep.python.handed import handed, with_objects
from lockstep.python.run import Run
from lockstep.python.start import start


def train(
    env: str | Path | Mapping[str, Any] | Config | Callable[..., Any] | None = None,
    /,
    *,
    engine: str | None = None,
    nproc: int | str | None = None,
    callbacks: Sequence[Any] | Any = (),
    observe_only: bool = False,
    name: str | None = None,
    runs_dir: str | Path | None = None,
    resume: str | PathLike[str] | None = None,
    seeds: str | Iterable[int] | None = None,
    config: str | Path | Mapping[str, Any] | Config | None = None,
    quiet: bool | None = None,
    **settings: Any,
) -> Run:
    """Trains an agent in separate processes and returns its run, which equals that of ``lockstep train`` byte for byte.

    ``lockstep.train("CartPole-v1", nproc=2, ppo=dict(learning_rate=3e-4), num_envs=64)``

    Args:
        env: an environment's id, the ``module:name`` of what makes one, or a callable that makes one (a class, function
            or lambda). A config may stand here instead of in ``config``: a file, a mapping or a ``Config``. The
            environment's other settings may be given too, by keyword: ``env={"workers": 4}``.
        engine: ``torch`` or ``jax``; None: as the config says.
        nproc: number of ranks (engine torch) or processes (engine jax) on this machine, ``auto``, or a range such as
            ``2:8``; None: as the config says, else one.
        callbacks: one object or several, each with some of :class:`BaseCallback`'s methods, which this process calls
            during training.
        observe_only: whether training doesn't wait for callbacks; what they return then has no effect.
        name: name of the run directory; None: made of environment, seed and time.
        runs_dir: the directory in which run directories are made; None: as the config says, else ``runs``.
        resume: what to continue: a run (name, path or :class:`Run`), a checkpoint, or a place on a mirror; ``auto``: as
            ``--resume auto`` on the command line.
        seeds: seeds to train one agent each, ``range(5)`` or ``"0-4"``; the run is then a group, see :attr:`Run.seeds`.
        config: a config file, nested settings by the config's names, or a ``Config``; ``settings`` override it.
        quiet: whether to print only errors and warnings; None: as the config says, else False.
        **settings: any other setting or option by its name, nested as in a config file:
            ``ppo={"num_epochs": 10}``, ``total_steps=500_000``, ``max_restarts=10``. ``network={"custom": Net}`` takes
            the class itself, ``ppo={"loss": function}`` the function.

    Returns:
        The run, after it has ended or a limit or a callback has stopped it.

    Raises:
        ValueError: an argument is invalid; one line that names it, before anything is started.
        RunError: the run failed; it can be resumed from its last checkpoint.
        KeyboardInterrupt: the user interrupted; raised after a checkpoint was written.
        Exception: a callback's own exception; raised after a checkpoint was written.
    """
    again = resume if isinstance(resume, Run) else None
    given, before = ((), frozenset[str]()) if again is None else (again.given, again.named)
    if "env" in settings and env is None:
        if not _is_section(settings["env"], config is not None or resume is not None):
            env = settings.pop("env")
    elif "env" in settings and not isinstance(settings["env"], Mapping):
        raise ValueError(f"env: given twice{'; give the config as config=' if _is_config(env) else ''}")
    if _is_config(env):
        if config is not None:
            raise ValueError("config: given twice, as env as well; give the environment's id or what makes it as env")
        env, config = None, env
    elif callable(env):
        made = handed("env.id", env)
        given = (made, *(each for each in given if each.key != made.key))
        settings["env.id"] = made.id
    elif not isinstance(env, str | Path | None):
        raise ValueError(refusal(env))
    if isinstance(env, str | Path):
        settings["env.id"] = str(env)
    options = {"engine": engine, "nproc": nproc, "quiet": quiet, "name": name, "seeds": seeds}
    options |= {"runs_dir": runs_dir, "resume": resume}
    settings |= {key: value for key, value in options.items() if value is not None}
    asked = settings_asked({} if again is None else again.resumed_with(), config, settings)
    given = with_objects(asked, given)

    def run_at(path: Path, named: Collection[str], trust: bool) -> Run:
        return Run(path, given, trust, before.union(named))

    try:
        return start(asked, given, run_at, callbacks, observe_only, before)
    except ValueError as error:
        clearer = registered_here_alone(env, error)
        if clearer is None:
            raise
        raise clearer from None


def _is_config(env: Any) -> TypeGuard[str | Path | Mapping[str, Any] | Config]:
    """Returns whether the argument ``env`` is a config, in any form."""
    return isinstance(env, Mapping | Config) or (isinstance(env, str | Path) and names_config(Path(env)))


def _is_section(env: Any, beside_another: bool) -> bool:
    """Returns whether ``env=…`` holds settings of the section ``env``, and isn't a whole config."""
    return isinstance(env, Mapping) and (beside_another or "id" in env)
