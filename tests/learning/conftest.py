"""Settings for the tests of learning."""

from contextlib import suppress

with suppress(ModuleNotFoundError):  # without it the folder is skipped
    import torch

    torch.set_num_threads(1)
