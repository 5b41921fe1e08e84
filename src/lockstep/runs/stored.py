"""Reads a run's config from disk: from ``config.json``, or from the manifest of a checkpoint; tells if they differ."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lockstep.config.files import read_file
from lockstep.config.keys import FREE, validate
from lockstep.config.redact import shown_value
from lockstep.config.run import Config
from lockstep.core.errors import one_line
from lockstep.core.files import same_json
from lockstep.core.process import say
from lockstep.runs.checkpoint import manifest_of, newest_manifest
from lockstep.runs.directory import CHECKPOINTS, CONFIG

OF_POLICY = ("algorithm", "network.", "normalize.", "precision")
"""Settings, and sections of them, that decide what a policy computes from a checkpoint's arrays."""


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
    except (OSError, ValueError, RecursionError) as error:
        written = written_config(run)
        if written is None:
            raise
        config, step = written
        if warn:
            why = one_line(str(error).removeprefix(f"{file}: ").removeprefix("can't be read: "))
            why = why if os.path.lexists(file) else "it is missing"
            say(f"lockstep: warning: {file} can't be read ({why}); taken from checkpoint step_{step}")
        return config
    return validate(Config, settings, str(file), stored=True)


def written_config(run: Path) -> tuple[Config, int] | None:
    """Reads the config in a run's newest valid manifest, and the checkpoint's step; None if there is none.

    Raises:
        ValueError: a setting in it is invalid; one line.
    """
    return _config_in(newest_manifest(run / CHECKPOINTS), run)


def _config_in(manifest: dict[str, Any] | None, run: Path) -> tuple[Config, int] | None:
    """Returns the config in a manifest of a run's checkpoint, and its step, as :func:`written_config` does."""
    if manifest is None or not isinstance(manifest.get("config"), dict):
        return None
    step = int(manifest.get("step") or 0)
    return validate(Config, manifest["config"], str(run / CHECKPOINTS / f"step_{step}"), stored=True), step


def check_same_policy(run: Path, stored: Config, checkpoint: Path) -> None:
    """Checks that a checkpoint's policy is that of the run's config, which may have been edited since.

    Checkpoints of older versions, which hold no config, aren't checked.

    Args:
        run: the run's directory.
        stored: the run's config, as :func:`stored_config` reads it.
        checkpoint: the checkpoint's directory.

    Raises:
        ValueError: a setting that makes the policy differs, or one in the manifest is invalid; one line.
    """
    written = _config_in(manifest_of(checkpoint), run)
    if written is None:
        return
    config, step = written
    for key, old, new in differences(config.model_dump(mode="json"), stored.model_dump(mode="json")):
        if key.startswith(OF_POLICY):
            raise ValueError(edit_in_words(run, key, old, new, step))


def edit_in_words(run: Path, key: str, old: Any, new: Any, step: int) -> str:
    """Says that a setting in a run's ``config.json`` isn't what it was when a checkpoint was written."""
    old, new = shown_value(old, key), shown_value(new, key)
    return f"{key}: {run / CONFIG} says {new}, but it was {old} when step_{step} was written; put it back"


def differences(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Lists the differences between two configs as JSON, in value or type: the key, and both values."""
    out: list[tuple[str, Any, Any]] = []
    for key in a:
        whole = f"{prefix}{key}" in FREE  # a table with free keys is compared as a whole
        if isinstance(a[key], dict) and isinstance(b[key], dict) and not whole:
            out += differences(a[key], b[key], f"{prefix}{key}.")
        elif not same_json(a[key], b[key]):
            out.append((prefix + key, a[key], b[key]))
    return out
