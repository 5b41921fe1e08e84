"""Settings for the tests of the PyTorch engine."""

import torch

torch.set_num_threads(1)
