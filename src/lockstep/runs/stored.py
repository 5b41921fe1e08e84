"""Reads a run's config from disk: from ``config.json``, or from the manifest of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from lockstep.config.files import read_file
from lockstep.config.keys import validate
from lockstep.config.run import Config
from lockstep.core.process import say
from lockstep.runs.checkpoint import newest_manifest
from lockstep.runs.directory import CHECKPOINTS, CONFIG


def stored_config(run: Path, warn: bool = True) -> Config:
    """Reads a run's ``config.json``, or, with a warning, its newest checkpoint's copy if that is missing or torn.

    Raises:
        ValueError: neither can be read, or a setting is invalid; one line.
    """
    file = run / CONFIG
    try:
        if file.exists() and not file.is_file():
            raise ValueError(f"{file} is no file")
        settings = read_file(file)
    except (OSError, ValueError, RecursionError):
        written = written_config(run)
        if written is None:
            raise
        config, step = written
        if warn:
            say(f"lockstep: warning: {file} can't be read; taken from checkpoint step_{step}")
        return config
    return validate(Config, settings, str(file), stored=True)


def written_config(run: Path) -> tuple[Config, int] | None:
    """Reads the config in a run's newest valid manifest, and the checkpoint's step; None if there is none.

    Raises:
        ValueError: a setting in it is invalid; one line.
    """
    manifest = newest_manifest(run / CHECKPOINTS)
    if manifest is None or not isinstance(manifest.get("config"), dict):
        return None
    step = int(manifest.get("step") or 0)
    return validate(Config, manifest["config"], str(run / CHECKPOINTS / f"step_{step}"), stored=True), step
