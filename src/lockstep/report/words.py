"""Formats numbers, dates and commands for the page; values of other types are shown as they are."""

from __future__ import annotations

import datetime
import json
import shlex
from pathlib import Path
from typing import Any

from markupsafe import Markup

from lockstep.runs.listing import printable
from lockstep.runs.shown.numerals import LONGEST, format_number, format_share, format_size

UNKNOWN = "–"


def in_digits(value: Any) -> str:
    """Formats a number: whole ones with commas, others with digits according to their size; None as a dash."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return printable(str(value))
    return f"{int(value):,}" if value == int(value) and abs(value) < LONGEST else format_number(float(value))


def duration(seconds: Any) -> str:
    """Formats seconds: ``71.2 s``, ``3 min 20 s``, ``2 h 05 min``; anything else as a dash."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e12:
        return UNKNOWN
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds >= 0.95 else f"{1000 * seconds:.0f} ms"
    whole = round(seconds)
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"


def percent(share: float) -> str:
    """Formats a share of one as per cent; as :func:`~lockstep.runs.shown.numerals.format_share` does near 0 and 1."""
    text = f"{100 * share:.0f}" if share >= 0.095 or not share else f"{100 * share:.1f}"
    return f"{format_share(share)[:-1] if float(text) in (0.0, 100.0) else text} %"


def size(count: Any) -> str:
    """Formats bytes by :func:`~lockstep.runs.shown.numerals.format_size`; None as a dash."""
    return UNKNOWN if count is None else format_size(count)


def date(text: Any) -> str:
    """Formats an ISO date in UTC, to the minute."""
    try:
        then = datetime.datetime.fromisoformat(text).astimezone(datetime.UTC)
    except (ValueError, TypeError, OverflowError):
        return UNKNOWN if text is None else printable(str(text))
    return then.strftime("%Y-%m-%d %H:%M UTC")


def setting(value: Any) -> str:
    """Formats a setting's value as in a config file, but text without quotes."""
    return printable(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def typed(text: str) -> Markup:
    """Marks up a command word by word, so that lines break between words rather than inside them.

    Browsers would break ``--clip-coef`` after its dashes.
    """
    return Markup(" ").join(Markup('<span class="word">{}</span>').format(word) for word in text.split(" "))


def command(name: str, run: Path, *words: str) -> str:
    """Returns a command about a run, quoted for a shell."""
    return printable(shlex.join(["lockstep", name, str(run), *words]))
