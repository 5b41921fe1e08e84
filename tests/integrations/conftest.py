"""Settings for the tests of the integrations; the modules that stand for a user's are importable."""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "modules"))
torch.set_num_threads(1)
