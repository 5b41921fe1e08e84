"""Settings for the tests that hold the engines to the reference and to each other."""

import torch

torch.set_num_threads(1)
