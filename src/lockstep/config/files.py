"""Config files, and the nested dicts that they are read into."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config.keys import ALIASES, FREE, FREE_NAMES

FILE_SUFFIXES = (".yaml", ".yml", ".json", ".toml")


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def read_file(path: Path) -> dict[str, Any]:
    """Reads a YAML, JSON or TOML config file; keys may be nested or dotted.

    Raises:
        ValueError: the file is missing, of another kind, or doesn't parse; one line that says so.
    """
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*") if p.suffix in FILE_SUFFIXES] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, siblings, 1, 0.6)
        raise ValueError(
            f"{path}: no such config file" + (f"; did you mean {path.parent / close[0]}?" if close else "")
        )
    readers = {".toml": tomllib.loads, ".json": json.loads, ".yaml": _yaml, ".yml": _yaml}
    if path.suffix not in readers:
        raise ValueError(f"{path}: a config file ends in {', '.join(FILE_SUFFIXES)}")
    try:
        values = readers[path.suffix](path.read_text())
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: can't be read: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: a config is a mapping of keys to values, not {type(values).__name__}")
    return nested(values)


def nested(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turns dotted keys into nested dicts and, at the top, aliases into the names they stand for."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        path = name if prefix or isinstance(value, dict) else ALIASES.get(name, name)
        inner = isinstance(value, dict) and prefix + path not in FREE
        merge(out, nest(path.split("."), nested(value, f"{prefix}{path}.") if inner else value))
    return out


def nest(path: Sequence[str], value: Any) -> dict[str, Any]:
    """Puts a value below the words of its path, one dict a word."""
    for part in reversed(path):
        value = {part: value}
    return value


def merge(base: dict[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Lays nested dicts over ``base``, in place; ``env.kwargs`` and its like are replaced whole; returns ``base``."""
    for key, value in overlay.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), dict) and key not in FREE_NAMES:
            merge(base[key], value)
        else:
            base[key] = value
    return base
