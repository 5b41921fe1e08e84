"""Settings for the tests that hold the engines to the reference."""

import torch

torch.set_num_threads(1)
