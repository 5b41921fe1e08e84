"""Settings for the tests that hold the engines to the reference and to each other."""

from contextlib import suppress

with suppress(ModuleNotFoundError):  # without it the folder is skipped
    import torch

    torch.set_num_threads(1)
