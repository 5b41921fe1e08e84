"""Clones behaviour: trains a policy that imitates recorded episodes, and writes it as a run."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config.algorithms import PPOConfig
from lockstep.config.checks import resolve
from lockstep.config.engines import MissingPackageError, engine_module
from lockstep.config.keys import validate
from lockstep.config.run import Config
from lockstep.config.sections import CheckpointConfig, EvalConfig, LogConfig, NetworkConfig
from lockstep.core.errors import NonFiniteError, RunError
from lockstep.core.files import why_unwritten
from lockstep.core.fingerprint import sha256_of
from lockstep.envs.description import stepped_as_arrays
from lockstep.policies.baselines import BASELINES
from lockstep.policies.recordings import Recording, read_recording
from lockstep.runs.checkpoint import POLICY, to_files
from lockstep.runs.checkpoint_writer import commit
from lockstep.runs.directory import CONFIG, SUMMARY, RunDirectory
from lockstep.runs.finding import with_name
from lockstep.runs.making import create_run
from lockstep.runs.trackers import METRICS_JSONL
from lockstep.runs.trackers.jsonl import JsonlTracker
from lockstep.runs.trust import check_trusted

LESS = "nothing is written; a smaller --learning-rate may help"
EPOCHS, STEPS = 10, 2000
"""The least passes and optimiser steps, if nobody says how many: ten passes over few episodes are too few steps."""
UNUSED: dict[str, Any] = {
    **{"algorithm": "ppo", "backend": "auto", "collectives": "auto", "fsdp": False, "sync_period": 1},
    **{"compile": False, "cuda_graphs": None, "num_envs_per_rank": None},
    **{"log": LogConfig(), "checkpoint": CheckpointConfig()},
}
"""Values for settings on devices and records of training, in a run that isn't trained."""
UNTRAINED: dict[str, Any] = {"num_envs": None, "num_shards": None, "ppo": PPOConfig(num_minibatches=1)}
"""Sizes and optimisation in a recording of a baseline, whose config was never checked."""


@dataclass(frozen=True)
class CloneSettings:
    """Settings of learning from recorded episodes.

    Attributes:
        epochs: passes over the episodes; None: at least :data:`EPOCHS`, and as many as :data:`STEPS` take.
        batch: steps of a minibatch.
        learning_rate: Adam's learning rate, which falls to 0.
        seed: seed of the initial parameters and the minibatches.
        validation: share of the episodes, the last ones, that are held out for validation.
    """

    epochs: int | None = None
    batch: int = 512
    learning_rate: float = 1e-3
    seed: int = 0
    validation: float = 0.1

    def passes(self, learnt: int) -> tuple[int, int]:
        """Returns how many passes are made over ``learnt`` steps, and the minibatches of each."""
        each = -(-learnt // self.batch)
        return self.epochs or max(EPOCHS, -(-STEPS // each)), each


def clone(
    episodes: Path, out: Path, settings: CloneSettings, network: NetworkConfig | None = None, trust: bool = False
) -> dict[str, Any]:
    """Learns from a recording, writes the policy as a run with one checkpoint, and returns the run's summary.

    ``network`` None: the networks of the recording's config. ``trust``: whether to import what the recording names,
    though this user hasn't trained with it.

    Raises:
        ValueError: there is no such recording, the seed is negative, the run exists, or the networks can't learn this
            way; one line.
        NonFiniteError: the loss or the parameters aren't finite.
        RunError: a file of the run can't be written; one line.

    If it ends early for any reason, there is no run, and the same ``out`` can be given again.
    """
    if settings.seed < 0:
        raise ValueError(f"seed: {settings.seed}: use 0 or more")
    recording = read_recording(episodes)
    config = _config(recording.facts, settings, network)
    if network is None:
        check_trusted(config, episodes, trust)
    engine = _engine()
    engine.check_recording(config, recording)
    engine.learnt_episodes(recording, settings.validation)
    if (out / CONFIG).exists():
        raise ValueError(f"out: run {out} exists already; choose another --out")
    run = _directory(out, config)
    try:
        with contextlib.closing(JsonlTracker(run.path / METRICS_JSONL)) as metrics:
            arrays, last = engine.train_clone(config, recording, settings, _checked(metrics.log))
        _check_parameters(arrays)
        files = to_files(arrays, {}, _state(recording, settings))
        run.checkpoints.mkdir(exist_ok=True)
        commit(run.checkpoints, 0, files, None, {"config": config.model_dump(mode="json")})
        summary = {
            "status": "cloned",
            "environment": config.env.id,
            "policy": recording.facts["policy"],
            "recorded_episodes": len(recording.table),
            "recorded_steps": len(recording.actions),
            **last,
            "params_sha256": sha256_of({name: a for name, a in arrays.items() if name.startswith("policy/")}),
        }
        run.write_summary(summary)
    except OSError as error:
        _discard(run)
        raise RunError(f"{error.filename or run.path} can't be written: {why_unwritten(error)}") from error
    except BaseException:  # Ctrl-C, too
        _discard(run)
        raise
    finally:
        run.unlock()
    return summary


def _state(recording: Recording, settings: CloneSettings) -> dict[str, Any]:
    """Returns what a clone's checkpoint says beside its arrays."""
    return {
        **{"iteration": 0, "global_step": 0, "optimizer_steps": 0, "wall_time": 0.0, "score": None},
        **{"learning_rate": settings.learning_rate, "restarted_environments": []},
        "recent_episodes": {"window": [], "total": 0},
        "environment": recording.facts["environment"],
        "cloned": True,
        "recorded_seed": recording.facts.get("seed"),
    }


def _directory(out: Path, config: Config) -> RunDirectory:
    """Makes the directory of the run, also if it is given as ``.`` or ``..``; errors name ``out``."""
    place = with_name(out)
    if not place.name:
        raise ValueError(f"out: {out} is no directory that a run can have; give one like runs/clone")
    try:
        return create_run(str(place.parent), place.name, config)
    except ValueError as error:
        message = str(error).removeprefix("name: ").replace("another --name", "another --out")
        raise ValueError(f"out: {message}") from None


def _discard(run: RunDirectory) -> None:
    """Removes a run that isn't complete, as far as this process has written it."""
    for checkpoint in [*run.checkpoints.glob("step_0"), *run.checkpoints.glob(".step_0.*")]:
        shutil.rmtree(checkpoint, ignore_errors=True)
    with contextlib.suppress(OSError):  # why it isn't complete matters more
        run.checkpoints.rmdir()
    with contextlib.suppress(OSError):
        for name in (METRICS_JSONL, SUMMARY, CONFIG):
            (run.path / name).unlink(missing_ok=True)
        run.discard()


def _checked(log: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """Wraps ``log`` so that it raises a ``NonFiniteError`` if a record has a loss that isn't finite."""

    def logged(record: dict[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, float) and not np.isfinite(value):
                raise NonFiniteError(f"{name} is {value:g} in epoch {record['iteration']}; {LESS}")
        log(record)

    return logged


def _check_parameters(arrays: Mapping[str, np.ndarray]) -> None:
    """Raises a ``NonFiniteError`` if the last step left parameters that aren't finite."""
    for name, array in arrays.items():
        if name.startswith(POLICY) and not np.isfinite(array).all():
            raise NonFiniteError(f"{name} isn't finite after the last epoch; {LESS}")


def _config(facts: Mapping[str, Any], settings: CloneSettings, network: NetworkConfig | None) -> Config:
    """Turns a recording's config into that of a run that plays on a CPU, with other networks if given.

    Settings that only training uses are reset, so that they can't get in the way. The engine is torch, except for
    environments of JAX.
    """
    config: Config = validate(Config, facts["config"], "the recording's config")
    network = network or config.network
    if config.env.jax_only and network.custom is not None:
        raise ValueError(
            f"network.custom: {network.custom}, but a clone learns with PyTorch and plays {config.env.id} with engine "
            "jax; give another --like"
        )
    changed: dict[str, Any] = {
        "seed": settings.seed,
        "network": network.model_copy(update={"remat": False, "sequence_length": None}),
        "eval": EvalConfig(max_steps=config.eval.max_steps),
        **({"engine": "jax", "threads": 1} if config.env.jax_only else {"engine": "torch"}),
        **(UNTRAINED if facts["policy"] in BASELINES else {"ppo": _unused_ppo(config.ppo)}),
    }
    if config.env.backend != "tensor" or stepped_as_arrays(config.env):  # simulators stay on their device
        backend = "auto" if config.env.backend == "tensor" else config.env.backend
        changed |= {"device": "cpu", "env": config.env.model_copy(update={"backend": backend})}
    return resolve(config.model_copy(update=UNUSED | changed))


def _unused_ppo(ppo: PPOConfig) -> PPOConfig:
    """Removes settings that the torch engine lacks, and the user's loss, which isn't called."""
    even = {"drop_remainder": False, "num_minibatches": 1, "gradient_accumulation": 1} if ppo.drop_remainder else {}
    return ppo.model_copy(update={"loss": None, "loss_kwargs": {}, **even})


def _engine() -> Any:
    try:
        return engine_module("torch")
    except MissingPackageError as error:
        raise ValueError(f"clone: needs {error.package}; pip install 'lockstep-rl[torch]'") from None
