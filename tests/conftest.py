"""Settings for all tests, and runs that several of them read."""

import hypothesis
from command_line import trained

__all__ = ["trained"]

hypothesis.settings.register_profile("lockstep", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.load_profile("lockstep")
