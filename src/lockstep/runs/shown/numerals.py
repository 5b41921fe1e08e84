"""Formats numbers for people: with as many digits as their size takes, and never as what they aren't."""

from __future__ import annotations

import math

PRECISIONS = 3  # numbers of decimals that a share may have: none, one or two
LONGEST = 1e15  # numbers from here on are written with an exponent
SMALLEST = 1e-4  # and means below this


def format_number(value: float) -> str:
    """Formats a number by its size: one decimal from 100 on, two from 1 on, three significant digits below."""
    size = abs(value)
    if size >= LONGEST:
        return f"{value:.4g}"
    if size >= 100:
        return f"{value:,.1f}"
    return f"{value:.2f}" if size >= 1 or not value else f"{value:.3g}"


def spec_of(*values: float) -> str:
    """Returns one format for numbers that stand together, as a mean and its interval, by the largest of them.

    It is two decimals from 0.1 on, and below that three significant digits of the largest; ones that few columns hold
    have an exponent.
    """
    size = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if size >= LONGEST or 0 < size < SMALLEST:
        return ".2e"
    return ",.2f" if size >= 0.1 or not size else f",.{2 - math.floor(math.log10(size))}f"


def format_points(value: float) -> str:
    """Formats a score, which is a whole number in most games, and then has no decimals."""
    is_whole = abs(value) < LONGEST and value == int(value)
    return f"{value:,.0f}" if is_whole else f"{value:{spec_of(value)}}"


def format_share(share: float) -> str:
    """Formats a share of one as per cent, with decimals where it would be taken for 0 % or 100 % and is neither."""
    for decimals in range(PRECISIONS):
        text = f"{share:.{decimals}%}"
        if share in (0.0, 1.0) or float(text.rstrip("%")) not in (0.0, 100.0):
            return text
    return "<0.01%" if share < 0.5 else ">99.99%"


def format_size(size: float) -> str:
    """Formats bytes in the largest unit that gives at least 1, by powers of 1,000."""
    amount, units = float(size), ["B", "kB", "MB", "GB", "TB"]
    while round(amount, 1) >= 1000 and len(units) > 1:
        amount /= 1000
        units.pop(0)
    return f"{amount:.0f} {units[0]}" if units[0] == "B" else f"{amount:.1f} {units[0]}"
