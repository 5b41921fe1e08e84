"""Settings for the tests that hold the engines to the reference and to each other."""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "modules"))
torch.set_num_threads(1)
