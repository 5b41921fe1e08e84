"""Completes a request: adds defaults for the environment's spaces, and replaces the environment by its array twin."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.config.command_line import Request, base_settings, parse_arguments, parts_of, read_request
from lockstep.config.engines import engine_module, is_installed
from lockstep.config.files import layered
from lockstep.config.presets import defaults_for, for_grpo, has_preset
from lockstep.config.run import AUTO, Config, RunOptions
from lockstep.config.sections import SERVICES
from lockstep.config.switches import Switch
from lockstep.core.errors import RankMismatchError
from lockstep.core.files import quoted
from lockstep.core.topology import Topology
from lockstep.envs.batched.twins import with_array_twin
from lockstep.envs.describe import describe
from lockstep.envs.description import EnvDescription
from lockstep.envs.gymnasium.make import version_note
from lockstep.launch.jax_start import start_jax
from lockstep.launch.world import topology_of
from lockstep.runs.directory import CHECKPOINTS, CONFIG
from lockstep.runs.finding import is_run, run_if_any
from lockstep.runs.groups import seeds_of
from lockstep.runs.listing import printable
from lockstep.runs.making import has_begun
from lockstep.runs.trackers.service import flattened
from lockstep.runs.trust import OF_TRAINING, check_trusted, place_of_service, trusted_config, trusted_names


@dataclass(frozen=True)
class RunRequest:
    """A request whose config is complete, but not resolved.

    Attributes:
        config: complete.
        options: of the run.
        overrides: the nested settings that were given explicitly.
        note: what was decided for the user, a line each: defaults for an environment without a preset, an array
            environment in place of Gymnasium's.
        description: the environment's, if it had to be made for its defaults.
        undescribed: why it couldn't be made for that.
        begun: whether ``resume: auto`` found the run that is resumed.
        audience: as in :class:`~lockstep.runs.session_facts.SessionFacts`.
    """

    config: Config
    options: RunOptions
    overrides: dict[str, Any]
    note: str | None = None
    description: EnvDescription | None = None
    undescribed: ValueError | None = None
    begun: bool = False
    audience: str | None = None


def request_of(
    argv: Sequence[str],
    needs_env: bool = True,
    bring: Callable[[Request], RunOptions] | None = None,
    starts_others: bool = False,
    trains: bool = False,
) -> RunRequest:
    """Reads a command line as ``read_request`` does, and completes its config according to the environment.

    An environment without a preset is made once to choose defaults, unless the run is resumed.

    Args:
        argv: the words after the command.
        needs_env: as in ``read_request``.
        bring: fetches a run from its mirror first, and returns the options to resume it with; None: not called.
        starts_others: whether this process only starts others, and leaves accelerators to them.
        trains: whether this process may be a launcher's rank, which meets the others.

    Raises:
        ValueError: the command line is wrong, or names something that isn't trusted; one line.
        RankMismatchError: a launcher's ranks can't meet; one line.
    """
    request, lines = read_request(argv, needs_env), list[str]()
    if (run := request.run) is not None:
        if trains:
            _check_which_seeds(request, run)
        request, note = _without_strange_places(request, run)
        lines += [] if note is None else [note]
        check_trusted(request.config, run / CONFIG, request.options.trust, flattened(request.given))
    if bring is not None:  # from a mirror that this config may name
        request = replace(request, options=bring(request))
    request = _on_device(request)
    config, options = request.config, resumed_if_begun(request.options)
    description, undescribed = None, None
    if not has_preset(config.env.id) and options.resume is None:
        try:
            start_jax(config, options, topology_of(options) if trains else Topology(), starts_others)
            description = describe(config.env)
        except RankMismatchError:  # making it for the run would wait once more
            raise
        except ValueError as error:  # raised again when it is made for the run
            undescribed = error
        if description is not None:
            defaults, said = defaults_by_spaces(description, request)
            lines += [*([] if (old := version_note(config.env.id)) is None else [old]), *said]
            config = request.config_over(defaults)
    config, line = with_array_twin(config)
    lines += [] if line is None or not is_installed(config.engine) else [line]
    overrides, note = _as_begun(request, options), "\n".join(lines) or None
    begun = request.options.resume == AUTO and options.resume is not None
    return RunRequest(config, options, overrides, note, description, undescribed, begun)


def _check_which_seeds(request: Request, run: Path) -> None:
    """Raises a one-line ``ValueError`` if a group is named as a config, and not which seeds a new run is to have."""
    options = request.options
    if (
        options.is_group
        or options.resume not in (None, AUTO)
        or "seed" in request.given
        or not (seeds := seeds_of(run))
    ):
        return
    adjacent = len(seeds) > 1 and seeds == list(range(seeds[0], seeds[-1] + 1))
    listed = f"{seeds[0]}-{seeds[-1]}" if adjacent else ",".join(map(str, seeds))
    count = f"{len(seeds)} seed{'s' if seeds[1:] else ''}"
    raise ValueError(
        f"{run} is a group of {count}; --seeds {listed} trains a new one with its config, --seed {seeds[0]} a single "
        f"run, and --resume {quoted(run)} in its place goes on with it"
    )


PLACES = ("project", "entity", "group", "tags")
"""Keys of ``log`` that say where at a service metrics go, and with which labels."""


def _without_strange_places(request: Request, run: Path) -> tuple[Request, str | None]:
    """Leaves out where the run whose config is used sent its metrics, unless this user has sent metrics there.

    Services that the user switches on get the user's own defaults instead. ``trust`` leaves all as it is.

    Returns:
        The request, and a line that says what was left out; None if nothing was.
    """
    given, log = flattened(request.given), request.config.log
    asked = [name for name in SERVICES if getattr(log, name)]
    theirs = {
        name: value for name, value in request.file.get("log", {}).items() if name in PLACES and value is not None
    }
    theirs = {name: value for name, value in theirs.items() if f"log.{name}" not in given}
    if request.options.trust or not theirs or not asked:
        return request, None
    if any(f"log.{name}" not in given for name in asked):
        return request, None  # the file names a service: check_trusted refuses it if its place isn't this user's
    told = log.model_copy(update={name: request.file["log"].get(name) for name in ("project", "entity")})
    if {place_of_service(told, name) for name in SERVICES} & trusted_names():
        return request, None  # the place is this user's, at whichever service
    kept = {name: value for name, value in request.file["log"].items() if name not in theirs}
    listed = ", ".join(f"log.{name} {printable(str(value))}" for name, value in theirs.items())
    left = replace(request, file={**request.file, "log": kept})
    note = f"left out of {run / CONFIG}, for you haven't sent metrics there: {listed}; --trust takes all of it"
    return replace(left, config=left.config_over({})), note


def config_named(word: str, runs_dir: str, trust: bool = False) -> Config:
    """Reads the config that a run's name, directory or checkpoint, a config file or an environment id stands for.

    Raises:
        ValueError: ``word`` is none of them, or no environment can be made of the id; one line that says why.
    """
    run = run_if_any(word, runs_dir, single=False)
    if run is not None:
        return trusted_config(run[0], trust, unused=OF_TRAINING)
    request = request_of([word, *(["--trust"] if trust else [])])
    _, file = base_settings(word)
    if file is None and request.undescribed is not None:
        raise request.undescribed
    return request.config


def _on_device(request: Request) -> Request:
    """Replaces ``device: auto`` by what this machine has, because the run depends on the kind of device."""
    if request.config.device != AUTO:
        return request
    chosen = {"device": engine_module(request.config.engine).chosen_device()}
    return replace(request, config=request.config.model_copy(update=chosen), given={**request.given, **chosen})


def resumed_if_begun(options: RunOptions) -> RunOptions:
    """Replaces ``resume: auto`` by the run of that name if it has begun, else by None, which starts it."""
    if options.resume != AUTO or options.name is None:
        return options
    path = Path(options.runs_dir) / options.name
    return options.model_copy(update={"resume": str(path), "name": None} if has_begun(path) else {"resume": None})


def _as_begun(request: Request, options: RunOptions) -> dict[str, Any]:
    """Returns the settings that were given, without those that were settled when a run under ``resume: auto`` began."""
    overrides = request.overrides
    if request.options.resume == AUTO and options.resume is not None:
        overrides.pop("num_envs_per_rank", None)
        overrides.get("grpo", {}).pop("reference", None)
    return overrides


def split_target(command: str, argv: Sequence[str]) -> tuple[str, list[str]]:
    """Takes the config file, run or environment id out of a command line of options of ``lockstep train``.

    Raises:
        ValueError: there is none, or a second one, or an option is wrong; one line.
    """
    targets, rest = list[str](), list[str]()
    for part in parts_of(argv):
        if part.path or isinstance(part.value, Switch):
            rest += part.words
        else:
            targets.append(part.value)
    if not targets:
        raise ValueError(f"a config file or an environment id is needed, e.g. lockstep {command} CartPole-v1")
    if len(targets) > 1:
        raise ValueError(f"{targets[1]!r}: one config file or environment id is enough")
    path = Path(os.path.expanduser(targets[0]))
    if path.parent.name == CHECKPOINTS and is_run(path.parent.parent) and path.is_dir():
        raise ValueError(
            f"{targets[0]} is a checkpoint; lockstep {command} takes its run, {quoted(path.parent.parent)}"
        )
    return targets[0], rest


def described_run(command: str, target: str, rest: Sequence[str], starts_others: bool = True) -> Config:
    """Reads the config of a run that ``command`` starts itself, from a config file or environment id, and options.

    ``starts_others``: whether the run gets processes of its own; else this one steps the environment.

    Raises:
        ValueError: an option isn't about the config, or the target is a run without a ``config.json``; one line.
    """
    for key in parse_arguments(rest)[1]:
        if key in RunOptions.model_fields and key != "trust":
            raise ValueError(f"{key}: {command} starts its own runs; give only what describes the run")
    path = Path(os.path.expanduser(target))
    if path.is_dir() and not (path / CONFIG).exists() and is_run(path):
        raise ValueError(
            f"{target} has lost its {CONFIG}; copy it there from the config in a checkpoint's manifest.json"
        )
    return request_of([target, *rest], starts_others=starts_others).config


def defaults_by_spaces(description: EnvDescription, request: Request) -> tuple[dict[str, Any], list[str]]:
    """Chooses nested settings that suit an environment's spaces; a line lists those that the user didn't give."""
    images = bool(description.observation.image_bytes)
    settings, kind = defaults_for(continuous=not description.action.discrete, images=images)
    if not description.observation.vector_size and "observations" in settings.get("normalize", {}):
        settings["normalize"]["observations"] = False
    if request.config.algorithm == "grpo":
        settings = for_grpo(description.id, settings)
    given: Mapping[str, Any] = flattened(request.overrides)
    used = flattened(layered(settings, request.overrides))
    taken = {key: value for key, value in flattened(settings).items() if key in used and key not in given}
    listed = ", ".join(f"{key} {value}" for key, value in taken.items())
    return settings, [f"no preset for {description.id}: defaults for {kind}: {listed}"] if taken else []
