"""The PyTorch engine."""

import os

MKL_REPRODUCIBLE = "MKL_CBWR"
os.environ.setdefault(MKL_REPRODUCIBLE, "AUTO")
"""Read at MKL's first product: without it a product's last bits depend on where its factors begin in memory."""
