"""Settings for the tests of learning."""

import torch

torch.set_num_threads(1)
