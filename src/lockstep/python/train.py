"""``lockstep.train``: the command line's run, from Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard

from lockstep.config.files import FILE_SUFFIXES, lay_over, nested, read_file
from lockstep.config.run import Config
from lockstep.core.files import path_of
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
    quiet: bool = False,
    **settings: Any,
) -> Run:
    """Trains one agent, in processes of its own, and returns its run: the command line's, byte for byte.

    ``lockstep.train("CartPole-v1", nproc=2, ppo=dict(learning_rate=3e-4), num_envs=64)``

    Args:
        env: an environment's id, ``module:name`` of what makes one, a callable that does (a class, a function, a
            lambda), or in place of ``config`` a config: a file, a mapping, a ``Config``. Beside it the environment's
            own settings may be given, ``env={"workers": 4}``.
        engine: ``torch`` or ``jax``; None: as the config says.
        nproc: ranks (engine torch) or processes (engine jax) on this machine, ``auto``, or a range such as
            ``2:8``; None: as the config says, else one.
        callbacks: objects, or one, with some of :class:`BaseCallback`'s methods, called in this process meanwhile.
        observe_only: whether training goes on without waiting for callbacks, whose answers then count for nothing.
        name: of the run directory; None: environment, seed and time.
        runs_dir: where run directories are made; None: as the config says, else ``runs``.
        resume: run (name, path, :class:`Run`), checkpoint or place on a mirror to continue; ``auto``: as the command's.
        seeds: one agent a seed, ``range(5)`` or ``"0-4"``: the run is a group's then, with :attr:`Run.seeds`.
        config: a config file, nested settings by the config's names, or a ``Config``, under ``settings``.
        quiet: whether to print only errors and warnings.
        **settings: any other setting or option by its name, nested as in a config file:
            ``ppo={"num_epochs": 10}``, ``total_steps=500_000``, ``max_restarts=10``. ``network={"custom": Net}`` takes
            the class itself, ``ppo={"loss": function}`` the function.

    Returns:
        The run, at its end, or where a limit or a callback stopped it.

    Raises:
        ValueError: an argument can't be; one line that names it, before anything is started.
        RunError: the run failed; its last checkpoint can be resumed.
        KeyboardInterrupt: after a checkpoint was written.
        Exception: a callback's own, after a checkpoint was written.
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
    asked = lay_over({} if again is None else again.resumed_with(), _settings_of(config))
    if seeds is not None:
        asked.pop("seed", None)  # as a run's config has one
    options = _options_of(engine=engine, nproc=nproc, quiet=quiet or None, name=name, seeds=seeds)
    options |= {key: path_of(value) for key, value in (("runs_dir", runs_dir), ("resume", resume)) if value is not None}
    lay_over(asked, nested(settings | options))
    given = with_objects(asked, given)

    def run_at(path: Path, named: Collection[str]) -> Run:
        return Run(path, given, bool(asked.get("trust")), before.union(named))

    try:
        return start(asked, given, run_at, callbacks, observe_only, before)
    except ValueError as error:
        clearer = registered_here_alone(env, error)
        if clearer is None:
            raise
        raise clearer from None


def _options_of(seeds: Any, **options: Any) -> dict[str, Any]:
    """Those options that are given, with seeds as the command line has them."""
    if isinstance(seeds, Iterable) and not isinstance(seeds, str):
        seeds = ",".join(map(str, seeds))
    elif not isinstance(seeds, str | None):
        raise ValueError(f'seeds: {seeds!r} is no list of seeds; give range(5), [3, 7] or "0-4"')
    return {key: value for key, value in (options | {"seeds": seeds}).items() if value is not None}


def _is_config(env: Any) -> TypeGuard[str | Path | Mapping[str, Any] | Config]:
    """Whether what is given as ``env`` is a config in any form."""
    return isinstance(env, Mapping | Config) or (isinstance(env, str | Path) and Path(env).suffix in FILE_SUFFIXES)


def _is_section(env: Any, beside_another: bool) -> bool:
    """Whether ``env=…`` is the settings of that section, of a config that is given or is to be, not a whole config."""
    return isinstance(env, Mapping) and (beside_another or "id" in env)


def _settings_of(config: str | Path | Mapping[str, Any] | Config | None) -> dict[str, Any]:
    """Nested settings of a config in any form."""
    if config is None:
        return {}
    if isinstance(config, Config):
        return nested(config.model_dump(exclude_unset=True))
    found = nested(config) if isinstance(config, Mapping) else read_file(Path(os.path.expanduser(config)))
    if isinstance(found.get("env"), str):
        found["env"] = {"id": found["env"]}
    return found
