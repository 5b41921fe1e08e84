"""Hides what is secret in the words of a command line before they are written down."""

from __future__ import annotations

import re
from collections.abc import Iterable

HIDDEN = "***"
_USER = re.compile(r"(://)(?:[^/\s@:]*:(?!\d+/)\S*|[^/\s@]*)@")
"""A user and a password in a URL; the password may hold a slash or an @ that nobody has escaped."""
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
        for pattern, shown in ((_USER, rf"\1{HIDDEN}@"), (_QUERY, rf"\1{HIDDEN}")):
            word = pattern.sub(shown, word)
        if "{" in word:  # ``module.key:Class`` is no mapping
            word = _PAIR.sub(rf"\1{HIDDEN}", word)
        out.append(word)
    return tuple(out)


def _is_secret(name: str) -> bool:
    return _NAME.search(name) is not None
