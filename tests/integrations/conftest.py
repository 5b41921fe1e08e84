"""Settings for the tests of the integrations."""

import torch

torch.set_num_threads(1)
