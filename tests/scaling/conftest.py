"""Fixtures of these tests."""

from command_line import trained

__all__ = ["trained"]
