"""The parser of the small commands: what is wrong becomes one line, as everywhere."""

from __future__ import annotations

import argparse
from typing import NoReturn


def at_least_one(text: str) -> int:
    """A count, from 1 on, for ``type=``."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors are ``ValueError``."""

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong instead of printing the usage."""
        raise ValueError(f"{message} ({self.prog} --help)")
