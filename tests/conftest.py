"""Settings for all tests, and runs that several of them read."""

import hypothesis
from command_line import trained
from frameworks import pytest_collect_directory

__all__ = ["pytest_collect_directory", "trained"]

hypothesis.settings.register_profile("lockstep", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.load_profile("lockstep")
