"""The config of a run as it lies on the disk: in ``config.json``, and in every checkpoint's manifest."""

from __future__ import annotations

from pathlib import Path

from lockstep.config.files import read_file
from lockstep.config.keys import validate
from lockstep.config.run import Config
from lockstep.core.process import say
from lockstep.runs.checkpoint import newest_manifest
from lockstep.runs.directory import CHECKPOINTS, CONFIG


def stored_config(run: Path, warn: bool = True) -> Config:
    """Reads a run's config, where ``config.json`` is missing, empty or torn from its newest checkpoint, with a warning.

    Raises:
        ValueError: neither can be read, or a setting is none; one line.
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
    """The config with which a run's newest checkpoint was written, and its step; None without any."""
    manifest = newest_manifest(run / CHECKPOINTS)
    if manifest is None or not isinstance(manifest.get("config"), dict):
        return None
    step = int(manifest.get("step") or 0)
    return validate(Config, manifest["config"], str(run / CHECKPOINTS / f"step_{step}"), stored=True), step
