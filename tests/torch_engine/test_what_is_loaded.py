"""What a rank loads: neither the compiler nor FSDP, unless it is asked for them."""

import subprocess
import sys

import pytest

RUN = """
import sys
import torch
from lockstep.torch_engine.setup.devices import leave_out_compiler
import lockstep.torch_engine.train
if sys.argv[1] == "left out":
    leave_out_compiler()
torch.optim.Adam([torch.zeros(3, requires_grad=True)])
print(sorted({"torch._dynamo", "torch.distributed.fsdp"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("how", "loaded"), [("left out", []), ("as it is", ["torch._dynamo", "torch.distributed.fsdp"])]
)
def test_an_optimizer_is_made_without_the_compiler(how, loaded):
    """PyTorch by itself loads both at the first optimiser."""
    ended = subprocess.run([sys.executable, "-c", RUN, how], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == str(loaded)
