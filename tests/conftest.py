"""Settings for all tests."""

import hypothesis

hypothesis.settings.register_profile("lockstep", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.load_profile("lockstep")
