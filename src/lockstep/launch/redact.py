"""Hides what is secret in the words of a command line before they are written down."""

from __future__ import annotations

import re
from collections.abc import Iterable

HIDDEN = "***"
_USER = re.compile(r"(://)[^/\s@]*@")
"""A user and a password in a URL."""
_QUERY = re.compile(r"(://[^?\s]*\?)\S+")
_NAMES = r"(?:api[_-]?key|access[_-]?key|auth|credentials?|pass|passwd|password|secret|token)s?"
_NAME = re.compile(rf"(?:^|[._-]){_NAMES}$", re.IGNORECASE)
"""How the name of a setting ends whose value is a secret."""
_PAIR = re.compile(rf"""(\b(?:\w+[._-])?{_NAMES}["']?\s*:\s*)("[^"]*"|'[^']*'|[^\s,}}]+)""", re.IGNORECASE)
"""The same inside a mapping."""


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
        for pattern, shown in ((_USER, rf"\1{HIDDEN}@"), (_QUERY, rf"\1{HIDDEN}"), (_PAIR, rf"\1{HIDDEN}")):
            word = pattern.sub(shown, word)
        out.append(word)
    return tuple(out)


def _is_secret(name: str) -> bool:
    return _NAME.search(name) is not None
