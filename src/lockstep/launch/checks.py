"""Checks limits, packages and the machine before a run makes its directory or starts a process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.config.engines import check_processes_here, engine_module
from lockstep.config.run import Config, RunOptions
from lockstep.core.user_code.working_directory import keep_working_directory
from lockstep.envs.describe import describe
from lockstep.envs.description import EnvDescription
from lockstep.envs.registry import check_environment_options
from lockstep.runs.stored import stored_config
from lockstep.runs.trackers import check_trackers
from lockstep.training.limits import LEARNING_RATE_LIMITS
from lockstep.training.own_loss.fingerprint import same_loss


def check_limits(options: RunOptions, config: Config, is_group: bool = False) -> None:
    """Raises a one-line ``ValueError`` if name, end, seeds or learning rate of a run contradict its other options.

    A resumed run keeps the learning rate that it began with.
    """
    if options.seeds_at_once is not None and not is_group:
        raise ValueError(f"seeds_at_once: {options.seeds_at_once}, but there is one seed; give --seeds 0-4 as well")
    check_processes_here(config.device, options.seeds_at_once or 1)
    stop = options.stop_at_step
    if options.resume is None and stop is not None and stop > config.total_steps:
        raise ValueError(f"stop_at_step: {stop} is beyond total_steps {config.total_steps}")
    (low, high), rate = LEARNING_RATE_LIMITS, config.ppo.learning_rate
    if options.resume is None and config.ppo.schedule == "adaptive" and not low <= rate <= high:
        raise ValueError(
            f"ppo.learning_rate: {rate:g} with ppo.schedule adaptive, which moves between {low:g} and {high:g} alone; "
            "give one of these, or another schedule"
        )


def check_writer_needs(config: Config, resumed: Path | None = None) -> None:
    """Checks what only the writing rank needs: packages of trackers, and pictures of the environment for videos.

    A ``resumed`` run may have begun with videos of EnvPool, for which older versions filmed another environment. Such a
    run continues without videos, and says so at its first evaluation.

    Raises:
        ValueError: something is missing; one line.
    """
    check_trackers(config.log)
    if config.eval.record_video and not (resumed is not None and _began_with_false_videos(resumed)):
        from lockstep.policies.videos import check_video

        check_video(config.env)


def _began_with_false_videos(run: Path) -> bool:
    stored = stored_config(run, warn=False)
    return stored.eval.record_video and stored.env.backend == "envpool"


def check_machine(
    config: Config,
    ranks_here: int,
    describe: Callable[[], EnvDescription],
    sees_devices: bool = True,
    before: Mapping[str, Any] | None = None,
) -> None:
    """Checks whether this machine can run a resolved config: devices, environments, networks, the user's own loss.

    Args:
        config: resolved.
        ranks_here: number of ranks to start on this machine.
        describe: returns the environment's description.
        sees_devices: whether this process sees the devices that ranks will have.
        before: facts about the loss, from the checkpoint that is resumed; None if there are none.

    Raises:
        ValueError: it can't, or the run would resume with another loss; one line.
    """
    engine = engine_module(config.engine)
    if config.device != "cpu" and sees_devices:
        engine.check_device(config.device, ranks_here)
    with keep_working_directory():
        check_environment_options(config)
        own_loss = engine.check_own_loss(config, engine.check_networks(config, describe()))
    same_loss(config.ppo.loss, own_loss, before or {})


def check_settings(settings: dict[str, Any], ranks_here: int, before: Mapping[str, Any] | None = None) -> None:
    """Calls :func:`check_machine` with a config from JSON, for a process in which the engine is loaded."""
    config = Config.model_validate(settings)
    check_machine(config, ranks_here, lambda: describe(config.env), before=before)
