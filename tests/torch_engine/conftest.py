"""Settings for the tests of the PyTorch engine."""

from contextlib import suppress

with suppress(ModuleNotFoundError):  # without it the folder is skipped
    import torch

    torch.set_num_threads(1)
