"""Hides what is secret in a command line, a config or a URL before others see it: in records, pages and messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "***"
_USER = re.compile(r"(://)(?:[^/\s@:]*:(?!\d+/)\S*|(?:(?<=http://)|(?<=https://))[^/\s@]*)@")
"""A user and a password in a URL; the password may hold a slash or an @ that nobody has escaped.

A user without one is a token in ``https://``, and elsewhere no secret: ``sftp://me@host``, ``abfs://container@account``.
"""
_QUERY = re.compile(r"(://[^?\s]*\?)\S+")
_NAMES = r"(?:api[_-]?key|auth|credential|key|pass|passphrase|passwd|password|pwd|secret|token)s?"
_NAME = re.compile(rf"(?:^|[._-]|(?<=[a-z0-9])(?=[A-Z]))(?i:{_NAMES})$")
"""How the name of a setting ends whose value is a secret: as a word of its own, ``hf_key`` or ``accessToken``."""
_PAIR = re.compile(
    rf"""((?:\b|[_-]|(?<=[a-z0-9])(?=[A-Z]))(?i:{_NAMES})["']?\s*:(?!//)\s*)"""
    r"""([\[{|>&!].*|"(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^\s,}]+)""",
    re.DOTALL,
)
"""The same inside a mapping; where its value is no scalar, what follows is hidden to the end."""


def without_secrets(words: Iterable[str]) -> tuple[str, ...]:
    """Hides passwords and queries of URLs, and values of settings that are named as secrets are."""
    out: list[str] = []
    hides_next = False
    for word in words:
        name, equals, _ = word.partition("=")
        is_option = word.startswith("--")
        if hides_next and not is_option:
            word = HIDDEN
        elif equals and _is_secret(name):
            word = f"{name}={HIDDEN}"
        hides_next = is_option and not equals and _is_secret(name)
        word = shown_url(word)
        if "{" in word:  # ``module.key:Class`` is no mapping
            word = _PAIR.sub(rf"\1{HIDDEN}", word)
        out.append(word)
    return tuple(out)


def shown_url(text: str) -> str:
    """Hides users, passwords and queries of the URLs in a text."""
    for pattern, shown in ((_USER, rf"\1{HIDDEN}@"), (_QUERY, rf"\1{HIDDEN}")):
        text = pattern.sub(shown, text)
    return text


def secrets_in(url: str) -> tuple[str, ...]:
    """Finds what :func:`shown_url` hides of a user and a password: both together, and the password alone."""
    found = _USER.search(url)
    if found is None:
        return ()
    whole = found[0].removeprefix("://").removesuffix("@")
    return tuple(filter(None, (whole, whole.partition(":")[2])))


def shown_value(value: Any, key: str = "") -> Any:
    """Hides what is secret in a setting, or a whole config as JSON: values by their names, and parts of URLs.

    Args:
        value: of the setting; a mapping has settings of its own.
        key: its name, dotted or not; of a whole config none.

    Returns:
        A copy in which :data:`HIDDEN` stands in place of each secret that is there.
    """
    if value and not isinstance(value, int | float) and _is_secret(key):  # ``num_tokens`` is a number
        return HIDDEN
    if isinstance(value, Mapping):
        return {name: shown_value(each, str(name)) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [shown_value(each) for each in value]
    return shown_url(value) if isinstance(value, str) else value


def _is_secret(name: str) -> bool:
    return _NAME.search(name) is not None
