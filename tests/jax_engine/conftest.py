"""Settings for the tests of the JAX engine; the modules that stand for a user's are importable."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "modules"))
