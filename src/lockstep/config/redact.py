"""Hides secrets in a command line, a config or a URL before they appear in records, pages and messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote

HIDDEN = "***"
_USER = re.compile(r"(://)(?:[^/\s@:]*:(?!\d+/)\S*|(?:(?<=http://)|(?<=https://))[^/\s@]*)@", re.IGNORECASE)
"""A user and a password in a URL; the password may hold an unescaped slash or @.

A user without a password is a token in ``https://``, but no secret elsewhere: ``sftp://me@host``,
``abfs://container@account``.
"""
_QUERY = re.compile(r"(://[^?\s]*\?)(\S+)")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRETS = frozenset(
    (
        *("apikey", "apikeys", "auth", "auths", "authorization", "bearer", "credential", "credentials"),
        *("passphrase", "passphrases", "passwd", "passwds", "password", "passwords", "pwd", "pwds"),
        *("secret", "secrets"),
    )
)
_KEYS = frozenset(("key", "pass", "token"))
"""Words that name a secret unless one of :data:`_NO_SECRETS` precedes them; their plurals only after another word."""
_NO_SECRETS = frozenset(
    (
        *("action", "backward", "band", "bos", "camera", "cls", "eos", "eval", "filter", "forward", "goal", "high"),
        *("image", "info", "low", "mask", "obs", "observation", "pad", "prompt", "random", "render", "reward"),
        *("sep", "sort", "start", "state", "stop", "unk"),
    )
)
"""Words before key, pass or token that make it no secret: ``stop_token``, ``observation_keys``."""
_KEYED = re.compile(r"""(?<![\w.-])([\w.-]+)(["']?)\s*:(?!//)\s*""")
_VALUE = re.compile(r"""[\[{|>&!].*|"(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^,}]+""", re.DOTALL)
"""The value of a name inside a mapping; if it isn't a scalar, everything to the end is hidden."""
SHORTEST = 4
"""Letters of the shortest password that a library's message is searched for; shorter ones are part of many words."""


def without_secrets(words: Iterable[str]) -> tuple[str, ...]:
    """Hides passwords and queries of URLs, and values of settings whose names are those of secrets."""
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
        if "{" in word:  # ``module.key:Class`` isn't a mapping
            word = _without_pairs(word)
        out.append(word)
    return tuple(out)


def shown_url(text: str) -> str:
    """Hides users, passwords and queries of the URLs in a text."""
    for pattern, shown in ((_USER, rf"\1{HIDDEN}@"), (_QUERY, rf"\1{HIDDEN}")):
        text = pattern.sub(shown, text)
    return text


def secrets_in(url: str) -> tuple[str, ...]:
    """Returns what :func:`shown_url` hides in a URL: user and password together, the password, and the query.

    Each is returned both as it is written and decoded (``%40`` is an @), unless it is too short to be told from words.
    """
    user, query = _USER.search(url), _QUERY.search(url)
    found = [query[2], *(value for _, value in parse_qsl(query[2]))] if query else []
    if user is not None:
        whole = user[0].removeprefix("://").removesuffix("@")
        found += [whole, whole.partition(":")[2]]
    both = dict.fromkeys(meant for each in found for meant in (each, unquote(each)))
    return tuple(each for each in both if len(each) >= SHORTEST)


def shown_value(value: Any, key: str = "") -> Any:
    """Hides secrets in a setting, or in a whole config as JSON: values by their names, and parts of URLs.

    Args:
        value: the setting's value; a mapping has settings of its own.
        key: the setting's name, dotted or not; "" for a whole config. Any part of it may mark it as secret.

    Returns:
        A copy in which :data:`HIDDEN` replaces each secret.
    """
    if value and not isinstance(value, int | float) and _is_secret(key):  # ``num_tokens`` is a number
        return HIDDEN
    if isinstance(value, Mapping):
        return {name: shown_value(each, str(name)) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [shown_value(each) for each in value]
    return shown_url(value) if isinstance(value, str) else value


def _without_pairs(text: str) -> str:
    out, at = [], 0
    for name in _KEYED.finditer(text):
        is_class = "." in name[1] and not name[2]  # ``module.key:Class``
        if name.start() < at or is_class or not _is_secret(name[1]):
            continue
        if (value := _VALUE.match(text, name.end())) is None:
            continue
        out += [text[at : name.end()], HIDDEN]
        at = value.end()
    return "".join([*out, text[at:]])


def _is_secret(name: str) -> bool:
    """Returns whether a setting's name, or a part of it between dots, ends as those of secrets do."""
    return any(map(_names_a_secret, name.split(".")))


def _names_a_secret(part: str) -> bool:
    words = [word.lower() for word in _WORDS.findall(part)]
    if not words:
        return False
    *before, last = words
    if last in _KEYS:
        return not before or before[-1] not in _NO_SECRETS
    several = last in ("keys", "passes", "tokens")
    return last in _SECRETS or (several and bool(before) and before[-1] not in _NO_SECRETS)
